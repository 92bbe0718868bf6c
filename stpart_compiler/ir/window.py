"""Windows: which positions of a dim are read for positions of another, as in a convolution.

A rank that makes the positions [a, b) of a result reads those of an operand from the first that a reads to the last
that b - 1 does. Blocks of such an operand overlap: what a rank lacks of its own is the *halo*, which its neighbours
send.
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Position o of a dim of `size` reads the positions ceil((num o + low) / den) to floor((num o + high) / den).

    What lies beyond the ends of the dim that is read is no position of it: an op pads there.
    """

    size: int
    num: int
    den: int
    low: int
    high: int

    def reach(self, span: Range) -> Range:
        """What the positions in `span`, which is not empty, read, beyond the ends too."""
        first, last = span[0], span[1] - 1
        return -(-(self.num * first + self.low) // self.den), (self.num * last + self.high) // self.den + 1

    def image(self, span: Range, size: int) -> Range:
        """What the positions in `span` read of a dim of `size`."""
        if span[0] >= span[1]:
            return 0, 0
        low, high = (min(max(bound, 0), size) for bound in self.reach(span))
        return (low, high) if low < high else (low, low)

    def most(self, count: int, size: int) -> int:
        """The most that `count` positions side by side read of a dim of `size`."""
        if not count:
            return 0
        return min(size, (self.num * (count - 1) + self.high - self.low) // self.den + 1)


def strided(size: int, stride: int, padding: int, span: int) -> Window:
    """Of a convolution or pool whose results are of `size`; `span`: how far its kernel reaches, dilation included."""
    return Window(size, stride, 1, -padding, span - 1 - padding)


def transposed(size: int, stride: int, padding: int, span: int) -> Window:
    """The other way: of results of `size`, each is made of all that it is read for by `strided`."""
    return Window(size, 1, stride, padding - span + 1, padding)
