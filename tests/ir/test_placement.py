"""The same steps in every process, whatever was asked there before."""

from __future__ import annotations

from stpart_compiler.ir.layout import form, replicated, shard
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.placement import tables
from stpart_compiler.ir.redistribute import Redistribution, redistribute

GRID = Mesh(("r", "c"), (2, 2))


def _after(first: str) -> Redistribution:
    """From blocks cut both ways to the whole, in a process where the form of axis `first` was met first."""
    tables.cache_clear()
    redistribute.cache_clear()
    redistribute(shard((4,), {0: (form(2, **{first: 1}),)}), replicated((4,)), GRID)
    return redistribute(shard((4, 8), {0: (form(2, r=1),), 1: (form(2, c=1),)}), replicated((4, 8)), GRID)


def test_ties_do_not_depend_on_the_past() -> None:
    assert _after("r") == _after("c")


def test_numbers_of_forms() -> None:
    """Equal on all ranks: one number; else different ones, whatever the modulus."""
    table = tables(Mesh(("r", "c"), (2, 3)))
    forms = [form(2, r=1), form(2, r=-1), form(3, c=1), form(3, c=2), form(3, r=1), form(6, r=3, c=1), form(4, r=1)]
    numbers = [table.number(digit) for digit in forms]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == len(forms) - 1
