"""A call with inputs of other sizes compiles once more under the same plan, over the same parameters."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.ir.layout import gather
from stpart_compiler.runtime.engine import CommTimeoutError, Engine
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.threads import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return (self.down(self.drop(torch.tanh(self.up(x)))) * scale).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double().eval()


def rows(number: int) -> Tensor:
    return torch.randn(number, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def compiled(model: nn.Module, mesh: Any = 2) -> st.CompiledModel:
    return st.compile_model(model, (rows(6),), {"scale": 2.0}, mesh=mesh, cluster=CLUSTER, solver=SOLVER)


def on_ranks(done: st.CompiledModel, fn: Callable[[RankModule], Any], timeout_s: float = 30.0) -> list[Any]:
    def rank(index: int, engine: Engine) -> Any:
        return fn(done.rank_module(index, engine))

    return run_ranks(done.world_size, rank, timeout_s=timeout_s)


def trained(model: nn.Module) -> list[Tensor]:
    """Losses over batches of several sizes; gradients of two sizes add up in each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for sizes in ((6, 4), (4, 7), (6, 4)):
        optimizer.zero_grad()
        for size in sizes:
            loss = model(rows(size), scale=2.0)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses


def test_training_over_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    done = compiled(net())
    captures = []
    capture = st.compile.capture
    monkeypatch.setattr(st.compile, "capture", lambda *args, **kwargs: captures.append(1) or capture(*args, **kwargs))

    def rank(module: RankModule) -> Any:
        return trained(module), dict(module.named_parameters()), {slot.name: slot for slot, _ in module.param_slots()}

    found = on_ranks(done, rank)
    assert len(captures) == 2, "each of two new sizes is compiled once, for all ranks"
    model = net()
    expected = trained(model)
    for losses, _, _ in found:
        torch.testing.assert_close(losses, expected)
    for name, param in model.named_parameters():
        layout = found[0][2][name].layout
        whole = gather([params[name].detach() for _, params, _ in found], layout, done.plan.mesh)
        torch.testing.assert_close(whole, param.detach())


def test_the_runner_takes_other_sizes_in_the_modes_of_compile_time() -> None:
    model = net()
    done = compiled(model)
    model.train()
    x = rows(10)
    result = done.run_in_process(x, scale=2.0)
    assert model.training and model.drop.training
    torch.testing.assert_close(result.loss, net()(x, scale=2.0).detach())
    assert result.messages == done.run_in_process(x, scale=2.0).messages


def test_what_differs_in_more_than_sizes_is_refused() -> None:
    module = compiled(net(), 1).rank_module(0)
    with pytest.raises(ValueError, match=r"'args\[0\]': expected torch.float64 of shape \(6, 8\), got torch.float32"):
        module(rows(4).float(), scale=2.0)
    with pytest.raises(ValueError, match=r"'args\[0\]': expected torch.float64 of shape \(6, 8\), got .*\(2, 2, 8\)"):
        module(rows(4).view(2, 2, 8), scale=2.0)
    with pytest.raises(ValueError, match=r"'scale': compiled for the constant 2.0, got 3.0"):
        module(rows(6), scale=3.0)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_sizes_that_the_plan_does_not_fit_say_what_to_do() -> None:
    done = st.compile_model(Sequences(), (torch.ones(4, 3, 8),), mesh=2, cluster=CLUSTER, solver=SOLVER)
    with pytest.raises(ValueError, match="plan: op .* is made of other dims at these input sizes") as caught:
        done.run_in_process(torch.ones(1, 3, 8))
    [note] = caught.value.__notes__
    assert "inputs of other sizes, ((1, 3, 8),): leave such calls out (drop_last=True" in note


def test_ranks_with_different_sizes_stop() -> None:
    done = compiled(net())
    with pytest.raises(RuntimeError, match=r"sizes args\[0\] \(\d, 8\), but ranks \[\d\] with others.*give all"):
        on_ranks(done, lambda module: module(rows(4 + module.rank), scale=2.0))


def test_a_rank_with_a_known_size_beside_a_new_one_stops() -> None:
    done = compiled(net())
    failed: dict[int, str] = {}
    both = threading.Barrier(2)

    def rank(module: RankModule) -> None:
        both.wait()
        try:
            module(rows(6 if module.rank else 4), scale=2.0)
        except CommTimeoutError as error:
            failed[module.rank] = str(error)
            raise

    with pytest.raises(CommTimeoutError):
        on_ranks(done, rank, timeout_s=2.0)
    assert "compiling for inputs of other sizes: args[0] (4, 8)" in failed[0]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own class warns when a TreeSpec is copied
def test_copies_share_what_compiles_and_pickles_go_without() -> None:
    module = compiled(net(), 1).rank_module(0)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.get_parameter("down.bias").add_(1.0)
        expected = module(rows(4), scale=2.0), copied(rows(4), scale=2.0)
    assert expected[0] != expected[1]
    loaded = pickle.loads(pickle.dumps(copied))
    assert loaded(rows(4), scale=2.0) == expected[1]
    with pytest.raises(ValueError, match="compile for that shape"):
        loaded(rows(5), scale=2.0)


def test_a_loaded_model_is_for_its_own_sizes(tmp_path: Any) -> None:
    compiled(net(), 1).save(tmp_path)
    with pytest.raises(ValueError, match=r"expected torch.float64 of shape \(6, 8\), got .*; compile for that shape"):
        st.load_compiled(tmp_path).rank_module(0)(rows(4), scale=2.0)
