"""Random layouts for the property tests of this folder."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from stpart_compiler.ir.layout import Atom, Digit, Layout, check_layout, form, shard
from stpart_compiler.ir.mesh import Mesh

Layouts = Callable[[Mesh, tuple[int, ...]], st.SearchStrategy[Layout]]


@pytest.fixture(scope="session")
def layouts() -> Layouts:
    """Strategy of the valid layouts of a shape on a mesh: skewed and offset forms, sums, several atoms and digits."""
    return lambda mesh, shape: _layouts(mesh, shape)


@st.composite
def _layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    digits = _independent(draw, mesh)
    cuts: list[list[Digit]] = [[] for _ in range(len(shape) + 1)]
    for digit in digits:
        cuts[draw(st.integers(0, len(shape)))].append(digit)
    layout = Layout(tuple(map(_atoms, [draw] * len(shape), shape, cuts)), tuple(cuts[-1]))
    check_layout(layout, mesh)
    return layout


def _independent(draw: st.DrawFn, mesh: Mesh) -> list[Digit]:
    found: list[Digit] = []
    for _ in range(draw(st.integers(0, len(mesh.axes) + 1))):
        q = mesh.size[draw(st.sampled_from(mesh.axes))]
        coeffs = {axis: draw(st.integers(0, q - 1)) for axis in mesh.axes if mesh.size[axis] % q == 0}
        digit = form(q, 0, draw(st.sampled_from([0, 0, 1])), **coeffs)
        try:
            check_layout(shard((64,), {0: (*found, digit)}), mesh)
        except ValueError:
            continue
        found.append(digit)
    return found


def _atoms(draw: st.DrawFn, size: int, digits: list[Digit]) -> tuple[Atom, ...]:
    """One atom, or two where the size has a divisor."""
    divisors = [k for k in range(2, size) if size % k == 0]
    if not divisors or draw(st.booleans()):
        return (Atom(size, tuple(digits)),)
    major, at = draw(st.sampled_from(divisors)), draw(st.integers(0, len(digits)))
    return Atom(major, tuple(digits[:at])), Atom(size // major, tuple(digits[at:]))
