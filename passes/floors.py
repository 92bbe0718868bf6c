"""Prices that re-layouts cannot be below, for whole tables of them at once.

A re-layout's exact price asks for its cheapest path, which takes milliseconds for each kind of it; on three mesh axes
there are tens of thousands. What must enter a rank, or a host, at least follows from the blocks alone: what of its new
blocks it does not hold, or, where sums are reduced, its new blocks and its part of all summands. With these prices the
solver's bound holds; what it rests on is then priced exactly (`passes/tighten.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from stpart_compiler.cost_models.cluster import Link
from stpart_compiler.cost_models.compute import copy_seconds
from stpart_compiler.ir.layout import Layout, max_local_numel
from stpart_compiler.ir.placement import Cuts, Tables, is_windowed, tables
from stpart_compiler.passes.costs import Array, Costs
from stpart_compiler.passes.overlap import Beside
from stpart_compiler.passes.room import NO_ROOM, Room
from stpart_compiler.passes.space import Space
from stpart_compiler.passes.uses import Prices, Use

Index = npt.NDArray[np.int64]

PAIRS_LOOKED_AT = 64
"""Of more pairs of ranks of one unit so many are looked at, of units evenly spread: the most that enters one of these
is still a lower bound."""


class FloorPrices(Prices):
    """Prices of uses that no re-layout is cheaper than, in ns; one where nothing is known and the layouts differ, which
    tells what may cost something."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.beside: dict[object, Beside] = {}

    def table(self, use: Use, costs: Costs, hidden: Beside) -> list[list[int]]:
        sources, targets, itemsize = use.from_layouts, use.to_layouts, use.edge.value.dtype.itemsize
        transfer = floor_seconds(costs, sources, targets, itemsize)
        local = repackings(costs, sources, targets, itemsize) * (transfer > 0)
        most = np.minimum.outer(hidden.sources, hidden.targets)
        prices = np.floor((self.exposed(transfer, most, hidden) + local) * 1e9).astype(np.int64)
        numbers: dict[Layout, int] = {}
        same = [[numbers.setdefault(layout, len(numbers)) for layout in side] for side in (sources, targets)]
        found: list[list[int]] = np.maximum(prices, np.not_equal.outer(*same)).tolist()
        return found

    def room(self, use: Use, i: int, j: int, *, stays: bool) -> Room:
        """What no re-layout needs less than."""
        return NO_ROOM

    def exact(self, use: Use, sources: list[int], targets: list[int]) -> list[int]:
        """The prices of some re-layouts of a use, which it then has."""
        edge, itemsize = use.edge, use.edge.value.dtype.itemsize
        key = edge.producer, edge.consumer, edge.port
        if key not in self.beside:
            self.beside[key] = self.overlap.seconds(edge, use.from_ports, use.to_ports)
        hidden, costs = self.beside[key], self.costs(edge)
        found = []
        for at in zip(sources, targets, strict=True):
            source, target = use.from_ports[at[0]].layout, use.to_ports[at[1]].layout
            transfer, local = costs.priced(source, target, itemsize)
            if at in use.apart:
                slices = use.apart[at]
                part = costs.relayout(slices.largest(source), slices.largest(target), itemsize)
                transfer = len(slices.atoms) * part
            found.append(self._ns(transfer, local, hidden, at))
            use.price[at[0]][at[1]] = found[-1]
        return found

    def with_slices(self, table: list[list[int]], use: Use, costs: Costs, hidden: Beside) -> list[list[int]]:
        """As they are: slices send as much as the whole."""
        return table


