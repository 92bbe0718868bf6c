"""What differs between two plans: totals, layouts at rest and ops, folded over layers; plans of other steps."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import nn

import stpart_compiler as st
from stpart_compiler.cli import main


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width, bias=False), nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def plan(template: str, mesh: Any = 2, width: int = 16, length: int = 6, training: bool = True) -> st.Plan:
    ids = torch.zeros(4, length, dtype=torch.long)
    compiled = st.compile_model(
        Net(width), (ids,), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER, training=training
    )
    return compiled.plan


@pytest.fixture(scope="module")
def plans() -> dict[str, st.Plan]:
    return {name: plan(name) for name in ("data", "zero3", "metp")}


def test_rows_and_totals_are_those_of_the_plans(plans: dict[str, st.Plan]) -> None:
    one, two = plans["data"], plans["zero3"]
    found = st.diff(one, two)
    ones, twos = ({row.name: row for row in p.rows} for p in (one, two))
    assert ones.keys() == twos.keys() and len(found.rows) + found.alike == len(ones)
    assert {a.name for a, b in found.rows if a} == {
        name for name in ones if ones[name] != dataclasses.replace(twos[name], alternatives=ones[name].alternatives)
    }
    assert all(a is ones[a.name] and b is twos[a.name] for a, b in found.rows if a is not None)
    up = tuple(str(p.params["layers.0.up.weight"]) for p in (one, two))
    assert ("layers.*.up.weight (x3)", *up) in found.params and up[0] == "[16, 8]"
    assert len(found.params) == len({re.sub(r"\d", "", name) for name in one.params}), "all are cut, one row a kind"
    text = str(found)
    ratio = two.seconds / one.seconds
    assert (
        re.search(rf"predicted step .* {ratio:.3f}\n", text) and f"a: {one.headline()}\nb: {two.headline()}\n" in text
    )
    assert "layers.*.up " in text and "layers.0" not in text, "layers that repeat are one row"
    assert text.endswith(f" op classes are alike, {len(found.rows) - shown(text)} that cost nothing differ\n")
    assert shown(found.text(verbose=True)) == len(found.rows)


def shown(text: str) -> int:
    """Op classes in the table of ops: each has a line for plan a."""
    return len(re.findall(r"(?:forward|backward)\S* +\d+ +a ", text))


def test_a_plan_is_no_other_than_itself(plans: dict[str, st.Plan]) -> None:
    again = st.Plan.from_json(plans["data"].to_json())
    found = st.diff(plans["data"], again)
    assert (found.rows, found.params, found.alike) == ([], [], len(again.rows))


def test_regions_are_ops_of_one_plan_alone(plans: dict[str, st.Plan]) -> None:
    found = st.diff(plans["data"], plans["metp"])
    only_b = [b.op for a, b in found.rows if a is None and b is not None]
    only_a = [a.op for a, b in found.rows if b is None and a is not None]
    assert only_b and all("fused_" in op for op in only_b)
    assert "mm.default" in only_a and "fused_" in str(found)


def test_other_meshes_are_compared(plans: dict[str, st.Plan]) -> None:
    assert "on mesh r=2 x c=2" in str(st.diff(plans["data"], plan("data", (2, 2))))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"width": 20}, "other models: 6 parameters differ, such as layers.0.up.weight (a: [16, 8], b: [20, 8])"),
        ({"length": 5}, "the plans are for the same model over other inputs"),
        ({"training": False}, "other graphs of one model: ops only in a: ['"),
    ],
)
def test_plans_of_other_steps(changes: dict[str, Any], text: str, plans: dict[str, st.Plan]) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        st.diff(plans["data"], plan("data", **changes))


def test_what_is_no_plan(plans: dict[str, st.Plan]) -> None:
    with pytest.raises(TypeError, match=r"plan_b: got str, expected a Plan; Plan.from_json\(text\) reads a saved one"):
        st.diff(plans["data"], "b.json")  # type: ignore[arg-type]


def test_command(plans: dict[str, st.Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, bad = (tmp_path / name for name in ("a.json", "b.json", "bad.json"))
    a.write_text(plans["data"].to_json())
    b.write_text(plans["zero3"].to_json())
    bad.write_text("{")
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out == str(st.diff(plans["data"], plans["zero3"]))
    assert main(["diff", str(a), str(bad)]) == 2
    assert f"stpart: error: {bad}: plan: not JSON" in capsys.readouterr().err
    assert main(["diff", str(a), str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
