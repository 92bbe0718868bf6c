"""Which ends of links messages take: those of one end share its bandwidth, in prices and in simulation.

Each rank has, at each level of the hierarchy, a link out and a link in: one for both where it is not full duplex, one
for several ranks where they share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stpart_compiler.cost_models.cluster import Cluster, Link

Pair = tuple[int, int]
"""Sender and receiver of a message."""

PortKey = tuple[str, int, int]
"""Direction, level, and the number of the link there."""


class Shared(NamedTuple):
    """One end of a link of a level: how many messages of each kind are on it at once.

    `messages`: how many one rank sends over links of that level, one after another.
    """

    link: Link
    counts: tuple[int, ...]
    messages: int


def ports_between(cluster: Cluster, source: int, target: int) -> tuple[PortKey, ...]:
    """The ends of links that a message between two ranks takes: one where both are the same."""
    level = cluster.level_between(source, target)
    link = cluster.levels[level][1]
    sides = ("out", "in") if link.full_duplex else ("both", "both")
    return tuple(
        dict.fromkeys((side, level, rank // link.shared_by) for side, rank in zip(sides, (source, target), strict=True))
    )


def shared(cluster: Cluster, kinds: Sequence[Sequence[Pair]]) -> tuple[Shared, ...]:
    """The ends that differ in what is on them, of messages that go at once. `kinds`: the messages of each kind."""
    on: dict[PortKey, list[int]] = {}
    sent: dict[tuple[int, int], int] = {}
    for kind, pairs in enumerate(kinds):
        for source, target in pairs:
            keys = ports_between(cluster, source, target)
            for key in keys:
                on.setdefault(key, [0] * len(kinds))[kind] += 1
            at = keys[0][1], source
            sent[at] = sent.get(at, 0) + 1
    most = {level: max(n for (other, _), n in sent.items() if other == level) for level, _ in sent}
    rows = dict.fromkeys((level, tuple(counts)) for (_, level, _), counts in on.items())
    return tuple(Shared(cluster.levels[level][1], counts, most[level]) for level, counts in rows)


def as_shared(cluster: Cluster, pairs: Sequence[Pair], others: Sequence[Pair] = ()) -> Link:
    """The slowest link that some of these messages take, as one of them sees it while those and others are under way.

    Its bandwidth is that of one direction, whether or not the other one takes from it.
    """
    counts = Counter(key for pair in (*pairs, *others) for key in ports_between(cluster, *pair))
    most: dict[int, int] = {}
    for key in {key for pair in pairs for key in ports_between(cluster, *pair)}:
        most[key[1]] = max(most.get(key[1], 0), counts[key])
    links = [(cluster.levels[level][1], n) for level, n in most.items()]
    seen = [replace(link, bandwidth=link.bandwidth / n, full_duplex=True, shared_by=1) for link, n in links]
    return min(seen, key=lambda link: (link.bandwidth, -link.latency))
