"""Time of transfers between ranks: latency per message, and bytes over the link as a collective's algorithm sends them.

In every collective a rank sends as much as it receives. On a full-duplex link the two overlap; on another they add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stpart_compiler.cost_models.cluster import Cluster, Link, groups_along
from stpart_compiler.cost_models.collectives import (
    BETWEEN,
    INSIDE,
    KINDS,
    RING,
    RINGS,
    WHOLE,
    Group,
    Phase,
    members,
    parts_of,
    phases,
    ring,
    traffic,
)
from stpart_compiler.cost_models.ports import Pair, Shared, as_shared, shared
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.spacetime import Shift

COLLECTIVES = KINDS

Route = tuple[tuple[Phase, Link], ...]
"""Phases of a collective one after another, each with the slowest link that it crosses."""

Way = tuple[Route, Route]
"""How a collective goes: in one group alone, and while others beside it go so too."""


def p2p_seconds(nbytes: float, link: Link, messages: int = 1, kind: str = "p2p") -> float:
    """Seconds to move `nbytes` in one direction as `messages` messages; nothing goes the other way meanwhile.

    `kind`: of the collective that they are part of, if they are.
    """
    return messages * link.latency_of(kind) + nbytes / link.bandwidth if messages else 0.0


def exchange_seconds(nbytes: float, link: Link, messages: int = 1, kind: str = "exchange") -> float:
    """Seconds in which a rank sends and receives `nbytes` each, in `messages` messages each way.

    `kind`: as in `p2p_seconds`.
    """
    return p2p_seconds(nbytes if link.full_duplex else 2 * nbytes, link, messages, kind)


def two_way_seconds(sent: float, received: float, link: Link, messages: int) -> float:
    """Seconds in which a rank sends and receives other numbers of bytes, in at most `messages` messages each way."""
    return p2p_seconds(max(sent, received) if link.full_duplex else sent + received, link, messages)


def collective_seconds(kind: str, nbytes: float, group_size: int, link: Link) -> float:
    """Seconds of a collective among `group_size` ranks.

    `nbytes`: what one rank holds of the reduced tensor (all_reduce), of the gathered result (all_gather), of the input
    (reduce_scatter, all_to_all), or sends and receives (exchange). A group of one costs nothing.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"collective {kind!r} is unknown; use one of {', '.join(COLLECTIVES)}")
    if group_size <= 1:
        return 0.0
    ways = _possible(kind, link, group_size)
    return min(route_seconds(tuple((phase, link) for phase in way), nbytes) for way in ways)


def route_seconds(route: Route, nbytes: float) -> float:
    """Seconds of a collective that goes so. `nbytes`: as in `collective_seconds`."""
    return sum(_reached_seconds(phase.kind, phase.share * nbytes, link, phase.messages) for phase, link in route)


def _reached_seconds(kind: str, nbytes: float, link: Link, messages: int) -> float:
    """Seconds in which each rank of a collective sends `nbytes`, at the rate that this kind reaches on the link."""
    return exchange_seconds(nbytes / link.reached(kind, nbytes) if link.efficiency else nbytes, link, messages, kind)


def routes(cluster: Cluster, kind: str, group: Group) -> tuple[Route, ...]:
    """The ways in which a collective may go in a group that has its links for itself."""
    pairs = {among: _pairs(cluster, [group], among) for among in _amongs(cluster, group)}
    links = {among: as_shared(cluster, each) for among, each in pairs.items()}
    parts = len(parts_of(group, unit_of(cluster, group))) if len(links) > 1 else 1
    ways = _possible(kind, links[WHOLE], len(group), parts)
    return tuple(tuple((phase, links[phase.among]) for phase in way) for way in ways)


def _amongs(cluster: Cluster, group: Group) -> tuple[str, ...]:
    """Among whom phases of a collective may be: in hosts and between them where the group has as many ranks in each."""
    sizes = {len(part) for part in parts_of(group, unit_of(cluster, group))}
    return (WHOLE, INSIDE, BETWEEN) if len(sizes) == 1 and not sizes & {1, len(group)} else (WHOLE,)


