"""Enumerate the space-time strategies of an op from its factor rule (DESIGN sections 1-2).

Per mesh axis: leave the op replicated, cut a factor, or let a pending sum pass. For a contraction also the six 1-D
temporal maps of each axis, the 2-D temporal maps of each pair of equal axes with skewed forms, and time-only cuts. For
attention and fused regions the rings of each axis. A temporal map on some axes combines with every spatial choice on
the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stpart_compiler.ir.layout import Digit, form
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import ONLINE, SUM, OpRule
from stpart_compiler.ir.spacetime import MOVE, InvalidStrategyError, Strategy, check_covers, derive

Choice = tuple[str, int]  # ("keep", -1), ("cut", factor) or ("pending", linear set)


@dataclass(frozen=True)
class StrategySpace:
    """Which strategies are enumerated. `forms`: multiples of (r, c) used as skewed forms on pairs of equal axes.

    `pairs`: those pairs of equal axes; None: all of them.
    """

    temporal_1d: bool = True
    temporal_2d: bool = True
    skewed: bool = True
    pending: bool = True
    time_only: bool = False
    forms: tuple[tuple[int, int], ...] = ((1, 0), (0, 1), (1, 1))
    pairs: tuple[tuple[str, str], ...] | None = None


TILE_STEPS = (2, 4, 8)
"""Numbers of blocks in which a region may be run where nothing travels."""

DEFAULT_SPACE = StrategySpace()
MANY_AXES = 3
"""On so many wide axes skewed forms and 2-D temporal maps are kept to one pair of them."""

FULL_SPACE = StrategySpace(time_only=True, forms=((1, 0), (0, 1), (1, 1), (1, -1)))


def space_on(mesh: Mesh) -> StrategySpace:
    """The default space on a mesh; of three and more wide axes the innermost two of equal size are the pair."""
    wide = [axis for axis in mesh.axes if mesh.size[axis] > 1]
    if len(wide) < MANY_AXES:
        return DEFAULT_SPACE
    pairs = [pair for pair in itertools.combinations(wide, 2) if mesh.size[pair[0]] == mesh.size[pair[1]]]
    inner = sorted(pairs, key=lambda pair: (wide.index(pair[1]), wide.index(pair[0])))[-1:]
    return replace(DEFAULT_SPACE, pairs=tuple(inner))


@lru_cache(maxsize=20_000)
def enumerate_strategies(
    rule: OpRule,
    mesh: Mesh,
    movable: frozenset[int],
    space: StrategySpace = DEFAULT_SPACE,
    tokens: frozenset[int] = frozenset(),
) -> tuple[Strategy, ...]:
    """Every valid strategy of the space, the fully replicated one first.

    Two factors of `tokens` (batch and sequence) are not skewed against each other: no temporal map asks for that.
    """
    axes = tuple(axis for axis in mesh.axes if mesh.size[axis] > 1)
    found = [*_spatial(rule, mesh, axes, movable, space, tokens)]
    if is_contraction(rule):
        found += _temporal(rule, mesh, axes, movable, space)
    if rule.loops and space.temporal_1d:
        found += _rings(rule, mesh, axes, movable, space)
    in_time = {f for f in rule.tiles if rule.factors[f].kind == ONLINE or rule.factors[f].local}
    for tile, steps in itertools.product(sorted(rule.tiles & movable | in_time), TILE_STEPS):
        found += _with_rest(rule, mesh, axes, movable, {tile: form(steps, 1)}, steps, space)
    kept = [strategy for strategy in dict.fromkeys(found) if _valid(rule, strategy, mesh)]
    assert kept, f"no strategy for {rule}"
    return tuple(kept)


def _valid(rule: OpRule, strategy: Strategy, mesh: Mesh) -> bool:
    if not all(_may_go_round(strategy, f) for f in rule.rings):
        return False
    try:
        derive(rule, strategy, mesh)
        if strategy.steps > 1:
            check_covers(rule, strategy, mesh)
    except InvalidStrategyError:
        return False
    return True


def _may_go_round(strategy: Strategy, f: int) -> bool:
    """Whether factor f is cut over one axis at most, which cuts nothing else: all its ranks then hold the same rest."""
    axes = {axis for digit in strategy.digits[f] for axis, _ in digit.coeffs}
    others = {a for g, digits in enumerate(strategy.digits) if g != f for digit in digits for a, _ in digit.coeffs}
    return len(strategy.digits[f]) <= 1 and len(axes) <= 1 and not axes & others


def is_contraction(rule: OpRule) -> bool:
    """Two operands, one result, bilinear: mm, bmm."""
    bilinear = frozenset({0}) in rule.linear and frozenset({1}) in rule.linear
    return len(rule.inputs) == 2 and len(rule.outputs) == 1 and bilinear and any(f.kind == SUM for f in rule.factors)


def _room(rule: OpRule, factor: int, used: tuple[Digit, ...], q: int) -> bool:
    """Whether another cut by `q` leaves at most the usual uneven blocks."""
    return rule.factors[factor].size >= q * math.prod(digit.q for digit in used)


def _axis_choices(rule: OpRule, movable: frozenset[int], space: StrategySpace, pending: bool) -> list[Choice]:
    choices: list[Choice] = [("keep", -1), *(("cut", f) for f in sorted(movable))]
    if pending and space.pending:
        choices += [("pending", i) for i in range(len(rule.linear))]
    return choices


def with_digit(digits: Sequence[Digit], digit: Digit, mesh: Mesh) -> tuple[Digit, ...]:
    """One more cut of a dim, in the order of the mesh's axes, time last: ops and values at rest then cut it alike."""
    here = mesh.axes.index(digit.coeffs[0][0])
    behind = (i for i, d in enumerate(digits) if d.tau or mesh.axes.index(d.coeffs[0][0]) > here)
    at = next(behind, len(digits))
    return (*digits[:at], digit, *digits[at:])


