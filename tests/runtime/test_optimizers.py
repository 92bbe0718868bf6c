"""Optimizers that need whole tensors are refused where a parameter is cut, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_ranks import SOLVER
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.threads import run_ranks

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def adafactor(params: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params)


class Mine(torch.optim.Adafactor):
    pass


class LBFGS(torch.optim.SGD):
    """A user's own, which may be right."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


@pytest.fixture(scope="module", params=["zero3", "data"])
def compiled(request: pytest.FixtureRequest) -> tuple[st.CompiledModel, bool]:
    template: str = request.param
    done = st.compile_model(net(), (X,), mesh=2, template=template, loss_fn=torch.sum, solver=SOLVER)
    return done, template == "zero3"


def stepped(done: st.CompiledModel, make: Callable[[Any], torch.optim.Optimizer]) -> list[list[Tensor]]:
    def rank(index: int, engine: Engine) -> list[Tensor]:
        module: RankModule = done.rank_module(index, engine)
        optimizer = make(module.parameters())

        def loss() -> Any:
            optimizer.zero_grad()
            value = module(X)
            value.backward()
            return value

        if make is not torch.optim.LBFGS:
            loss()
        optimizer.step(loss if make is torch.optim.LBFGS else None)
        return [param.detach() for param in module.parameters()]

    return run_ranks(done.world_size, rank, timeout_s=30)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, adafactor, Mine])
def test_whole_tensors_or_none(compiled: tuple[st.CompiledModel, bool], make: Any) -> None:
    done, cut = compiled
    if cut:
        message = r"(Adafactor|LBFGS|Muon|Mine) (keeps|takes|orth).*parameter '0.weight' is cut over ranks.*AdamW"
        with pytest.raises(ValueError, match=message):
            stepped(done, make)
    else:
        first, second = stepped(done, make)
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD",
                                  "Rprop", "Adadelta"])  # fmt: skip
def test_elementwise_ones_are_right_on_blocks(name: str) -> None:
    """The optimizer on both halves of a parameter does what it does on the whole."""
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    grads = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def trained(part: slice) -> Tensor:
        param = nn.Parameter(whole[part].clone())
        optimizer = getattr(torch.optim, name)([param], lr=0.1)
        for grad in grads:
            param.grad = grad[part].clone()
            optimizer.step()
        return param.detach()

    torch.testing.assert_close(torch.cat([trained(slice(0, 3)), trained(slice(3, 6))]), trained(slice(0, 6)))


def test_unknown_ones_pass(compiled: tuple[st.CompiledModel, bool]) -> None:
    stepped(compiled[0], lambda params: LBFGS(params, lr=0.1))


def test_other_modules_are_left_alone() -> None:
    model = net()
    model(X).sum().backward()
    torch.optim.Adafactor(model.parameters()).step()


def test_gradients_written_by_what_may_not_know_of_blocks_are_warned_of(
    compiled: tuple[st.CompiledModel, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, cut = compiled
    given: list[str] = []
    monkeypatch.setattr("warnings.warn", lambda message, **options: given.append(message))

    def train(clip: Callable[..., object]) -> None:
        def rank(index: int, engine: Engine) -> None:
            module = done.rank_module(index, engine)
            optimizer, scaler = torch.optim.SGD(module.parameters()), st.GradScaler("cpu", init_scale=2.0)
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(2):
                    scaler.scale(module(X)).backward()
                scaler.unscale_(optimizer)
                clip(module.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()

        run_ranks(2, rank, timeout_s=20)

    train(st.clip_grad_norm_)
    assert not given
    train(nn.utils.clip_grad_norm_)
    assert len(given) == (2 if cut else 0), "once for each rank's module"
    assert all("SGD.step: the gradient of '0.weight'" in message for message in given)
