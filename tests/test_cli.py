"""The command line: what it prints, and how it refuses bad input."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from stpart_compiler import demo
from stpart_compiler.cli import main, parse_mesh_text
from stpart_compiler.ir.plan import Plan
from stpart_compiler.local_ranks import RankReport

MODEL = """
    import torch
    from torch import nn

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return model, (torch.randn(8, 8),), {}, lambda y: y.square().mean()

    def no_loss():
        return make()[:3]

    def wrong():
        return 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(MODEL))
    return f"{path}:make"


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints."""
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stpart: error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("stpart: error: ")


@pytest.mark.parametrize(
    ("text", "mesh"),
    [("4", 4), ("2x2", (2, 2)), ("2x3x2", (2, 3, 2)), ("r=2,c=3", {"r": 2, "c": 3}), ("d=4", {"d": 4})],
)
def test_mesh_text(text: str, mesh: object) -> None:
    assert parse_mesh_text(text) == mesh


@pytest.mark.parametrize("text", ["2y2", "", "2x", "r=2,2", "r=", "-2", "2 x 2"])
def test_bad_mesh_text(text: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(["plan", model, f"--mesh={text}"], capsys)
    assert message == f"mesh: {text!r} cannot be read; expected 4, 2x2 or r=2,c=2"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--mesh", "0"], "mesh: axis 'd' has size 0"),
        (["--mesh", "r=2,r=2"], "names an axis twice"),
        (["--mesh", "2", "--template", "fast"], "template: 'fast' is unknown; expected one of data, zero3"),
        (["--mesh", "2", "--memory-limit", "16 gigs"], "size '16 gigs' cannot be read; expected a number of bytes"),
        (["--mesh", "2", "--memory-limit", "100"], "memory_limit: "),
        (["--mesh", "2", "--cluster", "nowhere"], "nowhere"),
        (["--mesh", "2", "--batch", "4"], "--batch and --seq: only for the named models"),
    ],
)
def test_bad_options(options: list[str], expected: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in error_of(["plan", model, *options], capsys)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda name: "llama-9000", "model: 'llama-9000' is unknown; expected llama-tiny, "),
        (lambda name: "nowhere.py:make", "model: no file nowhere.py"),
        (lambda name: name.replace("make", "absent"), "has no function 'absent'"),
        (lambda name: name.replace("make", "wrong"), "must return (model, args, kwargs)"),
    ],
)
def test_bad_model(change, expected: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in error_of(["plan", change(model), "--mesh", "2"], capsys)


def test_argparse_refuses_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["plan"], ["fly"], ["dump", "llama-tiny", "--mesh", "2"], ["run", "m", "--mesh", "2", "--steps", "0"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert "invalid positive number value: '0'" in capsys.readouterr().err


def test_plan_prints_the_table_and_writes_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    assert main(["plan", model, "--mesh", "2x2", "--template", "zero3", "-o", str(output)]) == 0
    printed = capsys.readouterr()
    plan = Plan.from_json(output.read_text())
    assert plan.template == "zero3" and plan.digest[:12] in printed.out
    assert "operands -> results" in printed.out
    assert "] capture" in printed.err, "plain progress lines when the stream is no terminal"


def test_yardsticks_without_temporal_maps_and_on_other_meshes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--mesh", "2x2", "--yardsticks"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\n  best spatial-only: \d+\.\d+ ms, \d\.\d\dx this plan\n", printed)
    assert len(re.findall(r"\n  (?:data|megatron)(?: \(4\))?: ", printed)) == 2, "each on the better mesh"
    message = error_of(["plan", model, "--mesh", "2x2", "--yardsticks", "--template", "data"], capsys)
    assert message == "--yardsticks: only where the plan is solved for; leave --template out"


def test_a_file_that_cannot_be_written_stops_before_the_work(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stpart_compiler.cli.compile_model", None)
    for output in (tmp_path / "missing" / "plan.json", tmp_path):
        assert str(output) in error_of(["plan", model, "--mesh", "2", "-o", str(output)], capsys)


def test_dump(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [model, "--mesh", "2", "--template", "zero3"]
    assert main(["dump", *common, "--text"]) == 0
    assert "\nbackward:\n" in capsys.readouterr().out
    assert main(["dump", *common, "--dot"]) == 0
    assert capsys.readouterr().out.startswith("digraph plan {")
    assert main(["dump", *common, "--rank", "1", "--phase", "backward"]) == 0
    compile(capsys.readouterr().out, "rank1", "exec")
    assert main(["dump", *common, "--dir", str(tmp_path / "dumps")]) == 0
    names = {path.name for path in (tmp_path / "dumps").iterdir()}
    assert {"00_capture.txt", "03_plan.json", "04_rank1_forward.py", "05_annotated.txt"} <= names


def test_dump_of_a_rank_that_is_not_there(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rank: 7 is not in 0..1" in error_of(
        ["dump", model, "--mesh", "2", "--template", "data", "--rank", "7"], capsys
    )


def test_run_trains_on_local_ranks(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, "--mesh", "2", "--template", "zero3", "--steps", "3", "--lr", "0.01"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    losses = [float(line.split()[3].rstrip(",")) for line in lines]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], "the same batch each time: the loss falls"


def test_run_needs_a_loss(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = model.replace("make", "no_loss")
    message = error_of(["run", name, "--mesh", "2", "--template", "data"], capsys)
    assert message.startswith("run: the model's output is no scalar loss")


def test_demo_compares_losses(capsys: pytest.CaptureFixture[str]) -> None:
    single = demo.OneDevice([7.0, 6.5], 100)
    report = RankReport(0, [7.0, 6.25], [0.1, 0.1], 50)
    assert demo.show_losses([report], single) == 0.25
    nan = RankReport(0, [7.0, float("nan")], [0.1, 0.1], 50)
    assert not demo.show_losses([nan], single) <= demo.TOLERANCE
    capsys.readouterr()


@pytest.mark.parametrize(
    ("difference", "status", "last"),
    [
        (3e-7, 0, "demo ok: 4 ranks, 5 steps, max |loss difference| = 3.000e-07"),
        (2e-4, 1, "demo failed: max |loss difference| = 2.000e-04 is over 1e-04"),
        (float("nan"), 1, "demo failed: max |loss difference| = nan is over 1e-04"),
    ],
)
def test_demo_says_how_it_ended(
    difference: float, status: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train_and_compare", lambda say: difference)
    assert main(["demo"]) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_simulate_prints_times_and_writes_a_trace(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert main(["simulate", model, "--mesh=2", "--template=ring", f"--trace={trace}"]) == 0
    shown = capsys.readouterr().out
    assert "simulated step on cpu-gloo, 2 ranks: " in shown and f"written to {trace}" in shown
    assert json.loads(trace.read_text())["traceEvents"]
