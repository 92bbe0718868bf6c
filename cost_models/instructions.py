"""Time of one instruction of a rank's program on its device: that of `op_seconds` on the shapes of its tensors.

Whether a view copies depends on strides, which programs do not state: calls are run on meta tensors, each kind once.
What cannot run there is taken to give contiguous results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.cost_models.compute import computed, copy_seconds, is_view, op_seconds
from stpart_compiler.ir.program import Instr, RankProgram, Value, substituted

_WRAPPERS = frozenset({"contiguous_call", "drawn"})
"""Functions that call the op which is their first argument."""

Strides = dict[str, tuple[int, ...]]
"""Strides of the values that are not contiguous, by name."""


@dataclass(frozen=True)
class _Call:
    """An instruction as `op_seconds` sees it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Value, ...]
    results: tuple[Value | None, ...]


class _Price(NamedTuple):
    """Seconds of a call, and the strides of its results, None where they are contiguous."""

    seconds: float
    strides: tuple[tuple[int, ...] | None, ...]


@dataclass
class InstructionCost:
    """Prices of the instructions of any number of programs on one cluster. Equal calls are priced once."""

    cluster: Cluster
    _known: dict[object, _Price] = field(default_factory=dict, init=False, repr=False)

    def of(self, program: RankProgram) -> list[float]:
        """Seconds of each instruction; 0 for those that communicate."""
        strides: Strides = {}
        return [self._seconds(instr, strides) for instr in program.body]

    def _seconds(self, instr: Instr, strides: Strides) -> float:
        if instr.kind not in ("compute", "view"):
            return 0.0
        key = (instr.target, _key(instr.args, strides), _key(tuple(instr.kwargs.items()), strides))
        price = self._known.get(key)
        if price is None:
            price = self._known[key] = self._price(instr, strides)
        for value, made in zip(instr.outs, price.strides, strict=False):
            if value is not None and made is not None:
                strides[value.name] = made
        return price.seconds

    def _price(self, instr: Instr, strides: Strides) -> _Price:
        target, args = instr.target, instr.args
        if getattr(target, "__name__", "") in _WRAPPERS:
            target, args = args[0], args[1:]
        operands = instr.inputs()
        tensors = {value.name: _meta(value, strides) for value in operands}
        results = _run(target, args, instr.kwargs, tensors)
        if is_view(target):
            own = {x.untyped_storage()._cdata for x in tensors.values()}
            copies = any(y is not None and y.untyped_storage()._cdata not in own for y in results)
            seconds = copy_seconds(operands[0].nbytes, self.cluster) if copies else 0.0
        else:
            call = _Call(target, args, instr.kwargs, operands, instr.outs)
            ins, outs = [value.shape for value in operands], [value.shape if value else () for value in instr.outs]
            seconds = op_seconds(call, ins, outs, self.cluster, computed(call, ins))
        return _Price(seconds, tuple(None if y is None or y.is_contiguous() else y.stride() for y in results))


def _key(item: Any, strides: Strides) -> object:
    """What a call's price depends on, of an argument."""
    if isinstance(item, Value):
        return item.shape, item.dtype, strides.get(item.name)
    if isinstance(item, (list, tuple)):
        return tuple([_key(part, strides) for part in item])
    return item if item is None or isinstance(item, (int, torch.dtype)) else str(item)


def _meta(value: Value, strides: Strides) -> torch.Tensor:
    own = strides.get(value.name)
    if own is None:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.empty_strided(value.shape, own, dtype=value.dtype, device="meta")


def _run(target: Any, args: Any, kwargs: Any, tensors: dict[str, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Results of a call on meta tensors; nothing where it cannot run on them."""
    leaf = partial(_on_meta, tensors=tensors)
    try:
        with torch.no_grad():
            made = target(*substituted(args, leaf), **substituted(kwargs, leaf))
    except (NotImplementedError, RuntimeError):
        return ()
    results = made if isinstance(made, (list, tuple)) else (made,)
    return [y if isinstance(y, torch.Tensor) and y.device.type == "meta" else None for y in results]


def _on_meta(item: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(item, Value):
        return tensors[item.name]
    return torch.device("meta") if isinstance(item, torch.device) else item
