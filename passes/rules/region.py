"""Regions: several ops run as one, block by block, so that the values between them never exist whole.

A region has one factor rule, made of those of its ops: dims that the ops share are one factor. It is then placed like
any op. A factor that all products of the region have may be its loop: the middle values exist one block at a time
(METP's O = f(AB)C).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.rule import (
    COMBINED,
    LOGSUMEXP,
    ONLINE,
    PARALLEL,
    SUM,
    WHOLE,
    Factor,
    OpRule,
    TensorMap,
    block_shape,
)
from stpart_compiler.passes.rules.registry import Block, Merge, OpCall, bind
from stpart_compiler.runtime import fused_ops, local_ops

Shape = tuple[int, ...]
Source = tuple[int, int]
"""(-1, i): operand i of the region; (j, r): result r of its j-th op."""

Atoms = list[list[int]]  # per dim of a tensor, sizes of its atoms


@dataclass(frozen=True)
class BodyOp:
    """One op of a region. `factors[f]`: the factor of the region that its own factor f is.

    `ring`: two of its own factors that are one of the region (queries and keys of one sequence). Where that is cut over
    an axis, blocks of the first stay and those of the second go round (`passes/inner_rings.py`).
    """

    call: OpCall
    rule: OpRule
    sources: tuple[Source, ...]
    factors: tuple[int, ...] = ()
    ring: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """Short name of what it computes, such as mm."""
        return str(self.call.target).removeprefix("aten.").split(".")[0]

    def block(self, ranges: Sequence[tuple[int, int]]) -> Block:
        """The op's part in a block of the region with these index ranges."""
        return Block(self.rule, tuple(ranges[f] for f in self.factors))

    def shapes(self, extents: Sequence[int]) -> tuple[list[Shape], list[Shape]]:
        """Shapes of operands and results in a block of the region with these extents."""
        own = [extents[f] for f in self.factors]
        ins, outs = ([block_shape(tensor, own) for tensor in maps] for maps in (self.rule.inputs, self.rule.outputs))
        return ins, outs


_MERGE = Merge(local_ops.merge_written, local_ops.merged_written, lambda dtypes: (dtypes[1], dtypes[1]))


@dataclass(frozen=True, eq=False)
class Region:
    """The target of a fused call: called with whole tensors, it computes what its ops compute."""

    body: tuple[BodyOp, ...]
    outputs: tuple[Source, ...]
    rule: OpRule

    @cached_property
    def __name__(self) -> str:
        text = "".join(f"{op.call.text}{op.sources}{op.rule}{op.factors}" for op in self.body)
        digest = hashlib.sha256(f"{text}{self.outputs}".encode()).hexdigest()[:8]
        kinds = dict.fromkeys(op.kind for op in self.body)
        return f"fused_{'_'.join([k for k in kinds if k not in _QUIET][:4])}_{digest}"

    def __str__(self) -> str:
        return self.__name__

    @cached_property
    def merge(self) -> Merge | None:
        """How blocks of the keys of attention written out are merged: its results are the output and the logsumexp."""
        return _MERGE if any(factor.kind == ONLINE for factor in self.rule.factors) else None

    def __call__(self, *tensors: Any) -> Any:
        made: list[tuple[Any, ...]] = []
        for op in self.body:
            operands = [tensors[r] if j < 0 else made[j][r] for j, r in op.sources]
            results = op.call.target(*bind(op.call.args, operands), **bind(op.call.kwargs, operands))
            made.append(tuple(results) if isinstance(results, (tuple, list)) else (results,))
        found = tuple(made[j][r] for j, r in self.outputs)
        return found if len(found) > 1 else found[0]

    @cached_property
    def shares_storage(self) -> bool:
        """Whether a result may be a view of another one: then neither may be added to in place."""
        bases = [self._base(source) for source in self.outputs]
        return len(set(bases)) < len(bases)

    def _base(self, source: Source) -> Source:
        while source[0] >= 0 and is_view(self.body[source[0]].call.target):
            source = self.body[source[0]].sources[0]
        return source

    def peak_bytes(self, extents: Sequence[int]) -> int:
        """Most bytes of middle values and results alive at once in one block; operands are not counted."""
        sizes = {
            (j, r): math.prod(shape) * result.dtype.itemsize
            for j, op in enumerate(self.body)
            for r, (shape, result) in enumerate(zip(op.shapes(extents)[1], op.call.results, strict=True))
            if result is not None and not is_view(op.call.target)
        }
        behind = {
            (j, r): op.sources[0]
            for j, op in enumerate(self.body)
            if is_view(op.call.target)
            for r in range(len(op.call.results))
        }
        last: dict[Source, int] = {}
        reads = [(source, j) for j, op in enumerate(self.body) for source in op.sources]
        for source, j in (*reads, *((source, len(self.body)) for source in self.outputs)):
            while source in behind:  # a view keeps what it looks at alive
                source = behind[source]
            last[source] = j
        spans = [(at[0], last.get(at, at[0]), size) for at, size in sizes.items()]
        own = [self._inner_bytes(op, extents) for op in self.body]
        return max(sum(size for start, end, size in spans if start <= j <= end) + own[j] for j in range(len(self.body)))

    def _inner_bytes(self, op: BodyOp, extents: Sequence[int]) -> int:
        """What a region or ring inside needs beside the op's operands and results."""
        middle = (
            op.call.target.peak_bytes([extents[f] for f in op.factors]) if isinstance(op.call.target, Region) else 0
        )
        return middle + self._ring_bytes(op, extents)

    def _ring_bytes(self, op: BodyOp, extents: Sequence[int]) -> int:
        """Buffers in use, arriving, and of merging."""
        if op.ring is None or extents[op.factors[op.ring[0]]] == self.rule.factors[op.factors[op.ring[0]]].size:
            return 0
        ins, outs = op.shapes(extents)
        moving = sum(
            math.prod(shape) * x.dtype.itemsize
            for tensor, shape, x in zip(op.rule.inputs, ins, op.call.operands, strict=True)
            if any(op.ring[1] in dim for dim in tensor)
        )
        made = sum(
            math.prod(shape) * x.dtype.itemsize for shape, x in zip(outs, op.call.results, strict=True) if x is not None
        )
        return 2 * moving + 2 * made


