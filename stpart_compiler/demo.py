"""`stpart demo`: a small Llama trains on 4 local ranks under a memory limit, and exactly like on one device."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stpart_compiler.compile import compile_model
from stpart_compiler.compiled import CompiledModel
from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.inspect.table import plan_table
from stpart_compiler.local_ranks import Batch, RankReport, RanksFailedError, train_on_ranks, train_step
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.solve import InfeasibleError
from stpart_compiler.presets import Preset, causal_lm

MESH = (2, 2)
STEPS = 5
LEARNING_RATE = 1e-3
TOLERANCE = 1e-4
LIMIT_SHARE = 0.75
"""The memory limit as a share of what the replicated plan (template `data`) needs."""
TABLE_ROWS = 12
SOLVER = SolverOptions(time_limit_s=20.0, gap=0.05)
MESSAGE_TIMEOUT_S = 60.0
RANKS_LIMIT_S = 240.0

LLAMA = Preset(
    "Llama",
    {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    },
    batch=8,
    sequence=256,
)


@dataclass(frozen=True)
class OneDevice:
    """Plain eager training: loss of each step, peak bytes with optimizer state."""

    losses: list[float]
    peak_bytes: int


def demo() -> int:
    """Run the demonstration; exit status 0 if every loss agrees and the limit holds, else 1."""
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", flush=True)

    try:
        difference = train_and_compare(say)
    except (RanksFailedError, InfeasibleError, _DemoError) as error:
        print(f"demo failed: {error}", flush=True)
        return 1
    if not difference <= TOLERANCE:
        print(f"demo failed: max |loss difference| = {difference:.3e} is over {TOLERANCE:.0e}", flush=True)
        return 1
    print(f"demo ok: 4 ranks, {STEPS} steps, max |loss difference| = {difference:.3e}", flush=True)
    return 0


class _DemoError(RuntimeError):
    """The demonstration did not show what it is there to show."""


def train_and_compare(say: Callable[[str], None]) -> float:
    """The demonstration itself; gives the largest difference between the losses."""
    model = causal_lm(LLAMA)
    batches = _batches()
    count = sum(param.numel() for param in model.parameters())
    size = f"{count / 1e6:.1f} M float32 parameters, {LLAMA.batch} x {LLAMA.sequence} tokens a step"
    say(f"Llama, 4 layers, {size}, AdamW")
    limit = _limit(model, batches[0], say)
    compiled = _compiled(model, batches[0], say, memory_limit=limit)
    if "data" in compiled.plan.yardsticks:
        raise _DemoError("plain replication fits in the memory limit, which shows nothing")
    print(f"\n{compiled.plan.summary()}\n\n{plan_table(compiled.plan, most=TABLE_ROWS)}")
    say(f"one device, {STEPS} eager steps")
    single = _train_one_device(model, batches)
    say(f"4 ranks, {STEPS} steps")
    reports = train_on_ranks(
        compiled,
        batches,
        learning_rate=LEARNING_RATE,
        timeout_s=MESSAGE_TIMEOUT_S,
        limit_s=RANKS_LIMIT_S,
        verbose=False,
    )
    say("done")
    _show_memory(compiled, reports, single, limit)
    return show_losses(reports, single)


def _batches() -> list[Batch]:
    """Random tokens, some much more frequent than others, which is what a few steps can learn."""
    generator = torch.Generator().manual_seed(1)
    frequency = 1 / torch.arange(1, LLAMA.config["vocab_size"] + 1)
    count = LLAMA.batch * LLAMA.sequence
    drawn = [torch.multinomial(frequency, count, True, generator=generator) for _ in range(STEPS)]
    tokens = [ids.reshape(LLAMA.batch, LLAMA.sequence) for ids in drawn]
    return [((), {"input_ids": ids, "labels": ids}) for ids in tokens]


def _compiled(model: nn.Module, batch: Batch, say: Callable[[str], None], **options: Any) -> CompiledModel:
    args, kwargs = batch
    return compile_model(
        model, args, kwargs, mesh=MESH, solver=SOLVER, progress=lambda text: say(f"  {text}"), **options
    )


def _limit(model: nn.Module, batch: Batch, say: Callable[[str], None]) -> int:
    """A memory limit below what plain replication needs."""
    say("plain replication (template data), to see what it needs:")
    need = _compiled(model, batch, say, template="data").plan.memory["peak"]
    limit = int(need * LIMIT_SHARE)
    say(f"replication needs {format_bytes(need)} per rank; memory limit for the plan: {format_bytes(limit)}")
    return limit


def _train_one_device(model: nn.Module, batches: Sequence[Batch]) -> OneDevice:
    model = copy.deepcopy(model)
    torch.set_num_threads(1)  # as every rank has, so that sums run in one order
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, peaks = [], []
    for batch in batches:
        held = (batch, list(model.parameters()), list(model.buffers()))
        loss, peak = train_step(optimizer, held, partial(_eager_loss, model, batch))
        losses.append(loss)
        peaks.append(peak)
    return OneDevice(losses, max(peaks))


def _eager_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    args, kwargs = batch
    loss: torch.Tensor = model(*args, **kwargs, use_cache=False).loss
    return loss


def _show_memory(compiled: CompiledModel, reports: Sequence[RankReport], single: OneDevice, limit: int) -> None:
    predicted = compiled.plan.memory["peak"]
    print(f"\npeak bytes (limit {limit}; one device: {single.peak_bytes})")
    print("  rank    predicted     measured")
    for report in reports:
        print(f"  {report.rank:4d} {predicted:12d} {report.peak_bytes:12d}")
    over = [report.rank for report in reports if report.peak_bytes > limit]
    if over:
        raise _DemoError(f"ranks {over} took more memory than the limit of {format_bytes(limit)}")


def show_losses(reports: Sequence[RankReport], single: OneDevice) -> float:
    """Largest difference between the losses of the ranks and of one device."""
    print("\n  step   one device      4 ranks   difference")
    differences = []
    for step, (one, four) in enumerate(zip(single.losses, reports[0].losses, strict=True), 1):
        differences.append(abs(one - four))
        print(f"  {step:4d} {one:12.6f} {four:12.6f} {differences[-1]:12.3e}")
    print()
    return float("nan") if any(d != d for d in differences) else max(differences)
