"""Re-layouts slice by slice, beside a loop in time: of an operand one step ahead of its use, of a result one behind.

An operand that rests elsewhere than a loop reads it need not be there whole, if each step reads a slice of it: that of
the next step is on its way while one is in use. A gradient that a loop makes in slices is brought to where it rests as
it is made. The bytes that are sent are those of the whole; of what is re-laid out two slices are held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.program import Pending, Value
from stpart_compiler.ir.spacetime import Slices

Relayout = Callable[[Value, Layout, Layout], Value | Pending]


@dataclass(frozen=True)
class Apart:
    """`relayout`: starts to bring a local tensor from one layout to another."""

    slices: Slices
    source: Layout
    target: Layout
    relayout: Relayout

    def start(self, part: Value, t: int) -> Value | Pending:
        return self.relayout(part, self.slices.part(self.source, t), self.slices.part(self.target, t))


@dataclass
class Arriving:
    """An operand of a loop. `whole`: the local tensor where it rests; `cut`: makes the slice of a step of it."""

    whole: Value
    cut: Callable[[Value, int], Value]
    apart: Apart
    begun: dict[int, Value | Pending] = field(default_factory=dict)

    def begin(self, t: int) -> None:
        if t < len(self.apart.slices.atoms):
            self.begun[t] = self.apart.start(self.cut(self.whole, t), t)

    def take(self, t: int) -> Value:
        """The slice of step `t`, waited for; that of the next step is then on its way."""
        made = finished(self.begun.pop(t))
        self.begin(t + 1)
        return made


@dataclass
class Leaving:
    """A result of a loop, whose slices are given in the order of its steps."""

    apart: Apart
    made: list[Value | Pending] = field(default_factory=list)

    def give(self, part: Value) -> None:
        if self.made:
            self.made[-1] = finished(self.made[-1])
        self.made.append(self.apart.start(part, len(self.made)))

    def finish(self) -> list[Value]:
        """All slices where they rest."""
        return [finished(made) for made in self.made]


def finished(made: Value | Pending) -> Value:
    return made.finish() if isinstance(made, Pending) else made