fused = getattr(torch.ops, fused_ops.NAMESPACE)
_KEPT = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
_QUIET = frozenset({"t", "view", "_unsafe_view", "transpose", "permute", "expand", "unsqueeze", "clone"})


def compose(
    body: Sequence[BodyOp], operands: Sequence[Atoms], results: dict[Source, Atoms], outputs: Sequence[Source]
) -> Region | None:
    """The region of these ops, or None where no factor runs through all of its products.

    `operands`, `results`: the atoms of the values it reads and makes.
    """
    dims = _Dims(body, operands, results)
    body = [replace(op, ring=_ring(j, op, dims)) for j, op in enumerate(body)]
    kinds, combines = _kinds(body, dims, outputs)
    shared = _common(body, dims) & {c for c, kind in kinds.items() if kind != WHOLE}
    rings = {dims.of(j, op.ring[0]) for j, op in enumerate(body) if op.ring is not None} & shared
    local = {dims.of(j, f) for j, op in enumerate(body) for f, factor in enumerate(op.rule.factors) if factor.local}
    tiles = shared - rings
    if not tiles:
        return None
    number = {c: i for i, c in enumerate(kinds)}
    factors = tuple(
        Factor(f"f{i}", dims.size[c], kinds[c] if c in shared else WHOLE, local=c in local) for i, c in enumerate(kinds)
    )
    rule = OpRule(
        factors,
        tuple(dims.tensor((-1, i), number) for i in range(len(operands))),
        tuple(dims.tensor(source, number) for source in outputs),
        loops=frozenset(number[c] for c in tiles - local),
        tiles=frozenset(number[c] for c in tiles),
        combines=combines,
        rings=frozenset(number[c] for c in rings),
    )
    named = tuple(
        replace(op, factors=tuple(number[dims.of(j, f)] for f in range(len(op.rule.factors))))
        for j, op in enumerate(body)
    )
    return Region(named, tuple(outputs), rule)


Node = tuple[object, ...]


