"""Ranks that are processes, in a gloo process group: training, checkpoints, and what happens when a rank fails.

Run as a script this file is one of the ranks: `python test_online.py SCENARIO DIRECTORY RANK WORLD_SIZE`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.ir.layout import coordinate
from stpart_compiler.runtime.rank_module import RankModule

MESH = (2, 2)
RANKS = 4
STEPS, SAVED_AFTER = 5, 3
MAX_NORM = 0.5  # below the norms met here, so that clipping changes the steps
LIMIT_S = 240.0  # for all ranks of a launch
HANG_S, PATIENCE_S = 4.0, 60.0  # timeouts of the runs in which a rank stops or dies

# Slow ranks on a fast network: cutting pays at these sizes too.
CLUSTER = st.Cluster("slow ranks", Device("slow", "cpu", (("float32", 1e8),), 2**34, 1e10), ((None, Link(1e-9, 1e11)),))
SOLVER = st.SolverOptions(time_limit_s=60, patience_s=3, yardsticks=False)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)
    )


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    ids = [torch.randint(0, 64, (4, 16)) for _ in range(STEPS)]
    return [{"input_ids": x, "labels": x} for x in ids]


def smaller() -> list[dict[str, torch.Tensor]]:
    """A batch of fewer and shorter sequences."""
    return [{key: x[:2, :9] for key, x in batches()[0].items()}]


def compiled_llama(model: nn.Module, mesh: Any, **options: Any) -> st.CompiledModel:
    return st.compile_model(model, (), batches()[0], mesh=mesh, cluster=CLUSTER, solver=SOLVER, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[..., torch.Tensor] | None,
    data: list[dict[str, torch.Tensor]],
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms."""
    losses, norms = [], []
    options = {} if isinstance(model, RankModule) else {"use_cache": False}
    for batch in data:
        optimizer.zero_grad()
        output = model(**batch, **options)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        if clip is not None:
            norms.append(clip(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def noisy() -> tuple[nn.Module, torch.Tensor]:
    """A model with dropout, and its input."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.4), nn.Linear(16, 8), nn.Dropout(0.2)]
    return nn.Sequential(*layers), torch.randn(8, 8)


def noise_losses(model: nn.Module, x: torch.Tensor) -> list[float]:
    """Two steps, each with masks of its own."""
    return [float(model(x).detach()) for _ in range(2)]


class _Squares(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return _sum_of_squares(y)


def _sum_of_squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def code_of(compiled: st.CompiledModel, rank: int) -> str:
    program = compiled.program(rank)
    assert program.backward is not None
    return program.forward.code + program.backward.code


# ---- what a rank does


def trains(directory: Path, rank: int) -> dict[str, Any]:
    """Compiles online and trains; trains what was compiled offline, with clipping, and saves on the way."""
    compiled = compiled_llama(llama(), MESH)
    module = compiled.local_module(PATIENCE_S)
    found: dict[str, Any] = {"digest": compiled.plan.digest, "code": code_of(compiled, rank)}
    if rank == 0:
        (directory / "online.json").write_text(compiled.plan.to_json())
    found["plain"], _ = train(module, adamw(module), None, batches())
    found["smaller"], _ = train(module, adamw(module), None, smaller())
    offline = st.load_compiled(directory / "offline")
    found["offline code"] = code_of(offline, rank)
    again = offline.local_module(PATIENCE_S)
    optimizer = adamw(again)
    first = train(again, optimizer, st.clip_grad_norm_, batches()[:SAVED_AFTER])
    st.save_checkpoint(again, directory / "checkpoint", optimizer)
    second = train(again, optimizer, st.clip_grad_norm_, batches()[SAVED_AFTER:])
    found["clipped"], found["norms"] = ([*a, *b] for a, b in zip(first, second, strict=True))
    found["drifted"] = [*drifted(module), *drifted(again)]
    model, x = noisy()
    random = st.compile_model(model, (x,), mesh=MESH, cluster=CLUSTER, solver=SOLVER, loss_fn=_sum_of_squares)
    torch.manual_seed(rank)  # the ranks' own generators differ
    found["noise"] = noise_losses(random.local_module(PATIENCE_S), x)
    return found


def drifted(module: RankModule) -> list[str]:
    """Parameters of which two ranks hold the same block with other bits."""
    mesh = module.interface.mesh
    mine = {slot.name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for slot, p in module.param_slots()}
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, mine)
    names = []
    for slot, _ in module.param_slots():
        blocks: dict[Any, set[str]] = {}
        for rank, theirs in enumerate(everyone):
            blocks.setdefault(str(coordinate(slot.layout, mesh, rank)), set()).add(theirs[slot.name])
        names += [slot.name] if any(len(seen) > 1 for seen in blocks.values()) else []
    return names


def resumes(directory: Path, rank: int) -> dict[str, Any]:
    """Goes on from the checkpoint, on another mesh."""
    module = st.load_compiled(directory / "pair").local_module(PATIENCE_S)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(7.0)  # nothing of the old values may be needed
    optimizer = adamw(module)
    st.load_checkpoint(module, directory / "checkpoint", optimizer)
    losses, norms = train(module, optimizer, st.clip_grad_norm_, batches()[SAVED_AFTER:])
    return {"clipped": losses, "norms": norms}


def fails(directory: Path, rank: int) -> dict[str, Any]:
    """A rank with another plan; a rank that stops answering in mid-step; a rank that dies in mid-step."""
    found: dict[str, Any] = {}
    mine = st.load_compiled(directory / ("other" if rank == 2 else "plan"))
    found["plan"] = failure(lambda: mine.local_module(PATIENCE_S))
    found["program"] = failure(lambda: _changed(directory, rank).local_module(PATIENCE_S))
    compiled = st.load_compiled(directory / "plan")
    x = torch.load(directory / "x.pt")
    hanging, dying = compiled.local_module(HANG_S), compiled.local_module(PATIENCE_S)
    if rank == 3:
        break_at_first_sum(hanging, lambda: time.sleep(3 * HANG_S))
        break_at_first_sum(dying, lambda: os._exit(9))
    found["hang"] = failure(lambda: hanging(x).backward())
    dist.barrier()
    found["death"] = failure(lambda: dying(x).backward())
    return found


def _changed(directory: Path, rank: int) -> st.CompiledModel:
    """The plan of all, but rank 1 holds programs of which one sends to another channel."""
    compiled = st.load_compiled(directory / "plan")
    if rank == 1:
        instr = next(instr for instr in compiled.artifacts[3].forward.body if instr.kind == "collective")
        instr.channel += 1
    return compiled


def break_at_first_sum(module: RankModule, event: Callable[[], object]) -> None:
    """`event` happens where the step first sums over ranks, in the middle of forward."""
    engine: Any = module.engine
    all_reduce = engine.all_reduce

    def broken(*args: Any) -> torch.Tensor:
        engine.all_reduce = all_reduce
        event()
        return all_reduce(*args)

    engine.all_reduce = broken


def failure(call: Callable[[], object]) -> dict[str, Any]:
    """Kind and text of the exception that a call raises, and the seconds it took."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"kind": "none", "text": "", "seconds": time.monotonic() - started}


SCENARIOS = {function.__name__: function for function in (trains, resumes, fails)}


def main(scenario: str, directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory}/{scenario}.store"
    timeout = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    found = SCENARIOS[scenario](directory, rank)
    (directory / f"{scenario}{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # after a peer has died the group cannot be taken down in good order


# ---- the tests


def launch(scenario: str, directory: Path, world_size: int = RANKS) -> list[dict[str, Any]]:
    """Run the ranks; what each found, in rank order, empty for one that left nothing. None is left running."""
    started = time.monotonic()
    with _processes(scenario, directory, world_size) as processes:
        for process in processes:
            process.wait(max(1.0, LIMIT_S - (time.monotonic() - started)))
    found = []
    for rank, process in enumerate(processes):
        path = directory / f"{scenario}{rank}.json"
        log = (directory / f"{scenario}{rank}.log").read_text()
        assert process.returncode in (0, 9), f"rank {rank} ended with status {process.returncode}:\n{log}"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    return found


@contextmanager
def _processes(scenario: str, directory: Path, world_size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    package = Path(st.__file__).parents[1]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            command = [sys.executable, __file__, scenario, str(directory), str(rank), str(world_size)]
            with (directory / f"{scenario}{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _close(found: list[float], expected: list[float], tolerance: float = 1e-5) -> bool:
    return len(found) == len(expected) and all(abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True))


def test_training(tmp_path: Path) -> None:
    offline = compiled_llama(llama(), MESH)
    offline.save(tmp_path / "offline")
    assert any(any(strategy.digits) for strategy in offline.plan.strategies.values())
    found = launch("trains", tmp_path)

    model = llama()
    plain, _ = train(model, adamw(model), None, batches())
    less, _ = train(model, adamw(model), None, smaller())
    model = llama()
    clipped, norms = train(model, adamw(model), nn.utils.clip_grad_norm_, batches())
    assert min(norms) > MAX_NORM
    noisy_model, x = noisy()
    torch.manual_seed(0)  # that of rank 0
    noise = noise_losses(nn.Sequential(*noisy_model, _Squares()), x)
    assert abs(noise[0] - noise[1]) > 1e-3
    for rank, seen in enumerate(found):
        assert _close(seen["noise"], noise, 1e-4), rank
        assert _close(seen["plain"], plain), rank
        assert _close(seen["smaller"], less), rank
        assert _close(seen["clipped"], clipped), rank
        assert _close(seen["norms"], norms), rank
        assert not seen["drifted"]
        assert all(seen[key] == found[0][key] for key in ("plain", "clipped", "norms")), rank

    # Rank 0 solved online, this process offline: the same plan and programs; and given the plan, the same programs.
    given = compiled_llama(llama(), MESH, plan=st.Plan.from_json((tmp_path / "online.json").read_text()))
    for rank, seen in enumerate(found):
        assert seen["digest"] == offline.plan.digest == given.plan.digest
        assert seen["code"] == seen["offline code"] == code_of(offline, rank) == code_of(given, rank)

    _check_resumed_on_two_ranks(tmp_path, clipped, norms)
    _check_resumed_on_one_device(tmp_path, clipped, norms)


def _check_resumed_on_two_ranks(directory: Path, clipped: list[float], norms: list[float]) -> None:
    compiled_llama(llama(), 2, template="zero3").save(directory / "pair")
    for seen in launch("resumes", directory, 2):
        assert _close(seen["clipped"], clipped[SAVED_AFTER:])
        assert _close(seen["norms"], norms[SAVED_AFTER:])


def _check_resumed_on_one_device(directory: Path, clipped: list[float], norms: list[float]) -> None:
    dcp_to_torch_save(directory / "checkpoint", directory / "whole.pt")
    state = torch.load(directory / "whole.pt")
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    missing, _ = model.load_state_dict({name: state[name] for name in names}, strict=False)
    assert not missing
    optimizer = adamw(model)
    keys = ("step", "exp_avg", "exp_avg_sq")
    moments = {i: {key: state[f"optimizer.{name}.{key}"] for key in keys} for i, name in enumerate(names)}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    found = train(model, optimizer, nn.utils.clip_grad_norm_, batches()[SAVED_AFTER:])
    assert _close(found[0], clipped[SAVED_AFTER:])
    assert _close(found[1], norms[SAVED_AFTER:])


def test_failures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(8, 8)
    torch.save(x, tmp_path / "x.pt")
    for name, template in (("plan", "megatron"), ("other", "zero3")):
        compiled = st.compile_model(model, (x,), mesh=MESH, template=template, loss_fn=torch.sum, solver=SOLVER)
        compiled.save(tmp_path / name)
    found = launch("fails", tmp_path)
    assert not found[3]  # the rank that died

    for seen in found[:3]:
        assert seen["plan"]["kind"] == "RuntimeError"
        assert "plan digests differ" in seen["plan"]["text"]
        assert "rank 2" in seen["plan"]["text"]
        assert "program digests differ" in seen["program"]["text"]
        assert "rank 1" in seen["program"]["text"]
    for case in ("hang", "death"):
        # A rank that needs nothing of the failed one in this step may finish it.
        stopped = [seen[case] for seen in found[:3] if seen[case]["kind"] != "none"]
        assert stopped, case
        for seen in stopped:
            assert seen["kind"] == "CommTimeoutError", seen
            assert all(part in seen["text"] for part in ("node ", "module ", "peer ")), seen
            # Nobody waits longer than the timeout; a death is noticed at once.
            assert seen["seconds"] < (2 * HANG_S if case == "hang" else PATIENCE_S), seen
    assert any(f"no answer within the timeout of {HANG_S:g} s" in seen["hang"]["text"] for seen in found[:3])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