def floor_seconds(costs: Costs, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: int) -> Array:
    """[source, target] -> least seconds of transfers between layouts of one value. `itemsize`: bytes an element."""
    least = np.zeros((len(sources), len(targets)))
    for unit in _entering(costs, tuple(sources), tuple(targets)) or ():
        link = unit.link
        ways = max(1, unit.size // link.shared_by) * (1.0 if link.full_duplex else 0.5)
        latency = min([link.latency, *(seconds for _, seconds in link.latencies)])
        seconds = latency + unit.elements * itemsize / (link.bandwidth * ways)
        least = np.maximum(least, np.where(unit.elements > 0, seconds, 0.0))
    return least


@dataclass(frozen=True)
class _Entering:
    """What enters units of `size` ranks (single ranks, hosts, ...) over `link`, [source, target].

    `elements`: those that enter some unit at least, 0 where nothing is known.
    """

    size: int
    link: Link
    elements: Array


@lru_cache(maxsize=300)
def _entering(costs: Costs, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> tuple[_Entering, ...] | None:
    """For units of every level. None: the layouts have no atoms in common."""
    spread = _spread(tables(costs.mesh), [*sources, *targets])
    if spread is None:
        return None
    known, blocks = spread
    here, there = blocks.only(slice(0, len(sources))), blocks.only(slice(len(sources), None))
    both = known[: len(sources), None] * known[None, len(sources) :]
    return tuple(_of_units(costs, here, there, both, size, link) for size, link in _units(costs))


def _units(costs: Costs) -> Iterator[tuple[int, Link]]:
    """Single ranks, hosts, and so on: number of ranks, and the fastest link over which anything enters."""
    size = 1
    for ranks, link in costs.cluster.levels:
        yield size, link
        if ranks is None or ranks >= costs.mesh.world_size:
            return
        size = ranks


def _of_units(costs: Costs, here: _Blocks, there: _Blocks, both: Array, size: int, link: Link) -> _Entering:
    table = tables(costs.mesh)
    units = np.arange(len(table.ranks)).reshape(-1, size)
    step = max(1, -(-len(table.ranks) * size // PAIRS_LOOKED_AT))
    some = units[step // 2 :: step]
    nowhere = np.zeros(len(table.ranks), dtype=np.int64)
    elements = np.zeros((len(here.partial), len(there.partial)))
    for own, i in here.by_partial().items():
        for kept, j in there.by_partial().items():
            sums = _Sums.between(table, own, kept, units)
            at = np.ix_(i, j)
            if sums.n > 1:
                wanted = there.only(j).distinct(units, np.array(table.classes(sums.stay)))
                elements[at] = sums.elements(here.numel, wanted, len(units))
            elif not sums.gone:
                classes = np.array(table.classes(own)) if own else nowhere
                elements[at] = _missing(here.only(i), there.only(j), some, classes)
    return _Entering(size, link, elements * both)


@dataclass(frozen=True)
class _Sums:
    """Each element of `apart` tensors has summands, numbered by the digits `gone`, that are to be added up. No unit has
    more than one in `n` of them."""

    gone: tuple[int, ...]
    stay: tuple[int, ...]
    n: int
    apart: int

    @staticmethod
    def between(table: Tables, own: tuple[int, ...], kept: tuple[int, ...], units: Index) -> _Sums:
        if own == kept or table.classes(own) == table.classes(kept):
            return _Sums((), own, 1, 1)
        gone = tuple(digit for digit in own if digit not in kept)
        stay = tuple(digit for digit in own if digit in kept)
        classes = np.array(table.classes(gone))
        most = max(len(set(classes[unit].tolist())) for unit in units)
        return _Sums(gone, stay, -(-len(set(classes.tolist())) // most), len(set(table.values(stay))))

    def elements(self, numel: int, wanted: Array, units: int) -> Array:
        """[target] -> elements that enter some unit at least. `wanted`: those of the new blocks, [target, unit].

        From n units n - 1 transfers at least make a sum; each further unit that wants it takes one.
        """
        total = numel * self.apart
        copies = wanted.min(axis=1) * units / total
        found: Array = np.maximum(wanted.max(axis=1), total * (self.n + copies - 2) / units)
        return found


@dataclass
class _Blocks:
    """Layouts over common atoms. `cuts[a][i]`: number of layout i's cut of atom a, in `ranges[a]` of [cut, rank, 2]."""

    numel: int
    partial: list[tuple[int, ...]]
    cuts: list[Index]
    ranges: list[Array]

    def only(self, which: list[int] | slice) -> _Blocks:
        chosen = self.partial[which] if isinstance(which, slice) else [self.partial[i] for i in which]
        return _Blocks(self.numel, chosen, [cuts[which] for cuts in self.cuts], self.ranges)

    def by_partial(self) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for i, partial in enumerate(self.partial):
            found.setdefault(partial, []).append(i)
        return found

    def shares(self, units: Index, classes: Index) -> Array:
        """[layout, unit, rank] -> 1 / number of ranks of the unit that hold the same block of the same summand."""
        same = (classes[units][:, :, None] == classes[units][:, None, :])[None]
        for cuts, ranges in zip(self.cuts, self.ranges, strict=True):
            at = ranges[:, units]
            same = same & (at[:, :, :, None] == at[:, :, None, :]).all(axis=-1)[cuts]
        count = np.broadcast_to(same.sum(axis=-1), (len(self.partial), *units.shape))
        found: Array = 1.0 / count
        return found

    def volumes(self, units: Index) -> Array:
        """[layout, unit, rank] -> elements of the block."""
        total = np.ones((len(self.partial), 1, 1))
        for cuts, ranges in zip(self.cuts, self.ranges, strict=True):
            total = total * (ranges[:, :, 1] - ranges[:, :, 0])[:, units][cuts]
        return np.broadcast_to(total, (len(self.partial), *units.shape))

    def distinct(self, units: Index, classes: Index) -> Array:
        """[layout, unit] -> elements of the unit's blocks, equal ones once."""
        found: Array = (self.volumes(units) * self.shares(units, classes)).sum(axis=-1)
        return found


def _missing(here: _Blocks, there: _Blocks, units: Index, classes: Index) -> Array:
    """[source, target] -> elements of new blocks that some unit does not hold."""
    size = units.shape[1]
    wanted = there.distinct(units, classes)
    share, wanting = here.shares(units, classes), there.shares(units, classes)
    held = np.zeros((len(here.partial), *wanted.shape))
    for giver in range(size):
        for taker in range(size):
            shared = (classes[units[:, giver]] == classes[units[:, taker]]).astype(np.float64)[None, None]
            for a, ranges in enumerate(here.ranges):
                one, two = ranges[:, None, units[:, giver]], ranges[None, :, units[:, taker]]
                low, high = np.maximum(one[..., 0], two[..., 0]), np.minimum(one[..., 1], two[..., 1])
                shared = shared * np.maximum(high - low, 0.0)[here.cuts[a][:, None], there.cuts[a][None, :]]
            held += shared * share[:, None, :, giver] * wanting[None, :, :, taker]
    missing: Array = (wanted[None] - held).max(axis=-1)
    return np.maximum(0.0, np.round(missing, 3))


def _spread(table: Tables, layouts: list[Layout]) -> tuple[Array, _Blocks] | None:
    """Layouts over atoms that all of them cut; which of them (1.0) can be written so. None: there are no such atoms."""
    profiles = [table.profile(layout) for layout in layouts]
    written: list[list[tuple[int, ...]] | None] = [[] for _ in layouts]
    sizes: list[int] = []
    for dim in range(len(profiles[0].dims)):
        found = _common_sizes([profile.dims[dim] for profile in profiles])
        if found is None:
            return None
        sizes += found
        for i, profile in enumerate(profiles):
            cuts, mine = _cuts(table, profile.dims[dim], found), written[i]
            written[i] = None if cuts is None or mine is None else [*mine, *cuts]
    known = np.array([float(cuts is not None) for cuts in written])
    nothing: list[tuple[int, ...]] = [()] * len(sizes)
    index, ranges = [], []
    for a, size in enumerate(sizes):
        kinds: dict[tuple[int, ...], int] = {}
        index.append(np.array([kinds.setdefault((cuts or nothing)[a], len(kinds)) for cuts in written]))
        ranges.append(np.array([table.ranges(size, cut) for cut in kinds], dtype=np.float64))
    numel = math.prod(layouts[0].shape)
    return known, _Blocks(numel, [profile.partial for profile in profiles], index, ranges)


def _common_sizes(dims: list[tuple[tuple[int, tuple[int, ...]], ...]]) -> list[int] | None:
    """Sizes of the coarsest atoms that refine all of these; None where the sizes form no divisor chain."""
    strides = {math.prod(size for size, _ in dims[0]), 1}
    for sizes in dict.fromkeys(tuple(size for size, _ in atoms) for atoms in dims):
        stride = 1
        for size in reversed(sizes):
            strides.add(stride)
            stride *= size
    ordered = sorted(strides, reverse=True)
    if 0 in strides or any(big % small for big, small in itertools.pairwise(ordered)):
        return None
    return [big // small for big, small in itertools.pairwise(ordered)]


def _cuts(table: Tables, atoms: tuple[tuple[int, tuple[int, ...]], ...], sizes: list[int]) -> Cuts | None:
    if any(is_windowed(digits) or (digits and size == 1) for size, digits in atoms):
        return None
    return table.spread(tuple(atom for atom in atoms if atom[0] != 1), sizes)


def repackings(costs: Costs, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: int) -> Array:
    """The local copies of `Costs.priced`, seconds, of all pairs at once."""
    sides = [*sources, *targets]
    atoms = [[atom for dim in layout.dims for atom in dim if atom.size > 1] for layout in sides]
    numbers: dict[object, int] = {}
    wholes = np.array([numbers.setdefault(tuple(own), len(numbers)) for own in atoms])
    tails = np.array([numbers.setdefault(tuple(own[1:]), len(numbers)) for own in atoms])
    blocks = np.array([max_local_numel(layout) for layout in sides], dtype=np.float64)
    count = len(sources)
    larger = np.maximum(blocks[:count, None], blocks[None, count:])
    base = copy_seconds(0, costs.cluster)
    seconds = base + larger * (copy_seconds(itemsize, costs.cluster) - base)
    in_place = (tails[:count, None] == tails[None, count:]) & (wholes[:count, None] != wholes[None, count:])
    return np.where(in_place, 0.0, seconds)