class _Dims:
    """Which loop dims of the ops, and which atoms of the values, are the same."""

    def __init__(self, body: Sequence[BodyOp], operands: Sequence[Atoms], results: dict[Source, Atoms]) -> None:
        self.parent: dict[Node, Node] = {}
        self.size: dict[Node, int] = {}
        self.whole: set[Node] = set()
        self.atoms: dict[Source, Atoms] = {(-1, i): atoms for i, atoms in enumerate(operands)} | results
        for source, atoms in self.atoms.items():
            for d, sizes in enumerate(atoms):
                for a, size in enumerate(sizes):
                    self._add(("value", source, d, a), size)
        for j, op in enumerate(body):
            for f, factor in enumerate(op.rule.factors):
                self._add(("op", j, f), factor.size)
            self.whole.update(("op", j, f) for f in op.rule.windowed)
        for j, op in enumerate(body):
            for source, tensor in zip(op.sources, op.rule.inputs, strict=True):
                self._join(j, op.rule, source, tensor)
            for r, tensor in enumerate(op.rule.outputs):
                if (j, r) in self.atoms:
                    self._join(j, op.rule, (j, r), tensor)
        self.root = {node: self._find(node) for node in self.parent}
        self.size = {self.root[node]: size for node, size in self.size.items()}
        self.whole = {self.root[node] for node in self.whole}

    def _add(self, node: Node, size: int) -> None:
        self.parent[node] = node
        self.size[node] = size

    def _find(self, node: Node) -> Node:
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def of(self, j: int, f: int) -> Node:
        """The dim that factor f of op j is."""
        return self.root["op", j, f]

    def _join(self, j: int, rule: OpRule, source: Source, tensor: TensorMap) -> None:
        for d, (sizes, factors) in enumerate(zip(self.atoms[source], tensor, strict=True)):
            atoms: list[Node] = [("value", source, d, a) for a, size in enumerate(sizes) if size > 1]
            loops: list[Node] = [("op", j, f) for f in factors if rule.factors[f].size > 1]
            if [self.size[x] for x in atoms] != [self.size[x] for x in loops]:
                self.whole.update(atoms, loops)
                continue
            for one, two in zip(atoms, loops, strict=True):
                self.parent[self._find(one)] = self._find(two)

    def tensor(self, source: Source, number: dict[Node, int]) -> TensorMap:
        return tuple(tuple(number[c] for c in self.of_dim(source, d)) for d in range(len(self.atoms[source])))

    def of_dim(self, source: Source, d: int) -> list[Node]:
        sizes = self.atoms[source][d]
        return [self.root["value", source, d, a] for a, size in enumerate(sizes) if size > 1]

    def has(self, source: Source, c: Node) -> bool:
        return any(c in self.of_dim(source, d) for d in range(len(self.atoms[source])))


def _weighted(op: BodyOp, f: int | None, operands: list[str]) -> str | None:
    """What is made of shares of a block of keys: linear in them it is one too, and summed over keys it is merged."""
    ports = frozenset(i for i, state in enumerate(operands) if state in (SHARE, MERGED))
    passes = len(operands) == 1 and (is_view(op.call.target) or op.call.target in _KEPT)
    if not passes and ports not in op.rule.linear:
        return None
    if f is None:
        return MERGED
    return {PARALLEL: SHARE, SUM: MERGED}.get(op.rule.factors[f].kind)


def _ring(j: int, op: BodyOp, dims: _Dims) -> tuple[int, int] | None:
    """Two factors of an op that are one dim of the region, if its blocks may go round: what stays, what travels."""
    found: list[tuple[int, int, int]] = []
    for f, g in itertools.permutations(range(len(op.rule.factors)), 2):
        tensors = [{x for dim in tensor for x in dim} for tensor in (*op.rule.inputs, *op.rule.outputs)]
        apart = all(len({f, g} & tensor) < 2 for tensor in tensors)
        cut = op.rule.factors[f].kind in (PARALLEL, *COMBINED) and op.rule.factors[f].size > 1
        if g in op.rule.loops and apart and cut and dims.of(j, f) == dims.of(j, g):
            travels = sum(math.prod(op.rule.factors[x].size for x in tensor) for tensor in tensors if g in tensor)
            found.append((travels, f, g))
    return min(found)[1:] if found else None


def _common(body: Sequence[BodyOp], dims: _Dims) -> set[Node]:
    """Dims that all products have."""
    products = [j for j, op in enumerate(body) if any(factor.kind == SUM for factor in op.rule.factors)]
    heavy = [j for j in products if len(body[j].call.operands) == 2]
    found = [{dims.of(j, f) for f, factor in enumerate(body[j].rule.factors) if factor.size > 1} for j in heavy]
    return set.intersection(*found) if found else set()


