"""The torch.compile backend: eager's results on one rank and on several, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import backend_ranks
import pytest
import torch
from processes import run_processes
from torch import Tensor, nn

from stpart_compiler import backend

LIMIT_S = 400.0


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", backend_ranks.CASES, ids=lambda case: case.__name__)
def test_one_rank(case: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    case(1)


@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks(world: int, tmp_path: Path) -> None:
    arguments = [(rank, world, tmp_path / "store") for rank in range(world)]
    ended = run_processes(backend_ranks.main, arguments, LIMIT_S)
    assert [status for status, _ in ended] == [0] * world, "\n".join(text for _, text in ended)
    assert [text.count(" ok\n") for _, text in ended] == [len(backend_ranks.ON_RANKS[world])] * world


def test_compiled_once_and_drawn_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled at a second call of the same shape, here or elsewhere; dropout masks are those of eager."""
    calls = []
    compile_ = backend._Compiled._compile

    def counted(self: Any, args: Any) -> Any:
        calls.append(args)
        return compile_(self, args)

    monkeypatch.setattr(backend._Compiled, "_compile", counted)
    torch._dynamo.reset()
    graphs = []
    other = torch.compile(torch.sin, backend=lambda gm, _: graphs.append(gm) or gm.forward)
    other(torch.ones(3))
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 4), nn.Dropout(0.5))
    compiled = torch.compile(model, backend="stpart", options={"mesh": 1})
    x = torch.randn(8, 16)
    for seed in range(3):
        torch.manual_seed(seed)
        found, after = compiled(x), torch.rand(1)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, model(x))
        assert torch.equal(after, torch.rand(1))
    other(torch.ones(3))
    assert len(calls) == 1
    assert len(graphs) == 1


def test_found_without_import() -> None:
    """A fresh process that never names the package."""
    code = (
        "import sys, torch\n"
        "m = torch.nn.Linear(2, 2)\n"
        "c = torch.compile(m, backend='stpart', options={'mesh': 1})\n"
        "x = torch.randn(3, 2)\n"
        "assert torch.equal(c(x), m(x))\n"
        "assert 'stpart' in torch._dynamo.list_backends()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class BreakBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        print("between")  # HERE
        return self.inner(x)


class BreakFirst(BreakBetween):
    """Dynamo calls the backend once, with all ops of the model, and says nothing of a break."""

    def forward(self, x: Tensor) -> Tensor:
        print("first")  # HERE
        return self.inner(self.inner(x))


class Skipped(BreakBetween):
    """Dynamo leaves this function to Python: the backend sees `inner` twice, each time as a whole graph."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            try:
                print("in a loop")
                x = self.inner(x)  # HERE
            except ValueError:
                x = x + 1
        return x


class Branch(BreakBetween):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.sum() > 0:  # HERE
            x = x + 1
        return self.inner(x)


class Item(BreakBetween):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * x.sum().item()  # HERE


def _line(model: type[nn.Module]) -> int:
    """Number of the first line marked HERE in the class."""
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {model.__name__}("))
    return next(i + 1 for i, line in enumerate(lines) if i > start and line.endswith("# HERE"))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (BreakBetween, "does not know how to trace builtin operator `print`"),
        (BreakFirst, "does not know how to trace builtin operator `print`"),
        (Skipped, "left this function to Python"),
        (Branch, "a branch depends on tensor data"),
        (Item, "Tensor.item()"),
    ],
)
def test_graph_breaks_are_refused(model: type[nn.Module], why: str) -> None:
    compiled = torch.compile(model(), backend="stpart", options={"mesh": 1})
    with pytest.raises(Exception) as caught:
        compiled(torch.randn(2, 4))
    message = str(caught.value)
    assert f"graph break at {__file__}:{_line(model)}" in message
    assert why in message
    assert "A step must be one graph to be partitioned" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'give a mesh, as in options={"mesh": (2, 2)}'),
        ({"mesh": 1, "colour": 2}, "unknown options ['colour']; expected some of mesh, memory_limit"),
        ({"mesh": ()}, "at least one axis"),
        ({"mesh": 0}, "axis 'd' has size 0"),
        ({"mesh": (2, 2)}, "has 4 ranks but there is no process group; start under torchrun"),
        ({"mesh": 1, "template": "none"}, "template: 'none' is unknown; expected one of data"),
        ({"mesh": 1, "cluster": "none"}, "cluster: no preset 'none'"),
        ({"mesh": 1, "solver": {"colour": 1}}, "unexpected keyword argument 'colour'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="stpart", options=options)
    with pytest.raises(Exception) as caught:
        compiled(torch.randn(3, 2))
    assert message in str(caught.value)
