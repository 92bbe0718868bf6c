"""Train a compiled model on ranks that are processes of this machine, under torchrun and gloo.

The parent saves the compiled model, the batches and the job into a directory; each rank loads them, trains, and writes
what it saw beside them. `python -m stpart_compiler.local_ranks DIRECTORY` is what a rank runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from stpart_compiler.compiled import CompiledModel, load_compiled
from stpart_compiler.runtime.memory import PeakBytes
from stpart_compiler.runtime.rank_module import RankModule

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Global (args, kwargs) of one step."""

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
"""Ranks share the cores: one thread each. glibc keeps what a step frees for the next one, as allocators of GPUs do:
memory from the system comes a page at a time, at a tenth of the speed at which it is filled."""

_GRACE_S = 15.0  # for torchrun to end its ranks after it was told to stop


class RanksFailedError(RuntimeError):
    """A rank's process failed or the ranks did not finish in time."""


@dataclass(frozen=True)
class Job:
    """What the ranks do: AdamW at `learning_rate` over the saved batches. `timeout_s`: for each wait for a message."""

    learning_rate: float
    timeout_s: float
    verbose: bool


@dataclass(frozen=True)
class RankReport:
    """What one rank saw: per step the loss and seconds; `peak_bytes`: the largest of forward + backward over the steps.

    Counted are parameters, buffers, inputs, optimizer state, activations and gradients (no temporaries in kernels).
    """

    rank: int
    losses: list[float]
    seconds: list[float]
    peak_bytes: int


def train_on_ranks(
    compiled: CompiledModel,
    batches: Sequence[Batch],
    *,
    learning_rate: float,
    timeout_s: float = 60.0,
    limit_s: float = 600.0,
    verbose: bool = True,
) -> list[RankReport]:
    """One AdamW step per batch on as many local processes as the mesh has ranks; the reports in rank order.

    `timeout_s`: seconds a rank waits for a message; `limit_s`: for the whole run. `verbose`: rank 0 prints each loss.

    Raises:
        ValueError: the model's output is no scalar loss.
        RanksFailedError: a rank failed, the ranks took too long, or they disagree about a loss.
    """
    if compiled.interface.loss_index is None:
        raise ValueError("run: the model's output is no scalar loss; give a loss_fn, or labels to the model")
    with tempfile.TemporaryDirectory(prefix="stpart") as name:
        directory = Path(name)
        compiled.save(directory / "compiled")
        torch.save(list(batches), directory / "batches.pt")
        (directory / "job.json").write_text(json.dumps(asdict(Job(learning_rate, timeout_s, verbose))))
        launch(compiled.world_size, "stpart_compiler.local_ranks", str(directory), limit_s)
        reports = [_report(directory, rank) for rank in range(compiled.world_size)]
    for report in reports[1:]:
        if report.losses != reports[0].losses:
            raise RanksFailedError(
                f"the losses of rank {report.rank} differ from those of rank 0: {report.losses}, {reports[0].losses}"
            )
    return reports


def _report(directory: Path, rank: int) -> RankReport:
    return RankReport(**json.loads((directory / f"report{rank}.json").read_text()))


def launch(world_size: int, module: str, argument: str, limit_s: float) -> None:
    """Run a module on local ranks under torchrun and wait for them; whatever happens, none is left behind.

    Raises:
        RanksFailedError: a rank failed, or they took longer than `limit_s` seconds.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command = [*torchrun, "-m", module, argument]
    environment = os.environ | RANK_ENVIRONMENT
    # What this process has buffered comes before what they print.
    sys.stdout.flush()
    process = subprocess.Popen(command, env=environment)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired as error:
        raise RanksFailedError(f"the {world_size} ranks did not finish within {limit_s:g} s") from error
    finally:
        _stop(process)
    if status:
        raise RanksFailedError(f"the {world_size} ranks failed (exit status {status}); their own messages stand above")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_rank(directory: Path) -> None:
    """Train this process's rank, inside torchrun."""
    job = Job(**json.loads((directory / "job.json").read_text()))
    batches: list[Batch] = torch.load(directory / "batches.pt", weights_only=False)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    module = load_compiled(directory / "compiled").local_module(job.timeout_s)
    optimizer = torch.optim.AdamW(module.parameters(), lr=job.learning_rate)
    losses, seconds, peaks = [], [], []
    for number, (args, kwargs) in enumerate(batches):
        start = time.perf_counter()
        slots = (*module.param_slots(), *module.buffer_slots())
        held = (args, kwargs, module.constants, [tensor for _, tensor in slots])
        loss, peak = train_step(optimizer, held, partial(loss_of, module, args, kwargs))
        losses.append(loss)
        peaks.append(peak)
        seconds.append(time.perf_counter() - start)
        if job.verbose and module.rank == 0:
            print(f"step {number + 1}: loss {loss:.6f}, {seconds[-1]:.2f} s", flush=True)
    report = RankReport(module.rank, losses, seconds, max(peaks))
    (directory / f"report{module.rank}.json").write_text(json.dumps(asdict(report)))
    dist.barrier()  # no rank closes its connections while another still uses them
    dist.destroy_process_group()


def train_step(
    optimizer: torch.optim.Optimizer, held: object, compute_loss: Callable[[], torch.Tensor]
) -> tuple[float, int]:
    """Loss of one step, and the peak bytes of its forward and backward.

    `held`: a tree of the tensors that exist before; the optimizer's state is counted too.
    """
    optimizer.zero_grad()
    leaves = tree_leaves((held, list(optimizer.state.values())))
    with PeakBytes(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)) as counter:
        loss = compute_loss()
        loss.backward()
    optimizer.step()
    return loss.item(), counter.peak


def loss_of(module: RankModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The scalar loss among the outputs of a rank module."""
    index = module.interface.loss_index
    assert index is not None
    loss = tree_leaves(module(*args, **kwargs))[index]
    assert isinstance(loss, torch.Tensor)
    return loss


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
