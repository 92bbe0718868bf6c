"""Numbers that remember how they were made: the cost model run on them gives its own formulas.

A `Traced` number has a value and a sympy expression. Arithmetic does both, comparisons look at values; so of
`max(a, b)` what is larger at these values remains. So the code that makes the number of a cost makes its formula too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import total_ordering
from typing import Any

import sympy as sp

from stpart_compiler.ir.overlap import Expr


@total_ordering
class Traced:
    """A number with the expression that it is the value of."""

    __slots__ = ("expr", "value")

    def __init__(self, value: float, expr: Expr) -> None:
        self.value = value
        self.expr = expr

    def __add__(self, other: Any) -> Traced:
        return _both(lambda a, b: a + b, self, other)

    def __radd__(self, other: Any) -> Traced:
        return _both(lambda a, b: a + b, other, self)

    def __sub__(self, other: Any) -> Traced:
        return _both(lambda a, b: a - b, self, other)

    def __rsub__(self, other: Any) -> Traced:
        return _both(lambda a, b: a - b, other, self)

    def __mul__(self, other: Any) -> Traced:
        return _both(lambda a, b: a * b, self, other)

    def __rmul__(self, other: Any) -> Traced:
        return _both(lambda a, b: a * b, other, self)

    def __truediv__(self, other: Any) -> Traced:
        return _both(lambda a, b: a / b, self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return _both(lambda a, b: a / b, other, self)

    def __floordiv__(self, other: Any) -> Traced:
        return _floor(self, other)

    def __rfloordiv__(self, other: Any) -> Traced:
        return _floor(other, self)

    def __neg__(self) -> Traced:
        return Traced(-self.value, -self.expr)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Traced) else other)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < value_of(other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"{self.value} = {self.expr}"


def _both(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Traced:
    return Traced(operation(value_of(left), value_of(right)), operation(expression(left), expression(right)))


def _floor(left: Any, right: Any) -> Traced:
    """The whole part of a quotient; what divides at these values is written as the quotient."""
    value, ratio = value_of(left) // value_of(right), expression(left) / expression(right)
    if value * value_of(right) == value_of(left):
        return Traced(value, ratio)
    return Traced(value, -sp.ceiling(-ratio) if ratio.could_extract_minus_sign() else sp.floor(ratio))


def value_of(number: Any) -> Any:
    """The plain number."""
    return number.value if isinstance(number, Traced) else number


def expression(number: Any) -> Expr:
    """The sympy expression; that of a plain number is exact where it is a short fraction."""
    if isinstance(number, Traced):
        return number.expr
    short = Fraction(number).limit_denominator(1000)
    return sp.Rational(short.numerator, short.denominator) if short == number else sp.Float(number)


@dataclass
class Symbols:
    """Named symbols with values. One name stands for one value: another value under it gets a number behind."""

    values: dict[str, float] = field(default_factory=dict)

    def named(self, name: str, value: float) -> Traced:
        """The symbol for a value under a name."""
        free, number = name, 1
        while self.values.setdefault(free, value) != value:
            number += 1
            free = f"{name}{number}"
        return Traced(value, sp.Symbol(free, positive=True))
