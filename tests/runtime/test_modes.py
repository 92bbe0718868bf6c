"""A rank module runs in the modes it was compiled in, and says so where it was put in others."""

from __future__ import annotations

import pytest
import torch
from slow_ranks import SOLVER
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.runtime.rank_module import RankModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x)).square().sum()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module, *, training: bool = True) -> RankModule:
    return st.compile_model(model, (X,), mesh=1, training=training, solver=SOLVER).rank_module(0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_compile_time_is_shown_and_kept(mode: bool, training: bool) -> None:
    module = compiled(Net().train(mode), training=training)
    now, other = ("train", "eval") if mode else ("eval", "train")
    assert all(part.training == mode for part in module.modules())
    module.train(not mode)
    message = f"compiled with the model in {now} mode, but called in {other} mode.*call .{now}\\(\\) to go on, or"
    with pytest.raises(ValueError, match=message):
        module(X)
    module.train(mode)
    module(X)


def test_modules_in_modes_of_their_own() -> None:
    model = Net()
    model.norm.eval()
    module = compiled(model)
    assert {name for name, part in module.named_modules() if not part.training} == {"norm"}
    module(X)
    module.train()
    with pytest.raises(ValueError, match=r"with module 'norm' in eval mode, but called in train mode"):
        module(X)
    module.get_submodule("norm").eval()
    module.get_submodule("block.1").eval()
    with pytest.raises(ValueError, match=r"with module 'block.1' in train mode, but called in eval mode"):
        module(X)
