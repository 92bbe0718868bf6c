"""Fused regions: the middle of an MLP exists one block at a time. Every strategy is executed on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from forced import Step, programs
from slow_ranks import CLUSTER, SOLVER
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import Captured
from stpart_compiler.graphs import annotate, fuse
from stpart_compiler.ir.layout import Layout, form, shard
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.fuse import FuseScores
from stpart_compiler.passes.propagate import Annotated, OpNode, Propagate, ValueKey
from stpart_compiler.passes.regions import REGIONS
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.strategies import enumerate_strategies


class Gated(nn.Module):
    """SwiGLU with biases between a norm and a residual."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = (
            nn.Linear(width, middle),
            nn.Linear(width, middle, False),
            nn.Linear(middle, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    """Two linear layers around a GELU, the first input being a result too."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, middle), nn.Linear(middle, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


class Attention(nn.Module):
    """Causal grouped-query attention with its projections: the loop is one over groups of heads."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = (nn.Linear(width, heads * dim, bias=False) for heads in (8, 4, 4))
        self.out = nn.Linear(8 * dim, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Written(nn.Module):
    """Attention as two products with a softmax between; `masked`: before it, and after it as dropout does."""

    def __init__(self, width: int, dim: int, masked: bool = False) -> None:
        super().__init__()
        self.dim, self.masked = dim, masked
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, 4 * dim, bias=False) for _ in range(3))
        self.out = nn.Linear(4 * dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / self.dim**0.5
        if self.masked:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        probabilities = torch.softmax(scores, dim=-1)
        if self.masked:  # as dropout does it
            kept = torch.arange(hidden.numel()).remainder(5).ne(0).view_as(hidden).to(x.dtype)
            probabilities = probabilities * kept * 1.25
        y = probabilities @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Masked(Written):
    def __init__(self, width: int, dim: int) -> None:
        super().__init__(width, dim, masked=True)


class Twice(nn.Module):
    """The result of the region is read as it is and through a view, so the region gives both."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, middle, bias=False), nn.Linear(middle, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x.flatten(0, 1))))
        return y.unflatten(0, x.shape[:2]).sin() + y.square().mean()


class Head(nn.Module):
    """Logits over a vocabulary and their cross entropy; a target is ignored."""

    smoothing = 0.0

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        target = (
            torch.arange(x.shape[0] * x.shape[1]).remainder(logits.shape[-1]).index_fill(0, torch.tensor([1]), -100)
        )
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), target, ignore_index=-100, label_smoothing=self.smoothing
        )


class Smoothed(Head):
    smoothing = 0.1


def _fused(captured: Captured) -> Annotated:
    found = fuse(annotate(captured), "all")
    assert found is not None, "no region found"
    return found


def _scores(captured: Captured) -> Annotated:
    """With attention written out as one op, its projections beside it."""
    found = FuseScores().apply(annotate(captured).captured)
    assert found is not None, "no scores found"
    return Propagate().apply(found)


def _step(
    make: Callable[[int, int], nn.Module],
    sizes: tuple[int, int, int, int],
    graph: Callable[[Captured], Annotated] = _fused,
) -> Step:
    batch, length, width, middle = sizes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), make(width, middle)).double()
    weight = torch.randn(length, width, dtype=torch.float64)
    loss_fn = None if make in (Head, Smoothed) else lambda y: (y * weight).sum()
    return Step(model, (torch.randn(batch, length, width, dtype=torch.float64),), loss_fn, graph)


CASES = {
    "gated": lambda: _step(Gated, (4, 6, 8, 12)),
    "gated-uneven": lambda: _step(Gated, (3, 5, 7, 10)),
    "plain": lambda: _step(Plain, (4, 8, 6, 16)),
    "plain-uneven": lambda: _step(Plain, (2, 7, 5, 9)),
    "twice": lambda: _step(Twice, (2, 4, 6, 8)),
    "head": lambda: _step(Head, (2, 6, 5, 16)),
    "head-uneven": lambda: _step(Head, (3, 3, 4, 13)),
    "smoothed": lambda: _step(Smoothed, (2, 3, 4, 13)),
    "attention": lambda: _step(Attention, (2, 6, 24, 3)),
    "written": lambda: _step(Written, (1, 6, 8, 3)),
    "written-uneven": lambda: _step(Written, (1, 7, 8, 3)),
    "scores": lambda: _step(Written, (2, 6, 8, 3), _scores),
    "masked-uneven": lambda: _step(Masked, (1, 7, 8, 3), _scores),
}


# sizes that do not divide where they matter, the others on meshes of powers of two
MESHES: dict[bool, list[Any]] = {False: [1, 2, 4, (2, 2)], True: [3, 8, (2, 3)]}
WRITTEN: dict[str, list[Any]] = {
    "written": [1, 2, 4],
    "written-uneven": [3],
    "scores": [4],
    "masked-uneven": [3],
    "smoothed": [2, 3],
}
PLACES = [(name, mesh) for name in CASES for mesh in WRITTEN.get(name, MESHES[name.endswith("uneven")])]


@cache
def _case(name: str) -> Step:
    return CASES[name]()


def _regions(graph: Annotated) -> list[OpNode]:
    return [op for op in graph.ops if isinstance(op.call.target, Region)]


@pytest.mark.parametrize(("name", "spec"), PLACES, ids=str)
def test_every_strategy_of_the_regions(name: str, spec: object) -> None:
    step, mesh = _case(name), parse_mesh(spec)
    regions = _regions(step.graph)
    assert [op.name in step.graph.backward for op in regions] == [False, True]
    options = {op.name: enumerate_strategies(op.rule, mesh, op.movable) for op in regions}
    for i in range(max(map(len, options.values()))):
        step.check(mesh, {name: found[i % len(found)] for name, found in options.items()})


def _in_time_alone(strategy: Strategy) -> bool:
    """Whether nothing travels around its loop, of which there is one."""
    return any(digit.tau and not digit.coeffs for digits in strategy.digits for digit in digits)


def _cut_over_all(step: Step, mesh: Mesh, dim: int) -> dict[ValueKey, Layout]:
    """Layouts of the parameters that have the dim, cut over all axes there."""
    cuts = tuple(form(size, **{axis: 1}) for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    shapes = {(info.node, 0): info.info.shape for info in step.captured.params if info.node is not None}
    return {key: shard(shape, {dim: cuts}) for key, shape in shapes.items() if dim < len(shape)}


APART = [("gated", 2), ("gated-uneven", 3), ("plain-uneven", 3), ("head-uneven", 3), ("head", (2, 2))]


@pytest.mark.parametrize(("name", "spec"), [*APART, ("attention", 2), ("attention", 4), ("written", 2)], ids=str)
def test_loops_in_time_with_weights_that_rest_apart(name: str, spec: object) -> None:
    """Weights come slice by slice where they rest along another dim than the loop's, and their gradients go so."""
    step, mesh = _case(name), parse_mesh(spec)
    options = {
        op.name: list(filter(_in_time_alone, enumerate_strategies(op.rule, mesh, op.movable)))
        for op in _regions(step.graph)
    }
    sliced: set[str] = set()
    every = 6 if len(mesh.axes) > 1 else 2
    for i, dim in itertools.product(range(0, max(map(len, options.values())), every), (0, 1)):
        forced, rest = {name: found[i % len(found)] for name, found in options.items()}, _cut_over_all(step, mesh, dim)
        step.check(mesh, forced, rest=rest)
        schedule, _ = programs(step, mesh, forced, rest=rest)
        assert schedule.backward is not None
        phases = (schedule.forward, schedule.backward)
        sliced |= {phase.name for phase in phases if phase.slices} | {"gradients" for phase in phases if phase.leaving}
    assert sliced == {"forward", "backward", "gradients"}


@pytest.mark.parametrize("name", CASES)
def test_middle_is_not_kept_for_backward(name: str) -> None:
    """But for what attention kernels give, nothing that backward reads of forward has the dim that is the loop."""
    graph = _case(name).graph
    loops = [op.rule.factors[f].size for op in _regions(graph) for f in op.rule.loops - op.data]
    read = {key for op in graph.ops if op.name in graph.backward for key in op.operands}
    saved = [graph.values[key] for key in read if graph.values[key].kind == "op" and key[0] not in graph.backward]
    assert loops
    assert saved
    if name in ("scores", "masked-uneven"):  # what it keeps of q, k, v has heads, which may be a loop too
        wide = [value.shape for value in saved if value.dtype == torch.float64 and len(value.shape) > 2]
        assert not any(shape[-1] == shape[-2] for shape in wide)
        return
    kept = [value for value in saved if any(size in atoms for atoms in value.atoms for size in loops)]
    attends = name in ("attention", "written", "written-uneven")
    assert sorted(len(value.shape) for value in kept) == ([3, 4] if attends else [])


def test_regions_are_taken_where_memory_is_short() -> None:
    """The plan without a limit keeps the middle; with little room it does not, and computes the same."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(8, 256), Gated(8, 256)).double()
    x = torch.randn(4, 64, 8, dtype=torch.float64)
    options = {"mesh": 2, "loss_fn": lambda y: y.square().mean(), "cluster": CLUSTER, "solver": SOLVER}
    free = st.compile_model(model, (x,), **options).plan
    compiled = st.compile_model(model, (x,), memory_limit=int(0.5 * free.memory["peak"]), **options)
    assert free.regions is None
    assert compiled.plan.regions in REGIONS
    assert compiled.plan.memory["peak"] <= 0.5 * free.memory["peak"]
    again = st.compile_model(model, (x,), plan=st.Plan.from_json(compiled.plan.to_json()), **options)
    loss = model(x).square().mean()
    loss.backward()
    for result in (compiled.run_in_process(x), again.run_in_process(x)):
        assert abs(result.loss - loss.detach()) <= 1e-12
        for name, param in model.named_parameters():
            assert (result.grads[name] - param.grad).norm() <= 1e-10 * max(1.0, float(param.grad.norm())), name
