"""A plain number of ranks on a cluster of hosts: axes that follow the hosts, and the cheapest plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.grids import over_hierarchy

FAST, SLOW = Link(1e-6, 1e10), Link(1e-4, 1e8)
DEVICE = Device("slow", "cpu", (("float64", 1e9), ("float32", 1e9)), 2**34, 1e10)
HOSTS = st.Cluster("hosts of two", DEVICE, ((2, FAST), (None, SLOW)))
QUICK = st.SolverOptions(time_limit_s=5, patience_s=0.5, yardsticks=False)


@pytest.mark.parametrize(
    ("ranks", "levels", "sizes"),
    [
        (8, (4, None), [(2, 4)]),
        (4, (4, None), []),
        (6, (4, None), [(3, 2)]),
        (5, (4, None), []),
        (16, (2, 8, None), [(8, 2), (2, 8)]),
        (8, (None,), []),
    ],
)
def test_axes_follow_the_levels(ranks: int, levels: tuple[int | None, ...], sizes: list[tuple[int, int]]) -> None:
    cluster = st.Cluster("levels", DEVICE, tuple((level, FAST) for level in levels))
    assert [mesh.sizes for mesh in over_hierarchy(ranks, cluster)] == sizes


def compiled(mesh: Any, **options: Any) -> st.CompiledModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).double()
    asked = {"loss_fn": lambda y: y.square().mean(), "cluster": HOSTS, "solver": QUICK} | options
    return st.compile_model(model, (X,), mesh=mesh, **asked)


X = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_cheapest_mesh_is_taken() -> None:
    plans = {str(plan.mesh): plan for plan in (compiled(mesh).plan for mesh in ({"d": 4}, (2, 2)))}
    chosen = compiled(4)
    plan = chosen.plan
    assert plan.solver["meshes"] == pytest.approx({name: other.seconds for name, other in plans.items()})
    assert plan.seconds == pytest.approx(min(other.seconds for other in plans.values()))
    assert plan.digest == plans[str(plan.mesh)].digest and plan.mesh.axes == ("r", "c")
    assert f"cheapest of the meshes tried: d=4 {plans['d=4'].seconds * 1e3:.3f} ms, r=2 x c=2 " in plan.summary()
    one, two = chosen.run_in_process(X), compiled({"d": 4}, template="data").run_in_process(X)
    assert torch.allclose(one.loss, two.loss, rtol=1e-12)
    again = compiled(4, plan=st.Plan.from_json(plan.to_json())).plan
    assert again.digest == plan.digest, "a given plan has its mesh"


def test_meshes_that_a_template_or_the_limit_rules_out() -> None:
    assert compiled(4, template="primepar").plan.mesh.sizes == (2, 2), "one axis of square size is seen so already"
    assert compiled(6, template="data").plan.mesh.world_size == 6
    assert "meshes" not in compiled({"d": 4}, template="data").plan.solver
    with pytest.raises(ValueError, match="template 'primepar': needs two mesh axes of equal size .* got mesh d=6"):
        compiled(6, template="primepar")
    with pytest.raises(st.InfeasibleError, match=r"memory_limit: 1.00 KiB per rank is too small"):
        compiled(4, template="data", memory_limit="1KiB")
