"""Runs of an op on small random inputs, for finding its rule: a call that is cheap to run, and what it gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stpart_compiler.passes.rules.registry import OpCall, Operand

SMALL = 2**16  # elements of operands and results up to which a call is run at its own sizes
AFFORDABLE = 2**22  # elements up to which it is run at all
WORK = 2**26  # elements of all runs in the search of one op, and again in each later check
RUN_WORK = 2**14  # what starting a run costs, in elements
FEWEST = 2  # integers below this are drawn, and blocks are not smaller: kernels may not check where an index points

NORMAL, WIDE, UNIT, MIXED = "normal", "wide", "unit", "mixed"
DRAWS = (NORMAL, WIDE, MIXED, NORMAL, UNIT, MIXED, UNIT, UNIT, NORMAL)  # an op may refuse some: logarithms, losses
DRAWS_USED, DRAWS_NEEDED = 5, 3

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 2e-2  # of all narrower types

Path = tuple[int | str, ...]  # position or keyword of an argument, then positions in lists
Tensors = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Small:
    """A call, and the same call with some sizes replaced."""

    original: OpCall
    call: OpCall
    sizes: Mapping[int, int]


def variants(call: OpCall) -> Iterator[Small]:
    """Small calls to try: in double precision, then in the call's own types."""
    double = _in_double(call)
    for typed in (double, call) if double != call else (call,):
        small = smallest(typed)
        if numel(small.call) <= AFFORDABLE:
            yield small


