"""The graphs of a step that plans are made of: op by op, with regions as one op each, sequences in stripes or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

from stpart_compiler.capture import Captured
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.passes.decompose import Decompose
from stpart_compiler.passes.fuse import FuseRegions, FuseScores
from stpart_compiler.passes.propagate import Annotated, OpNode, Propagate
from stpart_compiler.passes.regions import ALL, REGIONS, kind_of, kinds_of
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.templates import template as named_template
from stpart_compiler.pauses import same_random, without_gc


def annotate(captured: Captured, dumper: Dumper | None = None, stripes: int = 1) -> Annotated:
    """Normalize and propagate: decomposed graph with a refined rule per op. `stripes`: see `passes/stripes.py`."""
    dumper = dumper or Dumper(None)
    dumper.graph("capture", captured.gm)
    with without_gc(), same_random():
        captured = dataclasses.replace(captured, gm=Decompose().apply(captured.gm))
        graph = Propagate(stripes).apply(captured)
    dumper.graph("decompose", captured.gm)
    dumper.annotated(graph)
    return graph


def fuse(graph: Annotated, regions: str = "head+mlp", dumper: Dumper | None = None) -> Annotated | None:
    """The annotated graph with each region as one op; None where there are none. `regions`: one of REGIONS."""
    with without_gc():
        stripes, kinds = graph.sequences.stripes, kinds_of(regions)
        scores = FuseScores(stripes).apply(graph.captured) if "attention" in kinds else None
        if scores is not None:
            graph = Propagate(stripes).apply(scores)
        captured = FuseRegions(kinds).apply(graph)
        found = Propagate(stripes).apply(captured) if captured is not None else graph if scores is not None else None
    if found is not None:
        (dumper or Dumper(None)).annotated(found)
    return found


@dataclasses.dataclass
class Graphs:
    """The annotated graph of a step, op by op and with its regions as one op each."""

    plain: Annotated
    dumper: Dumper
    known: dict[str, Annotated | None] = dataclasses.field(default_factory=dict)

    def fused(self, regions: str) -> Annotated | None:
        """With these regions, one of REGIONS; None where there are none."""
        if regions not in self.known:
            self.known[regions] = fuse(self.plain, regions, self.dumper)
        return self.known[regions]

    def of(self, regions: str | None) -> Annotated:
        """With these regions, as far as there are any."""
        return (self.fused(regions) if regions else None) or self.plain

    def named(self, kinds: Iterable[str]) -> str | None:
        """The member of REGIONS that has these kinds, of those that there are; None where it has none."""
        wanted = self.kinds & frozenset(kinds)
        if wanted == self.kinds:
            return ALL if wanted else None
        return next((regions for regions in REGIONS if kinds_of(regions) == wanted), None)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds of regions that there are."""
        graph = self.fused(ALL)
        found = _regions(graph) if graph is not None else []
        return frozenset(kind_of(op.call.target) for op in found if op.name not in self.plain.backward)


@dataclasses.dataclass
class Written:
    """The graphs of a step, with its sequences written in stripes or not (`passes/stripes.py`)."""

    captured: Captured
    dumper: Dumper
    known: dict[int, Graphs] = dataclasses.field(default_factory=dict)

    def of(self, stripes: int) -> Graphs:
        """In so many stripes; 1, or a number that divides no sequence: in none."""
        if stripes not in self.known:
            found = Graphs(annotate(self.captured, self.dumper, stripes), self.dumper)
            self.known[stripes] = self.known[found.plain.sequences.stripes] = found
        return self.known[stripes]


def regions_of(graphs: Graphs, template: str) -> str | None:
    """Those that a template asks for; without attention where its sequence could not be cut in one."""
    asked = named_template(template).regions
    graph = graphs.fused(ALL) if asked == ALL else None
    attends = [op for op in _regions(graph) if kind_of(op.call.target) == "attention"] if graph is not None else []
    return asked if all(op.rule.rings for op in attends) else "head+mlp"


def _regions(graph: Annotated) -> list[OpNode]:
    return [op for op in graph.ops if isinstance(op.call.target, Region)]
