"""Which blocks of a loop over time travel, from whom to whom, where a mask leaves out some of them as a whole.

A block goes round from rank to rank, and stops where it is computed with: a rank whose part of it is masked is passed
over, and a block that no rank on its way needs any more stays where it is. So does a sum: it is passed on from one rank
that adds to it to the next, and goes to where it rests at last. Where nothing is masked each hop is to the next rank.

A hop begins in the step in which the sender computes with the block. The receiver may need it only some steps later,
and holds it until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from stpart_compiler.cost_models.cluster import Link
from stpart_compiler.cost_models.communication import beside, two_way_seconds
from stpart_compiler.cost_models.compute import Computed
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.spacetime import MOVE, Derived, Port, Shift, Strategy
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.shares import Shares, step_shares

Needs = tuple[tuple[bool, ...], ...]
"""Per rank and step, whether anything of the block is computed."""


class Hop(NamedTuple):
    """A transfer that begins in step `start`, of what `target` needs in step `end`."""

    source: int
    start: int
    target: int
    end: int


@dataclass(frozen=True)
class Hops:
    """The transfers of one operand or result that moves."""

    all: tuple[Hop, ...]

    @cached_property
    def sent(self) -> dict[tuple[int, int], Hop]:
        """What a rank sends in a step, by (rank, step)."""
        return {(hop.source, hop.start): hop for hop in self.all}

    @cached_property
    def received(self) -> dict[tuple[int, int], list[Hop]]:
        """What a rank begins to receive in a step, by (rank, step)."""
        found: dict[tuple[int, int], list[Hop]] = {}
        for hop in self.all:
            found.setdefault((hop.target, hop.start), []).append(hop)
        return found

    @cached_property
    def arrived(self) -> dict[tuple[int, int], int]:
        """Blocks that a rank holds in a step of those that came or are coming, by (rank, step)."""
        return dict(Counter((hop.target, t) for hop in self.all for t in range(hop.start, hop.end + 1)))


@dataclass(frozen=True)
class Moving:
    """The transfers of all that moves in a loop: per operand, and per result."""

    inputs: dict[int, Hops]
    outputs: dict[int, Hops]


def skips_blocks(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether some block of a loop is masked as a whole."""
    return not all(part.share for row in step_shares(op, strategy, mesh) for part in row)


def moving(op: OpNode, strategy: Strategy, derived: Derived, mesh: Mesh) -> Moving:
    """The transfers of a loop."""
    shares = step_shares(op, strategy, mesh) if skips_blocks(op, strategy, mesh) else ()
    needs = tuple(tuple(part.share > 0 for part in row) for row in shares) or None

    def found(ports: tuple[Port, ...], rest: int) -> dict[int, Hops]:
        moved = ((i, port.shift) for i, port in enumerate(ports) if port.motion == MOVE)
        return {i: _hops(needs, strategy.steps, shift, mesh, rest) for i, shift in moved}

    return Moving(found(derived.inputs, 0), found(derived.outputs, strategy.steps - 1))


@lru_cache(maxsize=1000)
def _hops(needs: Needs | None, steps: int, shift: Shift, mesh: Mesh, rest: int) -> Hops:
    """Hops between the stops of each block: where it is needed (None: everywhere), and where it is in step `rest`."""
    back = {axis: -x for axis, x in shift}
    found: list[Hop] = []
    for rank in range(mesh.world_size):
        way = [rank]
        while len(way) < steps:
            way.append(mesh.shifted(way[-1], back))
        stops = [t for t, at in enumerate(way) if t == rest or needs is None or needs[at][t]]
        found += [Hop(way[a], a, way[b], b) for a, b in pairwise(stops)]
    return Hops(tuple(found))


def most_held(hops: Hops, at_first: int) -> int:
    """Most blocks that a rank holds at once of those that come, with `at_first` more in the first step."""
    held = (n + at_first * (t == 0) for (_, t), n in hops.arrived.items())
    return max(held, default=at_first)


def busiest(
    shares: Shares, compute: Mapping[Computed, float], sizes: Sequence[tuple[Hops, int]], link: Link, hidden: float
) -> tuple[float, int]:
    """Seconds of a loop on the busiest rank, and the most bytes that a rank sends in it.

    `shares`: per rank and step, what is computed; `compute`: the seconds of that. `sizes`: of all that moves, its
    transfers and bytes of each. A step ends when what the rank sends and receives beside it is there.
    """
    seconds, most = [], 0
    for rank, row in enumerate(shares):
        total, nbytes = compute[row[-1]], 0
        for t, part in enumerate(row[:-1]):
            sent = [size for hops, size in sizes if (rank, t) in hops.sent]
            received = [size for hops, size in sizes for _ in hops.received.get((rank, t), ())]
            transfer = two_way_seconds(sum(sent), sum(received), link, max(len(sent), len(received)))
            total, nbytes = total + beside(compute[part], transfer, hidden), nbytes + sum(sent)
        seconds.append(total)
        most = max(most, nbytes)
    return max(seconds), most
