"""Convolutions, pools and padding with their places cut: ops on windows, forward and backward, combined to the whole.

A function is traced with its gradients and taken apart as in the pipeline. Every op of it that has places is checked in
blocks; the gradients of the graph are autograd's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from blocks import GRID, LINE, Example, assert_close, check_maps, check_strategy, cut
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stpart_compiler.ir.layout import form
from stpart_compiler.ir.rule import HALO
from stpart_compiler.passes.decompose import Decompose
from stpart_compiler.passes.rules import op_call, rule_of

F = torch.nn.functional
Function = Callable[..., torch.Tensor]


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every call with a rule that reads through windows, or would if places were many."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.examples: list[Example] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and any(name in str(n.target) for name in ("conv", "pool", "pad")):
            call, values = op_call(n), self.fetch_args_kwargs_from_env(n)[0]
            rule = rule_of(call)
            assert rule is not None, f"no rule for {n.format_node()}"
            self.examples.append(Example(call, [x for x in values if isinstance(x, torch.Tensor)], rule))
        return super().run_node(n)


def recorded(function: Function, tensors: tuple[torch.Tensor, ...]) -> list[Example]:
    """The calls of a function of `tensors` and of its gradients, which are checked on the way."""

    def step(tangent: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, tangent)

    given_ = (torch.randn_like(function(*tensors)), *tensors)
    recorder = Recorder(Decompose().apply(make_fx(step, tracing_mode="fake")(*given_)))
    with torch.no_grad():
        got = recorder.run(*given_)
    for found, expected in zip(got, step(*given_), strict=True):
        assert_close(found, expected.detach(), "gradients after Decompose")
    return recorder.examples


def check_places(function: Function, tensors: tuple[torch.Tensor, ...]) -> None:
    for ex in recorded(function, tensors):
        rule = ex.rule
        check_maps(ex)
        driven = sorted({factor.driver for factor in rule.factors if factor.kind == HALO})
        for f, q in itertools.product(driven, (2, 3, 4)):
            check_strategy(ex, rule, cut(rule, {f: (form(q, d=1),)}), LINE[q])
        for f in driven:
            check_strategy(ex, rule, cut(rule, {f: (form(2, r=1), form(3, c=1))}), GRID)
        for f, g in itertools.permutations(driven, 2):
            check_strategy(ex, rule, cut(rule, {f: (form(2, r=1),), g: (form(3, c=1),)}), GRID)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """1 to 3 dims of places, plain and transposed, grouped and depthwise."""
    n = draw(st.integers(1, 3))

    def numbers(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    kernel, stride, dilation, padding = numbers(1, 5), numbers(1, 3), numbers(1, 2), numbers(0, 2)
    groups, i, o = draw(st.sampled_from([(1, 2, 3), (2, 1, 2), (3, 1, 1)]))
    transposed = draw(st.integers(0, 3)) == 0
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    missing = [2 * p - span for span, p in zip(spans, padding, strict=True)]
    if transposed:
        least = [1 + max(0, -(-(m + 1) // s)) for m, s in zip(missing, stride, strict=True)]
    else:
        least = [max(1, -m) for m in missing]
    sizes = [draw(st.integers(low, max(low, (17, 9, 6)[n - 1]))) for low in least]
    torch.manual_seed(0)
    x = torch.randn(1, groups * i, *sizes, dtype=torch.float64)
    if not transposed:
        weight = torch.randn(groups * o, i, *kernel, dtype=torch.float64)
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        op = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        return lambda x, w: op(x, w, None, **options), (x, weight)
    weight = torch.randn(groups * i, o, *kernel, dtype=torch.float64)
    longer = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    return lambda x, w: op(x, w, None, stride, padding, longer, groups, dilation), (x, weight)


@settings(max_examples=30)
@given(convolutions())
def test_convolutions_and_their_gradients_hold_on_windows(case: tuple[Function, tuple[torch.Tensor, ...]]) -> None:
    check_places(*case)


@st.composite
def pools(draw: st.DrawFn) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """Largest values, some of them equal or infinite, and averages by every way to count; with and without a batch."""
    n = draw(st.integers(2, 3))

    def numbers(low: int, high: Sequence[int]) -> list[int]:
        return [draw(st.integers(low, most)) for most in high]

    kernel, stride = numbers(1, [4] * n), numbers(1, [3] * n)
    padding = numbers(0, [k // 2 for k in kernel])
    largest, ceil = draw(st.booleans()), draw(st.booleans())
    dilation = numbers(1, [2 if largest else 1] * n)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [draw(st.integers(span, 12)) for span in spans]
    torch.manual_seed(0)
    x = torch.randn(2, 2, *sizes, dtype=torch.float64)
    if largest:
        x = x.round() if draw(st.booleans()) else x.masked_fill(x < 0.5, -torch.inf)
        op = (F.max_pool2d, F.max_pool3d)[n - 2]
        return lambda x: op(x, kernel, stride, padding, dilation, ceil), (x[0] if draw(st.booleans()) else x,)
    op = (F.avg_pool2d, F.avg_pool3d)[n - 2]
    count, divisor = draw(st.booleans()), draw(st.sampled_from([None, None, 3]))
    return lambda x: op(x, kernel, stride, padding, ceil, count, divisor), (x,)


@settings(max_examples=30)
@given(pools())
def test_pools_and_their_gradients_hold_on_windows(case: tuple[Function, tuple[torch.Tensor, ...]]) -> None:
    check_places(*case)


def test_where_the_largest_value_is_when_all_are_infinite() -> None:
    """It is a place of the image, not of its padding."""
    check_places(lambda x: F.max_pool2d(x, 3, 2, 1), (torch.full((1, 1, 7, 8), -torch.inf, dtype=torch.float64),))


@settings(max_examples=20)
@given(st.lists(st.integers(3, 9), min_size=1, max_size=2), st.data())
def test_zeros_around_a_block_and_their_gradients_hold_on_windows(sizes: list[int], data: st.DataObject) -> None:
    """Some pads are negative: they cut off. Blocks may be padding as a whole."""
    pads = [data.draw(st.integers(-1, 4)) for _ in range(2 * len(sizes))]
    check_places(lambda x: F.pad(x, pads), (torch.randn(2, *sizes, dtype=torch.float64),))
