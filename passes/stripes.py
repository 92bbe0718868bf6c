"""Sequences under causal masks as (rows, stripes), so that cutting the stripes gives every rank equal work.

Cut in one piece per rank, the first rank's queries see hardly any key and the last one's all. Of n ranks each gets
every n-th token instead (Brandon et al. 2023, Striped Attention): any block of queries and keys is then masked by half.
That is no permutation: a dim of s positions is written as two atoms, s/n rows and n stripes, of which the minor one is
cut. All that touches the sequence is written so, and positions, labels and masks are found by the rules of their ops.

Rows are cut in time alone, so that there are no more ways to cut a sequence than before. A length that the stripes do
not divide stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stpart_compiler.ir.rule import WHOLE, DimMap, OpRule, striped
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import WORK, OpCall

if TYPE_CHECKING:
    from stpart_compiler.passes.propagate import OpNode, ValueInfo, ValueKey

Place = tuple[int, int]
"""Number of an op, factor of it."""


@dataclass(frozen=True)
class Sequences:
    """Sequences under causal masks. `stripes`: in how many they are written; 1: none is.

    `single`, `windows`: there is a batch of one, whose pieces lie side by side in memory, or there are windows over
    places, which read neighbours: then pieces may be cheaper to move than stripes. `uneven`: lengths that are not
    written so, as the stripes do not divide them. `whole`: by name of an op, factors of sequences not written so.
    """

    stripes: int = 1
    single: bool = False
    windows: bool = False
    uneven: tuple[int, ...] = ()
    whole: dict[str, frozenset[int]] = field(default_factory=dict)


def stripe_cuts(ops: Iterable[OpNode], stripes: int) -> dict[tuple[ValueKey, int], int]:
    """Boundaries between rows and stripes, by value and dim, at queries and keys of attention."""
    found: dict[tuple[ValueKey, int], int] = {}
    for op in ops if stripes > 1 else ():
        for masked in _masked(op.call, op.rule):
            sizes = {op.rule.factors[f].size for dim in masked.dims for f in dim}
            if len(sizes) > 1 or any(size % stripes or size == stripes for size in sizes):
                continue
            ports = zip(op.operands, op.rule.inputs, strict=True)
            dims = ((key, d, dim) for key, tensor in ports for d, dim in enumerate(tensor))
            found |= {(key, d): stripes for key, d, dim in dims if dim in masked.dims}
    return found


def write_stripes(ops: list[OpNode], values: dict[ValueKey, ValueInfo], stripes: int) -> Sequences:
    """Note in ops, whose rules are over atoms by now, that rows are not cut over ranks and that stripes go round."""
    if stripes == 1:
        return Sequences()
    seen = _Seen(stripes)
    for i, op in enumerate(ops):
        for masked in _masked(op.call, op.rule):
            for dim in masked.dims:
                seen.add(i, [(f, op.rule.factors[f].size) for f in dim], masked.batch)
    uneven = tuple(sorted(seen.uneven))
    links = _Links(ops, values)
    whole = {ops[i].name: found for i, found in links.reached(seen.whole).items()}
    if not seen.minors:
        return Sequences(uneven=uneven, whole=whole)
    known: dict[tuple[int, frozenset[int]], OpRule] = {}  # identical layers share rules, by id
    before = [op.rule for op in ops]
    for i, rows in links.reached(seen.rows).items():
        key = id(before[i]), rows
        known[key] = ops[i].rule = known.get(key) or striped(before[i], rows)
    for i, minors in links.reached(seen.minors).items():
        ops[i].stripes = minors
    return Sequences(stripes, seen.single, any(rule.windowed for rule in before), uneven, whole)


@dataclass
class _Seen:
    """Factors of sequences, each with the number of its op. `single`: whether there is a batch of one."""

    stripes: int
    single: bool = False
    rows: set[Place] = field(default_factory=set)
    minors: set[Place] = field(default_factory=set)
    whole: set[Place] = field(default_factory=set)
    uneven: set[int] = field(default_factory=set)

    def add(self, op: int, dim: list[tuple[int, int]], batch: int) -> None:
        """A dim of an op, as factors and sizes, major to minor."""
        self.single |= batch == 1
        wide = [(f, size) for f, size in dim if size > 1]
        if len(wide) > 1 and wide[-1][1] == self.stripes:
            self.rows |= {(op, f) for f, _ in wide[:-1]}
            self.minors.add((op, wide[-1][0]))
            return
        self.whole |= {(op, f) for f, _ in wide}
        length = math.prod(size for _, size in wide)
        if length % self.stripes:
            self.uneven.add(length)


@dataclass(frozen=True)
class _Masked:
    """Dims of queries and keys under a causal mask, as factors of an op, and the size of the batch."""

    dims: tuple[DimMap, ...]
    batch: int


def _masked(call: OpCall, rule: OpRule) -> Iterator[_Masked]:
    """The causal attention that an op is, or has inside, where its sequence may be cut."""
    if isinstance(call.target, Region):
        for inner in call.target.body:
            for found in _masked(inner.call, inner.rule):
                yield _Masked(tuple(tuple(inner.factors[f] for f in dim) for dim in found.dims), found.batch)
        return
    work = WORK.get(call.target)
    dims = work.dims(call, rule) if work is not None else ()
    if dims and all(rule.factors[f].kind != WHOLE for dim in dims for f in dim):
        yield _Masked(dims, call.operands[0].shape[0])


Spot = tuple[int, int, int]
"""Operand or result of an op (results are counted after operands), dim, atom."""


class _Links:
    """Which factors of ops are one dim, through the values between them."""

    def __init__(self, ops: list[OpNode], values: dict[ValueKey, ValueInfo]) -> None:
        self.values = values
        self.rules = [op.rule for op in ops]
        self.ports = [(*op.operands, *((op.name, j) for j in range(len(op.rule.outputs)))) for op in ops]
        self.at: dict[ValueKey, list[tuple[int, int]]] = {}  # value -> (op, port)
        for i, keys in enumerate(self.ports):
            for port, key in enumerate(keys):
                self.at.setdefault(key, []).append((i, port))
        self.known: dict[int, _Spots] = {}  # by id of a rule: it is over the same atoms wherever it stands

    def _spots(self, i: int) -> _Spots:
        rule = self.rules[i]
        if id(rule) not in self.known:
            atoms = [self.values[key].atoms if key in self.values else [] for key in self.ports[i]]
            self.known[id(rule)] = _Spots.of(rule, atoms)
        return self.known[id(rule)]

    def _near(self, i: int, f: int) -> Iterator[Place]:
        """Factors of ops that have a value in common with this one, along it."""
        for port, d, a in self._spots(i).of_factor.get(f, ()):
            for j, other in self.at[self.ports[i][port]]:
                yield from ((j, g) for g in self._spots(j).factors.get((other, d, a), ()))

    def reached(self, start: set[Place]) -> dict[int, frozenset[int]]:
        """Number of an op -> its factors that are one dim with those of `start`."""
        seen, todo = set(start), list(start)
        while todo:
            near = set(self._near(*todo.pop())) - seen
            seen |= near
            todo += near
        found: dict[int, set[int]] = {}
        for i, f in seen:
            found.setdefault(i, set()).add(f)
        return {i: frozenset(factors) for i, factors in sorted(found.items())}


@dataclass(frozen=True)
class _Spots:
    """Where the factors of a rule are atoms of values, and the other way round."""

    of_factor: dict[int, list[Spot]]
    factors: dict[Spot, list[int]]

    @staticmethod
    def of(rule: OpRule, values: list[list[list[int]]]) -> _Spots:
        """`values`: atoms of the dims of each operand and result."""
        found = _Spots({}, {})
        for port, (tensor, dims) in enumerate(zip((*rule.inputs, *rule.outputs), values, strict=True)):
            for d, (factors, sizes) in enumerate(zip(tensor, dims, strict=True) if dims else ()):
                wide = [f for f in factors if rule.factors[f].size > 1]
                atoms = [a for a, size in enumerate(sizes) if size > 1]
                if [rule.factors[f].size for f in wide] != [sizes[a] for a in atoms]:
                    continue
                for f, a in zip(wide, atoms, strict=True):
                    found.of_factor.setdefault(f, []).append((port, d, a))
                    found.factors.setdefault((port, d, a), []).append(f)
        return found
