"""Gradient clipping by the global norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stpart_compiler.ir.artifact import TensorSlot
from stpart_compiler.ir.layout import coordinate, holders
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.owners import allow_change, owner_of
from stpart_compiler.runtime.rank_module import RankModule

# Collectives are told apart by (channel, tag), and programs use channels from 0 on.
_CHANNEL = -1


def clip_grad_norm_(
    parameters: RankModule | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Like `torch.nn.utils.clip_grad_norm_` on the whole model: scales the gradients in place, returns the norm before.

    `parameters`: a rank module, or parameters of one. All ranks call it with the same ones; all get the same norm.
    `foreach` is accepted and ignored. torch's own function sees this rank's blocks alone: it is wrong where parameters
    are cut, of which the next step of an optimizer warns.

    Raises:
        ValueError: a parameter belongs to no rank module or to another one than the rest, or `norm_type` is not > 0.
        RuntimeError: the norm is not finite and `error_if_nonfinite`; sums of gradients wait (`RankModule.no_sync`).
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive or inf, got {norm_type}")
    owned = _owned(parameters)
    if owned is None:
        return torch.tensor(0.0)
    module, pairs = owned
    module.check_reduced("clip_grad_norm_")
    total = _global_norm(module, pairs, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} over all ranks is not finite: {total}")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for _, param in pairs:
            if param.grad is not None:
                param.grad.mul_(scale.to(param.grad.dtype))
                allow_change(param)
    return total


def _owned(
    parameters: RankModule | Tensor | Iterable[Tensor],
) -> tuple[RankModule, list[tuple[TensorSlot, Tensor]]] | None:
    """The module that owns the parameters, and each parameter once with its slot; None where there are none."""
    if isinstance(parameters, RankModule):
        return parameters, list(parameters.param_slots())
    params = {id(p): p for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
    module: RankModule | None = None
    pairs: list[tuple[TensorSlot, Tensor]] = []
    for index, param in enumerate(params.values()):
        owner = owner_of(param)
        if owner is None:
            raise ValueError(
                f"clip_grad_norm_: parameter {index} of shape {tuple(param.shape)} belongs to no rank module; pass the "
                f"module from rank_module() or local_module(), or its parameters()"
            )
        if module is not None and owner[0] is not module:
            raise ValueError("clip_grad_norm_: the parameters belong to several rank modules; clip each by itself")
        module = owner[0]
        pairs.append((owner[1], param))
    return None if module is None else (module, pairs)


def _global_norm(module: RankModule, pairs: list[tuple[TensorSlot, Tensor]], order: float) -> Tensor:
    """The norm in the parameters' dtype, the same bits on every rank."""
    dtype, device = torch.float32, torch.device("cpu")
    for index, (slot, param) in enumerate(pairs):
        dtype = slot.dtype if index == 0 else torch.promote_types(dtype, slot.dtype)
        device = param.device
    local = torch.zeros((), dtype=torch.float64, device=device)
    for slot, param in pairs:
        if param.grad is None or param.grad.numel() == 0:
            continue
        accumulate = torch.promote_types(param.grad.dtype, torch.float32)
        norm = torch.linalg.vector_norm(param.grad, order, dtype=accumulate).to(device, torch.float64)
        # A block that several ranks hold counts once.
        local = torch.maximum(local, norm) if math.isinf(order) else local + norm**order / _replicas(module, slot)
    return _over_ranks(module, local, order).to(dtype)


def _over_ranks(module: RankModule, local: Tensor, order: float) -> Tensor:
    if math.isinf(order):
        return largest_over_ranks(module, local, "clip_grad_norm_")
    ranks = range(module.interface.mesh.world_size)
    if len(ranks) == 1:
        return local ** (1.0 / order)
    engine = _engine_of(module, "clip_grad_norm_")
    total = engine.all_reduce(local, ranks, 0, _CHANNEL)
    engine.wait((0,), _CHANNEL)
    return total ** (1.0 / order)


def largest_over_ranks(module: RankModule, local: Tensor, caller: str) -> Tensor:
    """The largest value of any rank, the same on all of them; `caller` is named where there is no engine."""
    ranks = range(module.interface.mesh.world_size)
    if len(ranks) == 1:
        return local
    engine = _engine_of(module, caller)
    values = engine.all_gather(local, ranks, 0, _CHANNEL)
    engine.wait((0,), _CHANNEL)
    return values.amax()


def _engine_of(module: RankModule, caller: str) -> Engine:
    if module.engine is None:
        raise RuntimeError(f"{caller}: the rank module has no engine; call attach(engine) on every rank first")
    return module.engine


def _replicas(module: RankModule, slot: TensorSlot) -> int:
    """How many ranks hold this rank's block."""
    mesh = module.interface.mesh
    [ranks] = holders(slot.layout, mesh)[coordinate(slot.layout, mesh, module.rank)].values()
    return len(ranks)