def mapped(item: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """An argument with every part of it, by its path, replaced."""
    if isinstance(item, dict):
        return {key: mapped(part, leaf, (*path, key)) for key, part in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(mapped(part, leaf, (*path, i)) for i, part in enumerate(item))
    return leaf(path, item)


def _rebuilt(call: OpCall, leaf: Callable[[Path, Any], Any]) -> OpCall:
    parts = (call.args, call.kwargs, call.operands, call.results)
    return OpCall(call.target, *(mapped(part, leaf) for part in parts))


def _in_double(call: OpCall) -> OpCall:
    def leaf(path: Path, item: Any) -> Any:
        if isinstance(item, Operand):
            return replace(item, dtype=_WIDER.get(item.dtype, item.dtype))
        return _WIDER.get(item, item) if isinstance(item, torch.dtype) else item

    return _rebuilt(call, leaf)


def integers(call: OpCall) -> dict[Path, int]:
    """All integer arguments."""
    found: dict[Path, int] = {}

    def leaf(path: Path, item: Any) -> Any:
        if type(item) is int:
            found[path] = item
        return item

    mapped((call.args, call.kwargs), leaf)
    return {path[1:]: value for path, value in found.items()}


def shapes_of(call: OpCall) -> list[tuple[int, ...]]:
    return [x.shape for x in (*call.operands, *call.results) if x is not None]


def numel(call: OpCall) -> int:
    return sum(map(math.prod, shapes_of(call)))


_NEW_SIZES = (
    (12, 8, 18, 6, 10, 20, 24, 9, 15, 16, 14, 30, 36, 48, 64, 4, 3),  # leaves room for divisors
    (4, 6, 3, 8, 9, 10, 12),
)


def smallest(call: OpCall, kept: int | None = None) -> Small:
    """The call with its large sizes, all but the `kept` one, replaced one after another until it is small."""
    return min((_shrunk(call, order, kept) for order in _NEW_SIZES), key=lambda small: numel(small.call))


def _shrunk(call: OpCall, order: Sequence[int], kept: int | None) -> Small:
    small = Small(call, call, {})
    for size in sorted({size for shape in shapes_of(call) for size in shape if size != kept}, reverse=True):
        for new in _fitting(call, small.sizes, size, order) if numel(small.call) > SMALL else ():
            sizes = {**small.sizes, size: new}
            tried = _with_sizes(call, sizes)
            if tried is not None:
                small = Small(call, tried, sizes)
                break
    return small


def _fitting(call: OpCall, sizes: Mapping[int, int], size: int, order: Sequence[int]) -> Iterator[int]:
    """Replacements of a size: unlike all numbers of the call, and divided as it is by arguments and other sizes."""
    numbers = set(integers(call).values())
    taken = numbers.union(sizes.values(), *shapes_of(call))
    steps = numbers - {s for operand in call.operands for s in operand.shape}
    step = math.lcm(*(v for v in steps if 1 < v < size and size % v == 0))
    multiples = [m for old, m in sizes.items() if old % size == 0]
    for new in order:
        if new not in taken and 2 * new <= size and new % step == 0 and all(m % new == 0 for m in multiples):
            yield new


def _with_sizes(call: OpCall, sizes: Mapping[int, int]) -> OpCall | None:
    """The call with other sizes, also where arguments and results are products of them; None if it is another call."""
    known: dict[int, int] = {}
    for operand in call.operands:
        for low, high in itertools.combinations(range(operand.ndim + 1), 2):
            run = operand.shape[low:high]
            known[math.prod(run)] = math.prod(sizes.get(size, size) for size in run)
    known.update(sizes)

    def leaf(path: Path, item: Any) -> Any:
        if isinstance(item, Operand):
            return replace(item, shape=tuple(known.get(size, size) if size > 1 else 1 for size in item.shape))
        return known.get(item, item) if type(item) is int and item > 1 else item

    small = _rebuilt(call, leaf)
    return small if _meta_shapes(small) == [r.shape if r is not None else None for r in small.results] else None


def _meta_shapes(call: OpCall) -> list[tuple[int, ...] | None] | None:
    tensors = tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in call.operands)
    try:
        return [tuple(r.shape) if r is not None else None for r in _called(call, tensors, {}, "meta")]
    except Exception:  # whatever an op raises: the sizes do not suit it
        return None


def _called(call: OpCall, tensors: Tensors, values: Mapping[Path, int], device: str = "cpu") -> Results:
    """The op's results; `values` replace integer arguments."""

    def leaf(path: Path, item: Any) -> Any:
        if isinstance(item, Operand):
            return tensors[item.index]
        return torch.device(device) if isinstance(item, torch.device) else values.get(path, item)

    made = call.target(*mapped(call.args, leaf), **mapped(call.kwargs, leaf))
    results = made if isinstance(made, (list, tuple)) else (made,)
    return tuple(r if isinstance(r, torch.Tensor) else None for r in results)


@dataclass(frozen=True)
class Draw:
    """Random operands, what the op makes of them, and whether all of them have numbers of both signs."""

    tensors: Tensors
    whole: Results
    signed: bool


@dataclass
class Trial:
    """A call with draws on which it ran. Once `work` is spent every run fails, and so does what asks for it."""

    call: OpCall
    draws: list[Draw]
    contiguous: bool = False  # the op takes only operands that are contiguous
    work: int = WORK

    def run(self, tensors: Tensors, values: Mapping[Path, int]) -> Results | None:
        """Results of the op, None where it raises."""
        if self.work < 0:
            return None
        try:
            results = _called(self.call, tensors, values)
        except Exception:  # whatever an op raises: it cannot be cut like this
            return None
        self.work -= RUN_WORK + sum(x.numel() for x in (*tensors, *results) if x is not None)
        return results

    def accepts(self, tensors: Tensors, values: Mapping[Path, int]) -> bool:
        """Whether the op's shape function takes the operands: kernels do not always check that shapes fit."""
        try:
            _called(self.call, tuple(x.to("meta") for x in tensors), values, "meta")
        except Exception:  # whatever an op raises: it cannot be cut like this
            return False
        return True


def trial_of(call: OpCall, wanted: int = DRAWS_USED) -> Trial | None:
    """None where too few draws can be run, or the op is no function of its operands."""
    trial = Trial(call, [])
    for seed, kind in enumerate(DRAWS):
        tensors = _random_operands(call, kind, torch.Generator().manual_seed(seed))
        whole = trial.run(tensors, {})
        if whole is None:
            continue
        if not _is_steady(trial, tensors, whole):
            return None
        if all(map(_is_telling, whole)):
            trial.draws.append(Draw(tensors, whole, kind in (NORMAL, WIDE)))
        if len(trial.draws) == wanted:
            break
    trial.work = WORK
    return trial if len(trial.draws) >= min(wanted, DRAWS_NEEDED) else None


def _is_steady(trial: Trial, tensors: Tensors, whole: Results) -> bool:
    """Whether the shapes are those of the graph, and a second run gives the same. Notes if memory layouts matter."""
    shapes = [r.shape if r is not None else None for r in trial.call.results]
    if [tuple(r.shape) if r is not None else None for r in whole] != shapes:
        return False
    kept = [x.clone() for x in tensors]
    again, turned = trial.run(tensors, {}), trial.run(tuple(map(_turned, tensors)), {})
    trial.contiguous |= turned is None or not all(map(is_close, turned, whole))
    return again is not None and all(map(_identical, (*again, *kept), (*whole, *tensors)))


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    if x.ndim < 2:
        return torch.stack([x, x], -1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _random_operands(call: OpCall, kind: str, generator: torch.Generator) -> Tensors:
    picks = torch.randint(0, 2, (len(call.operands),), generator=generator).tolist()
    kinds = [(NORMAL, UNIT)[pick] if kind == MIXED else kind for pick in picks]
    return tuple(_random(x, k, generator) for x, k in zip(call.operands, kinds, strict=True))


def _random(x: Operand, kind: str, generator: torch.Generator) -> torch.Tensor:
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return torch.randint(0, FEWEST, x.shape, generator=generator, device="cpu").to(x.dtype)
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    make = torch.rand if kind == UNIT else torch.randn
    drawn = make(x.shape, dtype=wide, generator=generator, device="cpu")
    return (drawn * 30 if kind == WIDE else drawn).to(x.dtype)


def _is_telling(result: torch.Tensor | None) -> bool:
    """Whether at least half of the numbers are finite."""
    return result is None or not result.numel() or bool(result.isfinite().double().mean() >= 0.5)


def _identical(got: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return got.shape == want.shape and torch.allclose(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def is_close(got: torch.Tensor | None, want: torch.Tensor | None, scale: float = 0.0) -> bool:
    """Equal up to rounding of numbers as large as `scale` or the wanted ones, where these are finite."""
    if got is None or want is None:
        return got is want
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    finite = want.isfinite()
    bound = _TOLERANCE.get(want.dtype, _COARSE) * max(scale, largest(want))
    return bool(((got - want).abs()[finite] <= bound).all())


def largest(x: torch.Tensor) -> float:
    """Largest finite magnitude, 0 of types without rounding."""
    finite = x[x.isfinite()] if x.is_floating_point() or x.is_complex() else x.new_empty(0)
    return float(finite.abs().max()) if finite.numel() else 0.0
