"""Why an op is placed as it is: alternatives are priced as the whole problem prices them."""

from __future__ import annotations

import re

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.ir.plan import Alternative, Plan
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.plan_rows import plan_rows
from stpart_compiler.passes.problem import BuildProblem, Problem, evaluate, memory_bytes
from stpart_compiler.passes.solve import Solve
from stpart_compiler.passes.space import BuildSpace
from stpart_compiler.passes.uses import Assignment


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def solved() -> tuple[Problem, Assignment]:
    graph = annotate(capture(Net(), (torch.randn(8, 12),)))
    space = BuildSpace(Costs(CLUSTER, parse_mesh(4))).apply(graph)
    problem = BuildProblem(SOLVER).apply(space)
    return problem, Solve(SOLVER).apply(problem).choice


def test_alternatives_cost_what_the_changed_assignment_costs(solved: tuple[Problem, Assignment]) -> None:
    problem, choice = solved
    rows = {row.name: row for row in plan_rows(problem.space, problem, choice)}
    checked = 0
    for klass, choices in enumerate(problem.space.choices):
        row = rows[choices.op.name]
        if choices.root != klass:
            assert not row.alternatives and row.follows in {*rows, *(p.names[0] for p in problem.space.params)}
            continue
        assert not row.follows and len(row.alternatives) == min(3, len(choices.strategies) - 1)
        texts = [s.describe(choices.op.rule) for s in choices.strategies]
        changed = [{**choice, klass: i} for i in range(len(texts)) if i != choice[klass]]
        more = {evaluate(problem, other) - evaluate(problem, choice) for other in changed}
        assert [a.seconds for a in row.alternatives] == pytest.approx(sorted(more)[: len(row.alternatives)], abs=1e-12)
        for other in row.alternatives:
            trial = {**choice, klass: texts.index(other.strategy)}
            peak = memory_bytes(problem, trial) - memory_bytes(problem, choice)
            assert (other.seconds, other.memory) == (
                pytest.approx(evaluate(problem, trial) - evaluate(problem, choice), abs=1e-12),
                peak,
            )
            own = (problem.own[klass][trial[klass]] - problem.own[klass][choice[klass]]) / 1e9
            assert other.compute == pytest.approx(own)
            checked += 1
    assert checked > 10


@pytest.fixture(scope="module")
def plan() -> Plan:
    x = torch.randn(8, 12)
    found = st.compile_model(Net(), (x,), mesh=(4,), cluster=CLUSTER, solver=SOLVER).plan
    return Plan.from_json(found.to_json())


def test_explain_finds_ops_of_all_layers(plan: Plan) -> None:
    for path in ("layers.0", "layers.1", "layers.2"):
        rows = [row for row in plan.rows if path in (row.module_path, *row.twins.values())]
        assert len(rows) > 3 and re.findall(r"^(\w+) \(", plan.explain(path), re.M) == [row.name for row in rows]
    row = next(row for row in plan.rows if row.twins and row.op.startswith(("mm", "addmm")) and not row.is_backward)
    text = plan.explain(list(row.twins)[-1])
    assert text == plan.explain(row.name) and text.startswith(f"{row.name} ({row.op}, layers.0, forward, x3): ")
    assert len(re.findall("  instead ", text)) == len(row.alternatives)
    follower = next(row for row in plan.rows if row.follows)
    assert f"  follows {follower.follows}, which decides for it" in plan.explain(follower.name)
    with pytest.raises(KeyError, match="no op or module 'layers.x'; module paths include head, layers.0"):
        plan.explain("layers.x")


def test_explain_says_what_the_limit_rules_out(plan: Plan) -> None:
    row = next(row for row in plan.rows if not row.follows)
    others = [Alternative("m=d", -2e-6, 1e-6, 2000), Alternative("k=d", 3e-6, 3e-6, 0)]
    row.alternatives = others
    plan.memory["solver estimate"], plan.solver["memory_limit"] = 9000, 10000
    lines = plan.explain(row.name).splitlines()
    assert lines[-2] == (
        "  instead m=d: -2.0 us with all else as it is (re-layouts -3.0 us), +2000 bytes at the peak, over the limit"
    )
    assert lines[-1] == "  instead k=d: +3.0 us with all else as it is (re-layouts +0.0 us)"
