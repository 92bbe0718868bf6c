"""Space-time maps: how one op's loop dims are spread over ranks and time steps, and all that follows.

A `Strategy` gives each factor of a rule its digits. `derive` answers, from the linear forms alone: which block of each
operand a rank holds at rest, which operands move and to whom, which are sliced locally step by step, how the results
of the steps combine, and along which digits the output is still a pending sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from stpart_compiler.ir.layout import Atom, Digit, Layout, Range, digit_key
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import COMBINED, SUM, Factor, OpRule, TensorMap

Shift = tuple[tuple[str, int], ...]

STAY = "stay"  # operand: used as it rests; result: one step, or accumulated in place
SLICE = "slice"  # operand: whole along the time digit, sliced locally; result: blocks of the steps are concatenated
MOVE = "move"  # operand: the block of step t+1 comes from the rank at +shift; result: the partial sum travels


@dataclass(frozen=True)
class Strategy:
    """A point of an op's space. `digits[f]` cut factor f; at most one digit has time, the minor one of its factor.

    `pending` digits pass through the operands `rule.linear[linear]` from inputs to outputs.
    """

    digits: tuple[tuple[Digit, ...], ...]
    steps: int = 1
    linear: int = -1
    pending: tuple[Digit, ...] = ()

    @property
    def time_factor(self) -> int | None:
        """The factor cut in time, if any."""
        for index, digits in enumerate(self.digits):
            if any(digit.tau for digit in digits):
                return index
        return None

    def describe(self, rule: OpRule) -> str:
        cuts = [
            f"{factor.name}={'.'.join(str(d) for d in digits)}"
            for factor, digits in zip(rule.factors, self.digits, strict=True)
            if digits
        ]
        if self.pending:
            cuts.append(f"pending {', '.join(str(d) for d in self.pending)}")
        return ", ".join(cuts) or "replicated"


@dataclass(frozen=True)
class Slices:
    """Parts of a tensor that the steps of a loop read or make, one after another, the same on all ranks.

    `dim`: the dim that is sliced; `atoms[t]`: that dim in the part of step t, which is a tensor of its own. `is_outer`:
    nothing lies outside of what is sliced, so that a part of a contiguous tensor is contiguous.
    """

    dim: int
    atoms: tuple[tuple[Atom, ...], ...]
    is_outer: bool

    def part(self, layout: Layout, t: int) -> Layout:
        """The layout of the part of step `t`, of a tensor in `layout`."""
        dims = (*layout.dims[: self.dim], self.atoms[t], *layout.dims[self.dim + 1 :])
        return Layout(dims, layout.partial, layout.combine)

    def largest(self, layout: Layout) -> Layout:
        """The layout of the largest part."""
        sizes = [math.prod(atom.size for atom in atoms) for atoms in self.atoms]
        return self.part(layout, sizes.index(max(sizes)))


@dataclass(frozen=True)
class Port:
    """One operand or result under a strategy: its layout at rest, and what it does over the time steps.

    `slices`: of one that is sliced, unless ranks take different parts in a step.
    """

    layout: Layout
    motion: str = STAY
    shift: Shift = ()
    slices: Slices | None = None

    def comes_apart(self, other: Layout) -> bool:
        """Whether a re-layout from or to `other` is as well made of those of the slices.

        So it is where both layouts have the sliced dim alike: then the part of a step is a part of every rank's block.
        """
        slices = self.slices
        if slices is None or other == self.layout:
            return False
        return other.dims[slices.dim] == self.layout.dims[slices.dim]


@dataclass(frozen=True)
class Derived:
    """Layouts and motions of every operand and result of an op under a strategy."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class InvalidStrategyError(ValueError):
    """The forms do not compute the op: some block is missed, or a pending sum would be lost."""


@dataclass(frozen=True)
class Cuts:
    """The factors of an op that are cut, and the ranges of the others, which are the same on all ranks."""

    whole: tuple[Range, ...]
    cut: tuple[tuple[int, Atom], ...]

    @staticmethod
    def of(rule: OpRule, strategy: Strategy) -> Cuts:
        atoms = [factor_atom(rule, strategy, f) for f in range(len(rule.factors))]
        return Cuts(tuple((0, atom.size) for atom in atoms), tuple((f, a) for f, a in enumerate(atoms) if a.digits))

    def ranges(self, coords: Mapping[str, int], t: int = 0) -> tuple[Range, ...]:
        """Per factor, the index range that the rank at `coords` computes at step `t`."""
        if not self.cut:
            return self.whole
        found = list(self.whole)
        for f, atom in self.cut:
            found[f] = atom.range(coords, t)
        return tuple(found)


def factor_range(strategy: Strategy, rule: OpRule, mesh: Mesh, rank: int, t: int) -> tuple[Range, ...]:
    """Per factor, the index range that `rank` computes at step `t`."""
    return Cuts.of(rule, strategy).ranges(mesh.coords[rank], t)


def factor_atom(rule: OpRule, strategy: Strategy, f: int) -> Atom:
    """Factor `f` with its digits: through its window those of the factor that drives it."""
    factor, digits = rule.factors[f], strategy.digits[rule.driver(f)]
    return Atom(factor.size, digits, factor.window if digits else None)


