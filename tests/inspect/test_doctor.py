"""The doctor: what would be replicated, where it stands and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stpart_compiler.capture import GraphBreakError, capture
from stpart_compiler.cli import main
from stpart_compiler.graphs import annotate
from stpart_compiler.inspect.doctor import Diagnosis, diagnose


def diagnosed(model: nn.Module, *args: torch.Tensor) -> Diagnosis:
    return diagnose(annotate(capture(model, args)))


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.linalg.inv_ex(self.drop(layer(x)) @ x.T)[0] @ x
        return x.square().mean()


def test_what_is_replicated_and_why() -> None:
    found = diagnosed(Inverse(), torch.randn(32, 32))
    by_op = {finding.op: finding for finding in found.findings}
    assert by_op.keys() == {"linalg_inv_ex", "bernoulli.p"}
    assert by_op["linalg_inv_ex"].shapes == ((32, 32),)
    assert __file__ in by_op["linalg_inv_ex"].where
    assert "no rule" in by_op["linalg_inv_ex"].reason
    assert "random" in by_op["bernoulli.p"].reason
    assert by_op["bernoulli.p"].module_path == "drop"
    assert "mm" in found.own
    text = str(found)
    assert "linalg_inv_ex([32, 32]) at " in text
    assert "the step stays exact" in text


def test_nothing_to_report() -> None:
    found = diagnosed(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(32, 32))
    assert not found.findings
    assert str(found).endswith("nothing is replicated")


def test_small_results_are_not_worth_a_word() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv_ex(x)[0].sum()

    assert not diagnosed(Model(), torch.randn(4, 4)).findings


def test_an_op_with_an_ordered_effect_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(self.layer(x)).sum()

    with pytest.raises(
        GraphBreakError, match=r"test_doctor.py:\d+: aten._linalg_check_errors.default has a side effect"
    ):
        capture(Model(), (torch.randn(4, 4),))


def test_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for a model whose code reads globals of its file, which the tracer looks up by module."""
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\nSCALE = torch.full((3,), 2.0)\n\n"
        "class Model(nn.Module):\n    def forward(self, x):\n        return (x * len(SCALE)).sum()\n\n"
        "def make():\n    return Model(), (torch.randn(2, 3),), {}\n"
    )
    assert main(["doctor", f"{path}:make"]) == 0
    assert "nothing is replicated" in capsys.readouterr().out
