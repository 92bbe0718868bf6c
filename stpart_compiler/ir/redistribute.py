"""Redistribution: the cheapest steps from one layout of a tensor to another.

Every path leads through at most a few layouts on the way: what can be sliced locally is sliced, sums are reduced (at
once or digit by digit, scattered where the target cuts along them), then blocks move, directly or by way of a gather;
halos come last.
Paths depend on the cuts, not on the sizes, as long as blocks are even: they are found once for a *pattern*, in which
each atom is as small as its cuts allow, and priced for every tensor by scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from stpart_compiler.ir.layout import Atom, Layout
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.placement import Box, Cuts, Pair, PairAtom, Placed, Tables, is_windowed, tables
from stpart_compiler.ir.relayout import Flow, Groups, Leg, Reach, Sizes, Traffic, find_flow, find_leg

FEWER_STEPS = 1.1
"""How much dearer a path of fewer steps that moves no more may be: only the first step runs beside compute."""

PLAN_ITEMSIZE = 4  # bytes an element by which paths are compared


class StepCost(Protocol):
    """Seconds of a communication; hashable.

    kind: "exchange" or a collective. nbytes: what the busiest rank sends or receives, the larger. messages: how many.
    mean: what a rank sends on average.
    """

    def __call__(
        self, kind: str, group_size: int, nbytes: float, axes: tuple[str, ...], messages: int, mean: float, /
    ) -> float: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class PlainCost:
    """The same link everywhere: `latency` seconds a message, `bandwidth` bytes/s each way."""

    latency: float = 10e-6
    bandwidth: float = 10e9

    def __call__(
        self, kind: str, group_size: int, nbytes: float, axes: tuple[str, ...], messages: int, mean: float
    ) -> float:
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Step:
    """One step of a redistribution.

    kind: "slice" (local), "zero" (local: all but one holder of a block hold zeros, which makes it a pending sum),
    "exchange" (pieces, point to point), "reduce_exchange" (pieces, then a local sum), "all_gather", "reduce_scatter",
    "all_reduce", "all_to_all". `groups` of collectives hold every rank once, in the order of the blocks.
    """

    kind: str
    source: Layout
    target: Layout
    groups: Groups = ()


@dataclass(frozen=True)
class Redistribution:
    """Steps that bring a tensor from `source` to `target`; none where the blocks already lie alike."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]


Charge = tuple[str, int, float, tuple[str, ...], int, float]  # arguments of a cost, with elements for bytes
Charges = tuple[Charge, ...]
"""Of one leg, side by side: what goes over each kind of link. The slowest is what it takes."""


class _Path(NamedTuple):
    """Placements on the way, the source first, the legs between them, and what is paid for the legs with transfers.

    Elements of the charges are those of the path's pattern.
    """

    stops: tuple[Placed, ...]
    legs: tuple[Leg, ...]
    charges: tuple[Charges, ...]


