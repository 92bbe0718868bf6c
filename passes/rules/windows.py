"""Dims that are read through windows: their factors, and the padding that a block of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stpart_compiler.ir.rule import HALO, WHOLE, DimMap, Factor, TensorMap
from stpart_compiler.ir.window import Range, Window, strided, transposed
from stpart_compiler.passes.rules.factors import Factors
from stpart_compiler.passes.rules.registry import Block

Margin = tuple[int, int]  # positions before and after a block


@dataclass(frozen=True)
class Geometry:
    """How far apart, and where, places of an image are read: numbers per dim of the places."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def spans(self) -> list[int]:
        """How far the kernel reaches, dilation included."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    def windows(self, sizes: Sequence[int], *, back: bool = False) -> list[Window]:
        """Through which results of `sizes` read their image; or, `back`, those of the image the results."""
        kind = transposed if back else strided
        return [kind(*numbers) for numbers in zip(sizes, self.stride, self.padding, self.spans, strict=True)]


def places(
    factors: Factors, windows: Sequence[Window], read: Sequence[int], kinds: Sequence[str]
) -> tuple[TensorMap, TensorMap]:
    """Maps of dims, one per window, that may be cut, and of the dims of sizes `read` that are read through them."""
    pairs = [_pair(factors, *each) for each in zip(windows, read, kinds, range(len(windows)), strict=True)]
    return tuple(driver for driver, _ in pairs), tuple(halo for _, halo in pairs)


def _pair(factors: Factors, window: Window, read: int, kind: str, number: int) -> tuple[DimMap, DimMap]:
    if window == Window(read, 1, 1, 0, 0):  # each position reads itself
        both = factors.dim(read, kind, f"p{number}")
        return both, both
    if window.size == 1 or read == 1 or kind == WHOLE:
        return factors.dim(window.size, WHOLE, f"p{number}"), factors.dim(read, WHOLE, f"h{number}")
    (driver,) = factors.dim(window.size, kind, f"p{number}")
    factors.items.append(Factor(f"h{number}", read, HALO, window, driver))
    return (driver,), (driver + 1,)


def spans(block: Block, dims: Sequence[DimMap]) -> list[Range]:
    """The index range of each dim in a block. One of several factors reads itself: where it starts does not matter."""
    return [block.ranges[dim[0]] if len(dim) == 1 else (0, block.extent(dim)) for dim in dims]


def margins(window: Window, read: Range, made: Range) -> Margin:
    """How many positions before and after `read` the positions `made` read; negative where they leave some out."""
    low, high = window.reach(made)
    return read[0] - low, high - read[1]


def each(value: int | Sequence[int], count: int) -> list[int]:
    """One number per dim of an argument that may hold a single one for all."""
    items = [value] if isinstance(value, int) else list(value)
    return items * count if len(items) == 1 else items


def padding(pads: Sequence[Margin]) -> list[int]:
    """`pads` of the last dims as torch's padding ops take them: the last dim first."""
    return [width for pad in reversed(pads) for width in pad]