FREE, HAS = "free", "has"  # of a dim; else pending over it: one of COMBINED
SHARE, MERGED = "share", "merged"
"""Of keys: probabilities of a block by the block's own logsumexp, and sums weighted by such, which are merged by it."""


Kinds = dict[Node, str]


def _kinds(body: Sequence[BodyOp], dims: _Dims, outputs: Sequence[Source]) -> tuple[Kinds, tuple[str, ...]]:
    """Kind of each dim of the region, as its ops meet them; how the blocks of each result combine."""
    members: dict[Node, list[tuple[int, int]]] = {}
    for j, op in enumerate(body):
        for f in range(len(op.rule.factors)):
            members.setdefault(dims.of(j, f), []).append((j, f))
    for source, atoms in dims.atoms.items():
        for d in range(len(atoms)):
            for c in dims.of_dim(source, d):
                members.setdefault(c, [])
    kinds: Kinds = {}
    combines: list[str | None] = [None] * len(outputs)
    for c, at in members.items():
        found = _states(body, dims, outputs, c, at)
        kinds[c] = _kind(found, combines)
        if kinds[c] not in (WHOLE, ONLINE):
            combines = [state if state in COMBINED else known for state, known in zip(found, combines, strict=True)]
    return kinds, tuple(known or SUM for known in combines)


def _kind(states: list[str], combines: list[str | None]) -> str:
    """Whether blocks of a dim concatenate, combine, or must not be cut, given what the results are of it."""
    pending = [state for state in states if state in COMBINED]
    if MERGED in states:
        return ONLINE if states == [MERGED, LOGSUMEXP] else WHOLE
    if not states or FREE in states or SHARE in states:
        return WHOLE
    if any(state in COMBINED and known not in (None, state) for state, known in zip(states, combines, strict=True)):
        return WHOLE
    return SUM if SUM in pending else pending[0] if pending else PARALLEL


def _states(
    body: Sequence[BodyOp], dims: _Dims, outputs: Sequence[Source], c: Node, at: list[tuple[int, int]]
) -> list[str]:
    """What each result is of a dim; empty where the dim must not be cut."""
    rings = {j for j, f in at if f in (body[j].ring or ())}
    at = [(j, f) for j, f in at if j not in rings]
    once = len({j for j, _ in at}) == len(at)  # an op in which it is two dims needs it whole, or goes round
    cut = all(body[j].rule.factors[f].kind in (PARALLEL, *COMBINED) for j, f in at)
    if c in dims.whole or not at or not once or not cut:
        return []
    states: dict[Source, str] = {source: HAS if dims.has(source, c) else FREE for source in dims.atoms if source[0] < 0}
    own = dict(at)
    for j, op in enumerate(body):
        if j in rings:
            if any(states[source] in COMBINED for source in op.sources):
                return []
            states |= {(j, r): HAS for r in range(len(op.rule.outputs))}
            continue
        made = _state(op, own.get(j), [states[source] for source in op.sources])
        if made is None:
            return []
        for r in range(len(op.rule.outputs)):
            has = (j, r) in dims.atoms and dims.has((j, r), c) and made != SHARE
            states[j, r] = HAS if has else made
            if j in own and states[j, r] == FREE:
                return []
    return [states[source] for source in outputs]


def _state(op: BodyOp, f: int | None, operands: list[str]) -> str | None:
    """What results that lack a dim are: free of it, or pending over it; None where blocks do not combine.

    `f`: the op's own factor that is the dim. `operands`: what its operands are. Sums pass through what is linear in
    them, all else through views alone.
    """
    pending = {i: state for i, state in enumerate(operands) if state in COMBINED}
    if op.call.target is fused.exp_minus.default and operands == [HAS, LOGSUMEXP]:
        return SHARE
    if {SHARE, MERGED} & set(operands):
        return None if pending else _weighted(op, f, operands)
    if f is not None:
        kind = op.rule.factors[f].kind
        return None if pending else kind if kind in COMBINED else FREE
    if not pending:
        return FREE
    kinds = set(pending.values())
    if len(operands) == 1 and is_view(op.call.target):
        return kinds.pop()
    return SUM if kinds == {SUM} and any(pending.keys() == linear for linear in op.rule.linear) else None
