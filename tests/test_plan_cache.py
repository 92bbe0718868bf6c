"""The plan cache: the same compilation takes its plan without solving; any other, or a broken entry, solves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import nn

import stpart_compiler as st
from stpart_compiler import plan_cache
from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.search import Search

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that is switched on."""
    folder = tmp_path / "plans"
    monkeypatch.setenv(plan_cache.VARIABLE, str(folder))
    return folder


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each search."""
    found: list[int] = []
    run = Search.run

    def counted(search: Any) -> Any:
        found.append(1)
        return run(search)

    monkeypatch.setattr(Search, "run", counted)
    return found


def compiled(mesh: Any = 2, **options: Any) -> st.CompiledModel:
    return st.compile_model(model(), (X,), mesh=mesh, cluster=CLUSTER, solver=SOLVER, **options)


def test_the_same_again_takes_the_plan(cache: Path, solved: list[int]) -> None:
    first, second = compiled(), compiled()
    assert len(solved) == 1
    assert (first.plan.digest, first.plan.rows) == (second.plan.digest, second.plan.rows)
    assert first.plan.memory == second.plan.memory and first.plan.yardsticks == second.plan.yardsticks
    assert ", from the cache)" in second.plan.summary() and "cache" not in first.plan.summary()
    one, two = first.run_in_process(X), second.run_in_process(X)
    assert torch.equal(one.loss, two.loss) and all(torch.equal(one.grads[name], two.grads[name]) for name in one.grads)


def test_a_broken_entry_is_solved_anew_with_a_warning(cache: Path, solved: list[int]) -> None:
    plan = compiled().plan
    [entry] = cache.iterdir()
    entry.write_text("nonsense")
    with pytest.warns(UserWarning, match=r"plan cache: .* is left out and made anew"):
        assert compiled().plan.digest == plan.digest
    assert len(solved) == 2 and "cached" in compiled().plan.solver, "what was made anew is kept"


def test_switched_off_or_given_a_plan_it_does_nothing(
    cache: Path, solved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compiled(template="data").plan
    [entry] = cache.iterdir()
    entry.unlink()
    compiled(plan=plan)
    monkeypatch.setenv(plan_cache.VARIABLE, "off")
    compiled(template="data")
    assert len(solved) == 2 and not list(cache.iterdir())


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = compiled(template="data").plan
    return Plan.from_json(found.to_json())


def entry_in(folder: Path, name: str, plan: Plan) -> plan_cache.PlanCache:
    entry = plan_cache.PlanCache(folder / f"{name}.plan")
    entry.store(plan)
    return entry


@pytest.mark.parametrize("broken", ["", "truncated", "changed", "moved", "bytes"])
def test_what_was_not_written_so_is_not_taken(broken: str, tmp_path: Path, plan: Plan) -> None:
    entry, other = entry_in(tmp_path, "a", plan), entry_in(tmp_path, "b", plan)
    assert entry.path is not None and other.path is not None
    text = entry.path.read_bytes()
    wrong = {"truncated": text[: len(text) // 2], "changed": text.replace(b"seconds", b"minutes", 1), "bytes": b"\xff"}
    entry.path.write_bytes(other.path.read_bytes() if broken == "moved" else wrong.get(broken, b""))
    with pytest.warns(UserWarning, match=r"plan cache: .*a.plan is left out and made anew"):
        assert entry.load() is None
    found = other.load()
    assert found is not None and (found.digest, found.rows) == (plan.digest, plan.rows)


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(
        UserWarning, match=r"plan cache: cannot write .* set STPART_CACHE to another directory, or to off"
    ):
        entry_in(tmp_path / "file" / "plans", "a", plan)


def test_the_entries_used_last_are_kept(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry_in(tmp_path, name, plan) for name in "abc"]
    for entry in entries:
        assert entry.path is not None
        os.utime(entry.path, (1e9, 1e9))
    assert entries[1].load() is not None
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    entry_in(tmp_path, "d", plan)
    assert {path.stem for path in tmp_path.iterdir()} == {"b", "d"}


@pytest.fixture(scope="module")
def graph() -> Annotated:
    return annotate(capture(model(), (X,)))


def test_the_key_holds_all_that_decides(cache: Path, graph: Annotated, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = parse_mesh(4)
    usual: dict[str, Any] = {"graph": graph, "mesh": mesh, "cluster": CLUSTER, "memory_limit": 100, "options": SOLVER}
    usual |= {"template": None, "further": (1,)}
    ranks, link = CLUSTER.levels[0]
    slower = replace(CLUSTER, levels=((ranks, replace(link, latency=2e-9)),))
    again = replace(graph.ops[0], checkpoint=1)
    others: list[dict[str, Any]] = [
        {},
        {"graph": annotate(capture(model(), (X[:6],)))},
        {"graph": replace(graph, ops=[again, *graph.ops[1:]])},
        {"mesh": parse_mesh({"ranks": 4})},
        {"cluster": slower},
        {"memory_limit": 101},
        {"options": replace(SOLVER, optimizer="sgd")},
        {"template": "data"},
        {"further": (2,)},
    ]
    paths = [plan_cache.plan_cache(**usual | other).path for other in others]
    assert plan_cache.plan_cache(**usual).path == paths[0]
    monkeypatch.setattr(torch, "__version__", "9.9")
    plan_cache._versions.cache_clear()
    paths.append(plan_cache.plan_cache(**usual).path)
    plan_cache._versions.cache_clear()
    assert len(set(paths)) == len(others) + 1
    assert {path.parent for path in paths if path is not None} == {cache}


def test_where_it_is(graph: Annotated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path | None:
        path = plan_cache.plan_cache(graph, parse_mesh(2), CLUSTER, 1, SOLVER, None, ()).path
        return None if path is None else path.parent

    monkeypatch.delenv(plan_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "stpart_compiler" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "stpart_compiler" / "plans"
    for off in ("off", "OFF", "0"):
        monkeypatch.setenv(plan_cache.VARIABLE, off)
        assert folder() is None
