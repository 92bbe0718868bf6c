"""Loss scaling: an overflow in one rank's block makes every rank leave out the step, as one device would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.threads import run_ranks

STEPS = 4


def training(model: nn.Module, scaler: torch.amp.GradScaler, x: torch.Tensor, first: bool) -> list[float]:
    """Scales and losses. In the second step one gradient overflows, at the first place of the first weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(x)
        scaler.scale(loss).backward()
        grad = next(iter(model.parameters())).grad
        assert grad is not None
        if step == 1 and first:
            grad.view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), float(loss.detach())]
    return seen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()).square().mean()


@pytest.mark.parametrize("template", ["zero3", "megatron"])
def test_ranks_agree_with_one_device(template: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 8)
    compiled = st.compile_model(model, (x,), mesh=2, template=template)
    options = {"device": "cpu", "init_scale": 4.0, "growth_interval": 100}

    def rank(rank: int, engine: Engine) -> list[float]:
        return training(compiled.rank_module(rank, engine), st.GradScaler(**options), x, first=rank == 0)

    found = run_ranks(2, rank)
    expected = training(model, torch.amp.GradScaler(**options), x, first=True)
    assert expected[0::2] == [4.0, 2.0, 2.0, 2.0]
    assert expected[3] == expected[5] != expected[7]  # the step was left out
    for seen in found:
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=0)


def test_parameters_of_no_rank_module_are_refused() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = st.GradScaler(device="cpu")
    scaler.scale(layer(torch.randn(2, 2)).sum()).backward()
    with pytest.raises(ValueError, match="belong to no rank module"):
        scaler.step(optimizer)
