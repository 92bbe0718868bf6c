"""One step between two placements over common atoms: its kind, its groups or pieces, and what it moves.

Even blocks go by collectives where the ranks fall into groups that exchange everything among themselves. Groups come
from block coordinates, not from mesh axes, so skewed forms have them too. All else goes by single pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stpart_compiler.ir.placement import Box, Piece, Placed, Tables, extent, inside, is_windowed, volume
from stpart_compiler.ir.rule import SUM

Groups = tuple[tuple[int, ...], ...]
Sizes = tuple[int, ...]
Index = npt.NDArray[np.int64]


class Reach(NamedTuple):
    """Of the messages of a step those that go as far as some axis, counted from the outermost, or farther.

    `axes`: along which those cross that go just so far. `elements`: of the busiest rank, the larger of sent and
    received; `mean`: on average of the ranks that differ in axes farther inside alone, where that is most. `messages`:
    how many the busiest rank sends or receives.
    """

    axes: tuple[str, ...]
    elements: float
    mean: float
    messages: int


@dataclass(frozen=True)
class Traffic:
    """What a step moves. `sent`, `received`: elements of the busiest rank; `messages`: how many it sends or receives.

    `axes`: mesh axes along which data crosses. `reaches`: where every rank sends for itself, the farthest first, so
    that what crosses a slow link is told apart from all that is sent. All zero for a local step.
    """

    kind: str
    group_size: int = 1
    sent: float = 0.0
    received: float = 0.0
    axes: tuple[str, ...] = ()
    messages: int = 0
    reaches: tuple[Reach, ...] = ()

    @property
    def elements(self) -> float:
        """The larger of sent and received."""
        return max(self.sent, self.received)


class Source(NamedTuple):
    """A piece and the rank that it comes from."""

    rank: int
    piece: Piece


class Flow(NamedTuple):
    """Who gives what to whom.

    takes: per rank, per summand of its target block, the pieces of that summand and where each comes from; one summand,
    unless sums of the source are no longer pending in the target. gives: per rank, other ranks and the part each takes.
    """

    takes: list[list[list[Source]]]
    gives: list[list[tuple[int, Box]]]


class Leg(NamedTuple):
    """A step of a path. kind "same": nothing to do."""

    kind: str
    groups: Groups
    traffic: Traffic


def find_leg(table: Tables, sizes: Sizes, a: Placed, b: Placed, combine: str = SUM) -> Leg | None:
    """The step from `a` to `b`; None where one step cannot do it.

    Collectives only add: what combines otherwise (it is small, a number for each row) is sent in pieces. So are halos:
    blocks that overlap are no even parts. Of such blocks a rank can only keep less, or the same.
    """
    new = set(b.partial) - set(a.partial)
    gone = set(a.partial) - set(b.partial)
    here, there = table.boxes(sizes, a.cuts), table.boxes(sizes, b.cuts)
    changed = [(x, y) for x, y in zip(a.cuts, b.cuts, strict=True) if x != y]
    if any(is_windowed(x) for x, _ in changed):
        return _local("slice") if not new and not gone and all(map(inside, there, here)) else None
    halo = any(is_windowed(y) for _, y in changed)
    if new:
        assert combine == SUM, f"{combine}: only sums begin with blocks of zeros"
        return _local("zero") if not gone and here == there else None
    if gone and combine != SUM:
        return _pieces_leg(table, sizes, a, b, "reduce_exchange")
    if gone and halo:
        return _pieces_leg(table, sizes, a, b, "reduce_exchange")
    if gone:
        return _reduction(table, sizes, a, b)
    if here == there:
        return _local("same")
    if all(map(inside, there, here)):
        return _local("slice")
    if halo:
        return _pieces_leg(table, sizes, a, b, "exchange")
    return _gather(table, sizes, a, b) or _all_to_all(table, sizes, a, b) or _pieces_leg(table, sizes, a, b, "exchange")


def _local(kind: str) -> Leg:
    return Leg(kind, (), Traffic(kind))


def _collective(table: Tables, kind: str, groups: list[tuple[int, ...]], elements: Callable[[int, int], float]) -> Leg:
    """`elements`: (first rank of a group, group size) -> what each member sends."""
    size = len(groups[0])
    moved = max(elements(group[0], size) for group in groups)
    apart = 0
    for group in groups:
        for rank in group[1:]:
            apart |= table.apart(group[0], rank)
    messages = 2 * (size - 1) if kind == "all_reduce" else size - 1
    traffic = Traffic(kind, size, moved, moved, table.axes(apart), messages)
    return Leg(kind, tuple(sorted(groups)), traffic)


def _gather(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> Leg | None:
    here, there = table.boxes(sizes, a.cuts), table.boxes(sizes, b.cuts)
    if not all(map(inside, here, there)):
        return None
    classes = table.classes(a.partial)
    found: dict[tuple[int, Box], dict[Box, list[int]]] = {}
    for rank in table.ranks:
        found.setdefault((classes[rank], there[rank]), {}).setdefault(here[rank], []).append(rank)
    groups: list[tuple[int, ...]] = []
    for (_, whole), parts in found.items():
        if not _even_partition(whole, list(parts)):
            return None
        replicas = [parts[box] for box in sorted(parts)]
        if len({len(ranks) for ranks in replicas}) != 1:
            return None
        groups += zip(*replicas, strict=True)
    if len({len(group) for group in groups}) != 1:
        return None
    return _collective(table, "all_gather", groups, lambda rank, n: (n - 1) * volume(here[rank]))


def _even_partition(whole: Box, parts: list[Box]) -> bool:
    """Whether several parts of one shape, none of them empty, make up the whole (they are known to be disjoint)."""
    if len(parts) < 2 or len({extent(part) for part in parts}) != 1:
        return False
    return 0 < volume(whole) == len(parts) * volume(parts[0])


def _reduction(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> Leg:
    if table.boxes(sizes, a.cuts) == table.boxes(sizes, b.cuts):
        return _all_reduce(table, sizes, a, b)
    return _reduce_scatter(table, sizes, a, b) or _pieces_leg(table, sizes, a, b, "reduce_exchange")


def _add_alike(classes: tuple[int, ...], groups: list[tuple[int, ...]]) -> bool:
    """Whether groups with one result get the same bits: a backend adds in the order of the ranks."""
    orders = {tuple(classes[rank] for rank in sorted(group)) for group in groups}
    return len(groups[0]) <= 2 or len(orders) == 1


def _all_reduce(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> Leg:
    here = table.boxes(sizes, a.cuts)
    before, after = table.classes(a.partial), table.classes(b.partial)
    keys = _block_keys(table, a)
    found: dict[tuple[int, tuple[int, ...]], dict[int, list[int]]] = {}
    for rank in table.ranks:
        found.setdefault((after[rank], keys[rank]), {}).setdefault(before[rank], []).append(rank)
    groups: list[tuple[int, ...]] = []
    for summands in found.values():
        alike = list(zip(*summands.values(), strict=True))
        if not _add_alike(before, alike):
            return _pieces_leg(table, sizes, a, b, "reduce_exchange")
        groups += alike
    return _collective(table, "all_reduce", groups, lambda rank, n: 2 * (n - 1) / n * volume(here[rank]))


def _block_keys(table: Tables, a: Placed) -> list[tuple[int, ...]]:
    """Per rank the values of all digits of the dims: other than ranges, they tell empty blocks apart."""
    return table.values(tuple(i for cut in a.cuts for i in cut))


def _reduce_scatter(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> Leg | None:
    here, there = table.boxes(sizes, a.cuts), table.boxes(sizes, b.cuts)
    if not all(map(inside, there, here)):
        return None
    before, after = table.classes(a.partial), table.classes(b.partial)
    found: dict[tuple[int, Box], _Table] = {}
    for rank in table.ranks:
        row = found.setdefault((after[rank], here[rank]), {}).setdefault(before[rank], {})
        row.setdefault(there[rank], []).append(rank)
    groups: list[tuple[int, ...]] = []
    for (_, whole), rows in found.items():
        boxes = {box for row in rows.values() for box in row}
        if len(boxes) != len(rows) or not _even_partition(whole, list(boxes)):
            return None
        matched = _matchings(rows)
        if matched is None or not _add_alike(before, matched):
            return None
        groups += [tuple(sorted(group, key=lambda rank: there[rank])) for group in matched]
    if len({len(group) for group in groups}) != 1:
        return None
    return _collective(table, "reduce_scatter", groups, lambda rank, n: (n - 1) * volume(there[rank]))


def _all_to_all(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> Leg | None:
    here, there = table.boxes(sizes, a.cuts), table.boxes(sizes, b.cuts)
    if volume(here[0]) != volume(there[0]):
        return None
    if not _may_swap(here[0], table.pieces_of(there[0], sizes, a.cuts, b.cuts)):
        return None
    pieces = table.pieces(sizes, a.cuts, b.cuts)
    classes = table.classes(a.partial)
    found: dict[tuple[int, tuple[Box, ...]], _Table] = {}
    for rank in table.ranks:
        blocks = tuple(piece.block for piece in pieces[there[rank]])
        if here[rank] not in blocks:
            return None
        row = found.setdefault((classes[rank], blocks), {}).setdefault(here[rank], {})
        row.setdefault(there[rank], []).append(rank)
    groups: list[tuple[int, ...]] = []
    for (_, blocks), rows in found.items():
        targets = {box for row in rows.values() for box in row}
        parts = [piece.part for box in targets for piece in pieces[box]]
        matched = _matchings(rows) if len(rows) == len(targets) == len(blocks) > 1 else None
        if matched is None or len({extent(part) for part in parts}) != 1:
            return None
        if len(targets) * volume(parts[0]) != volume(blocks[0]):
            return None
        groups += [tuple(sorted(group, key=lambda rank: here[rank])) for group in matched]
    if len({len(group) for group in groups}) != 1 or any(not _ascending(group, there) for group in groups):
        return None
    leg = _collective(table, "all_to_all", groups, lambda rank, n: (n - 1) * volume(here[rank]) / n)
    members, n = np.array(groups), len(groups[0])
    senders, receivers = np.repeat(members, n, axis=1).ravel(), np.tile(members, n).ravel()
    away = senders != receivers
    part = np.full(int(away.sum()), volume(here[0]) // n)
    return leg._replace(traffic=replace(leg.traffic, reaches=_reaches(table, senders[away], receivers[away], part)))


def _may_swap(here: Box, pieces: tuple[Piece, ...]) -> bool:
    """Whether a rank with a block has one of the pieces of another, all alike and of as many blocks as there are."""
    blocks, parts = [piece.block for piece in pieces], {extent(piece.part) for piece in pieces}
    even = len(blocks) > 1 and len(parts) == 1 and len(blocks) * volume(pieces[0].part) == volume(blocks[0])
    return even and here in blocks


def _ascending(group: tuple[int, ...], boxes: tuple[Box, ...]) -> bool:
    return all(boxes[x] <= boxes[y] for x, y in itertools.pairwise(group))


_Table = dict[object, dict[Box, list[int]]]  # what a rank gives -> the block it wants -> ranks


def _matchings(rows: _Table) -> list[tuple[int, ...]] | None:
    """Groups of ranks in which every row and every column of the table stands once. None: there is no such partition.

    A table with equal counts in all rows and columns always has one (Koenig); each group is a perfect matching.
    """
    width = len(rows)
    left = {row: {box: list(ranks) for box, ranks in cells.items()} for row, cells in rows.items()}
    total = sum(len(ranks) for cells in rows.values() for ranks in cells.values())
    groups = []
    for _ in range(total // width):
        match = _perfect_matching(left)
        if match is None or len(match) != width:
            return None
        groups.append(tuple(left[row][box].pop(0) for box, row in match.items()))
    return groups if total % width == 0 else None


def _perfect_matching(left: _Table) -> dict[Box, object] | None:
    match: dict[Box, object] = {}

    def place(row: object, tried: set[Box]) -> bool:
        for box, ranks in left[row].items():
            if ranks and box not in tried:
                tried.add(box)
                if box not in match or place(match[box], tried):
                    match[box] = row
                    return True
        return False

    return match if all(place(row, set()) for row in left) else None


def _pieces_leg(table: Tables, sizes: Sizes, a: Placed, b: Placed, kind: str) -> Leg:
    wanted = _wanted(table, sizes, a, b)
    senders = np.array([one for row in _senders(table, wanted) for one in row], dtype=np.int64)
    receivers = np.repeat(np.arange(len(wanted)), [len(row.holders) for row in wanted])
    elements = np.array([one for row in wanted for one in row.elements], dtype=np.int64)
    away = senders != receivers
    senders, receivers, elements = senders[away], receivers[away], elements[away]
    reaches = _reaches(table, senders, receivers, elements)
    most = reaches[-1].messages if reaches else 0
    sent, received = (_largest_sum(ends, elements, len(wanted)) for ends in (senders, receivers))
    axes = table.axes(int(np.bitwise_or.reduce(table.all_apart[senders, receivers])))
    return Leg(kind, (), Traffic(kind, 2, sent, received, axes, most, reaches))


def _largest_sum(ends: Index, elements: Index, ranks: int) -> float:
    return float(np.bincount(ends, weights=elements, minlength=ranks).max())


def _reaches(table: Tables, senders: Index, receivers: Index, elements: Index) -> tuple[Reach, ...]:
    """Of messages, one an index."""
    apart = table.all_apart[senders, receivers]
    lengths = np.array([bits.bit_length() for bits in range(2 ** len(table.mesh.sizes))])[apart]
    ranks = len(table.ranks)
    ends, counts = np.zeros((2, ranks)), np.zeros((2, ranks), dtype=np.int64)
    found = []
    for reach in sorted(set(lengths.tolist()), reverse=True):
        at = lengths == reach
        for side, who in enumerate((senders[at], receivers[at])):
            ends[side] += np.bincount(who, weights=elements[at], minlength=ranks)
            counts[side] += np.bincount(who, minlength=ranks)
        unit = math.prod(table.mesh.sizes[len(table.mesh.sizes) - reach + 1 :])
        mean = float(ends.reshape(2, -1, unit).sum(axis=-1).max()) / unit
        crossed = table.axes(int(np.bitwise_or.reduce(apart[at])))
        found.append(Reach(crossed, float(ends.max()), mean, int(counts.max())))
    return tuple(found)


class _Wanted(NamedTuple):
    """What a rank's block is made of: `pieces` of each of its `summands`. `elements`, `holders`: of all pieces of all
    summands, one summand after another, how much each is and the ranks that hold it, ascending.
    """

    summands: list[int]
    pieces: tuple[Piece, ...]
    elements: list[int]
    holders: list[list[int]]


def _wanted(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> list[_Wanted]:
    """Per rank. Ranks that want the same have the same one."""
    here, there = table.boxes(sizes, a.cuts), table.boxes(sizes, b.cuts)
    before, after = table.classes(a.partial), table.classes(b.partial)
    holders: dict[int, dict[Box, list[int]]] = {}
    summands: dict[int, dict[int, None]] = {}
    for rank in table.ranks:
        holders.setdefault(before[rank], {}).setdefault(here[rank], []).append(rank)
        summands.setdefault(after[rank], {})[before[rank]] = None
    pieces = table.pieces(sizes, a.cuts, b.cuts)
    elements = {box: [volume(piece.part) for piece in found] for box, found in pieces.items()}
    known: dict[tuple[int, Box], _Wanted] = {}
    for which, box in zip(after, there, strict=True):
        if (which, box) not in known:
            added, parts = list(summands[which]), pieces[box]
            blocks = [piece.block for piece in parts]
            held = [own[block] for own in map(holders.__getitem__, added) for block in blocks]
            known[which, box] = _Wanted(added, parts, elements[box] * len(added), held)
    return [known[key] for key in zip(after, there, strict=True)]


def _senders(table: Tables, wanted: list[_Wanted]) -> list[list[int]]:
    """Per rank and piece who gives it: the rank itself, else the nearest holder, and among holders equally near the one
    that has given least so far.
    """
    load = [0] * len(wanted)
    return [_senders_to(rank, row, table.apart_from(rank), load) for rank, row in enumerate(wanted)]


def _senders_to(rank: int, wanted: _Wanted, apart: list[int], load: list[int]) -> list[int]:
    found = []
    for elements, holders in zip(wanted.elements, wanted.holders, strict=True):
        best = holders[0]
        if len(holders) > 1:
            least = min(map(apart.__getitem__, holders))  # 0 for the rank itself
            best = min([other for other in holders if apart[other] == least], key=load.__getitem__)
        if best != rank:
            load[best] += elements
        found.append(best)
    return found


def find_flow(table: Tables, sizes: Sizes, a: Placed, b: Placed) -> Flow:
    """Pieces of every rank's target block, from whom `_senders` says."""
    wanted = _wanted(table, sizes, a, b)
    flow = Flow([], [[] for _ in table.ranks])
    for rank, (row, senders) in enumerate(zip(wanted, _senders(table, wanted), strict=True)):
        left = iter(senders)
        takes = [[Source(next(left), piece) for piece in row.pieces] for _ in row.summands]
        flow.takes.append(takes)
        for source in itertools.chain(*takes):
            if source.rank != rank:
                flow.gives[source.rank].append((rank, source.piece.part))
    return flow