def _pairs(cluster: Cluster, groups: Sequence[Group], among: str) -> list[Pair]:
    """Who sends to whom while all these groups are in such a phase, those as a whole that cannot be in another one."""
    found = []
    for group in groups:
        own = among if among in _amongs(cluster, group) else WHOLE
        found += [pair for each in members(group, own, unit_of(cluster, group)) for pair in ring(each)]
    return found


def _beside(cluster: Cluster, group: Group, others: Sequence[Group], route: Route) -> Route:
    """A route of a group while others go so too: of the links that it crosses it has less."""
    found = []
    for phase, link in route:
        own, beside = _pairs(cluster, [group], phase.among), _pairs(cluster, others, phase.among)
        found.append((phase, replace(link, bandwidth=as_shared(cluster, own, beside).bandwidth)))
    return tuple(found)


def _possible(kind: str, link: Link, group_size: int, parts: int = 1) -> list[tuple[Phase, ...]]:
    """Phases by each algorithm of the link that can do it; a ring where there is none."""
    ways = [phases(kind, algorithm, group_size, parts) for algorithm in link.algorithms]
    return [way for way in ways if way] or [phases(kind, RING, group_size)]


def unit_of(cluster: Cluster, group: Group) -> int:
    """Ranks of a host, or whatever is inside of the outermost level that the group crosses."""
    crossed = cluster.level_between(min(group), max(group))
    return (cluster.levels[crossed - 1][0] or 1) if crossed else 1


def temporal_seconds(
    step_compute: float,
    transfer: float,
    steps: int,
    odd: Sequence[float] = (),
    last: float | None = None,
    hidden: float = 1.0,
) -> float:
    """Seconds of a temporal loop: each step computes while the next step's blocks travel; the last one only computes.

    `step_compute`: seconds a step. `transfer`: seconds in which the blocks travel. `odd`: seconds of steps before the
    last that take other than `step_compute`; `last`: of the last, where it does. `hidden`: the part of the time both
    run that costs nothing.
    """
    usual = (steps - 1 - len(odd)) * beside(step_compute, transfer, hidden)
    late = sum(beside(seconds, transfer, hidden) for seconds in odd)
    return usual + late + (step_compute if last is None else last)


def beside(compute: float, transfer: float, hidden: float) -> float:
    """Seconds of both at once."""
    longer = max(compute, transfer)
    return longer if hidden == 1.0 else longer + (1 - hidden) * min(compute, transfer)


@dataclass(frozen=True)
class Moves:
    """The ends of links over which the blocks of a loop's tensors travel between two steps."""

    ends: tuple[Shared, ...]

    def seconds(self, nbytes: Sequence[float]) -> float:
        """Seconds of a step. `nbytes`: of the block of each tensor that moves."""
        return max(end.messages * end.link.latency + _occupied(end, nbytes) for end in self.ends)

    def bandwidth(self, nbytes: Sequence[float]) -> float:
        """Bytes/s at which a rank sends them all, without latencies."""
        return sum(nbytes) / max(_occupied(end, nbytes) for end in self.ends)


def _occupied(end: Shared, nbytes: Sequence[float]) -> float:
    """Seconds for which blocks of so many bytes are on it."""
    return sum(n * count for n, count in zip(nbytes, end.counts, strict=True) if count) / end.link.bandwidth


