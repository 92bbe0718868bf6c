"""Where blocks lie, as plain numbers: the tables behind `redistribute`.

Forms are interned by their values over all ranks, so that equivalent forms are one, keys are small tuples of ints, and
what is known of a pattern of cuts is found again for tensors of other sizes. `PairAtom`: one atom of a common
refinement of two layouts, with the cuts that each makes in it. A cut of an atom that is held through a window ends in
the number of the window, which is negative; it goes along with the digits like one more of a single value.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stpart_compiler.ir.layout import Atom, Digit, Layout, Range
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import SUM
from stpart_compiler.ir.window import Window

Cuts = tuple[tuple[int, ...], ...]  # per atom, the numbers of its digits, major to minor
Box = tuple[Range, ...]  # an index range per atom
CutAtom = tuple[int, tuple[int, ...]]  # size, numbers of its digits
Overlap = tuple[Range, Range]  # range of a source block, its part inside a target block


class PairAtom(NamedTuple):
    """`size` elements, cut by `source` and by `target`."""

    size: int
    source: tuple[int, ...]
    target: tuple[int, ...]


class Placed(NamedTuple):
    """A layout over atoms known from elsewhere."""

    cuts: Cuts
    partial: tuple[int, ...] = ()


class Profile(NamedTuple):
    """A layout in numbers, by dims."""

    dims: tuple[tuple[CutAtom, ...], ...]
    partial: tuple[int, ...]


class Pair(NamedTuple):
    """Two layouts of one tensor over common atoms, and the dim each atom belongs to."""

    atoms: tuple[PairAtom, ...]
    dim_of: tuple[int, ...]
    source: tuple[int, ...]  # pending digits
    target: tuple[int, ...]
    combine: str = SUM  # of what is pending in the source


class Piece(NamedTuple):
    """Part of a target block that one source block holds."""

    block: Box
    part: Box


class Tables:
    """Facts about digits and blocks on one mesh, each worked out once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = range(mesh.world_size)
        self.digits: dict[int, Digit] = {}  # one form for each number
        self.q: dict[int, int] = {}
        self._values: dict[int, tuple[int, ...]] = {}
        self._number: dict[Digit, int] = {}
        self._windows: dict[int, Window] = {}
        self._profiles: dict[Layout, Profile] = {}
        self._refined: dict[tuple[tuple[CutAtom, ...], tuple[CutAtom, ...]], tuple[PairAtom, ...] | None] = {}
        self._ranges: dict[CutAtom, tuple[Range, ...]] = {}
        self._overlaps: dict[PairAtom, dict[Range, tuple[Overlap, ...]]] = {}
        self._boxes: dict[tuple[tuple[int, ...], Cuts], tuple[Box, ...]] = {}
        self._classes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._independent: dict[tuple[int, ...], bool] = {}
        self._coords = [tuple(coords.values()) for coords in mesh.coords]
        self.paths: dict[Any, Any] = {}  # kept for `redistribute`: pattern -> candidate paths
        self.prices: dict[Any, float] = {}  # kept for `redistribute`: pattern, scale, bytes an element, cost -> seconds
        self.legs: dict[Any, Any] = {}  # kept for `redistribute`: pattern of two stops -> the step between them
        self._evenly: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._apart: dict[int, list[int]] = {}

    def number(self, digit: Digit) -> int:
        """Number of a form; forms of equal values on every rank share it.

        It is made of these values, never of what was asked before: processes with different pasts must sort alike.
        """
        found = self._number.get(digit)
        if found is None:
            values = tuple(digit.value(coords) for coords in self.mesh.coords)
            found = digit.q
            for value in values:
                found = found * digit.q + value
            self._number[digit] = found
            self.digits.setdefault(found, digit)
            self.q[found] = digit.q
            self._values[found] = values
        return found

    def _numbers(self, digits: tuple[Digit, ...]) -> tuple[int, ...]:
        return tuple(self.number(digit) for digit in digits if digit.q > 1)

    def _cut(self, atom: Atom) -> tuple[int, ...]:
        digits = self._numbers(atom.digits)
        return digits if atom.window is None else (*digits, self._window(atom.window))

    def _window(self, window: Window) -> int:
        """Number of a window, made of its own numbers alone."""
        found = 1
        for part in (window.size, window.num, window.den, window.low, window.high):
            found = (found << 64) + part  # parts may be negative, yet are far smaller than the base: no two are alike
        self._windows[-found] = window
        self.q[-found] = 1
        self._values[-found] = (0,) * len(self.ranks)
        return -found

    def profile(self, layout: Layout) -> Profile:
        found = self._profiles.get(layout)
        if found is None:
            dims = tuple(tuple((atom.size, self._cut(atom)) for atom in atoms) for atoms in layout.dims)
            found = self._profiles[layout] = Profile(dims, tuple(sorted(self._numbers(layout.partial))))
        return found

    def pair(self, source: Layout, target: Layout) -> Pair | None:
        """Both layouts over common atoms. None: some dim has none."""
        a, b = self.profile(source), self.profile(target)
        atoms: list[PairAtom] = []
        dim_of: list[int] = []
        for dim, (left, right) in enumerate(zip(a.dims, b.dims, strict=True)):
            refined = self.refine(left, right)
            if refined is None:
                return None
            atoms += refined
            dim_of += [dim] * len(refined)
        same_sums = a.partial == b.partial or self.classes(a.partial) == self.classes(b.partial)
        combine = source.combine if source.partial else target.combine
        return Pair(tuple(atoms), tuple(dim_of), a.partial, a.partial if same_sums else b.partial, combine)

    def refine(self, source: tuple[CutAtom, ...], target: tuple[CutAtom, ...]) -> tuple[PairAtom, ...] | None:
        """Atoms of one dim that both cut. None: the sizes form no divisor chain, or a digit fits in no atom."""
        if len(source) == len(target) == 1:
            return (PairAtom(source[0][0], source[0][1], target[0][1]),)
        key = (source, target)
        if key not in self._refined:
            self._refined[key] = self._refine(source, target)
        return self._refined[key]

    def _refine(self, source: tuple[CutAtom, ...], target: tuple[CutAtom, ...]) -> tuple[PairAtom, ...] | None:
        strides = sorted((_strides(source) | _strides(target)).elements(), reverse=True)
        bounds = [math.prod(size for size, _ in source), *strides]
        if 0 in bounds or any(big % small for big, small in itertools.pairwise(bounds)):
            return None
        sizes = [big // small for big, small in itertools.pairwise(bounds)]
        left, right = self.spread(source, sizes), self.spread(target, sizes)
        if left is None or right is None:
            return None
        return tuple(PairAtom(*parts) for parts in zip(sizes, left, right, strict=True))

    def spread(self, atoms: tuple[CutAtom, ...], sizes: list[int]) -> Cuts | None:
        """Digits of `atoms` moved to the finer atoms of the given sizes, major ones first."""
        out: list[tuple[int, ...]] = []
        rest = list(sizes)
        for size, digits in atoms:
            parts = [rest.pop(0)]
            while math.prod(parts) < size:
                parts.append(rest.pop(0))
            split = self._split(digits, parts)
            if split is None:
                return None
            out += split
        return (*out, *(() for _ in rest))

    def _split(self, digits: tuple[int, ...], parts: list[int]) -> list[tuple[int, ...]] | None:
        """Digits of one atom over its parts. Only the last part may be cut unevenly; a window is never taken apart."""
        if len(parts) > 1 and is_windowed(digits):
            return None
        out = []
        left = list(digits)
        for size in parts[:-1]:
            taken = []
            while left and size > 1:
                if size % self.q[left[0]]:
                    return None
                size //= self.q[left[0]]
                taken.append(left.pop(0))
            out.append(tuple(taken))
        return [*out, tuple(left)]

    def evenly(self, source: tuple[int, ...], target: tuple[int, ...]) -> int:
        """Smallest size that both cuts divide evenly."""
        found = self._evenly.get((source, target))
        if found is None:
            found = math.lcm(math.prod(self.q[i] for i in source), math.prod(self.q[i] for i in target))
            self._evenly[source, target] = found
        return found

    def layout(self, pair: Pair, placed: Placed) -> Layout:
        """A placement over the pair's atoms, as a layout of the tensor."""
        dims: dict[int, list[Atom]] = {}
        for dim, atom, cut in zip(pair.dim_of, pair.atoms, placed.cuts, strict=True):
            dims.setdefault(dim, []).append(self._atom(atom.size, cut))
        partial = tuple(self.digits[i] for i in placed.partial)
        return Layout(tuple(tuple(atoms) for atoms in dims.values()), partial, pair.combine)

    def _atom(self, size: int, cut: tuple[int, ...]) -> Atom:
        if is_windowed(cut):
            return Atom(size, tuple(self.digits[i] for i in cut[:-1]), self._windows[cut[-1]])
        return Atom(size, tuple(self.digits[i] for i in cut))

    def ranges(self, size: int, cut: tuple[int, ...]) -> tuple[Range, ...]:
        """Per rank, its range of an atom."""
        found = self._ranges.get((size, cut))
        if found is None:
            atom = self._atom(size, cut)
            found = self._ranges[size, cut] = tuple(atom.range(coords) for coords in self.mesh.coords)
        return found

    def boxes(self, sizes: tuple[int, ...], cuts: Cuts) -> tuple[Box, ...]:
        """Per rank, its block."""
        found = self._boxes.get((sizes, cuts))
        if found is None:
            if not sizes:
                found = tuple(() for _ in self.ranks)
            else:
                found = tuple(zip(*map(self.ranges, sizes, cuts), strict=True))
            self._boxes[sizes, cuts] = found
        return found

    def overlaps(self, atom: PairAtom) -> dict[Range, tuple[Overlap, ...]]:
        """Target range -> the source ranges it meets, ascending, each with the part they share.

        Blocks held through a window overlap: they stay as they are.
        """
        found = self._overlaps.get(atom)
        if found is None and is_windowed(atom.source):
            assert atom.source == atom.target, f"{atom}: nothing is read of blocks that overlap"
            found = {to: ((to, to),) for to in self.ranges(atom.size, atom.target) if to[0] < to[1]}
            found |= {to: () for to in self.ranges(atom.size, atom.target) if to[0] >= to[1]}
            self._overlaps[atom] = found
        if found is None:
            sources = sorted(set(self.ranges(atom.size, atom.source)))
            targets = set(self.ranges(atom.size, atom.target))
            found = self._overlaps[atom] = {to: tuple(_shared(sources, to)) for to in targets}
        return found

    def pieces(self, sizes: tuple[int, ...], source: Cuts, target: Cuts) -> dict[Box, tuple[Piece, ...]]:
        """Target block -> the pieces it is made of, in order; empty blocks have none."""
        boxes = self.boxes(sizes, target)
        return {box: self.pieces_of(box, sizes, source, target) for box in dict.fromkeys(boxes)}

    def pieces_of(self, box: Box, sizes: tuple[int, ...], source: Cuts, target: Cuts) -> tuple[Piece, ...]:
        """The pieces of one target block."""
        if not sizes:
            return (Piece((), ()),)
        tables = [self.overlaps(PairAtom(*parts)) for parts in zip(sizes, source, target, strict=True)]
        found = itertools.product(*(table[span] for table, span in zip(tables, box, strict=True)))
        return tuple([Piece(*zip(*parts, strict=True)) for parts in found])

    def values(self, digits: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Per rank, the values of the digits."""
        return [tuple(self._values[i][rank] for i in digits) for rank in self.ranks]

    def classes(self, partial: tuple[int, ...]) -> tuple[int, ...]:
        """Per rank, which summand it holds. Numbered as met, so equal for digits that tell the same ranks apart."""
        found = self._classes.get(partial)
        if found is None:
            seen: dict[tuple[int, ...], int] = {}
            found = tuple(seen.setdefault(key, len(seen)) for key in self.values(partial))
            self._classes[partial] = found
        return found

    def is_first(self, rank: int, digits: tuple[int, ...]) -> bool:
        """Whether the rank has value 0 in all digits."""
        return not any(self._values[i][rank] for i in digits)

    def independent(self, digits: tuple[int, ...]) -> bool:
        """Whether every combination of values occurs."""
        key = tuple(sorted(digits))
        found = self._independent.get(key)
        if found is None:
            met = set(self.values(key))
            found = self._independent[key] = len(met) == math.prod(self.q[i] for i in key)
        return found

    def apart(self, one: int, two: int) -> int:
        """Axes in which two ranks differ, as bits, the first axis highest: a larger number is a longer way."""
        return self.apart_from(one)[two]

    def apart_from(self, rank: int) -> list[int]:
        """Per rank `apart` from this one."""
        found = self._apart.get(rank)
        if found is None:
            found = self._apart[rank] = self.all_apart[rank].tolist()
        return found

    @cached_property
    def all_apart(self) -> npt.NDArray[np.int64]:
        """[rank, rank] -> `apart`."""
        found = np.zeros((len(self.ranks), len(self.ranks)), dtype=np.int64)
        for column in np.array(self._coords, dtype=np.int64).T:
            found = 2 * found + np.not_equal.outer(column, column)
        return found

    def axes(self, apart: int) -> tuple[str, ...]:
        """Names of the axes in `apart`, in mesh order."""
        last = len(self.mesh.axes) - 1
        return tuple(name for i, name in enumerate(self.mesh.axes) if apart >> (last - i) & 1)


def is_windowed(cut: tuple[int, ...]) -> bool:
    """Whether an atom with this cut is held through a window."""
    return bool(cut) and cut[-1] < 0


def _strides(atoms: tuple[CutAtom, ...]) -> Counter[int]:
    """Elements below each atom: the product of the sizes after it. Atoms of size 1 count it once more."""
    out: Counter[int] = Counter()
    stride = 1
    for size, _ in reversed(atoms):
        out[stride] += 1
        stride *= size
    return out


def _shared(sources: list[Range], to: Range) -> list[Overlap]:
    out = []
    for low, high in sources:
        start, stop = max(low, to[0]), min(high, to[1])
        if start < stop:
            out.append(((low, high), (start, stop)))
    return out


@lru_cache(maxsize=64)
def tables(mesh: Mesh) -> Tables:
    """The tables of a mesh."""
    return Tables(mesh)


def extent(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def volume(box: Box) -> int:
    count = 1
    for low, high in box:
        count *= high - low
    return count


def inside(small: Box, large: Box) -> bool:
    """Whether each range of `small` is empty or lies in that of `large`."""
    for (low, high), (start, stop) in zip(small, large, strict=True):
        if low != high and (low < start or high > stop):
            return False
    return True
