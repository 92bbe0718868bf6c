"""Layouts: which block of a tensor each rank holds.

A tensor dim is a product of *atoms* (major to minor; one atom unless a view made it of several dims). An atom is cut by
*digits*, each a linear form over mesh coordinates and, inside a space-time map, the time step (DESIGN section 1):

    value(d, t) = (sum_a coeff_a * d_a + tau * t + offset) mod q

Several digits cut an atom one after another, each like `torch.chunk` (blocks may be smaller at the end, or empty). An
axis in no digit: the tensor is replicated over it. Pending digits in `partial` say that the blocks along them are
summands of the true value, or parts that `combine` to it in another way (ir.combine).

An atom may be held through a *window* (ir.window): the digits then cut another dim, and a rank holds what its block of
that one reads. Such blocks overlap. Values are brought into such a layout for one op, and never rest in one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from stpart_compiler.ir.combine import PAIRWISE, neutral
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import SUM
from stpart_compiler.ir.window import Range as Range
from stpart_compiler.ir.window import Window


@dataclass(frozen=True)
class Digit:
    """One linear form over mesh coordinates and time, modulo `q`. `coeffs` is sorted by axis, without zeros."""

    coeffs: tuple[tuple[str, int], ...]
    q: int
    tau: int = 0
    offset: int = 0

    def value(self, coords: Mapping[str, int], t: int = 0) -> int:
        return (sum(coeff * coords[axis] for axis, coeff in self.coeffs) + self.tau * t + self.offset) % self.q

    def at_rest(self, t: int = 0) -> Digit:
        """The form with the time step fixed at `t`."""
        if not self.tau:
            return self
        return Digit(self.coeffs, self.q, 0, (self.offset + self.tau * t) % self.q)

    def __str__(self) -> str:
        terms = [(coeff, axis) for axis, coeff in sorted(self.coeffs, key=_shown_order)]
        if self.tau:
            terms.append((self.tau, "t"))
        text = ""
        for coeff, name in terms:
            signed = coeff - self.q if coeff > self.q // 2 and coeff > 1 else coeff
            factor = name if abs(signed) == 1 else f"{abs(signed)}{name}"
            text += ("-" if signed < 0 else "+" if text else "") + factor
        if self.offset:
            text += f"+{self.offset}" if text else str(self.offset)
        return text or "0"


def _shown_order(term: tuple[str, int]) -> tuple[bool, str]:
    """Axis r, or a part of it, goes before axis c and all others, as in the default two-axis mesh."""
    return term[0].rstrip("0123456789") != "r", term[0]


def form(q: int, tau: int = 0, offset: int = 0, /, **coeffs: int) -> Digit:
    """Digit with the given axis coefficients, reduced modulo `q`: `form(2, r=1, c=1)` is r+c."""
    kept = tuple(sorted((axis, coeff % q) for axis, coeff in coeffs.items() if coeff % q))
    return Digit(kept, q, tau % q, offset % q)


@dataclass(frozen=True)
class Atom:
    """A factor of a tensor dim: `size` elements cut by `digits`, major to minor.

    With a `window` the digits cut the dim that it belongs to, and the blocks are what blocks of that dim read.
    """

    size: int
    digits: tuple[Digit, ...] = ()
    window: Window | None = None

    @property
    def parts(self) -> int:
        return math.prod(digit.q for digit in self.digits)

    def range(self, coords: Mapping[str, int], t: int = 0) -> Range:
        """Half-open index range of the block at `coords` (hierarchical torch.chunk)."""
        if self.window is not None:
            return self.window.image(Atom(self.window.size, self.digits).range(coords, t), self.size)
        start, size = 0, self.size
        for digit in self.digits:
            low, high = chunk_range(size, digit.q, digit.value(coords, t))
            start, size = start + low, high - low
        return start, start + size

    @property
    def largest(self) -> int:
        """Elements of the largest block."""
        size = self.size if self.window is None else self.window.size
        for digit in self.digits:
            size = -(-size // digit.q)
        return size if self.window is None else self.window.most(size, self.size)

    def __str__(self) -> str:
        halo = "+halo" if self.window is not None else ""
        return f"{self.size}@{'.'.join(str(d) for d in self.digits)}{halo}" if self.digits else str(self.size)


def chunk_range(size: int, parts: int, index: int) -> Range:
    """Range of block `index` of `parts` blocks that `size` elements are cut in (torch.chunk); the last may be empty."""
    chunk = -(-size // parts)
    low = min(index * chunk, size)
    return low, min(low + chunk, size)


@dataclass(frozen=True, eq=False)
class Layout:
    """Placement of one tensor: per dim its atoms, and the digits along which it is pending: a sum, unless `combine`
    says otherwise.

    Two layouts compare equal when their canonical forms place every block alike.
    """

    dims: tuple[tuple[Atom, ...], ...]
    partial: tuple[Digit, ...] = ()
    combine: str = SUM

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(_merged(atoms) for atoms in self.dims))
        object.__setattr__(self, "partial", tuple(sorted(self.partial, key=str)))
        object.__setattr__(self, "combine", self.combine if self.partial else SUM)
        # plain tuples: comparing them is what a search over layouts does most
        key = (
            tuple(tuple(map(_atom_key, atoms)) for atoms in self.dims),
            tuple(map(digit_key, self.partial)),
            self.combine,
        )
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        """Pickled without its hash, which is another one in the process that reads it."""
        return Layout, (self.dims, self.partial, self.combine)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Layout) and self._key == other._key  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(atom.size for atom in atoms) for atoms in self.dims)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """All atoms in order: the dims of the virtual tensor in which every cut is on a dim of its own."""
        return tuple(atom for atoms in self.dims for atom in atoms)

    @property
    def digits(self) -> tuple[Digit, ...]:
        return tuple(digit for atom in self.atoms for digit in atom.digits)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not self.digits

    def without_partial(self) -> Layout:
        return Layout(self.dims) if self.partial else self

    def without_halo(self) -> Layout:
        """Cut by the same digits, each dim by itself: a layout in which a value may rest."""
        if not any(atom.window for atom in self.atoms):
            return self
        dims = tuple(tuple(Atom(atom.size, atom.digits) for atom in atoms) for atoms in self.dims)
        return Layout(dims, self.partial, self.combine)

    def __str__(self) -> str:
        body = ", ".join(_dim_text(atoms) for atoms in self.dims)
        return f"[{body}]{self.pending_text}"

    @property
    def pending_text(self) -> str:
        return f" {self.combine}({', '.join(str(d) for d in self.partial)})" if self.partial else ""

    __repr__ = __str__


def _dim_text(atoms: tuple[Atom, ...]) -> str:
    return str(atoms[0]) if len(atoms) == 1 else f"({' '.join(str(a) for a in atoms)})"


def _atom_key(atom: Atom) -> tuple[object, ...]:
    digits = tuple(map(digit_key, atom.digits))
    return (atom.size, *digits) if atom.window is None else (atom.size, atom.window, *digits)


def digit_key(digit: Digit) -> tuple[tuple[tuple[str, int], ...], int, int, int]:
    """The form as a plain tuple."""
    return digit.coeffs, digit.q, digit.tau, digit.offset


def _merged(atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """Fewest atoms that place every element alike; a dim always keeps at least one."""
    kept = [atom for atom in atoms if atom.size != 1 or atom.digits]
    out: list[Atom] = []
    for atom in kept:
        if out and _can_merge(out[-1], atom):
            last = out.pop()
            atom = Atom(last.size * atom.size, last.digits + atom.digits)
        out.append(atom)
    return tuple(out) or (Atom(1),)


def _can_merge(major: Atom, minor: Atom) -> bool:
    if major.window is not None or minor.window is not None:
        return False
    if not major.digits and not minor.digits:
        return True
    if major.size % major.parts:
        return False
    return bool(major.digits) and (not minor.digits or major.size == major.parts)


def replicated(shape: Sequence[int]) -> Layout:
    """Every rank holds all of a tensor of `shape`."""
    return Layout(tuple((Atom(int(size)),) for size in shape))


def shard(shape: Sequence[int], cuts: Mapping[int, tuple[Digit, ...]], partial: tuple[Digit, ...] = ()) -> Layout:
    """Layout with dim `i` cut by the digits `cuts[i]`, the others whole."""
    return Layout(tuple((Atom(int(size), cuts.get(i, ())),) for i, size in enumerate(shape)), partial)


@lru_cache(maxsize=200_000)
def block(layout: Layout, mesh: Mesh, rank: int) -> tuple[Range, ...]:
    """Index range, per atom of the layout, of the block that `rank` holds."""
    coords = mesh.coords[rank]
    return tuple(atom.range(coords) for atom in layout.atoms)


@lru_cache(maxsize=200_000)
def local_shape(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Shape of the local tensor of `rank`: per dim the product of its atoms' extents."""
    ranges = iter(block(layout, mesh, rank))
    return tuple(math.prod(_extent(next(ranges)) for _ in atoms) for atoms in layout.dims)


