"""What the ranks of tests/numeric/test_online.py do, each in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slow_ranks import CLUSTER
from torch import nn

import stpart_compiler as st
from stpart_compiler.ir.layout import coordinate
from stpart_compiler.runtime.rank_module import RankModule

MESH = (2, 2)
RANKS = 4
STEPS, SAVED_AFTER = 5, 3
MAX_NORM = 0.5  # below the norms met here, so that clipping changes the steps
LIMIT_S = 240.0  # for all ranks of a launch
HANG_S, PATIENCE_S = 4.0, 60.0  # timeouts of the runs in which a rank stops or dies

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
    start = engine._sum

    def broken(*args: Any) -> None:
        engine._sum = start
        event()
        start(*args)

    engine._sum = broken


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
    store = f"file://{directory}/{scenario}.store"
    timeout = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    found = SCENARIOS[scenario](directory, rank)
    (directory / f"{scenario}{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # after a peer has died the group cannot be taken down in good order
