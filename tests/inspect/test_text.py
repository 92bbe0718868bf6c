"""What the inspection prints, against golden files in tests/text.

After a wanted change: STPART_UPDATE_GOLDEN=1 python -m pytest tests/inspect, then read the diff of tests/text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.graphs import annotate, fuse
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.inspect.table import plan_table
from stpart_compiler.inspect.text import dump_annotated, dump_rules, to_dot
from stpart_compiler.ir.layout import Digit, form, shard
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.ir.plan import Plan, PlanRow
from stpart_compiler.ir.spacetime import Strategy, derive
from stpart_compiler.passes.build_programs import BuildPrograms
from stpart_compiler.passes.codegen import Placement
from stpart_compiler.passes.propagate import Annotated

GOLDEN = Path(__file__).parents[1] / "text"
MESH = parse_mesh((2, 2))
R, C, SKEWED = form(2, r=1), form(2, c=1), form(2, r=1, c=1)
PAPER = form(2, 1, 0, r=1, c=1)  # r+c+t


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def hand_made_strategies(graph: Annotated) -> dict[str, Strategy]:
    """up: the 2-D temporal map M=c, N=r+c+t, K=r; down: N=r in space, which leaves a pending sum; the rest follows."""
    strategies = {op.name: Strategy(tuple(() for _ in op.rule.factors)) for op in graph.ops}

    def place(name: str, steps: int = 1, **digits: Digit) -> None:
        rule = graph.by_name[name].rule
        assert set(digits) <= {factor.name for factor in rule.factors}, (name, rule)
        cuts = tuple((digits[f.name],) if f.name in digits else () for f in rule.factors)
        strategies[name] = Strategy(cuts, steps)

    place("t", a=R, b=SKEWED)
    place("mm", steps=2, m=C, n=PAPER, k=R)
    place("relu", a=C, b=R)
    place("t_1", b=R)
    place("mm_1", m=C, n=R)
    return strategies


@pytest.fixture(scope="module")
def graph() -> Annotated:
    x = torch.zeros(4, 8)
    return annotate(capture(Mlp(), (x,), loss_fn=lambda y: y.square().sum()))


@pytest.fixture(scope="module")
def placement(graph: Annotated) -> Placement:
    layouts = {("p_up_weight", 0): shard((16, 8), {0: (R,), 1: (SKEWED,)})}
    layouts[("p_down_weight", 0)] = shard((8, 16), {1: (R,)})
    return Placement(graph, MESH, hand_made_strategies(graph), layouts, LinkCost(load_cluster("cpu-gloo"), MESH))


def hand_made_plan(graph: Annotated, placement: Placement) -> Plan:
    rows = []
    for op in graph.ops[:6]:
        ports = derive(op.rule, placement.strategies[op.name], MESH)
        rows.append(
            PlanRow(
                name=op.name,
                module_path=op.module_path.replace("up", "layers.0.up"),
                op=str(op.call.target).removeprefix("aten."),
                count=4 if op.module_path == "up" else 1,
                strategy=placement.strategies[op.name].describe(op.rule),
                inputs=[str(port.layout) for port in ports.inputs],
                outputs=[str(port.layout) for port in ports.outputs],
                seconds=0.0 if op.name in ("t", "t_1") else 1.5e-5,
                moved_bytes=96 if op.name == "mm" else 0,
                redistribution_seconds=2e-3 if op.name == "mm_1" else 0.0,
                is_backward=False,
            )
        )
    names = {"p_up_weight": "up.weight", "p_down_weight": "down.weight"}
    return Plan(
        mesh=MESH,
        graph_digest=graph.captured.digest(),
        torch_version=torch.__version__,
        template=None,
        strategies=placement.strategies,
        params={names[key[0]]: layout for key, layout in placement.param_layouts.items()},
        rows=rows,
        seconds=2.1e-3,
        bound_seconds=2.1e-3,
        memory={"peak": 1024},
        yardsticks={},
        replicated_ops=[],
    )


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("STPART_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; STPART_UPDATE_GOLDEN=1 writes it anew"


def test_rules(graph: Annotated) -> None:
    check("mlp_rules.txt", dump_rules(graph))


def test_regions_show_their_ops(graph: Annotated) -> None:
    fused = fuse(graph)
    assert fused is not None
    check("mlp_regions.txt", dump_rules(fused))


def test_annotated_graph(graph: Annotated, placement: Placement) -> None:
    check("mlp_annotated.txt", dump_annotated(graph, placement))


def test_annotated_graph_says_what_the_plan_does(graph: Annotated, placement: Placement) -> None:
    lines = dump_annotated(graph, placement).splitlines()
    [up] = [line for line in lines if line.startswith("%mm:")]
    assert up.startswith("%mm: f32[4@M:c, 16@K:r] = mm(%in_args_0, %t)  # up, moves ")
    assert up.endswith(", 2 steps")
    [down] = [line for line in lines if line.startswith("%mm_1:")]
    assert down.startswith("%mm_1: f32[4@M:c, 8] sum(r) = mm(%relu, %t_1)")
    assert any(re.match(r"%mm_1 -> \[4, 8\]  # .*(all_reduce|all_gather) along ", line) for line in lines)
    assert "%p_up_weight: f32[16@r, 8@r+c]  # param up.weight" in lines


def test_each_relayout_is_shown_once_in_a_phase(graph: Annotated, placement: Placement) -> None:
    forward, backward = dump_annotated(graph, placement).split("\nbackward:\n")
    for phase in (forward, backward):
        moves = [line for line in phase.splitlines() if " -> " in line]
        assert moves and len(set(moves)) == len(moves)


def test_plan_table(graph: Annotated, placement: Placement) -> None:
    plan = hand_made_plan(graph, placement)
    check("mlp_table.txt", plan_table(plan, width=120))
    text = plan_table(plan, verbose=True)
    assert "layers.*.up" in text and " t " in text, "repeated layers are one row; verbose lists views too"
    assert " t " not in plan_table(plan)


def test_plan_table_keeps_the_most_expensive_rows(graph: Annotated, placement: Placement) -> None:
    text = plan_table(hand_made_plan(graph, placement), most=1)
    assert "2.00 ms" in text and text.endswith("... 3 cheaper rows\n")


_STATEMENT = re.compile(
    r'  ("(?:[^"\\]|\\.)*"( -> "(?:[^"\\]|\\.)*")?( \[(?:\w+=("(?:[^"\\]|\\.)*"|\w+)(, )?)+\])?'
    r'|rankdir=TB|node \[(?:\w+=("(?:[^"\\]|\\.)*"|\w+)(, )?)+\]);'
)


def test_dot_is_well_formed_and_complete(graph: Annotated, placement: Placement) -> None:
    lines = to_dot(graph, placement).splitlines()
    assert lines[0] == "digraph plan {" and lines[-1] == "}"
    for line in lines[1:-1]:
        assert _STATEMENT.fullmatch(line), line
    edges = [line for line in lines if " -> " in line.split(" [")[0]]
    assert len(edges) == sum(len(op.operands) for op in graph.ops)
    nodes = {line.split('"')[1] for line in lines[3:-1] if line not in edges}
    assert nodes == {key[0] for key in graph.values}


def test_dot_marks_relayouts_and_temporal_maps(graph: Annotated, placement: Placement) -> None:
    text = to_dot(graph, placement)
    assert re.search(r'"mm_1" -> "pow_1" \[label="[^"]*along', text)
    assert re.search(r'"mm" \[label="[^"]*".*color="#c53030"', text)
    assert '"t" -> "mm";' in text, "no re-layout, no label"


def test_dumper_numbers_what_each_pass_made(tmp_path: Path, graph: Annotated, placement: Placement) -> None:
    plan = hand_made_plan(graph, placement)
    programs = BuildPrograms(placement.cost, torch.device("cpu")).apply(graph, plan)
    dumper = Dumper(tmp_path / "new" / "dumps")
    dumper.graph("capture", graph.captured.gm)
    dumper.annotated(graph)
    dumper.plan(plan)
    dumper.programs(programs.artifacts)
    found = {path.name: path.read_text() for path in (tmp_path / "new" / "dumps").iterdir()}
    ranks = {f"03_rank{rank}_{phase}.py" for rank in range(4) for phase in ("forward", "backward")}
    assert set(found) == {"00_capture.txt", "01_propagate.txt", "02_plan.json", "02_plan.txt", *ranks}
    assert Plan.from_json(found["02_plan.json"]).digest == plan.digest
    assert "def forward" in found["03_rank0_forward.py"] and "# up: mm" in found["03_rank0_forward.py"]
    compile(found["03_rank3_backward.py"], "rank3", "exec")


def test_dumper_without_directory_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: Annotated
) -> None:
    monkeypatch.chdir(tmp_path)
    Dumper(None).annotated(graph)
    Dumper(None).graph("capture", graph.captured.gm)
    assert not list(tmp_path.iterdir())


def test_forms_print_axis_r_before_c() -> None:
    assert str(form(3, r=1, c=-1)) == "r-c"
    assert str(form(2, 1, 0, c=1, r=1)) == "r+c+t"
    assert str(form(2, c=1, r0=1, r1=1)) == "r0+r1+c"
    assert str(form(4, y=1, x=2)) == "2x+y"
    assert form(2, r=1, c=1).coeffs == (("c", 1), ("r", 1)), "the order shown is not the order kept"