def _combined(
    rule: OpRule, mesh: Mesh, axes: tuple[str, ...], choices: tuple[Choice, ...], start: Strategy
) -> Strategy | None:
    """Add one spatial choice per axis to `start`; None where a factor is too small or two pending sets differ."""
    digits = [list(d) for d in start.digits]
    pending: list[Digit] = list(start.pending)
    linear = start.linear
    for axis, (kind, index) in zip(axes, choices, strict=True):
        digit = form(mesh.size[axis], **{axis: 1})
        if kind == "cut":
            if not _room(rule, index, tuple(digits[index]), digit.q):
                return None
            digits[index] = list(with_digit(digits[index], digit, mesh))
        elif kind == "pending":
            if linear not in (-1, index):
                return None
            linear = index
            pending.append(digit)
    return Strategy(tuple(map(tuple, digits)), start.steps, linear, tuple(pending))


def _spatial(
    rule: OpRule,
    mesh: Mesh,
    axes: tuple[str, ...],
    movable: frozenset[int],
    space: StrategySpace,
    tokens: frozenset[int],
) -> Iterator[Strategy]:
    nothing = Strategy(tuple(() for _ in rule.factors))
    pending = not is_contraction(rule)
    options = _axis_choices(rule, movable, space, pending)
    for choices in itertools.product(options, repeat=len(axes)):
        strategy = _combined(rule, mesh, axes, choices, nothing)
        if strategy is not None:
            yield strategy
    if space.skewed:
        yield from _skewed(rule, mesh, axes, movable, space, tokens)


def equal_pairs(mesh: Mesh, axes: Sequence[str], space: StrategySpace) -> list[tuple[str, str]]:
    """Pairs of axes of one size that skewed forms are made of."""
    equal = [pair for pair in itertools.combinations(axes, 2) if mesh.size[pair[0]] == mesh.size[pair[1]]]
    return equal if space.pairs is None else [pair for pair in equal if pair in space.pairs]


def _pair_forms(q: int, pair: tuple[str, str], space: StrategySpace) -> list[Digit]:
    made = [form(q, **{pair[0]: x, pair[1]: y}) for x, y in space.forms]
    return list(dict.fromkeys(made))


def _independent(one: Digit, two: Digit, pair: tuple[str, str]) -> bool:
    a, b = dict(one.coeffs), dict(two.coeffs)
    det = a.get(pair[0], 0) * b.get(pair[1], 0) - a.get(pair[1], 0) * b.get(pair[0], 0)
    return math.gcd(det, one.q) == 1


def _skewed(
    rule: OpRule,
    mesh: Mesh,
    axes: tuple[str, ...],
    movable: frozenset[int],
    space: StrategySpace,
    tokens: frozenset[int],
) -> Iterator[Strategy]:
    """Two factors cut by independent forms of a pair of axes, at least one of them skewed. Places of images are not:
    their neighbours would be ranks further away.
    """
    for pair in equal_pairs(mesh, axes, space):
        forms = _pair_forms(mesh.size[pair[0]], pair, space)
        rest = tuple(axis for axis in axes if axis not in pair)
        for (one, two), (f, g) in itertools.product(
            itertools.permutations(forms, 2), itertools.combinations(sorted(movable - rule.windowed), 2)
        ):
            plain = len(one.coeffs) == len(two.coeffs) == 1
            if not plain and not {f, g} <= tokens and _independent(one, two, pair):
                yield from _with_rest(rule, mesh, rest, movable, {f: one, g: two}, 1, space)


