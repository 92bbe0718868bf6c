"""Where the time of a simulated step of an MLP goes: compute, transfers and waiting of one rank, by phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.cost_models.timeline import COMPUTE, RECV, WAIT, Interval, RankTimeline
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.strategies import is_contraction

IN, BETWEEN = "in hosts", "between hosts"
OTHER, MIDDLE, COPIES = "around", "middle", "copies for transfers"


@dataclass
class Row:
    """A phase of a step on one rank: seconds of its compute or transfer, and of waiting for it; bytes it sends."""

    seconds: float = 0.0
    waits: float = 0.0
    nbytes: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Breakdown:
    """One rank's step: compute, transfers outside of temporal loops, and transfers inside, by phase.

    `late`: seconds of waiting while nothing was under way, for other ranks. All compute and all waits are the step.
    """

    end: float
    compute: dict[str, Row]
    transfers: dict[str, Row]
    rings: dict[str, Row]
    late: float

    @property
    def computed(self) -> float:
        return sum(row.seconds for row in self.compute.values())

    @property
    def collected(self) -> float:
        """Seconds of transfers outside of loops, one after another."""
        return sum(row.seconds for row in self.transfers.values())

    @property
    def ring(self) -> float:
        return sum(row.seconds for row in self.rings.values())

    @property
    def waited(self) -> float:
        return sum(row.waits for part in (self.transfers, self.rings) for row in part.values()) + self.late

    @property
    def exposed(self) -> float:
        """Seconds of the step if nothing ran beside compute but what loops hide."""
        return self.computed + self.collected + sum(row.waits for row in self.rings.values())


def breakdown(graph: Annotated, cluster: Cluster, rank: RankTimeline) -> Breakdown:
    """Where the time of a rank goes."""
    names = phases(graph)
    compute: dict[str, Row] = {}
    transfers: dict[str, Row] = {}
    rings: dict[str, Row] = {}

    def row_of(x: Interval) -> Row:
        table = rings if x.instr.origin.note == "temporal" else transfers
        return table.setdefault(f"{names.get(x.instr.origin.node, OTHER)} {_where(cluster, rank.rank, x)}", Row())

    for x in rank.intervals:
        if x.kind == COMPUTE:
            compute.setdefault(_computed(x, names), Row()).seconds += x.seconds
        elif x.kind != WAIT:
            row = row_of(x)
            row.spans.append((x.start, x.end))
            row.nbytes += x.nbytes if x.kind != RECV else 0
    late = 0.0
    for x, seconds in rank.waits:
        if x.kind == WAIT:
            late += seconds
        else:
            row_of(x).waits += seconds
    for table in (transfers, rings):
        for row in table.values():
            row.seconds = _covered(row.spans)
    return Breakdown(rank.end, compute, transfers, rings, late)


def _computed(x: Interval, names: dict[str, str]) -> str:
    origin = x.instr.origin
    if origin.note == "re-layout":
        return COPIES
    step = f" step {origin.step}" if origin.step is not None else ""
    return names.get(origin.node, OTHER) + step


def _where(cluster: Cluster, rank: int, x: Interval) -> str:
    return IN if max(cluster.level_between(rank, peer) for peer in x.peers) == 0 else BETWEEN


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans runs."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def phases(graph: Annotated) -> dict[str, str]:
    """Node -> "fc1.F", "fc1.B" (gradient of the input), "fc1.G" (of the weight), or "middle" between the layers.

    Views are part of what they look at; what has none of these is around the block.
    """
    found: dict[str, str] = {}
    width = max(max(value.shape, default=0) for value in graph.values.values() if value.kind == "param")
    for op in graph.ops:
        if is_contraction(op.rule):
            found[op.name] = f"{op.module_path}.{_kind(graph, op)}"
        elif is_view(op.call.target) and op.operands[0][0] in found:
            found[op.name] = found[op.operands[0][0]]
        elif any(value is not None and width in value.shape for value in op.call.results):
            found[op.name] = MIDDLE
    return found


def _kind(graph: Annotated, op: OpNode) -> str:
    if op.name not in graph.backward:
        return "F"
    return "B" if any(_of_weight(graph, key) for key in op.operands) else "G"


def _of_weight(graph: Annotated, key: ValueKey) -> bool:
    """Whether a value is a parameter or a view of one."""
    while key[0] in graph.by_name and is_view(graph.by_name[key[0]].call.target):
        key = graph.by_name[key[0]].operands[0]
    return graph.values[key].kind == "param"
