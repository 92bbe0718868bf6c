"""Discovered rules: they hold in blocks, say what rules written by hand say, and refuse what data might hide."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import blocks
import pytest
import torch
from torch import Tensor, nn
from torch.library import custom_op

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.plan import Plan
from stpart_compiler.ir.rule import OpRule
from stpart_compiler.passes.rules import Block, discovered_rule, discovery, local_call, rule_of
from stpart_compiler.passes.rules.registry import OF_CALLS, bind

aten = torch.ops.aten
mine = torch.ops.stpart_discovery


def _load(path: Path) -> Any:
    """The examples of rules, as a module of its own in which they have discovered rules."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_discovered", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module)["example"] = partial(blocks.example_by, discovered_rule)
    return module


examples = _load(Path(__file__).with_name("test_rules.py"))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Ops that have rules of their own must not keep the block programs of discovered ones."""
    torch.manual_seed(0)
    yield
    OF_CALLS.clear()
    discovery._KNOWN.clear()


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def found(target: Any, *args: Any, **kwargs: Any) -> str:
    """The discovered rule's results, after it has been checked in blocks."""
    ex = examples.example(target, *args, **kwargs)
    blocks.check(ex)
    return str(ex.rule)


def is_left_whole(target: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether nothing was found; `example` refuses to make a call without a rule."""
    with pytest.raises(AssertionError, match="no rule for"):
        examples.example(target, *args, **kwargs)
    return True


# --- ops that have rules: the same is found


def factors(rule: OpRule) -> dict[frozenset[tuple[str, int, int]], str]:
    """The kind of every factor that may be cut, by the dims it is in."""
    places: dict[int, set[tuple[str, int, int]]] = {}
    for side, tensors in (("in", rule.inputs), ("out", rule.outputs)):
        for i, tensor in enumerate(tensors):
            for d, dim in enumerate(tensor):
                for f in dim:
                    places.setdefault(f, set()).add((side, i, d))
    return {frozenset(places[f]): rule.factors[f].kind for f in rule.cuttable}


ALIKE = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "dot",
    "mul",
    "where",
    "expand",
    "permute",
    "sum keepdim",
    "max dim",
    "var_mean",
    "cumsum",
    "roll",
    "tril",
    "topk",
    "sort",
    "softmax",
    "log_softmax_backward",
    "layer_norm",
    "layer_norm plain",
    "layer_norm_backward",
    "rms_norm",
    "index_select",
    "scatter_add",
    "mse_loss none",
)


@pytest.mark.parametrize("sizes", [(4, 6, 5, 7), (5, 5, 5, 5)], ids=["distinct", "equal"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_found_is_what_the_rule_by_hand_says(name: str, sizes: tuple[int, ...]) -> None:
    build = examples.CASES[name]
    ex = build(*sizes[: build.__code__.co_argcount])
    by_hand = rule_of(ex.call)
    assert by_hand is not None
    assert factors(ex.rule) == factors(by_hand)
    blocks.check(ex)


LESS = (
    "amax",
    "view split",
    "mean",
    "cat equal",
    "split equal",
    "repeat",
    "embedding",
    "embedding_backward",
    "gather many",
    "nll_loss_backward",
)


@pytest.mark.parametrize("name", LESS)
def test_what_needs_a_block_program_of_its_own_is_found_in_part(name: str) -> None:
    build = examples.CASES[name]
    ex = build(*(4, 6, 5, 7)[: build.__code__.co_argcount])
    by_hand = rule_of(ex.call)
    assert by_hand is not None
    assert factors(ex.rule).items() < factors(by_hand).items()
    blocks.check(ex)


def test_linear_operands() -> None:
    def linear(target: Any, *args: Any) -> set[frozenset[int]]:
        return set(examples.example(target, *args).rule.linear)

    x, y = rand(4, 5), rand(4, 5)
    assert linear(aten.mul.Tensor, x, y) == {frozenset({0}), frozenset({1})}
    assert linear(aten.add.Tensor, x, y) == {frozenset({0, 1})}
    assert linear(aten.cat.default, [x, y, rand(4, 2)], 1) == {frozenset({0, 1, 2})}
    assert linear(aten.add.Tensor, x, 10.0) == set()
    assert linear(aten.relu.default, x) == linear(aten.abs.default, x) == set()
    assert linear(aten.add.Tensor, x.float(), rand()) == set()  # the result is float32, a summand is not
    assert linear(aten.zeros_like.default, x) == set()


# --- ops of aten


IMAGE = (4, 3, 6, 8)


def test_images_are_cut_by_sample_and_channel_never_by_place() -> None:
    x = rand(*IMAGE)
    for text in (
        found(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1], [1, 1]),
        found(aten.avg_pool2d.default, x, [2, 2]),
        found(aten.upsample_nearest2d.default, x, [12, 16]),
        found(aten.upsample_bilinear2d.vec, x, [12, 16], False, None),
        found(aten.reflection_pad2d.default, x, [1, 1, 1, 1]),
    ):
        assert text.startswith("(a b c d) -> (a b ") and "; whole c; whole d" in text


def test_a_convolution_without_groups() -> None:
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    text = found(aten.convolution.default, rand(*IMAGE), rand(5, 3, 3, 3), None, *geometry)
    assert text.startswith("(a b d e, c b f g) -> (a c h i); sum b; whole d")


def test_normalisation_with_sizes_among_its_arguments() -> None:
    args = (rand(4, 6, 5, 5), rand(6), rand(6), 4, 6, 25, 2, 1e-5)
    assert found(aten.native_group_norm.default, *args).startswith("(a b c d, e, f) -> (a g h i, a j, a k); whole b")
    stats = (rand(6), rand(6), rand(6), torch.rand(6, dtype=torch.float64))
    ex = examples.example(aten._native_batch_norm_legit_no_training.default, rand(4, 6, 5, 5), *stats, 0.1, 1e-5)
    assert str(ex.rule).startswith("(a b c d, b, b, b, b) -> (a b c d, ")
    blocks.check_cuts(ex)  # not check_maps: its empty results lack factors that are no sums


def test_other_ops() -> None:
    assert found(aten._cdist_forward.default, rand(3, 4, 5), rand(3, 6, 5), 2.0, None) == (
        "(a b d, a c e) -> (a b c); whole d; whole e"
    )
    assert found(aten.linalg_inv_ex.default, rand(3, 4, 4)).startswith("(a b c) -> (a d e, a); whole b")
    assert found(aten.diagonal.default, rand(4, 5, 5), 0, 1, 2).startswith("(a b c) -> (a d); whole b")
    assert found(aten.im2col.default, rand(*IMAGE), [3, 3], [1, 1], [1, 1], [1, 1]).startswith("(a b c d) -> (a e f)")
    assert found(aten.histc.default, rand(24), 10, -1, 1) == "(a) -> (b); sum a; whole b"
    assert found(aten.nll_loss2d_forward.default, rand(4, 5, 6, 7), torch.randint(0, 5, (4, 6, 7)), None, 2, -100) == (
        "(a d b c, a b c) -> (scalar, scalar); sum a; sum b; sum c; whole d"
    )


def test_what_cannot_be_cut_or_run_is_left_whole() -> None:
    x = rand(4, 5)
    assert is_left_whole(aten.histc.default, rand(24), 10)  # its range is that of the data
    assert is_left_whole(aten.max.default, x)
    assert is_left_whole(aten.mean.default, x)
    assert is_left_whole(aten.as_strided.default, rand(4, 4), [4, 4], [4, 1])  # reads memory, not values
    assert is_left_whole(aten.bernoulli.default, torch.rand(4, 5))
    assert is_left_whole(aten.native_dropout.default, x, 0.5, True)
    assert is_left_whole(aten.nonzero.default, x)
    assert is_left_whole(aten.add_.Tensor, x.clone(), x)
    assert is_left_whole(aten.zeros.default, [4, 5])


# --- ops of a user


def own(name: str) -> Any:
    """A custom op whose shapes are those of running it."""

    def register(fn: Any) -> Any:
        op = custom_op(f"stpart_discovery::{name}", fn, mutates_args=())
        op.register_fake(fn)
        return op

    return register


@own("gated")
def gated(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.silu(gate + bias) * x


@own("gated_backward")
def gated_backward(grad: Tensor, x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = gate + bias
    s = torch.sigmoid(z)
    dz = grad * x * (s + z * s * (1 - s))
    return grad * z * s, dz, dz.flatten(0, -2).sum(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


gated.register_autograd(lambda ctx, grad: gated_backward(grad, *ctx.saved_tensors), setup_context=_keep)


@own("row_sums")
def row_sums(x: Tensor) -> Tensor:
    return x.sum(0)


@own("buckets")
def buckets(x: Tensor, ids: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, x.shape[1]).index_add(0, ids, x)


@own("spread")
def spread(x: Tensor, sizes: list[int], scale: float) -> Tensor:
    return (x * scale).expand(sizes).clone()


@own("flat")
def flat(x: Tensor) -> list[Tensor]:
    return [x.view(-1).clone().view(x.shape), x.view(-1).view(x.shape) * 2]  # views: the operand must be contiguous


def test_ops_of_a_user() -> None:
    x, gate, bias = rand(4, 3, 5), rand(4, 3, 5), rand(5)
    assert found(mine.gated.default, x, gate, bias) == "(a b c, a b c, c) -> (a b c)"
    ex = examples.example(mine.gated_backward.default, x, x, gate, bias)
    blocks.check(ex)
    assert str(ex.rule) == "(a b c, a b c, a b c, c) -> (a b c, a b c, c); sum a; sum b"
    assert set(ex.rule.linear) == {frozenset({0})}
    assert found(mine.row_sums.default, rand(6, 5)) == "(a b) -> (b); sum a"


def test_arguments_that_are_sizes_follow_the_block() -> None:
    assert found(mine.spread.default, rand(1, 6), [4, 6], 0.5) == "(1 a) -> (b a)"
    assert found(mine.spread.default, rand(1, 5), [5, 5], 0.5) == "(1 a) -> (b a)"
    text = found(mine.buckets.default, rand(6, 5), torch.randint(0, 4, (6,)), 4)
    assert text == "(a b, a) -> (c b); sum a; whole c"  # an id beyond the block is an error


def test_operands_are_made_contiguous_for_ops_that_need_it() -> None:
    ex = examples.example(mine.flat.default, rand(4, 6))
    blocks.check(ex)
    assert str(ex.rule) == "(a b) -> (a b, a b)"
    whole = Block(ex.rule, tuple((0, factor.size) for factor in ex.rule.factors))
    target, args, kwargs = local_call(ex.call, whole)
    turned = rand(6, 4).t()
    made = pickle.loads(pickle.dumps(target))(*bind(args, [turned]), **kwargs)
    assert [torch.equal(y, k * turned) for k, y in enumerate(made, 1)] == [True, True]


def test_empty_blocks_are_not_run() -> None:
    ex = examples.example(aten.max_pool2d_with_indices.default, rand(*IMAGE), [2, 2])  # refuses to have no channel
    empty = Block(ex.rule, tuple((0, 0 if factor.name == "b" else factor.size) for factor in ex.rule.factors))
    target, args, kwargs = local_call(ex.call, empty)
    values, indices = target(*bind(args, [rand(4, 0, 6, 8)]), **kwargs)
    assert values.shape == indices.shape == (4, 0, 3, 4)
    assert (values.dtype, indices.dtype) == (torch.float64, torch.int64)


# --- traps


@own("clamped_sum")
def clamped_sum(x: Tensor) -> Tensor:
    return x.sum(0).clamp(-20, 20)


@own("scaled_by_all")
def scaled_by_all(x: Tensor) -> Tensor:
    return x / x.abs().max()


@own("pairs")
def pairs(x: Tensor) -> Tensor:
    return x.view(-1, 2).flip(1).reshape(x.shape)


@own("positions")
def positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]


@own("overflows")
def overflows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, (x > 1e6).sum().to(x.dtype)


@own("norm_and_sum")
def norm_and_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), y.sum(0) * 2


@own("beyond_a_prefix")
def beyond_a_prefix(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1000], x[:, 1000:] - x[:, 1000:].mean(1, keepdim=True)], 1)


@own("noisy")
def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@own("writes")
def writes(x: Tensor) -> Tensor:
    y = x * 2
    if x.device.type == "cpu":
        x.mul_(3)  # though its schema says that it does not
    return y


@own("refuses")
def refuses(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.shape != (4, 5, 1):
        raise RuntimeError("only elsewhere")
    return x.clone()


@own("dies")
def dies(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.shape[0] < 4:
        os.abort()
    return x.clone()


def test_what_data_might_hide_is_not_cut() -> None:
    assert found(mine.clamped_sum.default, rand(6, 5)) == "(b a) -> (a); whole b"
    assert found(aten.mean.dim, rand(4, 5), [0]) == "(b a) -> (a); whole b"
    assert found(mine.positions.default, rand(4, 5)) == "(b a) -> (c a); whole b; whole c"
    assert is_left_whole(mine.scaled_by_all.default, rand(4, 5))
    assert is_left_whole(mine.pairs.default, rand(8))
    assert is_left_whole(mine.overflows.default, rand(4, 5))  # zero in every draw, yet it counts
    assert is_left_whole(mine.noisy.default, rand(4, 5))
    assert is_left_whole(mine.writes.default, rand(4, 5))


def test_results_that_add_up_beside_one_that_does_not() -> None:
    """Cutting rows of x alone would leave the second result whole, which a factor cannot say."""
    assert found(mine.norm_and_sum.default, rand(4, 5), rand(6, 5)) == "(b a, c a) -> (a, a); whole b; whole c"


@pytest.mark.parametrize("shape", [(4, 2048), (4096, 2048), (64, 4096)], ids=str)
def test_a_factor_found_at_a_smaller_size_is_tried_at_its_own(shape: tuple[int, int]) -> None:
    ex = examples.example(mine.beyond_a_prefix.default, rand(*shape))
    assert str(ex.rule) == "(a b) -> (a c); whole b; whole c"


def test_large_calls_are_shrunk() -> None:
    text = str(examples.example(aten.mm.default, torch.empty(8192, 1024), torch.empty(1024, 512)).rule)
    assert text == "(a b, b c) -> (a c); sum b"
    groups = (torch.empty(32, 64, 56, 56), None, None, 32, 64, 3136, 8, 1e-5)
    assert str(examples.example(aten.native_group_norm.default, *groups).rule).startswith(
        "(a b c d) -> (a e f g, a h, a i)"
    )
    ex = examples.example(mine.spread.default, torch.empty(1, 4096), [2048, 4096], 0.5)
    assert [(factor.size, factor.kind) for factor in ex.rule.factors] == [(4096, "parallel"), (2048, "parallel")]


def test_an_op_that_raises_or_dies_is_left_whole(capfd: pytest.CaptureFixture[str]) -> None:
    ex = examples.example(mine.gated.default, rand(4, 5), rand(4, 5), rand(5))  # the process still works afterwards
    with pytest.raises(AssertionError, match="no rule for"):
        examples.example(mine.refuses.default, rand(4, 5, 1))
    assert is_left_whole(mine.dies.default, rand(6, 5))
    assert examples.example(mine.gated.default, rand(4, 5), rand(4, 5), rand(5)).rule == ex.rule
    assert capfd.readouterr() == ("", "")


def test_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    examples.example(aten.avg_pool2d.default, torch.ones(*IMAGE), [2, 2])
    assert torch.equal(torch.get_rng_state(), before)


# --- in a model


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated(self.up(x), gate, self.bias)


def loss_of(y: Tensor) -> Tensor:
    return (y * y).sum()


@pytest.mark.parametrize("mesh", [2, 3])
def test_a_model_with_ops_of_a_user_is_cut(mesh: int) -> None:
    model = Gated().double()
    x, gate = rand(5, 6), rand(5, 8)
    graph = annotate(capture(model, (x, gate), loss_fn=loss_of))
    ops = [op for op in graph.ops if str(op.call.target).startswith("stpart_discovery")]
    assert len(ops) == 2 and all(op.discovered and op.has_rule for op in ops)
    assert not any(op.discovered for op in graph.ops if op not in ops)
    compiled = st.compile_model(model, (x, gate), mesh=mesh, loss_fn=loss_of, template="data")
    assert all(any(compiled.plan.strategies[op.name].digits) for op in ops)
    names = sorted(str(op.call.target) for op in ops)
    assert compiled.plan.summary().splitlines()[-1] == f"  rules found by trial: {', '.join(names)}"
    assert Plan.from_json(compiled.plan.to_json()).discovered_ops == names
    result = compiled.run_in_process(x, gate)
    loss = loss_of(model(x, gate))
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.grads[name], parameter.grad)