def _with_rest(
    rule: OpRule,
    mesh: Mesh,
    rest: tuple[str, ...],
    movable: frozenset[int],
    cuts: dict[int, Digit],
    steps: int,
    space: StrategySpace,
) -> Iterator[Strategy]:
    """The given digits, with every spatial choice on the remaining axes."""
    if not all(_room(rule, f, (), digit.q) for f, digit in cuts.items()):
        return
    start = Strategy(tuple((cuts[f],) if f in cuts else () for f in range(len(rule.factors))), steps)
    options = _axis_choices(rule, movable, space, pending=False)
    for choices in itertools.product(options, repeat=len(rest)):
        strategy = _combined(rule, mesh, rest, choices, start)
        if strategy is not None:
            yield strategy


def _groups(rule: OpRule, movable: frozenset[int]) -> dict[str, list[int]]:
    """Factors of a contraction by role: m (left and result), k (right and result), n (summed)."""
    left, right, out = ({f for dim in tensor for f in dim} for tensor in (*rule.inputs, rule.outputs[0]))
    roles: dict[str, list[int]] = {"m": [], "n": [], "k": []}
    for f in sorted(movable):
        if f in left and f in right and f not in out:
            roles["n"].append(f)
        elif f in left and f in out and f not in right:
            roles["m"].append(f)
        elif f in right and f in out and f not in left:
            roles["k"].append(f)
    return roles


def _temporal(
    rule: OpRule, mesh: Mesh, axes: tuple[str, ...], movable: frozenset[int], space: StrategySpace
) -> Iterator[Strategy]:
    roles = _groups(rule, movable)
    if space.temporal_1d:
        yield from _temporal_1d(rule, mesh, axes, movable, space, roles)
    if space.temporal_2d:
        yield from _temporal_2d(rule, mesh, axes, movable, space, roles)
    if space.time_only:
        for f in (f for role in roles.values() for f in role):
            yield from _with_rest(rule, mesh, axes, movable, {f: form(2, 1)}, 2, space)


def _temporal_1d(
    rule: OpRule,
    mesh: Mesh,
    axes: tuple[str, ...],
    movable: frozenset[int],
    space: StrategySpace,
    roles: dict[str, list[int]],
) -> Iterator[Strategy]:
    """One factor at d, another at d+t: the six maps of DESIGN section 1."""
    for axis, (one, two) in itertools.product(axes, itertools.permutations(("m", "n", "k"), 2)):
        q = mesh.size[axis]
        rest = tuple(other for other in axes if other != axis)
        offset = 1 if one == "n" else 0  # the travelling sum then ends where the plain form says
        for f, g in itertools.product(roles[one], roles[two]):
            cuts = {f: form(q, **{axis: 1}), g: form(q, 1, offset, **{axis: 1})}
            yield from _with_rest(rule, mesh, rest, movable, cuts, q, space)


def _rings(
    rule: OpRule, mesh: Mesh, axes: tuple[str, ...], movable: frozenset[int], space: StrategySpace
) -> Iterator[Strategy]:
    """A factor at d, a loop at d-t: what has only the loop travels, to the next rank, as causal masks want keys to.

    A result that travels starts one rank further on, so that it ends where the plain form says.
    """
    for axis, g in itertools.product(axes, sorted(rule.loops)):
        q = mesh.size[axis]
        rest = tuple(other for other in axes if other != axis)
        for f in sorted(movable - {g}):
            for offset in (0, -1):
                cuts = {f: form(q, **{axis: 1}), g: form(q, -1, offset, **{axis: 1})}
                made = _with_rest(rule, mesh, rest, movable, cuts, q, space)
                yield from (s for s in made if _travels(rule, s, mesh) == (True, bool(offset)))


def _travels(rule: OpRule, strategy: Strategy, mesh: Mesh) -> tuple[bool, bool]:
    """Whether operands move over the time steps, and whether results do; (False, False) where it computes nothing."""
    try:
        derived = derive(rule, strategy, mesh)
    except InvalidStrategyError:
        return False, False
    moving = [any(port.motion == MOVE for port in ports) for ports in (derived.inputs, derived.outputs)]
    return moving[0], moving[1]


def _temporal_2d(
    rule: OpRule,
    mesh: Mesh,
    axes: tuple[str, ...],
    movable: frozenset[int],
    space: StrategySpace,
    roles: dict[str, list[int]],
) -> Iterator[Strategy]:
    """Pairwise independent forms for m, n, k on two equal axes, one of them with time (PrimePar, section 1.1)."""
    for pair in equal_pairs(mesh, axes, space):
        q = mesh.size[pair[0]]
        rest = tuple(axis for axis in axes if axis not in pair)
        triples = [
            triple
            for triple in itertools.permutations(_pair_forms(q, pair, space), 3)
            if all(_independent(a, b, pair) for a, b in itertools.combinations(triple, 2))
        ]
        for triple, timed in itertools.product(triples, range(3)):
            digits = [Digit(d.coeffs, q, int(i == timed)) for i, d in enumerate(triple)]
            for trio in itertools.product(roles["m"], roles["n"], roles["k"]):
                yield from _with_rest(rule, mesh, rest, movable, dict(zip(trio, digits, strict=True)), q, space)