@lru_cache(maxsize=200_000)
def derive(rule: OpRule, strategy: Strategy, mesh: Mesh) -> Derived:
    """Ports of every operand and result.

    Raises:
        InvalidStrategyError: the strategy does not compute the op.
    """
    time = strategy.time_factor
    inputs = tuple(_input_port(rule, strategy, mesh, i, time) for i in range(len(rule.inputs)))
    outputs = tuple(_output_port(rule, strategy, mesh, j, time) for j in range(len(rule.outputs)))
    return Derived(inputs, outputs)


def _input_port(rule: OpRule, strategy: Strategy, mesh: Mesh, index: int, time: int | None) -> Port:
    tensor = rule.inputs[index]
    carries = strategy.linear >= 0 and index in rule.linear[strategy.linear]
    partial = strategy.pending if carries else ()
    if not _has_factor(tensor, time):
        return Port(_layout(rule, strategy, tensor, 0, partial))
    shift = _shift(rule, strategy, tensor, mesh)
    if shift is None or not shift:
        layout = _layout(rule, strategy, tensor, None, partial)
        return Port(layout, SLICE, slices=_slices(rule, strategy, tensor, time))
    return Port(_layout(rule, strategy, tensor, 0, partial), MOVE, shift)


def _output_port(rule: OpRule, strategy: Strategy, mesh: Mesh, index: int, time: int | None) -> Port:
    tensor = rule.outputs[index]
    combine = result_combine(rule, strategy, index)
    if not _has_factor(tensor, time):
        pending = _unresolved(rule, strategy, tensor, ())
        return Port(_layout(rule, strategy, tensor, 0, (*strategy.pending, *pending), combine))
    shift = _shift(rule, strategy, tensor, mesh)
    if shift is None or not shift:
        pending = _unresolved(rule, strategy, tensor, ())
        layout = _layout(rule, strategy, tensor, None, (*strategy.pending, *pending), combine)
        return Port(layout, SLICE, slices=_slices(rule, strategy, tensor, time))
    pending = _unresolved(rule, strategy, tensor, shift)
    if combine != SUM:
        raise InvalidStrategyError(f"{strategy.describe(rule)}: only sums travel, the result is {combine}")
    if len(pending) == len(_summed_digits(rule, strategy, tensor)):
        raise InvalidStrategyError(f"{strategy.describe(rule)}: the result moves though no sum is resolved on its way")
    partial = (*strategy.pending, *pending)
    return Port(_layout(rule, strategy, tensor, strategy.steps - 1, partial, combine), MOVE, shift)


def _slices(rule: OpRule, strategy: Strategy, tensor: TensorMap, time: int | None) -> Slices | None:
    """The slices of a tensor that has the factor cut in time; None where they are no tensors of their own."""
    assert time is not None
    dim = next(d for d, factors in enumerate(tensor) if time in factors)
    *space, in_time = strategy.digits[time]
    if in_time.coeffs or rule.windowed & set(tensor[dim]):
        return None

    def atom(f: int, extent: int) -> Atom:
        return Atom(extent, tuple(space)) if f == time else Atom(rule.factors[f].size, strategy.digits[f])

    extents = _step_extents(rule.factors[time].size, tuple(space), in_time)
    is_outer = all(rule.factors[f].size == 1 for f in _before(tensor, dim, time))
    atoms = tuple(tuple(atom(f, extent) for f in tensor[dim]) for extent in extents)
    return Slices(dim, atoms, is_outer) if atoms else None


def _before(tensor: TensorMap, dim: int, factor: int) -> list[int]:
    """Factors that lie outside of one in a tensor's order."""
    return [*(f for factors in tensor[:dim] for f in factors), *tensor[dim][: tensor[dim].index(factor)]]


