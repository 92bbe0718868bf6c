"""All ranks of a compiled model in one process: one step, with global results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map_only

from stpart_compiler.ir.artifact import Interface, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import gather
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.memory import PeakBytes
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.threads import run_ranks

Totals = dict[str, tuple[int, int]]
"""Kind of message (send, recv, all_reduce, ...) -> number and bytes, as `Engine.message_totals` counts them."""


@dataclass(frozen=True)
class StepResult:
    """One step on all ranks, in global tensors.

    `loss`: the loss, or None where the model's output has no scalar loss; then, and for inference, only the forward ran
    and `grads` is empty. `outputs`: the model's output. `grads`: gradient of each parameter under each of its names,
    None where there is none. `buffers`: values after the step under each of their names. `peak_bytes`: per rank, the
    peak of live tensor bytes during forward and backward, which counts the local parameters and buffers, constants, the
    global inputs, and all that the step makes, gradients included, but no temporaries inside of kernels. `messages`:
    all ranks' messages by kind, number and bytes (a collective counts once per member, with the bytes of the member's
    input); `messages_per_rank`: the same for each rank.
    """

    loss: Tensor | None
    outputs: Any
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    peak_bytes: list[int]
    messages: Totals
    messages_per_rank: list[Totals]


class _Local(NamedTuple):
    """What one rank's thread brings back. `grads` is in the order of the parameters."""

    outputs: Any
    grads: tuple[Tensor | None, ...]
    peak_bytes: int
    messages: Totals


def run_in_process(
    artifacts: Sequence[RankArtifact],
    programs: Sequence[tuple[GraphModule, GraphModule | None]],
    params: Sequence[Mapping[str, Tensor]],
    buffers: Sequence[Mapping[str, Tensor]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> StepResult:
    """Run one step of all ranks, each in a thread of its own; see `run_modules`.

    Per rank: its artifact, its (forward, backward) graph modules, and its blocks of parameters and buffers.
    """
    parts = zip(artifacts, programs, params, buffers, strict=True)
    modules = [RankModule(artifact, *gms, local, state) for artifact, gms, local, state in parts]
    return run_modules(modules, args, kwargs, timeout_s)


def run_modules(
    modules: Sequence[RankModule],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> StepResult:
    """Run one step of the modules of all ranks (in rank order) on global inputs.

    The buffers change in place as in any step; the parameters' `.grad` is left alone. `timeout_s` (seconds) bounds
    every wait for a message.

    Raises:
        ValueError: not exactly one module of each rank, or the call is not the one that was compiled.
        RuntimeError: the ranks disagree about the loss.
        CommTimeoutError: a message did not arrive.
    """
    ranks = [module.rank for module in modules]
    if not modules or ranks != list(range(modules[0].interface.mesh.world_size)):
        raise ValueError(f"run_modules: needs the modules of all ranks of the mesh in rank order, got ranks {ranks}")
    call = (tuple(args), dict(kwargs or {}))

    def step(rank: int, engine: Engine) -> _Local:
        modules[rank].attach(engine)
        return _step(modules[rank], engine, *call)

    locals_ = run_ranks(len(modules), step, timeout_s=timeout_s)
    interface = modules[0].interface
    losses = [_loss(interface, local.outputs) for local in locals_]
    _check_equal(losses)
    return StepResult(
        loss=losses[0],
        outputs=locals_[0].outputs,
        grads=_global_grads(interface, locals_),
        buffers=_global_buffers(modules),
        peak_bytes=[local.peak_bytes for local in locals_],
        messages=_summed([local.messages for local in locals_]),
        messages_per_rank=[local.messages for local in locals_],
    )


def _step(module: RankModule, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Local:
    interface = module.interface
    trains = interface.training and interface.loss_index is not None
    params = [param for _, param in module.param_slots()]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    existing = [*params, *(tensor for _, tensor in module.buffer_slots()), *module.constants.values(), *inputs]
    with PeakBytes(existing) as counter, torch.set_grad_enabled(trains):
        outputs = module(*args, **kwargs)
        grads = _gradients(params, _loss(interface, outputs)) if trains else ()
    outputs = tree_map_only(Tensor, Tensor.detach, outputs)
    return _Local(outputs, grads, counter.peak, engine.message_totals())


def _gradients(params: list[Any], loss: Tensor | None) -> tuple[Tensor | None, ...]:
    assert loss is not None
    wanted = [param for param in params if param.requires_grad]
    if not wanted:
        return (None,) * len(params)
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return tuple(next(found) if param.requires_grad else None for param in params)


def _loss(interface: Interface, outputs: Any) -> Tensor | None:
    if interface.loss_index is None:
        return None
    loss = tree_leaves(outputs)[interface.loss_index]
    assert isinstance(loss, Tensor)
    return loss


def _check_equal(losses: list[Tensor | None]) -> None:
    first = losses[0]
    if first is None:
        return
    bits = [_bits(loss) for loss in losses if loss is not None]
    differing = [rank for rank, other in enumerate(bits) if other != bits[0]]
    if differing:
        values = ", ".join(f"rank {rank}: {loss}" for rank, loss in enumerate(losses))
        raise RuntimeError(f"the loss on ranks {differing} differs from that on rank 0: {values}")


def _bits(loss: Tensor) -> list[int]:
    """The value's bytes: NaN equals itself."""
    bits: list[int] = loss.reshape(-1).view(torch.uint8).tolist()
    return bits


def _global_grads(interface: Interface, locals_: list[_Local]) -> dict[str, Tensor | None]:
    if not locals_[0].grads:
        return {}
    found: dict[str, Tensor | None] = {}
    for index, slot in enumerate(interface.params):
        blocks = [local.grads[index] for local in locals_]
        present = [block for block in blocks if block is not None]
        assert len(present) in (0, len(blocks)), f"{slot.name} has a gradient on some ranks only"
        whole = gather(present, slot.layout, interface.mesh) if present else None
        found.update(dict.fromkeys((slot.name, *slot.aliases), whole))
    return found


def _global_buffers(modules: Sequence[RankModule]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for pairs in zip(*(module.buffer_slots() for module in modules), strict=True):
        slot: TensorSlot = pairs[0][0]
        whole = gather([tensor for _, tensor in pairs], slot.layout, modules[0].interface.mesh)
        found.update(dict.fromkeys((slot.name, *slot.aliases), whole))
    return found


def _summed(per_rank: list[Totals]) -> Totals:
    total: Totals = {}
    for totals in per_rank:
        for kind, (number, nbytes) in totals.items():
            before = total.get(kind, (0, 0))
            total[kind] = (before[0] + number, before[1] + nbytes)
    return total