def _extent(span: Range) -> int:
    return span[1] - span[0]


def max_local_numel(layout: Layout) -> int:
    """Elements of the largest block."""
    return math.prod(atom.largest for atom in layout.atoms)


def coordinate(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Block index of `rank`: the value of every digit of the dims (equal for replicas)."""
    coords = mesh.coords[rank]
    return tuple(digit.value(coords) for digit in layout.digits)


def pending_index(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Value of every pending digit at `rank` (equal for replicas of the same summand)."""
    coords = mesh.coords[rank]
    return tuple(digit.value(coords) for digit in layout.partial)


@lru_cache(maxsize=50_000)
def holders(layout: Layout, mesh: Mesh) -> dict[tuple[int, ...], dict[tuple[int, ...], tuple[int, ...]]]:
    """Block index -> pending index -> ranks that hold this summand of this block, ascending."""
    table: dict[tuple[int, ...], dict[tuple[int, ...], tuple[int, ...]]] = {}
    for rank in range(mesh.world_size):
        summands = table.setdefault(coordinate(layout, mesh, rank), {})
        key = pending_index(layout, mesh, rank)
        summands[key] = (*summands.get(key, ()), rank)
    return table


def check_layout(layout: Layout, mesh: Mesh) -> None:
    """Every block exists, and every summand of every block is held by equally many ranks.

    Raises:
        ValueError: a digit names an unknown axis, or the digits are not independent over the mesh.
    """
    for digit in (*layout.digits, *layout.partial):
        for axis, _ in digit.coeffs:
            if axis not in mesh.size:
                raise ValueError(f"layout {layout}: no axis {axis!r} in mesh {mesh}")
    table = holders(layout, mesh)
    blocks = math.prod(digit.q for digit in layout.digits)
    summands = math.prod(digit.q for digit in layout.partial)
    counts = {len(ranks) for groups in table.values() for ranks in groups.values()}
    complete = len(table) == blocks and all(len(groups) == summands for groups in table.values())
    if not complete or len(counts) != 1:
        raise ValueError(f"layout {layout}: its forms are not independent over mesh {mesh}; some blocks have no holder")


def virtual(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """View of a whole tensor with one dim per atom."""
    return tensor.reshape([atom.size for atom in layout.atoms])


def take(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The block of a whole tensor that `rank` holds (no pending sums), contiguous."""
    view = virtual(tensor, layout)
    for dim, (start, stop) in enumerate(block(layout, mesh, rank)):
        view = view.narrow(dim, start, stop - start)
    return view.reshape(local_shape(layout, mesh, rank)).contiguous()


def split(
    tensor: torch.Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator | None = None
) -> list[torch.Tensor]:
    """All ranks' local tensors. Pending sums get random summands of mixed sign that add up to the tensor."""
    assert layout.combine == SUM, f"{layout}: only sums are taken apart"
    summands = _summands(tensor, layout, generator)
    return [take(summands[pending_index(layout, mesh, rank)], layout, mesh, rank) for rank in range(mesh.world_size)]


def _summands(
    tensor: torch.Tensor, layout: Layout, generator: torch.Generator | None
) -> dict[tuple[int, ...], torch.Tensor]:
    keys = list(_indices([digit.q for digit in layout.partial]))
    parts = [torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for _ in keys[1:]]
    parts.append(tensor - sum(parts, torch.zeros_like(tensor)) if parts else tensor)
    return dict(zip(keys, parts, strict=True))


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for head in range(sizes[0]):
        for tail in _indices(sizes[1:]):
            yield (head, *tail)


def gather(locals_: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The whole tensor from all ranks' local tensors: one holder of each summand of each block is read."""
    dtype, device = locals_[0].dtype, locals_[0].device
    sizes = [atom.size for atom in layout.atoms]
    out = torch.full(sizes, neutral(layout.combine, dtype), dtype=dtype, device=device)
    for summands in holders(layout, mesh).values():
        for ranks in summands.values():
            _add_block(out, locals_[ranks[0]], block(layout, mesh, ranks[0]), layout.combine)
    return out.reshape(layout.shape)


def _add_block(out: torch.Tensor, local: torch.Tensor, ranges: tuple[Range, ...], combine: str) -> None:
    for dim, (start, stop) in enumerate(ranges):
        out = out.narrow(dim, start, stop - start)
    if out.dtype == torch.bool and combine == SUM:
        out.logical_or_(local.reshape(out.shape))
    else:
        out.copy_(PAIRWISE[combine](out, local.reshape(out.shape)))


def digit_to_json(digit: Digit) -> list[Any]:
    return [[list(pair) for pair in digit.coeffs], digit.q, digit.tau, digit.offset]


def digit_from_json(data: Sequence[Any]) -> Digit:
    coeffs, q, tau, offset = data
    return Digit(tuple((str(a), int(c)) for a, c in coeffs), int(q), int(tau), int(offset))