def _step_extents(size: int, space: tuple[Digit, ...], in_time: Digit) -> tuple[int, ...]:
    """Sizes of a dim's slices, over all ranks; none where it is cut in space too, and unevenly."""
    if not space:
        ranges = (Atom(size, (in_time,)).range({}, t) for t in range(in_time.q))
        return tuple(high - low for low, high in ranges)
    parts = math.prod(digit.q for digit in space) * in_time.q
    return (size // in_time.q,) * in_time.q if size % parts == 0 else ()


def _has_factor(tensor: TensorMap, factor: int | None) -> bool:
    return factor is not None and any(factor in dim for dim in tensor)


def result_combine(rule: OpRule, strategy: Strategy, index: int) -> str:
    """How the blocks of a result combine, over ranks and over time. A result is pending in one way only."""
    present = {f for dim in rule.outputs[index] for f in dim}
    cut = [rule.combine(index, f) for f, digits in enumerate(strategy.digits) if digits and f not in present]
    kinds = {kind for kind in cut if kind in COMBINED} | ({SUM} if strategy.pending else set())
    if len(kinds) > 1:
        raise InvalidStrategyError(f"{strategy.describe(rule)}: the result would be {' and '.join(sorted(kinds))}")
    return kinds.pop() if kinds else SUM


def _layout(
    rule: OpRule,
    strategy: Strategy,
    tensor: TensorMap,
    t: int | None,
    partial: tuple[Digit, ...],
    combine: str = SUM,
) -> Layout:
    """Layout of a tensor with the time step fixed at `t`, or without the time digit (None)."""

    cuts = tuple(tuple(strategy.digits[rule.driver(f)] for f in dim) for dim in tensor)
    return _laid_out(tuple(tuple(rule.factors[f] for f in dim) for dim in tensor), cuts, t, partial, combine)


@lru_cache(maxsize=100_000)
def _laid_out(
    factors: tuple[tuple[Factor, ...], ...],
    cuts: tuple[tuple[tuple[Digit, ...], ...], ...],
    t: int | None,
    partial: tuple[Digit, ...],
    combine: str,
) -> Layout:
    """The layout of a tensor with these factors, cut by these digits, per dim."""

    def at_rest(factor: Factor, cut: tuple[Digit, ...]) -> Atom:
        digits = tuple(digit.at_rest(t or 0) for digit in cut if t is not None or not digit.tau)
        return Atom(factor.size, digits, factor.window if cut else None)

    dims = tuple(tuple(map(at_rest, named, digits)) or (Atom(1),) for named, digits in zip(factors, cuts, strict=True))
    return Layout(dims, partial, combine)


def _tensor_digits(rule: OpRule, strategy: Strategy, tensor: TensorMap) -> list[Digit]:
    return [digit for dim in tensor for f in dim for digit in strategy.digits[rule.driver(f)]]


def _shift(rule: OpRule, strategy: Strategy, tensor: TensorMap, mesh: Mesh) -> Shift | None:
    """Displacement to the rank whose block at step t is the one needed here at step t+1; None: no rank has it."""
    return _solve_shift(tuple(_tensor_digits(rule, strategy, tensor)), mesh)


@lru_cache(maxsize=50_000)
def _solve_shift(digits: tuple[Digit, ...], mesh: Mesh) -> Shift | None:
    axes = sorted({axis for digit in digits for axis, _ in digit.coeffs}, key=mesh.axes.index)
    candidates = itertools.product(*(_by_distance(mesh.size[axis]) for axis in axes))
    solutions = [delta for delta in candidates if _advances(digits, dict(zip(axes, delta, strict=True)))]
    if not solutions:
        return None
    best = min(solutions, key=lambda delta: (sum(1 for x in delta if x), sum(abs(x) for x in delta)))
    return tuple((axis, x) for axis, x in zip(axes, best, strict=True) if x)


def _by_distance(size: int) -> list[int]:
    return sorted(range(-((size - 1) // 2), size // 2 + 1), key=lambda x: (abs(x), -x))


def _advances(digits: tuple[Digit, ...], delta: dict[str, int]) -> bool:
    return all((sum(c * delta[a] for a, c in digit.coeffs) - digit.tau) % digit.q == 0 for digit in digits)


def _summed_digits(rule: OpRule, strategy: Strategy, tensor: TensorMap) -> list[Digit]:
    present = {f for dim in tensor for f in dim}
    return [
        digit
        for f, digits in enumerate(strategy.digits)
        if f not in present and rule.factors[f].kind in COMBINED
        for digit in digits
    ]


def _unresolved(rule: OpRule, strategy: Strategy, tensor: TensorMap, shift: Shift) -> tuple[Digit, ...]:
    """Summed digits that do not run through all values along the path of the result."""
    step = dict(shift)
    resolved = 0
    pending = []
    for digit in _summed_digits(rule, strategy, tensor):
        change = (digit.tau - sum(c * step.get(a, 0) for a, c in digit.coeffs)) % digit.q
        if change and (math.gcd(change, digit.q) != 1 or strategy.steps != digit.q):
            raise InvalidStrategyError(f"{strategy.describe(rule)}: the sum over {digit} meets only some blocks")
        if change:
            resolved += 1
        else:
            pending.append(digit.at_rest(0))
    if resolved > 1:
        raise InvalidStrategyError(f"{strategy.describe(rule)}: two summed dims advance together, blocks are missed")
    return tuple(pending)


def check_covers(rule: OpRule, strategy: Strategy, mesh: Mesh) -> None:
    """Brute force: over all ranks and steps every block of the loop nest is computed, each equally often.

    Raises:
        InvalidStrategyError: a block is missed or computed more often than another.
    """
    digits = sorted((digit for factor in strategy.digits for digit in factor), key=digit_key)
    if not _cover(tuple(digits), strategy.steps, mesh):
        raise InvalidStrategyError(f"{strategy.describe(rule)}: the forms are not independent over mesh {mesh}")


@lru_cache(maxsize=50_000)
def _cover(digits: tuple[Digit, ...], steps: int, mesh: Mesh) -> bool:
    """Whether over all ranks and steps every combination of values occurs, each equally often."""
    counts: dict[tuple[int, ...], int] = {}
    for coords in mesh.coords:
        for t in range(steps):
            key = tuple(digit.value(coords, t) for digit in digits)
            counts[key] = counts.get(key, 0) + 1
    return len(counts) == math.prod(digit.q for digit in digits) and len(set(counts.values())) == 1
