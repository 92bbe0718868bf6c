"""Types of the factor rules (DESIGN section 2).

A rule names the loop dims (*factors*) of one op call and says of which factors each tensor dim is made. All
strategies, layouts and block programs of the op follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stpart_compiler.ir.window import Window

PARALLEL = "parallel"
SUM = "sum"
MAX = "max"
MIN = "min"
LOGSUMEXP = "logsumexp"
WHOLE = "whole"
ONLINE = "online"
HALO = "halo"

COMBINED = frozenset({SUM, MAX, MIN, LOGSUMEXP})
"""Kinds of factors that results lack when they are cut: results of blocks combine elementwise (ir.combine)."""

DimMap = tuple[int, ...]
TensorMap = tuple[DimMap, ...]


@dataclass(frozen=True)
class Factor:
    """A loop dim.

    `kind`: PARALLEL (blocks concatenate), SUM (block results add up), ONLINE (results of one block after another are
    merged as they are made, so that it may be cut in time only), WHOLE (must not be cut).
    MAX, MIN, LOGSUMEXP: like SUM, but the result is the largest, smallest, or logsumexp of block results.
    HALO: a block of it is what a block of the factor `driver` reads through `window`; it is cut as that one is.
    `local`: cut in time alone, never over ranks, whatever its kind.
    """

    name: str
    size: int
    kind: str = PARALLEL
    window: Window | None = None
    driver: int = -1
    local: bool = False


@dataclass(frozen=True)
class OpRule:
    """Factor rule of one op call.

    `inputs[i]` / `outputs[j]` map each dim of the i-th tensor operand / j-th tensor result to the factors it is made
    of, major to minor; `()` for a dim of size one that belongs to no factor (broadcast). Operands are counted in order
    of occurrence in (args, kwargs), lists flattened. `linear` lists maximal sets of operands in which the op is jointly
    linear: a pending sum may pass through the operands of one such set, if all of them carry it. `loops`: factors that
    may be cut in time, besides those of a contraction, so that operands and results travel while blocks are computed.
    `tiles`: factors that may be cut in time alone: nothing travels, but less is alive at once. `combines`: per result,
    how its blocks combine over a factor of a combined kind that it lacks; empty: as the factor says. `rings`: factors
    that may be cut over one axis only, which no other factor uses: inside, blocks go round that axis.
    """

    factors: tuple[Factor, ...]
    inputs: tuple[TensorMap, ...]
    outputs: tuple[TensorMap, ...]
    linear: tuple[frozenset[int], ...] = ()
    loops: frozenset[int] = frozenset()
    tiles: frozenset[int] = frozenset()
    combines: tuple[str, ...] = ()
    rings: frozenset[int] = frozenset()

    def combine(self, result: int, factor: int) -> str:
        """How blocks of a factor combine in a result that lacks it."""
        kind = self.factors[factor].kind
        return self.combines[result] if self.combines and kind in COMBINED else kind

    def __post_init__(self) -> None:
        used = {f for tensor in (*self.inputs, *self.outputs) for dim in tensor for f in dim}
        assert used <= set(range(len(self.factors))), f"rule names factors {used} of {len(self.factors)}"

    @property
    def cuttable(self) -> tuple[int, ...]:
        """Factors that may be cut in space."""
        kept = (WHOLE, ONLINE, HALO)
        return tuple(i for i, f in enumerate(self.factors) if f.kind not in kept and f.size > 1 and not f.local)

    @cached_property
    def windowed(self) -> frozenset[int]:
        """Factors that are read through windows, and those that drive them. They are never written as several."""
        halos = [f for f, factor in enumerate(self.factors) if factor.kind == HALO]
        return frozenset([*halos, *(self.factors[f].driver for f in halos)])

    def driver(self, f: int) -> int:
        """The factor whose digits cut factor `f`: itself, unless it is read through a window."""
        return self.factors[f].driver if self.factors[f].kind == HALO else f

    def __str__(self) -> str:
        ins = ", ".join(_tensor_text(self, tensor) for tensor in self.inputs)
        outs = ", ".join(_tensor_text(self, tensor) for tensor in self.outputs)
        kinds = "".join(f"; {f.kind} {f.name}" for f in self.factors if f.kind != PARALLEL)
        return f"({ins}) -> ({outs}){kinds}"


def block_shape(tensor: TensorMap, extents: Sequence[int]) -> tuple[int, ...]:
    """Shape of a tensor in a block of the loop nest with these extents per factor."""
    return tuple(math.prod(extents[f] for f in dim) for dim in tensor)


def _tensor_text(rule: OpRule, tensor: TensorMap) -> str:
    dims = []
    for dim in tensor:
        names = " ".join(rule.factors[f].name for f in dim)
        dims.append(names if len(dim) == 1 else f"({names})" if dim else "1")
    return " ".join(dims) or "scalar"


def refined(rule: OpRule, parts: Mapping[int, tuple[int, ...]]) -> OpRule:
    """The rule with factor `f` written as several factors of sizes `parts[f]`, major to minor, for each given `f`."""
    factors: list[Factor] = []
    ids: dict[int, DimMap] = {}
    for index, factor in enumerate(rule.factors):
        sizes = parts.get(index, (factor.size,))
        assert math.prod(sizes) == factor.size, f"{factor} cannot be refined as {sizes}"
        assert len(sizes) == 1 or index not in rule.windowed, f"{factor} goes with a window, refined as {sizes}"
        ids[index] = tuple(range(len(factors), len(factors) + len(sizes)))
        names = [factor.name] if len(sizes) == 1 else [f"{factor.name}{i}" for i in range(len(sizes))]
        factors += [replace(factor, name=name, size=size) for name, size in zip(names, sizes, strict=True)]

    def renamed(tensor: TensorMap) -> TensorMap:
        return tuple(tuple(new for old in dim for new in ids[old]) for dim in tensor)

    inputs, outputs = tuple(map(renamed, rule.inputs)), tuple(map(renamed, rule.outputs))
    factors = [replace(f, driver=ids[f.driver][0]) if f.kind == HALO else f for f in factors]
    timed = (frozenset(_major(ids[f], factors) for f in found) for found in (rule.loops, rule.tiles, rule.rings))
    loops, tiles, rings = timed
    assert all(len(ids[f]) == 1 for f in rule.rings), "a region's ring is of one atom"
    return OpRule(tuple(factors), inputs, outputs, rule.linear, loops, tiles, rule.combines, rings)


def _major(parts: DimMap, factors: list[Factor]) -> int:
    """The first part of a refined factor that is wider than one."""
    return next((f for f in parts if factors[f].size > 1), parts[0])


def striped(rule: OpRule, rows: frozenset[int]) -> OpRule:
    """The rule with `rows` cut in time alone, and loops over them made loops over the stripes beside them in a dim."""
    loops = frozenset(g for f in rule.loops for g in (_beside(rule, f, rows) if f in rows else [f]))
    factors = tuple(replace(factor, local=factor.local or f in rows) for f, factor in enumerate(rule.factors))
    return replace(rule, factors=factors, loops=loops)


def _beside(rule: OpRule, f: int, rows: frozenset[int]) -> list[int]:
    """The first factor behind f in its dim that is none of `rows`; none in a dim of rows alone."""
    dim = next(dim for tensor in (*rule.inputs, *rule.outputs) for dim in tensor if f in dim)
    return [g for g in dim[dim.index(f) :] if g not in rows][:1]
