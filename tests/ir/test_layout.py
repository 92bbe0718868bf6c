"""Layouts: blocks, replicas, pending sums, and the canonical form."""

import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stpart_compiler.ir.layout import (
    Atom,
    Layout,
    block,
    check_layout,
    chunk_range,
    digit_from_json,
    digit_to_json,
    form,
    gather,
    holders,
    local_shape,
    max_local_numel,
    replicated,
    shard,
    split,
    take,
)
from stpart_compiler.ir.mesh import Mesh, parse_mesh

Layouts = Callable[[Mesh, tuple[int, ...]], st.SearchStrategy[Layout]]

R, C = form(2, r=1), form(2, c=1)
SQUARE = Mesh(("r", "c"), (2, 2))
MESHES = [
    parse_mesh(sizes) for n in (1, 2, 3) for sizes in itertools.product((2, 3, 4), repeat=n) if math.prod(sizes) <= 24
]


@given(data=st.data(), mesh=st.sampled_from(MESHES), shape=st.lists(st.integers(0, 17), min_size=1, max_size=3))
def test_gather_inverts_split(data: st.DataObject, mesh: Mesh, shape: list[int], layouts: Layouts) -> None:
    layout = data.draw(layouts(mesh, tuple(shape)))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator)
    parts = split(whole, layout, mesh, generator)
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == local_shape(layout, mesh, rank)
        assert part.numel() <= max_local_numel(layout)
    if layout.partial:
        torch.testing.assert_close(gather(parts, layout, mesh), whole, rtol=0, atol=1e-12)
    else:
        assert torch.equal(gather(parts, layout, mesh), whole)


@given(size=st.integers(0, 40), parts=st.integers(1, 8))
def test_blocks_are_those_of_torch_chunk(size: int, parts: int) -> None:
    whole = torch.arange(size)
    blocks = [whole[slice(*chunk_range(size, parts, i))] for i in range(parts)]
    expected = list(whole.chunk(parts)) if size else []
    assert [b.tolist() for b in blocks if b.numel()] == [e.tolist() for e in expected]
    assert torch.equal(torch.cat(blocks), whole)


@given(data=st.data(), mesh=st.sampled_from(MESHES), shape=st.lists(st.integers(1, 12), min_size=1, max_size=2))
def test_canonical_form_keeps_every_block(data: st.DataObject, mesh: Mesh, shape: list[int], layouts: Layouts) -> None:
    """Merging atoms must not move an element: blocks equal those cut atom by atom."""
    layout = data.draw(layouts(mesh, tuple(shape)))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    split_more = [tuple(a for atom in atoms for a in _split_full(atom)) for atoms in layout.dims]
    sizes = [atom.size for atoms in split_more for atom in atoms]
    for rank, coords in enumerate(mesh.coords):
        view = whole.reshape(sizes)
        for dim, atom in enumerate(atom for atoms in split_more for atom in atoms):
            view = view[(slice(None),) * dim + (slice(*atom.range(coords)),)]
        assert torch.equal(view.reshape(local_shape(layout, mesh, rank)), take(whole, layout, mesh, rank))


def _split_full(atom: Atom) -> tuple[Atom, ...]:
    """An evenly cut atom as one atom for each digit and one for the rest; merging must undo this."""
    if not atom.digits or atom.size % atom.parts:
        return (atom,)
    return (*(Atom(d.q, (d,)) for d in atom.digits), Atom(atom.size // atom.parts))


def test_atoms_merge_where_blocks_stay_ranges() -> None:
    assert Layout(((Atom(4, (R,)), Atom(6)),)) == Layout(((Atom(24, (R,)),),))
    assert Layout(((Atom(2, (R,)), Atom(12, (C,))),)) == Layout(((Atom(24, (R, C)),),))
    assert Layout(((Atom(4, (R,)), Atom(6, (C,))),)) != Layout(((Atom(24, (R, C)),),))
    assert Layout(((Atom(3, (R,)), Atom(8)),)) != Layout(((Atom(24, (R,)),),))


def test_text() -> None:
    layout = Layout(((Atom(8, (form(2, r=1, c=1),)),), (Atom(6), Atom(4, (R, C)))), (form(3, x=1, y=-1),))
    assert str(layout) == "[8@r+c, (6 4@r.c)] sum(x-y)"
    assert str(replicated((2, 3))) == "[2, 3]"


def test_equal_forms_are_equal_digits() -> None:
    assert form(2, r=1, c=-1) == form(2, r=1, c=1)
    assert form(3, r=1, c=-1) != form(3, r=1, c=1)
    for digit in (R, form(3, 1, 2, r=1, c=2)):
        assert digit_from_json(digit_to_json(digit)) == digit


def test_skewed_blocks() -> None:
    layout = shard((4, 4), {0: (R,), 1: (form(2, r=1, c=1),)})
    assert [block(layout, SQUARE, rank) for rank in range(4)] == [
        ((0, 2), (0, 2)),
        ((0, 2), (2, 4)),
        ((2, 4), (2, 4)),
        ((2, 4), (0, 2)),
    ]


def test_holders_of_replicas_and_summands() -> None:
    assert holders(shard((4,), {0: (C,)}, (R,)), SQUARE) == {
        (0,): {(0,): (0,), (1,): (2,)},
        (1,): {(0,): (1,), (1,): (3,)},
    }
    assert holders(shard((4,), {0: (C,)}), SQUARE) == {(0,): {(): (0, 2)}, (1,): {(): (1, 3)}}


def test_dependent_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="not independent"):
        check_layout(shard((4, 4), {0: (R,), 1: (R,)}), SQUARE)
    with pytest.raises(ValueError, match="no axis 'x'"):
        check_layout(shard((4,), {0: (form(2, x=1),)}), SQUARE)


def test_a_layout_pickled_elsewhere_is_found_among_equal_ones() -> None:
    """Processes hash texts each in its own way, and layouts hold names of axes."""
    code = """
import pickle, sys
from stpart_compiler.ir.layout import Atom, Layout, form
layout = Layout(((Atom(6, (form(2, r=1),)),), (Atom(4),)), (form(3, c=1),))
sys.stdout.buffer.write(pickle.dumps(layout))
"""
    layout = Layout(((Atom(6, (form(2, r=1),)),), (Atom(4),)), (form(3, c=1),))
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env)
        assert pickle.loads(done.stdout) in {layout}
