"""What runs again as a choice of the solver: priced as in its own order, the best set of small graphs, true bounds."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import nn
from torch.utils.checkpoint import checkpoint

from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.graphs import annotate, fuse
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.bound import FindBound
from stpart_compiler.passes.choose_again import (
    Suiting,
    any_set,
    may_again,
    runs_again,
    together,
    with_flags,
    without_flags,
)
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.peak import TrySets
from stpart_compiler.passes.problem import BuildProblem, Problem, evaluate, memory_bytes
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.solve import InfeasibleError, Solve
from stpart_compiler.passes.solve_recompute import SolveRecompute
from stpart_compiler.passes.space import BuildSpace, Space
from stpart_compiler.passes.uses import Assignment


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Residual MLPs; `marked`: the first of them in a checkpoint."""

    def __init__(self, depth: int, width: int, marked: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.marked = marked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(partial(block), x, use_reentrant=False) if self.marked and not i else block(x)
        return x.square().mean()


@cache
def graph(depth: int, *, marked: bool = False, fused: bool = False) -> Annotated:
    torch.manual_seed(0)
    captured = capture(Blocks(depth, 16, marked).double(), (torch.zeros(256, 8, 16, dtype=torch.float64),))
    found = annotate(captured)
    found = fuse(found, "head+mlp") if fused else found
    assert found is not None
    return found


def space_of(graph: Annotated, mesh: object) -> Space:
    return BuildSpace(Costs(load_cluster(CLUSTER), parse_mesh(mesh))).apply(graph)


def drawn(problem: Problem, draw: random.Random) -> Assignment:
    return {root: draw.randrange(count) for root, count in problem.roots.items()}


@pytest.mark.parametrize("mesh", [1, 3, (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "marked", "fused"])
def test_as_in_its_own_order(kind: str, mesh: object) -> None:
    """With any set, seconds are those of its own problem. Bytes too of no set and of all on one rank; of a part of all,
    or where transfers start before what may run again, nearly."""
    found = graph(3, marked=kind == "marked", fused=kind == "fused")
    space = space_of(found, mesh)
    draw = random.Random(0)
    choice = drawn(BuildProblem(SOLVER).apply(space), draw)
    may = may_again(space, SOLVER)
    most = Suiting(space, choice, SOLVER).most
    problem, _ = together(space, SOLVER, most, may.always, choice)
    assert problem.optional
    parts = [draw.sample(sorted(problem.optional), len(problem.optional) // 2) for _ in range(4)]
    for some in ([], sorted(problem.optional), *parts):
        again = may.needed(frozenset(some))
        own = BuildProblem(SOLVER, again=may.names(again)).apply(space)
        flagged = with_flags(space, choice, problem.optional, again)
        assert evaluate(problem, flagged) == pytest.approx(evaluate(own, choice), rel=1e-9)
        share = memory_bytes(problem, flagged) / memory_bytes(own, choice)
        assert 0.95 <= share <= 1.3
        assert share == 1 or mesh != 1 or some in parts
        assert runs_again(space, flagged, problem.optional) == again - may.always
        assert without_flags(space, flagged) == choice


def test_best_set() -> None:
    """Of all sets for given placements, each in its own order, the one chosen is the fastest that fits."""
    space = space_of(graph(2), 2)
    free = Solve(SOLVER).apply(BuildProblem(SOLVER).apply(space)).choice
    may = may_again(space, SOLVER)
    suiting = Suiting(space, free, SOLVER)
    trial = TrySets(space, free, SOLVER)
    optional = sorted(suiting.problem.optional)
    assert 4 <= len(optional) <= 12
    sets = {
        may.needed(frozenset(some)) for n in range(len(optional) + 1) for some in itertools.combinations(optional, n)
    }
    tried = [trial.at(may.names(again)) for again in sets]
    least, most = min(one.nbytes for one in tried), max(one.nbytes for one in tried)
    for part in (0.0, 0.3, 0.6, 0.9):
        limit = round(least + part * (most - least))
        best = min(one.seconds for one in tried if one.nbytes <= limit)
        again = suiting.within(limit)
        assert again is not None
        assert trial.at(again).nbytes <= limit
        assert trial.at(again).seconds <= 1.004 * best
    assert suiting.within(least - 1) is None
    assert trial.at(suiting.leanest).nbytes == least


@pytest.mark.parametrize("mesh", [1, (2, 2)], ids=str)
def test_bound_of_any_set(mesh: object) -> None:
    """Under every limit the bound lies below the best plan found, and above what would be true without the limit."""
    space = space_of(graph(12), mesh)
    problem = BuildProblem(SOLVER).apply(space)
    free = Solve(SOLVER).apply(problem)
    with pytest.raises(InfeasibleError) as short:
        SolveRecompute(SOLVER, 1).apply(space, problem, None, lambda text: None)
    least, need = short.value.least, memory_bytes(problem, free.choice)
    limits = [round(least + part * (need - least)) for part in (0.02, 0.5)]
    raised = 0
    for limit in limits:
        chosen, solution = SolveRecompute(SOLVER, limit).apply(space, problem, None, lambda text: None)
        bound = FindBound(limit).apply(any_set(space, SOLVER))
        assert memory_bytes(chosen, solution.choice) <= limit
        assert evaluate(chosen, solution.choice) == pytest.approx(solution.seconds)
        assert bound.lower <= solution.seconds
        assert bound.free <= bound.lower
        raised += bound.lower > 1.0001 * bound.free
    assert raised


def test_together_is_no_worse() -> None:
    """From placements and a set, choosing both at once gives a plan that is at least as fast, and fits."""
    space = space_of(graph(3), 4)
    problem = BuildProblem(SOLVER).apply(space)
    free = Solve(SOLVER).apply(problem)
    suiting = Suiting(space, free.choice, SOLVER)
    limit = round(0.5 * (suiting.trial.at(suiting.leanest).nbytes + memory_bytes(problem, free.choice)))
    again = suiting.within(limit)
    assert again is not None
    classes = frozenset(space.graph.by_name[name].klass for name in again)
    both, hint = together(space, SOLVER, suiting.most, classes, free.choice)
    solution = Solve(replace(SOLVER, time_limit_s=5.0), limit).apply(both, hint)
    assert memory_bytes(both, solution.choice) <= limit
    assert solution.seconds <= evaluate(both, hint) + 1e-12
