"""What a rank computes of an op, found once: most ranks, and ops of repeated layers, do the same on equal blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import Range
from stpart_compiler.ir.rule import OpRule
from stpart_compiler.passes.rules import Block, OpCall, local_call


@dataclass(frozen=True)
class LocalCall:
    """What computes one block of an op: arguments with `Operand`s for tensors, and the shapes of the results."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    kind: str


class LocalCalls:
    """Local calls of blocks: most ranks, and ops of repeated layers, compute blocks of the same ranges."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, tuple[Range, ...]], tuple[OpCall, OpRule, LocalCall]] = {}

    def of(self, call: OpCall, block: Block) -> LocalCall:
        key = (id(call), id(block.rule), block.ranges)
        known = self._known.get(key)
        if known is None:  # call and rule are kept, so that nothing else gets their ids
            known = self._known[key] = call, block.rule, self._made(call, block)
        return known[2]

    def _made(self, call: OpCall, block: Block) -> LocalCall:
        target, args, kwargs = local_call(call, block)
        shapes = tuple(block.out_shape(i) for i, _ in enumerate(call.results))
        return LocalCall(target, args, kwargs, shapes, "view" if is_view(call.target) else "compute")
