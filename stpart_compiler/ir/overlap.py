"""When the transfers of a temporal loop hide behind its compute (METP's full-overlap condition), from one step's cost.

A step takes FLOPs / F seconds, and meanwhile bytes / B seconds of transfers arrive: F FLOP/s of a rank, B bytes/s of
its link each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy as sp

Expr = Any  # sympy has no types of its own

F, B = sp.symbols("F B", positive=True)


def hidden(flops: Expr, nbytes: Expr) -> Expr:
    """The condition under which a step's transfer hides behind its compute, as the relation `intensity >= F/B`."""
    (slowest,) = sp.solve(sp.Eq(flops / F, nbytes / B), B)
    return sp.Ge(sp.factor(sp.simplify(F / slowest)), F / B)


@dataclass(frozen=True)
class StepCost:
    """One step of a temporal loop: FLOPs of a rank and bytes that arrive meanwhile, as expressions in `values`.

    `values`: b batch, s sequence, f the dim cut in time where it is one of features, p ranks of the mesh axis, e bytes
    of an element, F FLOP/s that the cluster's device reaches in these products, B bytes/s of the link; other letters
    are dims of features: h, or as the op's rule names them.
    """

    steps: int
    flops: str
    nbytes: str
    values: dict[str, float]

    @cached_property
    def _symbols(self) -> dict[str, Expr]:
        return {name: sp.Symbol(name, positive=True) for name in self.values} | {"F": F, "B": B}

    @cached_property
    def condition(self) -> Expr:
        """Of the symbols; bytes of an element are put in."""
        flops, nbytes = (sp.sympify(text, locals=self._symbols) for text in (self.flops, self.nbytes))
        return hidden(flops, nbytes.subs(self._symbols["e"], sp.nsimplify(self.values["e"])))

    @property
    def sides(self) -> tuple[float, float]:
        """Both sides of the condition with the values put in: FLOPs per byte."""
        known = {self._symbols[name]: value for name, value in self.values.items()}
        return float(self.condition.lhs.subs(known)), float(self.condition.rhs.subs(known))

    @property
    def holds(self) -> bool:
        left, right = self.sides
        return left >= right


@dataclass(frozen=True)
class LoopOverlap:
    """The condition of one temporal loop of a plan. `op`: graph node of the first of `count` like it."""

    op: str
    module_path: str
    is_backward: bool
    cost: StepCost

    @property
    def condition(self) -> Expr:
        return self.cost.condition

    @property
    def holds(self) -> bool:
        return self.cost.holds

    def __str__(self) -> str:
        phase = "backward" if self.is_backward else "forward"
        left, right = self.cost.sides
        used = {str(symbol) for symbol in self.condition.free_symbols}
        values = ", ".join(f"{name} = {value:.4g}" for name, value in self.cost.values.items() if name in used)
        sign, word = (">=", "holds") if self.holds else ("<", "does not hold")
        return (
            f"{self.op} ({self.module_path}, {phase}, {self.cost.steps} steps):"
            f" {self.condition.lhs} >= {self.condition.rhs}\n"
            f"  {left:.4g} {sign} {right:.4g}, {word}; {values}"
        )


@dataclass(frozen=True)
class Overlap:
    """The conditions of all temporal loops of a module under a plan; prints them with their values."""

    loops: tuple[LoopOverlap, ...]

    @property
    def holds(self) -> bool:
        """Whether all transfers of all loops hide."""
        return all(loop.holds for loop in self.loops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.loops))
