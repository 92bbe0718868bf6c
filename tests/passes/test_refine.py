"""Search: the optimum of small graphs is that of all assignments; floors are never above prices; finer meshes help."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from slow_ranks import CLUSTER
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import Cluster, Link, load_cluster
from stpart_compiler.cost_models.collectives import ALGORITHMS
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.passes.bound import FindBound
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.floors import FloorPrices
from stpart_compiler.passes.narrow import only_choices
from stpart_compiler.passes.overlap import Beside
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.refine import axis_parts, lifted_strategy
from stpart_compiler.passes.solve import InfeasibleError, Solve
from stpart_compiler.passes.space import BuildSpace, Space
from stpart_compiler.passes.strategies import space_on
from stpart_compiler.passes.tighten import Tighten, stalls
from stpart_compiler.passes.uses import Prices

HOSTS = replace(load_cluster("v100-32gb-8x4"), name="hosts")
ANY = replace(
    HOSTS,
    name="any algorithm",
    levels=tuple(
        (ranks, replace(link, algorithms=ALGORITHMS[: 2 + level], efficiency=(("all_gather", ((1.0, 0.9),)),)))
        for level, (ranks, link) in enumerate(HOSTS.levels)
    ),
)
SOLVER = SolverOptions(gap=0.0, time_limit_s=20, patience_s=20)


class Two(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24, bias=False)
        self.down = nn.Linear(24, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


@cache
def graph() -> Annotated:
    torch.manual_seed(0)
    return annotate(capture(Two(), (torch.randn(8, 6, 12),)))


@cache
def space(mesh: Mesh, cluster: Cluster) -> Space:
    return BuildSpace(Costs(cluster, mesh), space_on(mesh)).apply(graph())


def few(seed: int, mesh: Mesh, cluster: Cluster = CLUSTER, priced_by: type[Prices] = Prices) -> Problem:
    """A problem in which eight roots have three choices each, and all others one."""
    whole = space(mesh, cluster)
    draw = random.Random(seed)
    roots = BuildProblem(SOLVER).apply(whole).roots
    free = set(draw.sample([root for root, n in roots.items() if n > 2], 8))
    kept = {root: sorted(draw.sample(range(n), min(n, 3 if root in free else 1))) for root, n in roots.items()}
    return BuildProblem(SOLVER, priced_by=priced_by).apply(only_choices(whole, kept))


@pytest.mark.parametrize("seed", [0, 2, 5, 7])
def test_the_optimum_is_that_of_all_assignments(seed: int) -> None:
    """Without a limit, and with limits between the least that any needs and what the best without a limit needs."""
    problem = few(seed, parse_mesh((2, 2) if seed % 2 else 4))
    every = [dict(zip(problem.roots, at, strict=True)) for at in itertools.product(*map(range, problem.roots.values()))]
    priced = sorted((evaluate(problem, choice), memory_bytes(problem, choice)) for choice in every)
    least = min(held for _, held in priced)
    limits = sorted({held for _, held in priced if held <= priced[0][1]})
    assert len(every) > 1000 and least < priced[0][1]
    for limit in (None, limits[len(limits) // 2], least):
        best = min(seconds for seconds, held in priced if limit is None or held <= limit)
        solution = Solve(SOLVER, limit).apply(problem)
        assert solution.seconds == pytest.approx(best, abs=2e-9), (limit, solution)
        assert solution.bound <= best + 2e-9
        assert limit is None or memory_bytes(problem, solution.choice) <= limit
    with pytest.raises(InfeasibleError):
        Solve(SOLVER, least - 1).apply(problem)


@pytest.mark.parametrize("cluster", [CLUSTER, HOSTS, ANY], ids=lambda cluster: cluster.name)
def test_no_re_layout_is_cheaper_than_its_floor(cluster: Cluster) -> None:
    whole = space(parse_mesh((2, 2, 2)), cluster)
    floors, exact = FloorPrices(whole), Prices(whole)
    draw = random.Random(0)
    near = 0
    for edge in (*whole.classes.edges, *whole.classes.finals):
        use = floors.use(edge, False)
        beside = exact.overlap.seconds(edge, use.from_ports, use.to_ports)
        for _ in range(25):
            i, j = draw.randrange(len(use.from_layouts)), draw.randrange(len(use.to_layouts))
            source, target = use.from_layouts[i], use.to_layouts[j]
            hidden = Beside((beside.sources[i],), (beside.targets[j],), beside.share, beside.hidden)
            one = replace(use, from_ports=[use.from_ports[i]], to_ports=[use.to_ports[j]])
            price = exact.table(one, exact.costs(edge), hidden)[0][0]
            assert use.price[i][j] <= price + 1, (source, target)
            near += bool(price) and use.price[i][j] >= 0.5 * price
    assert near > 50


def test_a_bound_from_floors_gets_as_high_as_one_from_prices() -> None:
    """Never above the optimum; what is found costs what it says."""
    at = 1, parse_mesh((2, 2, 2)), HOSTS
    exact = few(*at)
    optimum = Solve(SOLVER).apply(exact).seconds
    floors = few(*at, FloorPrices)
    begun = FindBound().apply(floors).lower
    bounds: list[float] = []
    tight = Tighten(0.0).apply(floors, bounds.append)
    assert begun < 0.9 * optimum and bounds[0] < tight.lower <= optimum + 2e-9
    assert tight.lower >= 0.98 * FindBound(gap=0.0).apply(exact).lower
    assert tight.seconds == pytest.approx(evaluate(exact, tight.choice), abs=1e-12) and tight.seconds >= optimum - 1e-12
    best = min(over.max() for over in tight.over.values() if len(over) > 1)
    assert all(over.min() >= 0 for over in tight.over.values()) and best > 0


def test_a_bound_that_hardly_rises_is_left_as_it_is() -> None:
    slow = [1 + 2e-4 * i for i in range(7)]
    assert not stalls(slow[:5]) and stalls(slow) and stalls([1.0] * 6)
    assert not stalls([*slow[:-1], 1.01]), "the last round raised it"


def test_a_strategy_keeps_its_meaning_on_a_finer_mesh() -> None:
    """Written in the axes of the fine mesh it costs the same and needs the same re-layouts; rings have no such form."""
    coarse, fine = parse_mesh({"a": 2, "b_c": 4}), parse_mesh({"a": 2, "b": 2, "c": 2})
    parts = axis_parts(coarse, fine)
    assert parts is not None and axis_parts(parse_mesh((4, 2, 3)), parse_mesh((2, 4, 3))) is None
    few_, many = space(coarse, CLUSTER), space(fine, CLUSTER)
    lifted = 0
    for one, two in zip(few_.choices, many.choices, strict=True):
        for strategy, seconds in zip(one.strategies, one.seconds, strict=True):
            found = lifted_strategy(strategy, parts)
            if found is not None and found in two.strategies:
                lifted += 1
                assert two.seconds[two.strategies.index(found)] == pytest.approx(seconds)
            ring = any("b_c" in dict(d.coeffs) and d.tau for digits in strategy.digits for d in digits)
            assert not ring or found is None
    assert lifted > 100


def test_three_axes_give_a_faster_plan_that_is_exact() -> None:
    """Bytes decide, on ranks too slow to do all: 2 x 2 x 2 beats 2 x 4, and computes what one device does."""
    torch.manual_seed(0)
    model, x = Two().double(), torch.randn(8, 6, 12, dtype=torch.float64)
    base = st.load_cluster("cpu-gloo")
    one_at_a_time = replace(base.device, type="cuda", peak_flops=(("float32", 1e9),), matmul_efficiency=((1.0, 1.0),))
    cluster = replace(base, device=one_at_a_time, levels=((None, Link(1e-9, 1e7)),))
    near = SolverOptions(gap=0.002)
    flat = st.compile_model(model, (x,), mesh=(2, 4), cluster=cluster, solver=near)
    compiled = st.compile_model(model, (x,), mesh=(2, 2, 2), cluster=cluster, solver=near)
    assert len(compiled.plan.mesh.axes) == 3
    assert compiled.plan.seconds < flat.plan.seconds
    assert compiled.plan.bound_seconds <= compiled.plan.seconds
    result = compiled.run_in_process(x)
    loss = model(x)
    loss.backward()
    assert abs(result.loss - loss) <= 1e-10 * abs(loss)
    for name, param in model.named_parameters():
        assert (result.grads[name] - param.grad).norm() <= 1e-10 * param.grad.norm(), name
