"""What collectives send, by the algorithm that the library runs them with: phases, each a ring among some of the ranks.

A ring sends least bytes, in most messages. A tree (two binary trees, each of one half of the tensor, in which who is a
leaf of one is inside the other; Sanders, Speck and Traeff 2009) takes two messages per level of it, one up and one
down; a rank inside sends a half up and two down, and as a leaf of the other one a half up. A hierarchical collective
has a ring in each host and, for every one of its members, a ring with their likes in the other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

RING, TREE, HIERARCHICAL = "ring", "tree", "hierarchical"
ALGORITHMS = (RING, TREE, HIERARCHICAL)

WHOLE, INSIDE, BETWEEN = "whole", "inside", "between"
"""Among whom a phase is: all ranks of the group, those of each part of it, or those of one number in each part."""

Group = tuple[int, ...]

# Bytes that one rank sends (and receives), as a share of the whole tensor, and the messages it takes, among n ranks.
_RINGS: dict[str, Callable[[int], tuple[float, int]]] = {
    "all_reduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "all_gather": lambda n: ((n - 1) / n, n - 1),
    "reduce_scatter": lambda n: ((n - 1) / n, n - 1),
    "all_to_all": lambda n: ((n - 1) / n, n - 1),
    "exchange": lambda n: (1.0, 1),
}
KINDS = tuple(_RINGS)
RINGS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
"""Collectives in which a rank sends to its neighbour alone; in the others, and in single messages, to any rank."""

_IN_TURN = {
    "all_reduce": (("reduce_scatter", INSIDE), ("all_reduce", BETWEEN), ("all_gather", INSIDE)),
    "reduce_scatter": (("reduce_scatter", INSIDE), ("reduce_scatter", BETWEEN)),
    "all_gather": (("all_gather", BETWEEN), ("all_gather", INSIDE)),
}


class Phase(NamedTuple):
    """`share`: what one rank sends (and receives), of the whole tensor, in `messages` messages one after another."""

    kind: str
    among: str
    share: float
    messages: int


def traffic(kind: str, group_size: int) -> tuple[float, int]:
    """What one rank of a ring sends, as a share of the whole tensor, and the messages that takes.

    The whole tensor: what `collective_seconds` takes as `nbytes`.

    Raises:
        KeyError: no such kind.
    """
    return _RINGS[kind](group_size)


def phases(kind: str, algorithm: str, group_size: int, parts: int = 1) -> tuple[Phase, ...]:
    """Phases of a collective one after another. `parts`: of the group, equal ones, in the hosts that it is on.

    Empty: the algorithm cannot do it. Trees are for sums that all want; the hierarchical one needs several ranks in
    each of several hosts.
    """
    if algorithm == TREE:
        return (_tree(group_size),) if kind == "all_reduce" else ()
    if algorithm == HIERARCHICAL:
        return _hierarchical(kind, group_size // parts, parts) if 1 < parts < group_size else ()
    return (Phase(kind, WHOLE, *traffic(kind, group_size)),)


def _tree(n: int) -> Phase:
    return Phase("all_reduce", WHOLE, 2.0 if n > 2 else 1.0, 2 * (n - 1).bit_length())


def _hierarchical(kind: str, inside: int, between: int) -> tuple[Phase, ...]:
    found = []
    for each, among in _IN_TURN.get(kind, ()):
        share, messages = traffic(each, inside if among == INSIDE else between)
        found.append(Phase(each, among, share if among == INSIDE else share / inside, messages))
    return tuple(found)


def parts_of(group: Sequence[int], unit: int) -> list[Group]:
    """The members in each host of `unit` ranks, in order."""
    found: dict[int, list[int]] = {}
    for rank in sorted(group):
        found.setdefault(rank // unit, []).append(rank)
    return [tuple(part) for part in found.values()]


def members(group: Sequence[int], among: str, unit: int) -> list[Group]:
    """The groups among which a phase of a collective of `group` is. `unit`: ranks of a host."""
    if among == WHOLE:
        return [tuple(sorted(group))]
    parts = parts_of(group, unit)
    return parts if among == INSIDE else list(zip(*parts, strict=True))


def ring(group: Sequence[int]) -> list[tuple[int, int]]:
    """Each member with the next one, to which it sends."""
    return list(zip(group, (*group[1:], group[0]), strict=True))