@dataclass(frozen=True)
class LinkCost:
    """Seconds of a communication on a mesh of a cluster, from the traffic of its busiest rank.

    Raises:
        ValueError: the mesh has more ranks than the cluster.
    """

    cluster: Cluster
    mesh: Mesh
    _links: dict[tuple[tuple[str, ...], int], Link] = field(default_factory=dict, init=False, repr=False, compare=False)
    _routes: dict[tuple[str, tuple[str, ...]], tuple[tuple[Way, ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _moves: dict[tuple[Shift, ...], Moves] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.cluster.check_mesh(self.mesh)

    @cached_property
    def _hash(self) -> int:
        return hash((self.cluster, self.mesh))

    def __hash__(self) -> int:
        return self._hash

    def link(self, axes: tuple[str, ...], ring: int = 1) -> Link:
        """Slowest link that the axes cross, as one of the rings of so many ranks sees it that lie along them.

        A ring of one: a rank that sends for itself. Groups of skewed forms lie along more axes than they have ranks
        for; several of them then share what one ring along all these axes would have.
        """
        link = self._links.get((axes, ring))
        if link is None:
            link = self.cluster.link_for(axes, self.mesh)
            alone = self.cluster.link_for(axes, self.mesh, each=True)
            share = ring / math.prod(self.mesh.size[axis] for axis in axes)
            link = replace(link, bandwidth=max(alone.bandwidth, min(1.0, share) * link.bandwidth))
            self._links[axes, ring] = link
        return link

    def __call__(
        self,
        kind: str,
        group_size: int,
        nbytes: float,
        axes: tuple[str, ...],
        messages: int,
        mean: float | None = None,
    ) -> float:
        """Seconds of a communication of `kind` among `group_size` ranks that differ in `axes`, its start included.

        `nbytes`: what goes over the wire at the busiest rank, the larger of sent and received (not the tensor's size:
        an all-reduce of X bytes among n is 2 X (n-1)/n). `messages`: how many it sends or receives one after another.
        "p2p" goes one way; in every other kind a rank sends and receives. `mean`: what a rank sends on average, where
        that is less: of a link that several share the busiest one then has more than its part.

        Raises:
            ValueError: unknown kind or axis.
        """
        if kind != "p2p" and kind not in KINDS:
            raise ValueError(f"communication {kind!r} is unknown; use one of p2p, {', '.join(COLLECTIVES)}")
        if group_size <= 1:
            return 0.0
        overhead = self.cluster.device.transfer_overhead
        if kind in RINGS:
            return overhead + self._collective(kind, group_size, nbytes / traffic(kind, group_size)[0], axes)
        link = self.link(axes)
        if mean is None or mean == nbytes:
            return overhead + _seconds(kind, nbytes, link, messages)
        alone, shared = _seconds(kind, nbytes, self._alone(axes), messages), _seconds(kind, mean, link, messages)
        return overhead + max(alone, shared)

    def moves(self, shifts: tuple[Shift, ...]) -> Moves:
        """What a step of a loop costs in which every rank sends a block to each of the ranks at these displacements."""
        found = self._moves.get(shifts)
        if found is None:
            ranks = range(self.mesh.world_size)
            kinds = [[(rank, self.mesh.shifted(rank, dict(shift))) for rank in ranks] for shift in shifts]
            found = self._moves[shifts] = Moves(shared(self.cluster, kinds))
        return found

    def _collective(self, kind: str, group_size: int, nbytes: float, axes: tuple[str, ...]) -> float:
        """Seconds of a collective of a whole tensor of `nbytes`, in all groups along the axes at once.

        Each goes by the algorithm that is cheapest for it alone: the library of one group does not know of the others.
        Where a group of skewed forms lies in its hosts is not known here: it is taken not to tell them apart.
        """
        if group_size < math.prod(self.mesh.size[axis] for axis in axes):
            return collective_seconds(kind, nbytes, group_size, self.link(axes, group_size))
        ways = self._routes.get((kind, axes))
        if ways is None:
            ways = self._routes[kind, axes] = self._ways(kind, axes)
        taken = (min(each, key=lambda way: route_seconds(way[0], nbytes)) for each in ways)
        return max(route_seconds(beside, nbytes) for _, beside in taken)

    def _ways(self, kind: str, axes: tuple[str, ...]) -> tuple[tuple[Way, ...], ...]:
        """For groups along the axes that differ in them, the ways to go: each alone, and while all groups go so."""
        groups = groups_along(axes, self.mesh)
        found: dict[tuple[Way, ...], None] = {}
        for at, group in enumerate(groups):
            others = (*groups[:at], *groups[at + 1 :])
            alone = routes(self.cluster, kind, group)
            found[tuple((way, _beside(self.cluster, group, others, way)) for way in alone)] = None
        return tuple(found)

    def _alone(self, axes: tuple[str, ...]) -> Link:
        """Slowest link that the axes cross, as a rank has it while no other one uses it."""
        link = self._links.get((axes, 0))
        if link is None:
            link = self._links[axes, 0] = self.cluster.link_for(axes, self.mesh, alone=True)
        return link


def _seconds(kind: str, nbytes: float, link: Link, messages: int) -> float:
    return p2p_seconds(nbytes, link, messages) if kind == "p2p" else _reached_seconds(kind, nbytes, link, messages)
