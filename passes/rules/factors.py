"""Building blocks for factor rules: collect factors, map tensor dims to them, match broadcast shapes."""

from __future__ import annotations

import string
from collections.abc import Sequence

from stpart_compiler.ir.rule import PARALLEL, WHOLE, DimMap, Factor, OpRule, TensorMap
from stpart_compiler.passes.rules.registry import OpCall, Operand

Shape = Sequence[int]


class Factors:
    """Collects the factors of one rule. A dim of size one belongs to no factor."""

    def __init__(self) -> None:
        self.items: list[Factor] = []

    def add(self, size: int, kind: str = PARALLEL, name: str | None = None) -> int:
        """A new factor; its index."""
        index = len(self.items)
        letters = string.ascii_lowercase
        self.items.append(Factor(name or (letters[index] if index < len(letters) else f"f{index}"), size, kind))
        return index

    def dim(self, size: int, kind: str = PARALLEL, name: str | None = None) -> DimMap:
        """A new factor for a dim of `size`, or `()` when it is one."""
        return () if size == 1 else (self.add(size, kind, name),)

    def dims(self, shape: Shape, kinds: Sequence[str] | str = PARALLEL) -> TensorMap:
        """A factor per dim; `kinds`: one for all dims, or one per dim."""
        per_dim = [kinds] * len(shape) if isinstance(kinds, str) else kinds
        return tuple(self.dim(size, kind) for size, kind in zip(shape, per_dim, strict=True))

    def rule(
        self,
        inputs: Sequence[TensorMap],
        outputs: Sequence[TensorMap],
        linear: Sequence[Sequence[int]] = (),
        loops: Sequence[int] = (),
    ) -> OpRule:
        sets = tuple(frozenset(s) for s in linear)
        return OpRule(tuple(self.items), tuple(inputs), tuple(outputs), sets, frozenset(loops))


def normalized(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim % ndim if ndim else 0


def whole_at(ndim: int, dims: Sequence[int]) -> list[str]:
    """Kinds per dim: WHOLE for the given dims, PARALLEL for the others."""
    return [WHOLE if i in dims else PARALLEL for i in range(ndim)]


def aligned(out: TensorMap, shape: Shape) -> TensorMap:
    """Map of an operand of `shape` that broadcasts (right-aligned) to a tensor mapped as `out`."""
    tail = out[len(out) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, tail, strict=True))


def result(call: OpCall, index: int = 0) -> Operand:
    """The `index`-th result, which must be a tensor."""
    found = call.results[index]
    assert found is not None, f"{call.target}: result {index} is no tensor"
    return found


def maps_of_results(call: OpCall, maps: Sequence[TensorMap]) -> tuple[TensorMap, ...]:
    """The maps of the results, `()` where a result is no tensor."""
    return tuple(m if r is not None else () for m, r in zip(maps, call.results, strict=True))
