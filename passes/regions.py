"""Find regions O = f(AB)C of the joint graph, forward and backward, whose middle need never exist whole (METP).

A *middle dim* is one that a linear layer makes and no result has: another layer sums over it (the hidden dim of an
MLP), or a loss does (a vocabulary). All ops that have it, found by following it through the rules, are the region:
those of forward are one op, those of backward another, which makes anew what it reads of forward's middle. What
attention gives, as a kernel or written out, is as large as what enters the region, and dear to make: backward reads it
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from stpart_compiler.capture import Captured
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.rule import SUM, WHOLE, TensorMap
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey, reached_from
from stpart_compiler.passes.rules.region import BodyOp, Region, Source, compose
from stpart_compiler.passes.strategies import is_contraction

KINDS = ("head", "mlp", "attention")
"""Kinds of regions: an LM head with its loss; MLPs; attention with its projections, whose loop is one over heads."""

ALL = "all"

REGIONS = (*("+".join(kinds) for n in range(1, len(KINDS)) for kinds in combinations(KINDS, n)), ALL)
"""Which kinds are one op each, in all layers: each of them, any two, and all."""

Place = tuple[str, int]  # (op, own factor)
Atom = tuple[ValueKey, int, int]  # (value, dim, atom)


@dataclass
class Found:
    """One region as found: its ops in order, values that it reads and gives, and the fused op."""

    ops: list[OpNode]
    operands: list[ValueKey]
    results: list[ValueKey]
    region: Region


def kinds_of(regions: str | None) -> frozenset[str]:
    """The kinds that a member of REGIONS names; none of None."""
    if regions is None:
        return frozenset()
    return frozenset(KINDS if regions == ALL else regions.split("+"))


def kind_of(region: Region) -> str:
    """Of a region of forward its kind."""
    if region.merge is not None or any(op.rule.loops for op in region.body):
        return "attention"
    return "mlp" if all(how == SUM for how in region.rule.combines) else "head"


class FindRegions:
    """Regions of forward with those of backward that belong to them, wide middles first. No op is in two regions."""

    def __init__(self, graph: Annotated, kinds: frozenset[str]) -> None:
        self.graph = graph
        self.links = _Links(graph, _tokens(graph), "attention" in kinds)
        self.kinds = kinds
        self.known: dict[object, Region | None] = {}  # identical layers have the same regions

    def run(self) -> Iterator[tuple[Found, ...]]:
        taken: set[str] = set()
        forward = [op for op in self.graph.ops if op.name not in self.graph.backward and is_contraction(op.rule)]
        seeds = [(op, f) for op in forward for f in sorted(op.movable - self.links.tokens[op.name])]
        for op, f in sorted(seeds, key=lambda seed: -seed[0].rule.factors[seed[1]].size):
            middle = self.links.middle(op, f) if op.name not in taken else None
            made = self._regions(middle) if middle is not None and not middle.ops & taken else ()
            if made and kind_of(made[0].region) not in self.kinds:
                continue
            taken |= {inner.name for found in made for inner in found.ops}
            if made:
                yield made

    def _regions(self, middle: Middle) -> tuple[Found, ...]:
        """The region of forward and that of backward; empty unless both can be run block by block of the middle."""
        after = _after(self.graph, self.links, middle.ops)
        return self._pair(middle, middle.ops | after) or (self._pair(middle, middle.ops) if after else ())

    def _pair(self, middle: Middle, names: set[str]) -> tuple[Found, ...]:
        graph = self.graph
        ops = [op for op in graph.ops if op.name in names]
        forward = [op for op in ops if op.name not in graph.backward]
        backward = [op for op in ops if op.name in graph.backward]
        lasting = _lasting(forward, backward)
        again = _remade(forward, backward, middle, self.links.tokens, lasting)
        body = [*again, *backward]
        made = {op.name for op in body}
        kept = {key for op in body for key in op.operands if key[0] not in made}
        found = [self._region(middle, forward, forward, names, kept, lasting)]
        if backward:
            found.append(self._region(middle, backward, body, names, set(), set()))
        return tuple(region for region in found if region is not None) if all(found) else ()

    def _region(
        self,
        middle: Middle,
        own: list[OpNode],
        body: list[OpNode],
        names: set[str],
        kept: set[ValueKey],
        lasting: set[ValueKey],
    ) -> Found | None:
        """`own` as one op that runs `body`; None where it would wait for itself, or the middle cannot be its loop.

        `kept`: what the other region reads, `lasting` of it what may be of the middle.
        """
        graph = self.graph
        body = _viewed(graph, body)
        inside = {op.name for op in own}
        results = self._results(inside, names, kept)
        if not results or len(own) == 1 or middle.values & set(results) - lasting or _waits_for_itself(graph, inside):
            return None
        index = {op.name: j for j, op in enumerate(body)}
        operands = list(dict.fromkeys(key for op in body for key in op.operands if key[0] not in index))
        number = {key: i for i, key in enumerate(operands)}

        def source(key: ValueKey) -> Source:
            return (index[key[0]], key[1]) if key[0] in index else (-1, number[key])

        steps = [BodyOp(op.call, op.rule, tuple(map(source, op.operands))) for op in body]
        region = self._composed(body, steps, operands, [source(key) for key in results])
        if region is None or not all(
            region.body[index[name]].factors[f] in region.rule.loops for name, f in middle.places if name in index
        ):
            return None
        return Found(own, operands, results, region)

    def _results(self, inside: set[str], names: set[str], kept: set[ValueKey]) -> list[ValueKey]:
        return _given(self.graph, inside, names, kept)

    def _composed(
        self, body: list[OpNode], steps: list[BodyOp], operands: list[ValueKey], outputs: list[Source]
    ) -> Region | None:
        values = self.graph.values
        given = [values[key].atoms for key in operands]
        made = {
            (j, r): values[op.name, r].atoms
            for j, op in enumerate(body)
            for r, result in enumerate(op.call.results)
            if result is not None
        }
        texts = tuple((step.call.text, str(step.rule), step.sources) for step in steps)
        key = (texts, str(given), str(made), tuple(outputs))
        if key not in self.known:
            self.known[key] = compose(steps, given, made, outputs)
        return self.known[key]


def _tokens(graph: Annotated) -> dict[str, frozenset[int]]:
    """Per op, the dims of the user's data that are no features: no parameter has them."""
    weights = reached_from(graph.ops, graph.values, "param")
    features = _features(graph, weights)
    data = reached_from(graph.ops, graph.values, "input", lambda key, dim: (key, dim) not in features)
    return {op.name: data[op.name] - weights[op.name] for op in graph.ops}


