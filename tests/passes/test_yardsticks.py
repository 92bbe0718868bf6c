"""What plans are compared with: the best plan without temporal maps, and templates priced with what they overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import Device, Hidden, Link, load_cluster
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import SPATIAL_ONLY, MakePlan, without_temporal
from stpart_compiler.passes.problem import BuildProblem
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.solve import Solve
from stpart_compiler.passes.space import BuildSpace
from stpart_compiler.passes.templates import template
from stpart_compiler.passes.uses import HIDDEN_SHARE

SOLVER = st.SolverOptions(time_limit_s=5, patience_s=0.5, yardsticks=False)
MESH = parse_mesh(4)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def graph_of(rows: int, width: int) -> Annotated:
    with torch.device("meta"):
        return annotate(capture(Net(width), (torch.zeros(rows, width),)))


def cluster(bandwidth: float) -> st.Cluster:
    """Ranks of 1 TFLOP/s, whose products take 34 us on a quarter of the batch."""
    device = Device("even", "cpu", (("float32", 1e12),), 2**34, 1e15)
    return st.Cluster("even", device, ((None, Link(0.0, bandwidth)),))


@pytest.mark.parametrize(("name", "transfers", "unhidden"), [("data", 4, 1), ("zero3", 11, 2)])
def test_reduced_gradients_and_fetched_parameters_hide_behind_products(
    name: str, transfers: int, unhidden: int
) -> None:
    """All but the first fetch and the last reduction: backward begins with a product that reads no weight."""
    graph = graph_of(1024, 256)
    fast, slow = (_exposed_share(graph, name, bandwidth) for bandwidth in (1e11, 1e9))
    assert fast == pytest.approx((unhidden + HIDDEN_SHARE * (transfers - unhidden)) / transfers, rel=0.01)
    assert 0.75 < slow < 0.95, "a product hides of a transfer what it takes itself"


def _exposed_share(graph: Annotated, name: str, bandwidth: float) -> float:
    """Of the time of all re-layouts of a template's plan, the part that is priced."""
    costs = Costs(cluster(bandwidth), MESH)
    space = BuildSpace(costs).apply(graph, template(name).restriction)
    problem = BuildProblem(SOLVER).apply(space)
    choice = Solve(SOLVER).apply(problem).choice
    whole = priced = 0.0
    for use in [use for group in problem.uses for use in group]:
        source, target = (use.side(choice, source=side) for side in (True, False))
        itemsize = use.edge.value.dtype.itemsize
        whole += use.edge.count * costs.relayout(use.from_layouts[source], use.to_layouts[target], itemsize)
        priced += use.edge.count * use.price[source][target] / 1e9
    return priced / whole


def test_the_best_plan_without_temporal_maps() -> None:
    graph, prices = graph_of(128, 1024), cluster(1e10)
    options = replace(SOLVER, spatial_only=True)
    plan = MakePlan(Costs(prices, MESH), options, 10**12).apply(graph)
    alone = plan.yardsticks[SPATIAL_ONLY]
    assert any(s.steps > 1 for s in plan.strategies.values()) and plan.seconds < alone
    assert f"{SPATIAL_ONLY}: {alone * 1e3:.3f} ms, {alone / plan.seconds:.2f}x this plan" in plan.summary()
    one = MakePlan(Costs(prices, parse_mesh(1)), options, 10**12).apply(graph)
    assert one.yardsticks == {SPATIAL_ONLY: one.seconds}, "one rank has no temporal maps"
    assert MakePlan(Costs(prices, parse_mesh(1)), SOLVER, 10**12).apply(graph).yardsticks == {}


def test_the_space_without_temporal_maps() -> None:
    """The same roots with fewer choices: what is left costs what it cost."""
    space = BuildSpace(Costs(cluster(1e10), parse_mesh((2, 2)))).apply(graph_of(128, 64))
    less = without_temporal(space)
    whole, part = (BuildProblem(SOLVER).apply(s) for s in (space, less))
    assert any(s.steps > 1 for found in space.choices for s in found.strategies)
    assert all(s.steps == 1 for found in less.choices for s in found.strategies)
    assert part.roots.keys() == whole.roots.keys() and part.roots != whole.roots
    for before, after in zip(space.choices, less.choices, strict=True):
        if before.root == before.op.klass:
            numbers = [before.strategies.index(s) for s in after.strategies]
            assert [part.own[before.root][n] for n in range(len(numbers))] == [
                whole.own[before.root][i] for i in numbers
            ]
            assert len(numbers) == sum(s.steps == 1 for s in before.strategies)


@pytest.mark.parametrize("mesh", [8, (2, 4)], ids=str)
@pytest.mark.parametrize(("batch", "least"), [(1, 1.0), (8, 1.05)], ids=["little", "much"])
def test_loops_of_async_tp_are_taken_where_they_pay(mesh: Any, batch: int, least: float) -> None:
    """MLPs of 4096 x 16384 on an H100 host: where there is little to compute, some products stay spatial."""
    costs = Costs(load_cluster("h100-80gb-8"), parse_mesh(mesh))
    graph = mlps(batch)
    options = replace(SOLVER, gap=0.0)
    spatial, loops = (MakePlan(costs, options, 10**12, name).apply(graph) for name in ("megatron_sp", "async_tp"))
    assert any(s.steps > 1 for s in loops.strategies.values())
    assert loops.seconds * least <= spatial.seconds


@lru_cache(maxsize=1)
def mlps(batch: int) -> Annotated:
    """Two MLPs with residuals over the output of an embedding, 4096 tokens a row, in bfloat16."""
    with torch.device("meta"):
        model = Residual().to(torch.bfloat16)
        return annotate(capture(model, (torch.zeros(batch, 4096, dtype=torch.long),)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32768, 4096)
        self.norms = nn.ModuleList(nn.LayerNorm(4096) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(4096, 16384, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(16384, 4096, bias=False) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x.float().square().mean()


class Normed(nn.Module):
    """Products whose weights are large, norms whose weights are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512, bias=False)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("name", ["data", "zero3"])
@pytest.mark.parametrize("hidden", [0.2, 1.0])
def test_small_tensors_take_latency_and_little_else(name: str, hidden: float) -> None:
    """Their collectives run beside products and large transfers: most of what 12 gradients of 2 KiB take is hidden."""
    device = Device("rank", "cuda", (("float32", 2e10),), 2**34, 1e12)
    high = st.Cluster("high latency", device, ((None, Link(1e-3, 2e9)),))
    with torch.device("meta"):
        model, x = Normed(), torch.zeros(4096, 512)

    def seconds(part: float) -> tuple[float, float]:
        on = replace(high, hidden=Hidden(collectives=part))
        compiled = st.compile_model(model, (x,), mesh=(4,), cluster=on, template=name, loss_fn=torch.sum)
        return compiled.plan.seconds, compiled.simulate().seconds

    (estimate, simulated), (_, exposed) = seconds(hidden), seconds(0.0)
    assert estimate == pytest.approx(simulated, rel=0.15)
    assert exposed - simulated > 0.6 * 12 * 6e-3, "of each gradient in six messages"
