"""Of a plan and the templates that are priced almost like it, the one that is fastest in simulation is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_grids import HOSTS, QUICK, X, compiled

import stpart_compiler as st
from stpart_compiler import rivals

SOLVER = replace(QUICK, yardsticks=True)
RIVAL = "megatron"  # priced 5.2 % over the plan on these ranks, all others much more


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "ABOUT", 0.1)


def simulated(template: str | None) -> float:
    options = st.SolverOptions(yardsticks=False) if template is None else QUICK
    return compiled({"d": 4}, template=template, cluster=HOSTS, solver=options).simulate().seconds


def test_the_plan_is_the_fastest_in_simulation() -> None:
    found = compiled({"d": 4}, solver=SOLVER)
    assert found.plan.solver["simulated"] == pytest.approx({"solved": simulated(None), RIVAL: simulated(RIVAL)})
    assert found.simulate().seconds == min(found.plan.solver["simulated"].values())
    assert "simulated, the fastest is this plan: solved " in found.plan.summary()


def test_a_template_that_is_faster_in_simulation_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the slower one stands for the faster one. Its plan keeps the bound and what it is compared with."""
    real = rivals._simulated
    monkeypatch.setattr(rivals, "_simulated", lambda *of: 1 / real(*of))
    found = compiled({"d": 4}, solver=SOLVER)
    plan = found.plan
    assert found.simulate().seconds == pytest.approx(simulated(RIVAL))
    assert plan.seconds == plan.yardsticks[RIVAL] and len(plan.yardsticks) > 3
    assert 0 < plan.bound_seconds < plan.seconds and plan.memory["peak"] > 0
    assert st.Plan.from_json(plan.to_json()).digest == compiled({"d": 4}, plan=plan).plan.digest
    loss = compiled({"d": 4}, template="data").run_in_process(X).loss
    assert torch.allclose(found.run_in_process(X).loss, loss, rtol=1e-12)


def test_what_is_much_dearer_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "ABOUT", 0.04)
    assert "simulated" not in compiled({"d": 4}, solver=SOLVER).plan.solver
