"""Find and fuse regions O = f(AB)C of the joint graph, forward and backward, so that their middle is never whole.

A *middle dim* is one that a linear layer makes and another one sums over (the hidden dim of an MLP). All ops that have
it, found by following it through the rules, are the region: those of forward become one op, those of backward another,
which makes anew what it reads of forward's middle. Nothing of the middle is then kept from forward for backward (METP,
FACTS 3; with one rank: a tiled MLP).
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from stpart_compiler.capture import Captured
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.rule import SUM, WHOLE, TensorMap
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.rules.region import BodyOp, Region, Source, compose
from stpart_compiler.passes.strategies import is_contraction

REGIONS = ("head", "mlp", "all")
"""Kinds of regions: an LM head with its loss; MLPs; attention with its projections, whose loop is one over heads."""

Place = tuple[str, int]  # (op, own factor)
Atom = tuple[ValueKey, int, int]  # (value, dim, atom)


@dataclass
class Found:
    """One region as found: its ops in order, values that it reads and gives, and the fused op."""

    ops: list[OpNode]
    operands: list[ValueKey]
    results: list[ValueKey]
    region: Region


@dataclass(frozen=True)
class FuseRegions:
    """annotated ops -> the captured step with each region as one op; None where there are no regions.

    `kind`: one of REGIONS, each of which has those of the ones before.
    """

    kind: str = "mlp"

    def apply(self, graph: Annotated) -> Captured | None:
        found = [region for pair in _Finder(graph, self.kind).run() for region in pair]
        if not found:
            return None
        return dataclasses.replace(graph.captured, gm=_Rewriter(graph, found).run())


class _Finder:
    """Regions of forward with those of backward that belong to them, wide middles first. No op is in two regions."""

    def __init__(self, graph: Annotated, kind: str) -> None:
        self.graph = graph
        self.links = _Links(graph, kind == "all")
        self.losses_only = kind == "head"
        self.known: dict[object, Region | None] = {}  # identical layers have the same regions

    def run(self) -> Iterator[tuple[Found, ...]]:
        taken: set[str] = set()
        forward = [op for op in self.graph.ops if op.name not in self.graph.backward and is_contraction(op.rule)]
        seeds = [(op, f) for op in forward for f in sorted(op.movable - op.data)]
        for op, f in sorted(seeds, key=lambda seed: -seed[0].rule.factors[seed[1]].size):
            middle = self.links.middle(op, f) if op.name not in taken else None
            made = self._regions(middle) if middle is not None and not middle.ops & taken else ()
            if self.losses_only and made and all(how == SUM for how in made[0].region.rule.combines):
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
        again = _remade(forward, backward, middle)
        body = [*again, *backward]
        made = {op.name for op in body}
        kept = {key for op in body for key in op.operands if key[0] not in made}
        found = [self._region(middle, forward, forward, names, kept)]
        if backward:
            found.append(self._region(middle, backward, body, names, set()))
        return tuple(region for region in found if region is not None) if all(found) else ()

    def _region(
        self, middle: Middle, own: list[OpNode], body: list[OpNode], names: set[str], kept: set[ValueKey]
    ) -> Found | None:
        """`own` as one op that runs `body`; None where it would wait for itself, or the middle cannot be its loop.

        `kept`: what the other region reads.
        """
        graph = self.graph
        body = _viewed(graph, body)
        inside = {op.name for op in own}
        results = _given(graph, inside, names, kept)
        if not results or len(own) == 1 or middle.values & set(results) or _waits_for_itself(graph, inside):
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

    def __init__(self, graph: Annotated, attention: bool) -> None:
        self.graph = graph
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
            if f in at.data or (at.rule.loops and not self.attention):
                return None
            found.places.add((at.name, f))
            for atom in self._atoms(at, f):
                todo += self._places(atom)
            found.values |= self._activations(at, f)
        return found if any(self._makes(name, f) for name, f in found.places) else None

    def _makes(self, name: str, f: int) -> bool:
        """Whether an op is a product of forward whose result has the dim."""
        op = self.graph.by_name[name]
        return name not in self.graph.backward and is_contraction(op.rule) and op.rule.factors[f].kind != SUM

    def _activations(self, op: OpNode, f: int) -> set[ValueKey]:
        """Values with a factor that are no weights: they have dims of the user's data too."""
        found: set[ValueKey] = set()
        for key, tensor in self._tensors(op):
            factors = {g for dim in tensor for g in dim}
            if f in factors and factors & op.data and self.graph.values[key].kind == "op":
                found.add(key)
        return found

    def _atoms(self, op: OpNode, f: int) -> Iterator[Atom]:
        """Where a factor is in the values that an op reads and makes."""
        for key, tensor in self._tensors(op):
            for d, factors in enumerate(tensor):
                wide = [g for g in factors if op.rule.factors[g].size > 1]
                if f in wide and len(wide) == len(self.graph.values[key].atoms[d]):
                    yield key, d, wide.index(f)

    def _tensors(self, op: OpNode) -> Iterator[tuple[ValueKey, TensorMap]]:
        yield from zip(op.operands, op.rule.inputs, strict=True)
        for r, tensor in enumerate(op.rule.outputs):
            if op.call.results[r] is not None:
                yield (op.name, r), tensor

    def _places(self, atom: Atom) -> Iterator[tuple[OpNode, int]]:
        """The factors that an atom of a value is, in the ops that make and read it."""
        key, d, a = atom
        if self.graph.values[key].kind != "op":
            return
        maker = self.graph.by_name.get(key[0])
        ports = [(op, op.rule.inputs[port]) for op, port in self.readers.get(key, ())]
        if maker is not None:
            ports.append((maker, maker.rule.outputs[key[1]]))
        for op, tensor in ports:
            if not op.data and len(op.operands) > 1:
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
    """The body with the views through which it reads: two views of one value are then one operand."""
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
    return [*(op for op in graph.ops if op.name in views), *body]


