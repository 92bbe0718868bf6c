"""Attention of accelerators, on fake tensors: shapes of blocks, and what is refused. The kernels are not run."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from blocks import GRID, LINE, Example, as_list, check_maps, cut, example
from torch._subclasses.fake_tensor import FakeTensorMode

from stpart_compiler.cost_models.compute import ALL, Computed, causal_share, computed
from stpart_compiler.ir.layout import form, local_shape
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import WHOLE
from stpart_compiler.ir.spacetime import Strategy, derive, factor_range
from stpart_compiler.passes.rules import Block, local_call
from stpart_compiler.passes.rules.registry import WORK, bind, span_of

aten = torch.ops.aten
KINDS = ("flash", "efficient", "cudnn", "fused")
HEADS, KV_HEADS, LENGTH, DIM = 6, 3, 40, 16


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


def forward(kind: str, causal: bool, bias: bool = False, dropout: float = 0.0) -> Example:
    q, k, v = tensor(4, HEADS, LENGTH, DIM), tensor(4, KV_HEADS, LENGTH, DIM), tensor(4, KV_HEADS, LENGTH, DIM)
    mask = tensor(4, 1, LENGTH, LENGTH) if bias else None
    if kind == "flash":
        return example(aten._scaled_dot_product_flash_attention.default, q, k, v, dropout, causal, scale=0.5)
    if kind == "efficient":
        k, v = (tensor(4, HEADS, LENGTH, DIM) for _ in range(2))
        return example(
            aten._scaled_dot_product_efficient_attention.default, q, k, v, mask, True, dropout, is_causal=causal
        )
    if kind == "cudnn":
        return example(aten._scaled_dot_product_cudnn_attention.default, q, k, v, mask, True, dropout, causal)
    op = aten._scaled_dot_product_fused_attention_overrideable.default
    return example(op, q, k, v, mask, dropout_p=dropout, is_causal=causal)


def backward(kind: str, causal: bool, bias: bool = False, dropout: float = 0.0, bias_grad: bool = False) -> Example:
    """The call with what forward made, as autograd writes it."""
    ahead = forward(kind, causal, bias)
    q, k, v, *masks = ahead.tensors
    mask = masks[0] if masks else None
    out, lse, *rest = ahead.run(ahead.tensors)
    assert out is not None
    grad, wanted = torch.empty_like(out), [True, True, True, bias_grad]
    if kind == "efficient":
        op = aten._scaled_dot_product_efficient_attention_backward.default
        return example(op, grad, q, k, v, mask, out, lse, *rest, dropout, wanted, causal)
    lengths, (seed, offset) = rest[:4], rest[4:6]
    if kind == "flash":
        op = aten._scaled_dot_product_flash_attention_backward.default
        return example(op, grad, q, k, v, out, lse, *lengths, dropout, causal, seed, offset, scale=0.5)
    if kind == "cudnn":
        op = aten._scaled_dot_product_cudnn_attention_backward.default
        return example(op, grad, q, k, v, out, lse, seed, offset, mask, *lengths, dropout, causal)
    op = aten._scaled_dot_product_fused_attention_overrideable_backward.default
    return example(op, grad, q, k, v, mask, wanted, out, lse, *lengths, dropout, causal, seed, offset)


def with_results(ex: Example, count: int) -> Example:
    """The first results only: every block has seeds of its own, which say nothing."""
    results = tuple(r if i < count else None for i, r in enumerate(ex.call.results))
    return replace(ex, call=replace(ex.call, results=results))


def check_shapes(ex: Example, strategy: Strategy, mesh: Mesh) -> None:
    """On every rank, blocks of the operands give blocks of the results."""
    ports = derive(ex.rule, strategy, mesh).inputs
    for rank in range(mesh.world_size):
        block = Block(ex.rule, factor_range(strategy, ex.rule, mesh, rank, 0))
        mine = [x.new_empty(local_shape(port.layout, mesh, rank)) for x, port in zip(ex.tensors, ports, strict=True)]
        target, args, kwargs = local_call(ex.call, block)
        for index, made in enumerate(as_list(target(*bind(args, mine), **bind(kwargs, mine)))):
            if isinstance(made, torch.Tensor):
                result = ex.call.results[index]
                assert result is not None
                assert (tuple(made.shape), made.dtype) == (block.out_shape(index), result.dtype)


CALLS = [*itertools.product((forward, backward), KINDS, (False, True), (False,))]
CALLS += [*itertools.product((forward, backward), KINDS[1:], (False, True), (True,))]


@pytest.mark.parametrize(("make", "kind", "causal", "bias"), CALLS)
def test_blocks_have_the_shapes_of_blocks(make: Any, kind: str, causal: bool, bias: bool) -> None:
    with FakeTensorMode():
        ex = make(kind, causal, bias)
        check_maps(with_results(ex, 3 if make is backward else 2))
        names = {ex.rule.factors[f].name for f in ex.rule.cuttable}
        assert {"b", "h"} <= names
        sequence = {"flash": set() if causal else {"q"} if make is forward else {"q", "s"}}.get(kind, set())
        assert names & {"q", "s"} == sequence
        for f, q in itertools.product(ex.rule.cuttable, (2, 3, 4)):
            check_shapes(ex, cut(ex.rule, {f: (form(q, d=1),)}), LINE[q])
        for f, g in itertools.combinations(ex.rule.cuttable, 2):
            check_shapes(ex, cut(ex.rule, {f: (form(2, r=1),), g: (form(3, c=1),)}), GRID)


def test_flash_backward_of_a_block_is_told_its_lengths() -> None:
    with FakeTensorMode():
        ex = backward("flash", causal=False)
    ranges = [(0, 10) if factor.name == "q" else (0, factor.size) for factor in ex.rule.factors]
    _, args, _ = local_call(ex.call, Block(ex.rule, tuple(ranges)))
    assert args[8:10] == (10, LENGTH)
    assert args[6:8] == (None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_depends_on_the_place_is_refused(kind: str) -> None:
    """Dropout masks; and gradients of a bias."""
    with FakeTensorMode():
        for make in (forward, backward):
            with pytest.raises(AssertionError, match="no rule for"):
                make(kind, False, dropout=0.1)
        if kind in ("efficient", "fused"):
            with pytest.raises(AssertionError, match="no rule for"):
                backward(kind, False, bias=True, bias_grad=True)


def test_seeds_and_padded_rows_are_whole() -> None:
    with FakeTensorMode():
        ex = forward("efficient", causal=True)
    rule = ex.rule
    assert ex.call.results[1] is not None and ex.call.results[1].shape == (4, HEADS, 64)
    assert [rule.factors[f].kind for f in rule.outputs[1][2]] == [WHOLE]
    assert rule.outputs[2:] == ((), ())


@pytest.mark.parametrize(("make", "kind", "causal"), [*itertools.product((forward, backward), KINDS, (False, True))])
def test_causal_kernels_are_priced_at_what_they_compute(
    make: Any, kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alike in the prices of the space, and in those of the instructions of programs."""
    monkeypatch.setattr(sys.modules[__name__], "LENGTH", 1024)
    with FakeTensorMode():
        ex = make(kind, causal)
    expected = Computed(causal_share(1024)) if causal else ALL
    assert computed(ex.call, [x.shape for x in ex.tensors]) == expected
    work = WORK[ex.call.target]
    dims = work.dims(ex.call, ex.rule)
    spans = [span_of([ex.rule.factors[f].size for f in dim], [(0, 1024)]) for dim in dims]
    assert (work.done(*spans) if dims else ALL) == expected