def _features(graph: Annotated, weights: dict[str, frozenset[int]]) -> set[tuple[ValueKey, int]]:
    """Dims of values that are read along a dim of a parameter, by an op or by what reads its results."""
    found: set[Atom] = set()
    for op in reversed(graph.ops):
        own = set(weights[op.name])
        for r, tensor in enumerate(op.rule.outputs):
            key = (op.name, r)
            own |= {
                f for d, factors in enumerate(tensor) for f, atom in _atoms(graph, op, key, d, factors) if atom in found
            }
        for key, tensor in zip(op.operands, op.rule.inputs, strict=True):
            atoms = (pair for d, factors in enumerate(tensor) for pair in _atoms(graph, op, key, d, factors))
            found |= {atom for f, atom in atoms if f in own}
    return {(key, d) for key, d, _ in found}


def _atoms(graph: Annotated, op: OpNode, key: ValueKey, d: int, factors: tuple[int, ...]) -> list[tuple[int, Atom]]:
    """The factors of a dim with the atoms that they are; where those differ, all with all."""
    wide = [f for f in factors if op.rule.factors[f].size > 1]
    if key not in graph.values:
        return []
    sizes = [size for size in graph.values[key].atoms[d] if size > 1]
    if len(wide) == len(sizes):
        return [(f, (key, d, a)) for a, f in enumerate(wide)]
    return [(f, (key, d, a)) for f in wide for a in range(len(sizes))]


@dataclass
class Middle:
    """A dim that a region goes through block by block: the loop dims that it is, and activations that have it."""

    places: set[Place] = field(default_factory=set)
    values: set[ValueKey] = field(default_factory=set)

    @property
    def ops(self) -> set[str]:
        return {name for name, _ in self.places}


class _Links:
    """Who makes and who reads each value."""

    def __init__(self, graph: Annotated, tokens: dict[str, frozenset[int]], attention: bool) -> None:
        self.graph = graph
        self.tokens = tokens
        self.attention = attention
        self.readers: dict[ValueKey, list[tuple[OpNode, int]]] = {}
        for op in graph.ops:
            for port, key in enumerate(op.operands):
                self.readers.setdefault(key, []).append((op, port))

    def middle(self, op: OpNode, factor: int) -> Middle | None:
        """All places of a dim; None where no product of forward makes it, or it is one of the user's data."""
        found = Middle()
        todo: list[tuple[OpNode, int]] = [(op, factor)]
        while todo:
            at, f = todo.pop()
            if (at.name, f) in found.places or at.rule.factors[f].kind == WHOLE:
                continue
            if f in self.tokens[at.name] or (at.rule.loops and not self.attention):
                return None
            found.places.add((at.name, f))
            for atom in self._atoms(at, f):
                todo += self._places(atom)
            found.values |= self._activations(at, f)
        is_made = any(self._makes(name, f) for name, f in found.places)
        return found if is_made and found.values else None

    def _makes(self, name: str, f: int) -> bool:
        """Whether an op is a product of forward whose result has the dim."""
        op = self.graph.by_name[name]
        return name not in self.graph.backward and is_contraction(op.rule) and op.rule.factors[f].kind != SUM

    def _activations(self, op: OpNode, f: int) -> set[ValueKey]:
        """Values with a factor that are no weights and no gradients of them: they have dims of tokens too."""
        found: set[ValueKey] = set()
        for key, tensor in self.tensors(op):
            factors = {g for dim in tensor for g in dim}
            if f in factors and factors & self.tokens[op.name] and self.graph.values[key].kind == "op":
                found.add(key)
        return found

    def _atoms(self, op: OpNode, f: int) -> Iterator[Atom]:
        """Where a factor is in the values that an op reads and makes."""
        for key, tensor in self.tensors(op):
            for d, factors in enumerate(tensor):
                wide = [g for g in factors if op.rule.factors[g].size > 1]
                if f in wide and len(wide) == len(self.graph.values[key].atoms[d]):
                    yield key, d, wide.index(f)

    def tensors(self, op: OpNode) -> Iterator[tuple[ValueKey, TensorMap]]:
        yield from zip(op.operands, op.rule.inputs, strict=True)
        for r, tensor in enumerate(op.rule.outputs):
            if op.call.results[r] is not None:
                yield (op.name, r), tensor

    def ports(self, key: ValueKey) -> list[tuple[OpNode, TensorMap]]:
        """The ops that read and make a value, with its map there."""
        maker = self.graph.by_name.get(key[0])
        found = [(op, op.rule.inputs[port]) for op, port in self.readers.get(key, ())]
        return [*found, (maker, maker.rule.outputs[key[1]])] if maker is not None else found

    def _places(self, atom: Atom) -> Iterator[tuple[OpNode, int]]:
        """The factors that an atom of a value is, in the ops that make and read it."""
        key, d, a = atom
        if self.graph.values[key].kind != "op":
            return
        for op, tensor in self.ports(key):
            if not self.tokens[op.name] and len(op.operands) > 1:
                continue  # of weights alone: their gradients meet here
            wide = [f for f in tensor[d] if op.rule.factors[f].size > 1]
            if len(wide) == len(self.graph.values[key].atoms[d]):
                yield op, wide[a]