def _remade(forward: list[OpNode], backward: list[OpNode], middle: Middle) -> list[OpNode]:
    """Ops of forward that backward must run again: those that make what it reads of the middle."""
    inside = {op.name: op for op in forward}
    needed: set[str] = set()
    todo = [key for op in backward for key in op.operands]
    while todo:
        key = todo.pop()
        is_weight_view = key[0] in inside and not inside[key[0]].data
        if key[0] in inside and key[0] not in needed and (key in middle.values or is_weight_view):
            needed.add(key[0])
            todo += inside[key[0]].operands
    return [op for op in forward if op.name in needed]


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


@dataclass
class _Rewriter:
    """Writes the graph anew with fused ops, each where its last op was."""

    graph: Annotated
    found: list[Found]
    new: fx.Graph = field(default_factory=fx.Graph)
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> fx.GraphModule:
        gm = self.graph.captured.gm
        nodes = list(gm.graph.nodes)
        self.by_name = {node.name: node for node in nodes}
        self.node_of = {key: self.by_name[name] for name, key in reversed(self.graph.alias.items())}
        owner = self._owners(nodes)
        for unit in _ordered(nodes, owner, [self._reads(found) for found in self.found]):
            if isinstance(unit, int):
                self._fused(self.found[unit])
            else:
                self.copied[unit] = self.new.node_copy(unit, self.copied.__getitem__)
        self.new.lint()
        return fx.GraphModule(gm, self.new, "Fused")

    def _owners(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
        """The region of each node that is in one; a getitem goes with what it takes from."""
        region = {op.name: i for i, found in enumerate(self.found) for op in found.ops}
        owner: dict[fx.Node, int] = {}
        for node in nodes:
            base = node.args[0] if node.target is operator.getitem else node
            if isinstance(base, fx.Node) and base.name in region:
                owner[node] = region[base.name]
        return owner

    def _reads(self, found: Found) -> list[fx.Node]:
        return [self.node_of[key] for key in found.operands]

    def _fused(self, found: Found) -> None:
        """The call of a region; its results keep the names that they had."""
        olds = [self.node_of[key] for key in found.results]
        args = tuple(self.copied[node] for node in self._reads(found))
        last = self.by_name[found.ops[-1].name]
        meta = {key: last.meta[key] for key in ("is_backward", "stack_trace") if key in last.meta}
        meta["module_path"] = _common_path([op.module_path for op in found.ops])
        if len(olds) == 1:
            call = self.new.create_node("call_function", found.region, args, {}, olds[0].name)
            call.meta = meta | {"val": olds[0].meta["val"]}
            self.copied[olds[0]] = call
            return
        call = self.new.create_node("call_function", found.region, args, {}, f"fused_{last.name}")
        call.meta = meta | {"val": tuple(node.meta["val"] for node in olds)}
        for r, old in enumerate(olds):
            self.copied[old] = self.new.create_node("call_function", operator.getitem, (call, r), {}, old.name)
            self.copied[old].meta = dict(old.meta)


def _ordered(nodes: list[fx.Node], owner: dict[fx.Node, int], reads: list[list[fx.Node]]) -> Iterator[fx.Node | int]:
    """Nodes outside of regions, and regions by number, each after what it reads, else as before."""
    place = {node: i for i, node in enumerate(nodes)}
    inputs: dict[fx.Node | int, set[fx.Node | int]] = {}
    rank: dict[fx.Node | int, int] = {}
    for node in nodes:
        unit = owner.get(node, node)
        rank[unit] = place[node]
        wanted = reads[unit] if isinstance(unit, int) else node.all_input_nodes
        inputs[unit] = {owner.get(x, x) for x in wanted}
    readers: dict[fx.Node | int, list[fx.Node | int]] = {}
    for unit, wanted_units in inputs.items():
        for x in wanted_units:
            readers.setdefault(x, []).append(unit)
    ready = [(rank[unit], i, unit) for i, unit in enumerate(inputs) if not inputs[unit]]
    heapq.heapify(ready)
    number = {unit: i for i, unit in enumerate(inputs)}
    while ready:
        _, _, unit = heapq.heappop(ready)
        yield unit
        for reader in readers.get(unit, ()):
            inputs[reader].discard(unit)
            if not inputs[reader]:
                heapq.heappush(ready, (rank[reader], number[reader], reader))


def _common_path(paths: list[str]) -> str:
    """The module that all of some module paths are in."""
    parts = [path.split(".") for path in paths if path]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
