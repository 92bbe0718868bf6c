"""Gradients of several backwards that wait for one reduction.

What waits has the shape in which backward made it, which is not always that of a parameter's block, so it cannot stand
in `.grad`. There, zeros without memory of their own mark that something waits: `zero_grad()` takes the mark away, and
with it what waits; reading gives zeros, and writing raises. A gradient that was there before is its own mark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stpart_compiler.ir.artifact import SumSlot
from stpart_compiler.runtime.owners import Home

Reduce = Callable[[list[Tensor | None]], dict[str, Tensor]]
"""Sums in the order of their slots (None: no summand) -> gradients by parameter name. All ranks call it together."""


class _Held(NamedTuple):
    """Sums of the same slots. Programs for inputs of several sizes have the same, as a rule."""

    sums: list[Tensor | None]
    reduce: Reduce


class _Mark(NamedTuple):
    """What stands in a parameter's `.grad` while sums wait."""

    grad: Tensor
    version: int
    is_ours: bool


class GradientSums:
    """What waits on one rank. `open`: how many `no_sync` contexts are entered."""

    def __init__(self, rank: int, homes: Mapping[str, Home]) -> None:
        self.open = 0
        self._rank = rank
        self._homes = homes
        self._held: dict[tuple[SumSlot, ...], _Held] = {}
        self._marks: dict[str, _Mark] = {}

    @property
    def waiting(self) -> list[str]:
        """Names of the parameters for which sums wait, without those whose gradient was set to None since.

        Raises:
            RuntimeError: a gradient was written or replaced since.
        """
        cleared = {name for name, mark in self._marks.items() if self._is_cleared(name, mark)}
        if cleared:
            self._forget(cleared)
        return list(self._marks)

    def check_reduced(self, caller: str) -> None:
        """Raises:
        RuntimeError: sums wait, so that the gradients are not whole; `caller` needs them whole.
        """
        waiting = self.waiting
        if waiting:
            raise RuntimeError(
                f"{caller}: rank {self._rank} holds sums of gradients that were not reduced, such as of"
                f" {waiting[0]!r} ({len(waiting)} parameters): run the last backward before it outside of no_sync(), or"
                " drop them with zero_grad()"
            )

    def add(
        self, slots: tuple[SumSlot, ...], values: Sequence[Tensor], needed: Collection[str], reduce: Reduce
    ) -> None:
        """Add what one backward made. `needed`: parameters that get gradients. Takes over the values' memory."""
        self._check_same(slots, needed)
        held = self._held.setdefault(slots, _Held([None] * len(slots), reduce))
        for index, (slot, value) in enumerate(zip(slots, values, strict=True)):
            mine = [name for name in slot.params if name in needed]
            if not mine:
                continue
            known = held.sums[index]
            held.sums[index] = _compact(value).to(slot.dtype) if known is None else known.add_(value)
            for name in mine:
                self._mark(name)

    def reduced(self) -> dict[str, Tensor]:
        """Gradients of all that waits, which it does no longer. All ranks call this together."""
        waiting = self.waiting
        held, self._held = self._held, {}
        total: dict[str, Tensor] = {}
        for part in held.values():
            total = added(total, part.reduce(part.sums))
        self._unmark()
        return {name: total[name] for name in waiting}

    def drop(self) -> None:
        self._held.clear()
        self._unmark()

    def _check_same(self, slots: tuple[SumSlot, ...], needed: Collection[str]) -> None:
        known = set(self.waiting)
        changed = sorted(known.difference(needed))
        if changed:
            raise RuntimeError(
                f"rank {self._rank}: parameter {changed[0]!r} no longer requires grad, but sums of its gradient wait:"
                " change requires_grad after a backward outside of no_sync(), or after zero_grad()"
            )

    def _mark(self, name: str) -> None:
        if name in self._marks:
            return
        param = self._homes[name].tensor
        is_ours = param.grad is None
        if is_ours:
            param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        assert param.grad is not None
        self._marks[name] = _Mark(param.grad, param.grad._version, is_ours)

    def _unmark(self) -> None:
        for name, mark in self._marks.items():
            param = self._homes[name].tensor
            if mark.is_ours and param.grad is mark.grad:
                param.grad = None
        self._marks.clear()

    def _is_cleared(self, name: str, mark: _Mark) -> bool:
        grad = self._homes[name].tensor.grad
        if grad is not None and (grad is not mark.grad or grad._version != mark.version):
            raise RuntimeError(
                f"rank {self._rank}: the gradient of {name!r} was written while a sum of it waits for its reduction:"
                " clip or scale gradients after a backward outside of no_sync(), and drop them by zero_grad() with"
                " set_to_none=True"
            )
        return grad is None

    def _forget(self, cleared: set[str]) -> None:
        for name in cleared:
            del self._marks[name]
        for slots, held in self._held.items():
            for index, slot in enumerate(slots):
                left = [name for name in slot.params if name in self._marks]
                if left and cleared.intersection(slot.params):
                    raise RuntimeError(
                        f"rank {self._rank}: the gradients of {list(slot.params)} are one sum, of which some were set"
                        f" to None while it waits, but not those of {left}: zero the gradients of all"
                    )
                if not left:
                    held.sums[index] = None
        if not self._marks:
            self._held.clear()


def added(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums by name, in the memory of `one`; a name may be in one of them alone."""
    return one | {name: one[name].add_(grad) if name in one else grad for name, grad in two.items()}


def _compact(value: Tensor) -> Tensor:
    """With memory of its own size: what is kept must not keep the whole of which it is a part."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
