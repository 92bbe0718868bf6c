"""Time of transfers between ranks: latency per message, and bytes over the link as a collective's algorithm sends them.

In every collective a rank sends as much as it receives. On a full-duplex link the two overlap; on another they add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    traffic,
)
from stpart_compiler.ir.mesh import Mesh

COLLECTIVES = KINDS

Route = tuple[tuple[Phase, Link], ...]
"""Phases of a collective one after another, each with the slowest link that it crosses."""


def p2p_seconds(nbytes: float, link: Link, messages: int = 1) -> float:
    """Seconds to move `nbytes` in one direction as `messages` messages; nothing goes the other way meanwhile."""
    return messages * link.latency + nbytes / link.bandwidth if messages else 0.0


def exchange_seconds(nbytes: float, link: Link, messages: int = 1) -> float:
    """Seconds in which a rank sends and receives `nbytes` each, in `messages` messages each way."""
    return p2p_seconds(nbytes if link.full_duplex else 2 * nbytes, link, messages)


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
    return exchange_seconds(nbytes / link.reached(kind, nbytes) if link.efficiency else nbytes, link, messages)


def routes(cluster: Cluster, kind: str, groups: Sequence[Group]) -> tuple[Route, ...]:
    """The ways in which a collective may go in groups of one size that communicate at the same time."""
    whole, unit = cluster.slowest(groups), unit_of(cluster, groups)
    parts = [parts_of(group, unit) for group in groups]
    even = len({len(part) for each in parts for part in each}) == 1
    links = {
        among: cluster.slowest([each for group in groups for each in members(group, among, unit)])
        for among in ((WHOLE, INSIDE, BETWEEN) if even else (WHOLE,))
    }
    ways = _possible(kind, whole, len(groups[0]), len(parts[0]) if even else 1)
    return tuple(tuple((phase, links[phase.among]) for phase in way) for way in ways)


def _possible(kind: str, link: Link, group_size: int, parts: int = 1) -> list[tuple[Phase, ...]]:
    """Phases by each algorithm of the link that can do it; a ring where there is none."""
    ways = [phases(kind, algorithm, group_size, parts) for algorithm in link.algorithms]
    return [way for way in ways if way] or [phases(kind, RING, group_size)]


def unit_of(cluster: Cluster, groups: Sequence[Group]) -> int:
    """Ranks of a host, or whatever the outermost level that the groups cross joins."""
    crossed = cluster.crossed(groups)
    return (cluster.levels[crossed - 1][0] or 1) if crossed else 1


def temporal_seconds(
    step_compute: float,
    step_bytes: float,
    steps: int,
    link: Link,
    messages: int = 1,
    odd: Sequence[float] = (),
    last: float | None = None,
    hidden: float = 1.0,
) -> float:
    """Seconds of a temporal loop: each step computes while the next step's blocks travel; the last one only computes.

    `step_compute`: seconds a step. `step_bytes`: bytes that a rank sends, and receives, between two steps, in
    `messages` messages each way (one per moving tensor). `odd`: seconds of steps before the last that take other than
    `step_compute`; `last`: of the last, where it does. `hidden`: the part of the time both run that costs nothing.
    """
    transfer = exchange_seconds(step_bytes, link, messages) if step_bytes else 0.0
    usual = (steps - 1 - len(odd)) * beside(step_compute, transfer, hidden)
    late = sum(beside(seconds, transfer, hidden) for seconds in odd)
    return usual + late + (step_compute if last is None else last)


def beside(compute: float, transfer: float, hidden: float) -> float:
    """Seconds of both at once."""
    longer = max(compute, transfer)
    return longer if hidden == 1.0 else longer + (1 - hidden) * min(compute, transfer)


@dataclass(frozen=True)
class LinkCost:
    """Seconds of a communication on a mesh of a cluster, from the traffic of its busiest rank.

    Raises:
        ValueError: the mesh has more ranks than the cluster.
    """

    cluster: Cluster
    mesh: Mesh
    _links: dict[tuple[tuple[str, ...], int], Link] = field(default_factory=dict, init=False, repr=False, compare=False)
    _routes: dict[tuple[str, tuple[str, ...]], tuple[Route, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.cluster.check_mesh(self.mesh)

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
        """Seconds of a communication of `kind` among `group_size` ranks that differ in `axes`.

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
        link = self.link(axes, group_size if kind in RINGS else 1)
        if kind in RINGS and link.algorithms != (RING,):
            return self._cheapest(kind, group_size, nbytes / traffic(kind, group_size)[0], axes, link)
        if mean is None or mean == nbytes:
            return _seconds(kind, nbytes, link, messages)
        return max(_seconds(kind, nbytes, self._alone(axes), messages), _seconds(kind, mean, link, messages))

    def _cheapest(self, kind: str, group_size: int, nbytes: float, axes: tuple[str, ...], link: Link) -> float:
        """Seconds by the cheapest algorithm. `nbytes`: of the whole tensor.

        Where a group of skewed forms lies in its hosts is not known here: it is taken not to tell them apart.
        """
        if group_size < math.prod(self.mesh.size[axis] for axis in axes):
            return collective_seconds(kind, nbytes, group_size, link)
        ways = self._routes.get((kind, axes))
        if ways is None:
            ways = self._routes[kind, axes] = routes(self.cluster, kind, groups_along(axes, self.mesh))
        return min(route_seconds(way, nbytes) for way in ways)

    def _alone(self, axes: tuple[str, ...]) -> Link:
        """Slowest link that the axes cross, as a rank has it while no other one uses it."""
        link = self._links.get((axes, 0))
        if link is None:
            link = self._links[axes, 0] = self.cluster.link_for(axes, self.mesh, alone=True)
        return link


def _seconds(kind: str, nbytes: float, link: Link, messages: int) -> float:
    return p2p_seconds(nbytes, link, messages) if kind == "p2p" else _reached_seconds(kind, nbytes, link, messages)
