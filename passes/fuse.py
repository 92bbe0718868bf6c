"""Write the joint graph with each region as one op."""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from stpart_compiler.capture import Captured
from stpart_compiler.passes.online import WriteOnline
from stpart_compiler.passes.propagate import Annotated, Propagate
from stpart_compiler.passes.regions import FindRegions, Found
from stpart_compiler.passes.scores import FindScores


@dataclass(frozen=True)
class FuseRegions:
    """annotated ops -> the captured step with each region as one op; None where there are no regions.

    `kinds`: some of KINDS.
    """

    kinds: frozenset[str]

    def apply(self, graph: Annotated) -> Captured | None:
        return _fused(graph, FindRegions(graph, self.kinds))


@dataclass(frozen=True)
class FuseScores:
    """captured step -> the same with each attention written out as one op; None where there is none.

    `stripes`: as of Propagate.
    """

    stripes: int = 1

    def apply(self, captured: Captured) -> Captured | None:
        written = WriteOnline().apply(captured)
        if written is None:
            return None
        graph = Propagate(self.stripes).apply(written[0])
        return _fused(graph, FindScores(graph, written[1]))


def _fused(graph: Annotated, finder: FindRegions) -> Captured | None:
    found = [region for pair in finder.run() for region in pair]
    gm = _Rewriter(graph, found).run() if found else None
    return None if gm is None else dataclasses.replace(graph.captured, gm=gm)


@dataclass
class _Rewriter:
    """Writes the graph anew with fused ops, each where its last op was."""

    graph: Annotated
    found: list[Found]
    new: fx.Graph = field(default_factory=fx.Graph)
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> fx.GraphModule | None:
        """None where two regions wait for each other."""
        gm = self.graph.captured.gm
        nodes = list(gm.graph.nodes)
        self.by_name = {node.name: node for node in nodes}
        self.node_of = {key: self.by_name[name] for name, key in reversed(self.graph.alias.items())}
        owner = self._owners(nodes)
        order = _ordered(nodes, owner, [self._reads(found) for found in self.found])
        if len(order) < len({owner.get(node, node) for node in nodes}):
            return None
        for unit in order:
            if isinstance(unit, int):
                self._fused(self.found[unit])
            else:
                self.copied[unit] = self.new.node_copy(unit, self.copied.__getitem__)
        self.new.lint()
        return _LazyGraphModule(gm, self.new, "Fused")

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
        meta = {
            key: last.meta[key]
            for key in ("is_backward", "stack_trace", "recompute", "ac_graph_id")
            if key in last.meta
        }
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


def _ordered(nodes: list[fx.Node], owner: dict[fx.Node, int], reads: list[list[fx.Node]]) -> list[fx.Node | int]:
    """Nodes outside of regions, and regions by number, each after what it reads, else as before.

    What waits for itself is left out.
    """
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
    order: list[fx.Node | int] = []
    while ready:
        _, _, unit = heapq.heappop(ready)
        order.append(unit)
        for reader in readers.get(unit, ()):
            inputs[reader].discard(unit)
            if not inputs[reader]:
                heapq.heappush(ready, (rank[reader], number[reader], reader))
    return order


def _common_path(paths: list[str]) -> str:
    """The module that all of some module paths are in."""
    parts = [path.split(".") for path in paths if path]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