def _after(graph: Annotated, links: _Links, names: set[str]) -> set[str]:
    """Ops that only add up what a region gives, or view it: one result then leaves it instead of several."""
    found: set[str] = set()
    todo = [reader for key in graph.values if key[0] in names for reader, _ in links.readers.get(key, ())]
    while todo:
        op = todo.pop()
        inside = all(name in names or name in found for name, _ in op.operands)
        if (
            op.name in names
            or op.name in found
            or not inside
            or frozenset(range(len(op.operands))) not in op.rule.linear
        ):
            continue
        if len({name in graph.backward for name in (op.name, *(name for name, _ in op.operands))}) == 1:
            found.add(op.name)
            todo += [reader for r in range(len(op.rule.outputs)) for reader, _ in links.readers.get((op.name, r), ())]
    return found


def _viewed(graph: Annotated, body: list[OpNode]) -> list[OpNode]:
    """The body with the views through which it reads: two views of one value are then one operand. A view may look at
    what the body itself makes, and comes after it.
    """
    inside = {op.name for op in body}
    views: dict[str, OpNode] = {}
    todo = [name for op in body for name, _ in op.operands]
    while todo:
        op = graph.by_name.get(todo.pop())
        if op is None or op.name in inside or op.name in views or not is_view(op.call.target) or len(op.operands) != 1:
            continue
        if len(op.call.results) == 1:
            views[op.name] = op
            todo.append(op.operands[0][0])
    return [op for op in graph.ops if op.name in inside or op.name in views]


def _remade(
    forward: list[OpNode],
    backward: list[OpNode],
    middle: Middle,
    tokens: dict[str, frozenset[int]],
    lasting: set[ValueKey],
) -> list[OpNode]:
    """Ops of forward that backward runs again: those that make what it reads of the middle, but for what is lasting,
    and views of weights.
    """
    inside = {op.name: op for op in forward}
    needed: set[str] = set()
    todo = [key for op in backward for key in op.operands]
    while todo:
        key = todo.pop()
        is_new = key[0] in inside and key[0] not in needed and key not in lasting
        if is_new and (key in middle.values or not tokens[key[0]]):
            needed.add(key[0])
            todo += inside[key[0]].operands
    return [op for op in forward if op.name in needed]


def _lasting(forward: list[OpNode], backward: list[OpNode]) -> set[ValueKey]:
    """What backward reads of the results of attention kernels, and of attention written out as one region."""
    kernels = {op.name for op in forward if op.rule.loops}
    return {key for op in backward for key in op.operands if key[0] in kernels}


def _given(graph: Annotated, inside: set[str], names: set[str], kept: set[ValueKey]) -> list[ValueKey]:
    """Values that others read, or that are results of the step."""
    finals = {graph.alias[node] for node in _result_nodes(graph.captured)}
    others = {key for op in graph.ops if op.name not in names for key in op.operands}
    return [key for key in graph.values if key[0] in inside and (key in finals or key in others or key in kept)]


def _result_nodes(captured: Captured) -> Iterator[str]:
    yield from (output.node for output in captured.outputs if output.node)
    yield from captured.mutations.values()
    yield from (grad for grad in captured.grads.values() if grad is not None)


def _waits_for_itself(graph: Annotated, inside: set[str]) -> bool:
    """Whether an op of the region reads what another op made of its results."""
    after: set[str] = set()
    for op in graph.ops:
        made_of = any(name in after or (name in inside and op.name not in inside) for name, _ in op.operands)
        if made_of and op.name in inside:
            return True
        if made_of:
            after.add(op.name)
    return False