class _Pattern(NamedTuple):
    """What the choice of paths depends on: cut atoms only, in a fixed order, and pending digits on both sides."""

    atoms: tuple[PairAtom, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    combine: str


@lru_cache(maxsize=50_000)
def redistribute(source: Layout, target: Layout, mesh: Mesh, cost: StepCost | None = None) -> Redistribution:
    """The cheapest way from `source` to `target` at 4 bytes an element.

    Raises:
        ValueError: the layouts are of different shapes.
    """
    if source.shape != target.shape:
        raise ValueError(f"redistribute: {source} and {target} have different shapes, expected one tensor's layouts")
    if math.prod(source.shape) == 0:
        return Redistribution(source, target, (Step("exchange", source, target),) if source != target else ())
    table = tables(mesh)
    pair = table.pair(source, target)
    if pair is None or _combine_differently(source, target):
        return min(
            (_joined(source, middle, target, mesh, cost) for middle in _detours(table, source, target)),
            key=lambda plan: _steps_seconds(plan, mesh, cost),
        )
    steps = _steps(table, pair, cost or PlainCost())
    if steps:
        steps[0] = replace(steps[0], source=source)
        steps[-1] = replace(steps[-1], target=target)
    return Redistribution(source, target, tuple(steps))


def redistribution_cost(
    source: Layout, target: Layout, mesh: Mesh, itemsize: int, cost: StepCost | None = None
) -> float:
    """Seconds of the steps that `redistribute` chooses, for elements of `itemsize` bytes. Local steps cost nothing."""
    if source is target:
        return 0.0
    table = tables(mesh)
    pair = table.pair(source, target)
    if pair is None or _combine_differently(source, target):
        return _detour_cost(source, target, mesh, itemsize, cost)
    pattern, scale, _ = _pattern(table, pair)
    key = (pattern, scale, itemsize, cost)
    seconds: float | None = table.prices.get(key)
    if seconds is None:
        seconds = table.prices[key] = _pattern_cost(table, pattern, scale, itemsize, cost or PlainCost())
    return seconds


def _pattern_cost(table: Tables, pattern: _Pattern, scale: int, itemsize: int, cost: StepCost) -> float:
    seconds, path = _cheapest(table, pattern, scale, cost)
    if itemsize == PLAN_ITEMSIZE or not seconds:
        return seconds
    return _seconds(path.charges, scale * itemsize, cost)


def _detour_cost(source: Layout, target: Layout, mesh: Mesh, itemsize: int, cost: StepCost | None) -> float:
    if not math.prod(source.shape):
        return 0.0

    def by(middle: Layout, size: int) -> float:
        return sum(redistribution_cost(*ends, mesh, size, cost) for ends in ((source, middle), (middle, target)))

    best = min(_detours(tables(mesh), source, target), key=lambda middle: by(middle, PLAN_ITEMSIZE))
    return by(best, itemsize)


def step_traffic(step: Step, mesh: Mesh) -> Traffic:
    """What a step of a redistribution moves, in elements."""
    table = tables(mesh)
    pair = table.pair(step.source, step.target)
    assert pair is not None or not math.prod(step.source.shape), f"{step.source} to {step.target} is not one step"
    if pair is None:
        return Traffic(step.kind)
    leg = find_leg(table, *_ends(pair), pair.combine)
    assert leg is not None and leg.kind == step.kind, f"{step.source} to {step.target} is no {step.kind}"
    return leg.traffic


def step_traffic_scaled(step: Step, mesh: Mesh) -> tuple[Traffic, int]:
    """As `step_traffic`, looked up by the step's pattern: traffic in the pattern's elements, and elements for each."""
    sizes, source, target = _ends(pair := step_pair(step, mesh))
    leg, scale = _known_leg(tables(mesh), sizes, source, target, pair.combine)
    assert leg is not None, f"{step.source} to {step.target} is not one step"
    return leg.traffic, scale


def step_pair(step: Step, mesh: Mesh) -> Pair:
    """Both layouts of a step over common atoms."""
    pair = tables(mesh).pair(step.source, step.target)
    assert pair is not None, f"{step.source} to {step.target} is not one step"
    return pair


def step_boxes(step: Step, mesh: Mesh) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """Per rank, its block before and after the step, over the atoms of `step_pair`."""
    sizes, source, target = _ends(step_pair(step, mesh))
    table = tables(mesh)
    return table.boxes(sizes, source.cuts), table.boxes(sizes, target.cuts)


def holds_zeros(step: Step, mesh: Mesh, rank: int) -> bool:
    """Whether a rank's summand is zero after a "zero" step: one holder of each block keeps its value."""
    pair = step_pair(step, mesh)
    return not tables(mesh).is_first(rank, tuple(i for i in pair.target if i not in pair.source))


@lru_cache(maxsize=1000)
def step_flow(step: Step, mesh: Mesh) -> Flow:
    """Pieces of an "exchange" or "reduce_exchange" step, over the atoms of `step_pair`."""
    return find_flow(tables(mesh), *_ends(step_pair(step, mesh)))


def _ends(pair: Pair) -> tuple[Sizes, Placed, Placed]:
    sizes = tuple(atom.size for atom in pair.atoms)
    source = Placed(tuple(atom.source for atom in pair.atoms), pair.source)
    return sizes, source, Placed(tuple(atom.target for atom in pair.atoms), pair.target)


def _joined(source: Layout, middle: Layout, target: Layout, mesh: Mesh, cost: StepCost | None) -> Redistribution:
    first, second = redistribute(source, middle, mesh, cost), redistribute(middle, target, mesh, cost)
    return Redistribution(source, target, first.steps + second.steps)


def _steps_seconds(plan: Redistribution, mesh: Mesh, cost: StepCost | None) -> float:
    charges = [_charges(step_traffic(step, mesh), 1) for step in plan.steps]
    return _seconds([charge for charge in charges if charge[-1][4]], PLAN_ITEMSIZE, cost or PlainCost())


def _detours(table: Tables, source: Layout, target: Layout) -> list[Layout]:
    """Layouts to go through when dims have no common atoms: those dims whole, the others as on either side.

    Where both sides are pending, to be combined in different ways: nothing pending.
    """
    if _combine_differently(source, target):
        return [source.without_partial()]
    a, b = table.profile(source), table.profile(target)
    bad = [i for i, atoms in enumerate(zip(a.dims, b.dims, strict=True)) if table.refine(*atoms) is None]
    return [_with_whole(source, bad), _with_whole(target, bad)]


def _with_whole(layout: Layout, dims: list[int]) -> Layout:
    shape = layout.shape
    return Layout(
        tuple((Atom(shape[i]),) if i in dims else atoms for i, atoms in enumerate(layout.dims)),
        layout.partial,
        layout.combine,
    )


def _combine_differently(source: Layout, target: Layout) -> bool:
    return bool(source.partial and target.partial) and source.combine != target.combine


def _pattern(table: Tables, pair: Pair) -> tuple[_Pattern, int, list[int]]:
    """The pattern, the elements of the tensor for each of its elements, and which of the pair's atoms are in it."""
    scale = 1
    cut: list[tuple[PairAtom, int]] = []
    for index, atom in enumerate(pair.atoms):
        size, source, target = atom
        if not source and not target:
            scale *= size
            continue
        least = table.evenly(source, target)
        if size % least == 0 and not is_windowed(source) and not is_windowed(target):
            scale *= size // least
            atom = PairAtom(least, source, target)
        cut.append((atom, index))
    cut.sort()
    atoms = tuple([atom for atom, _ in cut])
    return _Pattern(atoms, pair.source, pair.target, pair.combine), scale, [index for _, index in cut]


def _cheapest(table: Tables, pattern: _Pattern, scale: int, cost: StepCost) -> tuple[float, _Path]:
    paths: tuple[_Path, ...] | None = table.paths.get(pattern)
    if paths is None:
        paths = table.paths[pattern] = _distinct(_paths(table, pattern))
    if len(paths) == 1:
        return _seconds(paths[0].charges, scale * PLAN_ITEMSIZE, cost), paths[0]
    seconds = [_seconds(path.charges, scale * PLAN_ITEMSIZE, cost) for path in paths]
    least = min(seconds)
    moved = [sum(charges[-1][2] for charges in path.charges) for path in paths]
    most = moved[seconds.index(least)]
    best = next(i for i, price in enumerate(seconds) if price <= FEWER_STEPS * least and moved[i] <= most)
    return seconds[best], paths[best]


def _distinct(paths: Iterator[_Path]) -> tuple[_Path, ...]:
    """One path of each set of charges, fewest legs first; one that costs nothing leaves no other to try."""
    kept: dict[tuple[Charges, ...], _Path] = {}
    for path in sorted(paths, key=lambda path: len(path.legs)):
        kept.setdefault(tuple(sorted(path.charges)), path)
    return (kept[()],) if () in kept else tuple(kept.values())


def _charges(traffic: Traffic, scale: int) -> Charges:
    """Those of messages that go as far as some axis take in those that go farther: two axes may be one kind of link."""
    kind = "exchange" if traffic.kind == "reduce_exchange" else traffic.kind
    parts = traffic.reaches or (Reach(traffic.axes, traffic.elements, traffic.elements, traffic.messages),)
    return tuple(
        (kind, traffic.group_size, part.elements * scale, part.axes, part.messages, part.mean * scale) for part in parts
    )


def _seconds(legs: Iterable[Charges], scale: int, cost: StepCost) -> float:
    """`scale`: bytes for each element of the charges."""
    total = 0.0
    for charges in legs:
        total += max(
            cost(kind, n, elements * scale, axes, messages, mean * scale)
            for kind, n, elements, axes, messages, mean in charges
        )
    return total


def _steps(table: Tables, pair: Pair, cost: StepCost) -> list[Step]:
    pattern, scale, order = _pattern(table, pair)
    _, path = _cheapest(table, pattern, scale, cost)
    layouts = []
    for stop in path.stops:
        cuts: list[tuple[int, ...]] = [()] * len(pair.atoms)
        for index, cut in zip(order, stop.cuts, strict=True):
            cuts[index] = cut
        layouts.append(table.layout(pair, Placed(tuple(cuts), stop.partial)))
    return [_step(table, leg, a, b) for leg, a, b in zip(path.legs, layouts, layouts[1:], strict=False)]


def _step(table: Tables, leg: Leg, a: Layout, b: Layout) -> Step:
    """A leg of a path as a step of the tensor. A pattern has its atoms in an order of its own, so groups, which are in
    the order of the blocks, are found anew; where no order suits both sides, pieces go one by one, at the same price.
    """
    if leg.groups:
        pair = table.pair(a, b)
        assert pair is not None, f"{a} to {b} is not one step"
        found = find_leg(table, *_ends(pair), pair.combine)
        assert found is not None, f"{a} to {b} is not one step"
        leg = found
    return Step(leg.kind, a, b, leg.groups)


def _paths(table: Tables, pattern: _Pattern) -> Iterator[_Path]:
    """Candidate paths, each once; the most direct one is always possible."""
    sizes = tuple(atom.size for atom in pattern.atoms)
    source = Placed(tuple(atom.source for atom in pattern.atoms), pattern.source)
    target = Placed(tuple(atom.target for atom in pattern.atoms), pattern.target)
    seen: set[tuple[Placed, ...]] = set()
    for stops in _routes(table, source, target):
        path = _path(table, sizes, tuple(dict.fromkeys(stops)), pattern.combine)
        if path is not None and path.stops not in seen:
            seen.add(path.stops)
            yield path


def _path(table: Tables, sizes: Sizes, stops: tuple[Placed, ...], combine: str) -> _Path | None:
    kept, legs, charges = [stops[0]], [], []
    for stop in stops[1:]:
        leg, scale = _known_leg(table, sizes, kept[-1], stop, combine)
        if leg is None:
            return None
        if leg.kind == "same":
            continue
        kept.append(stop)
        legs.append(leg)
        if leg.traffic.messages:
            charges.append(_charges(leg.traffic, scale))
    return _Path(tuple(kept), tuple(legs), tuple(charges))


def _known_leg(table: Tables, sizes: Sizes, a: Placed, b: Placed, combine: str) -> tuple[Leg | None, int]:
    """The leg of the pattern that two stops make, and the elements for each of its elements."""
    atoms = tuple(map(PairAtom, sizes, a.cuts, b.cuts))
    pattern, scale, _ = _pattern(table, Pair(atoms, (), a.partial, b.partial, combine))
    if pattern not in table.legs:
        least = Pair(pattern.atoms, (), pattern.source, pattern.target, combine)
        table.legs[pattern] = find_leg(table, *_ends(least), combine)
    return table.legs[pattern], scale


def _routes(table: Tables, source: Placed, target: Placed) -> Iterator[list[Placed]]:
    """Stops to try, source and target included."""
    gone = tuple(i for i in source.partial if i not in target.partial)
    goal = Placed(target.cuts, tuple(i for i in target.partial if i in source.partial))
    plain = tuple(cut[:-1] if is_windowed(cut) else cut for cut in target.cuts)
    if plain != target.cuts:  # to blocks that do not overlap, then their halos
        yield from ([*stops, target] for stops in _routes(table, source, Placed(plain, target.partial)))
    for head in _heads(table, source, goal, gone):
        for tail in _tails(table, head[-1], goal):
            yield [*head, *tail, goal, target]


def _heads(table: Tables, source: Placed, goal: Placed, gone: tuple[int, ...]) -> Iterator[list[Placed]]:
    """Ways to a placement with the sums reduced that are no longer pending."""
    yield [source] if not gone else [source, goal]
    sliced = _extended(table, source, goal)
    if not gone:
        if sliced != source:
            yield [source, sliced]
        return
    yield [source, sliced, Placed(sliced.cuts, goal.partial)]
    orders = [[gone]]
    if len(gone) > 1:
        orders += [[(i,) for i in gone], [(i,) for i in reversed(gone)]]
    for order in orders:
        stops = [source, sliced]
        for digits in order:
            here = stops[-1]
            less = Placed(here.cuts, tuple(i for i in here.partial if i not in digits))
            stops.append(_extended(table, less, goal))
        yield stops


def _extended(table: Tables, here: Placed, goal: Placed) -> Placed:
    """`here`, cut further as the goal is, as far as its forms stay independent."""
    used = [*here.partial, *(i for cut in here.cuts for i in cut)]
    cuts = []
    for own, wanted in zip(here.cuts, goal.cuts, strict=True):
        grown = own
        while wanted[: len(grown)] == grown and len(grown) < len(wanted):
            if not table.independent((*used, wanted[len(grown)])):
                break
            used.append(wanted[len(grown)])
            grown = wanted[: len(grown) + 1]
        cuts.append(grown)
    return Placed(tuple(cuts), here.partial)


def _tails(table: Tables, here: Placed, goal: Placed) -> Iterator[list[Placed]]:
    """Stops on the way of blocks: none, the cuts both sides share, or one digit gathered after another.

    A digit that the goal has elsewhere may move; so may one that cuts as one of the goal's does, in another order.
    """
    yield []
    shared = tuple(map(_prefix, here.cuts, goal.cuts))
    moving = {i for cut in goal.cuts for i in cut}
    turned = {table.classes((i,)) for i in moving}
    alike = {i for cut in here.cuts for i in cut if table.classes((i,)) in turned}
    ends = [shared, *(tuple(_without_last(cut, some) for cut in here.cuts) for some in (moving, moving | alike))]
    yield from ([Placed(end, here.partial)] for end in dict.fromkeys(ends) if end not in (here.cuts, goal.cuts))
    for final in dict.fromkeys(ends):
        yield from _one_by_one(here, final)


def _prefix(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]


def _without_last(cut: tuple[int, ...], moving: set[int]) -> tuple[int, ...]:
    """The cut without its minor digits that the goal does not have anywhere."""
    while cut and cut[-1] not in moving:
        cut = cut[:-1]
    return cut


def _one_by_one(here: Placed, final: Cuts) -> Iterator[list[Placed]]:
    """Minor digits dropped one at a time down to `final`, first atoms first and last atoms first."""
    if sum(map(len, here.cuts)) - sum(map(len, final)) < 2:
        return
    for order in (range(len(final)), reversed(range(len(final)))):
        cuts = list(here.cuts)
        stops = []
        for atom in order:
            while len(cuts[atom]) > len(final[atom]):
                cuts[atom] = cuts[atom][:-1]
                stops.append(Placed(tuple(cuts), here.partial))
        yield stops
