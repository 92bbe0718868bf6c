"""A plain number of ranks: axes that follow hosts, two axes inside of one, a look at each, and the cheapest plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.grids import grids_to_try, over_hierarchy, within_host
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.make_plan import Screened
from stpart_compiler.search import Search, on_best_mesh, promising

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


@pytest.mark.parametrize(
    ("ranks", "level", "sizes"),
    [(4, None, [(2, 2)]), (12, 16, [(2, 6), (3, 4)]), (8, 8, [(2, 4)]), (8, 4, []), (7, None, []), (2, None, [])],
)
def test_axes_inside_of_a_host(ranks: int, level: int | None, sizes: list[tuple[int, int]]) -> None:
    levels = ((level, FAST), (None, SLOW)) if level else ((None, FAST),)
    assert [mesh.sizes for mesh in within_host(ranks, st.Cluster("levels", DEVICE, levels))] == sizes


@pytest.mark.parametrize(
    ("asked", "template", "sizes"),
    [
        ((4, 2, 2), "primepar", [(4, 2, 2)]),
        ((2, 2, 4), "primepar_space", [(2, 2, 4)]),
        ((2, 8, 2), "primepar", [(2, 8, 2)]),
        ((4, 2, 2), "megatron", [(4, 4)]),
        ((2, 4, 2, 2), "primepar_space", [(2, 4, 2, 2)]),
        ((2, 2, 2, 2, 2), "primepar", [(2, 8, 2)]),
        ((8, 4), "primepar", [(8, 2, 2)]),
        ((16, 4), "primepar", [(16, 2, 2)]),
        ((16, 2), "primepar", [(4, 4, 2)]),
        (16, "primepar_space", [(4, 4), (4, 2, 2)]),
        (8, "primepar", [(2, 2, 2)]),
        (16, "megatron", [(16,), (4, 4)]),
    ],
)
def test_a_template_of_two_dimensional_maps_keeps_its_pair(asked: Any, template: str, sizes: list[Any]) -> None:
    """Beside a third axis, and inside of hosts where the axes are left to the solver."""
    hosts = st.Cluster("hosts of four", DEVICE, ((4, FAST), (None, SLOW)))
    found = grids_to_try(asked, parse_mesh(asked), hosts, template, None)
    assert [mesh.sizes for mesh in found] == sizes


@pytest.mark.parametrize(
    ("looked", "order"),
    [
        ([(9.0, 10.0), (9.9, 9.95), (9.85, 9.9)], [2, 1, 0]),
        ([(9.9, 10.0), (9.85, 9.9), (9.82, 9.83)], [0, 2, 1]),
        ([(1.0, 1.0), (2.0, 2.0)], [0, 1]),
    ],
    ids=["a mesh may be faster", "within 2 %", "the first is fastest"],
)
def test_the_mesh_that_promises_most_is_tried_first(looked: list[tuple[float, float]], order: list[int]) -> None:
    assert promising([Screened(lower, seconds, lambda: 0) for lower, seconds in looked], 0.02, 1) == order


def test_where_memory_is_short_meshes_whose_plans_fit_are_tried_first() -> None:
    looked = [Screened(9.0, 9.0, lambda: 30), Screened(8.0, 8.0, lambda: 20), Screened(9.5, 9.5, lambda: 10)]
    assert [promising(looked, 0.02, limit) for limit in (30, 20, 10, 5)] == [[1, 0, 2], [1, 0, 2], [2, 1, 0], [1, 0, 2]]


class Stub:
    """A search on a mesh that finds a plan of so many ms, if one fits. `within`: the bound within the memory limit."""

    def __init__(self, name: str, free: float, nbytes: int, within: float, plan: float | None) -> None:
        self.costs = SimpleNamespace(mesh=name)
        self.look, self.plan, self.least = Screened(free, free, lambda: nbytes), plan, within
        self.limit = 10
        self.ran = False

    def say(self, text: str) -> None:
        pass

    def screened(self) -> Screened:
        return self.look

    def within_limit(self, look: Screened, enough: float) -> Screened:
        return look if look.nbytes() <= self.limit else Screened(self.least, self.least, look.nbytes)

    def run(self) -> tuple[Any, Any]:
        self.ran = True
        if self.plan is None:
            raise st.InfeasibleError("does not fit", 20)
        bound = min(self.plan, self.look.lower)
        return SimpleNamespace(seconds=self.plan, bound_seconds=bound, solver={}, yardsticks={}), self.costs.mesh


@pytest.mark.parametrize(
    ("searches", "taken", "ran"),
    [
        ([("a", 8, 9, 8, 8.0), ("b", 9, 9, 9, 9.0)], "a", "a"),
        ([("a", 8, 20, 8, None), ("b", 9, 20, 9, 12.0)], "b", "ab"),
        ([("a", 8, 20, 8.5, 15.0), ("b", 9, 20, 9.5, 12.0)], "b", "ab"),
        ([("a", 8, 20, 12.5, 15.0), ("b", 12, 9, 12, 12.0)], "b", "b"),
        ([("a", 8, 20, 9.0, 10.0), ("b", 12, 9, 12, 12.0)], "a", "ab"),
    ],
    ids=["all fit", "only one fits", "slower once it fits", "ruled out by its bound", "faster though memory is short"],
)
def test_meshes_are_compared_under_the_memory_limit(searches: list[Any], taken: str, ran: str) -> None:
    stubs = [Stub(*each) for each in searches]
    plan, programs = on_best_mesh(cast("list[Search]", stubs), 0.02)
    assert programs == taken and "".join(stub.costs.mesh for stub in stubs if stub.ran) == ran
    assert plan.bound_seconds <= plan.seconds == min(plan.solver["meshes"].values())


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
    assert f"meshes tried: d=4 {plans['d=4'].seconds * 1e3:.3f} ms, r=2 x c=2 " in plan.summary()
    one, two = chosen.run_in_process(X), compiled({"d": 4}, template="data").run_in_process(X)
    assert torch.allclose(one.loss, two.loss, rtol=1e-12)
    again = compiled(4, plan=st.Plan.from_json(plan.to_json())).plan
    assert again.digest == plan.digest, "a given plan has its mesh"


def test_ranks_of_one_host_get_two_axes_where_that_is_faster() -> None:
    said: list[str] = []
    host = st.Cluster("a host of four", DEVICE, ((None, SLOW),))
    plan = compiled(4, cluster=host, progress=said.append).plan
    kept = [compiled(mesh, cluster=host).plan for mesh in ({"d": 4}, (4,))]
    assert all(other.mesh.sizes == (4,) and "meshes" not in other.solver for other in kept), "as asked for"
    assert plan.mesh.sizes == (2, 2) and plan.seconds < (1 - QUICK.gap) * kept[0].seconds
    assert plan.solver["meshes"]["d=4"] == pytest.approx(kept[0].seconds)
    assert [text for text in said if text.startswith("mesh ")] == ["mesh r=2 x c=2"], "no other one is solved"


def test_where_no_mesh_can_be_faster_one_axis_is_kept() -> None:
    """Each rank has a row of the batch and too much to compute for any exchange to matter."""
    free = st.Cluster("links that cost nothing", DEVICE, ((None, Link(1e-12, 1e18)),))
    plan = compiled(4, cluster=free).plan
    assert plan.mesh.axes == ("d",) and plan.solver["meshes"].keys() == {"d=4", "r=2 x c=2"}
    assert plan.bound_seconds <= min(plan.solver["meshes"].values()), "the bound is that of all meshes"


def test_meshes_that_a_template_or_the_limit_rules_out() -> None:
    assert compiled(4, template="primepar").plan.mesh.sizes == (2, 2), "one axis of square size is seen so already"
    assert compiled(6, template="data").plan.mesh.world_size == 6
    assert "meshes" not in compiled({"d": 4}, template="data").plan.solver
    with pytest.raises(ValueError, match="template 'primepar': needs two mesh axes of equal size .* got mesh d=6"):
        compiled(6, template="primepar")
    with pytest.raises(st.InfeasibleError, match=r"memory_limit: 1.00 KiB per rank is too small"):
        compiled(4, template="data", memory_limit="1KiB")
