"""Sequences in stripes: exact whatever else touches the sequence, priced by the busiest rank, shown in the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lockstep_step import lockstep_step
from slow_ranks import CLUSTER, SOLVER
from torch import Tensor, nn
from torch.nn import functional as F

import stpart_compiler as st
from stpart_compiler.ir.plan import Plan, PlanRow


class Decoder(nn.Module):
    """Causal attention between all that a model may do along its sequence. tokens [b, s] -> a loss."""

    def __init__(self, windows: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Parameter(torch.randn(40, 16))
        self.start = nn.Parameter(torch.randn(1, 1, 16))
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.mix = nn.Conv1d(16, 16, 3, groups=16) if windows else None
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places[:length]
        x = x + torch.cat([self.start.expand(len(x), -1, -1), x[:, :-1]], 1)  # and the token before
        q = self.rotated(self.q(x).unflatten(-1, (4, 4))).transpose(1, 2)
        k, v = self.rotated(self.kv(x).unflatten(-1, (4, 4))).transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        if self.mix is not None:
            x = x + self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        x = x + x.cumsum(1) / torch.arange(1, length + 1, dtype=x.dtype)[:, None] + x.flip(1) * x.mean(1, keepdim=True)
        logits = self.head(x)[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        weights = torch.linspace(0.5, 1.5, length - 1, dtype=losses.dtype)
        return (losses.view(len(tokens), -1) * weights).mean() + x[:, -1].square().mean()

    @staticmethod
    def rotated(x: Tensor) -> Tensor:
        """x [b, s, heads, d], each pair of features turned by its place."""
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0], dtype=x.dtype)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def decoder(windows: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(windows).double()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(length))


def compiled(x: Tensor, mesh: Any, windows: bool = False, **options: Any) -> st.CompiledModel:
    return st.compile_model(decoder(windows), (x,), mesh=mesh, cluster=CLUSTER, solver=SOLVER, **options)


def assert_exact(done: st.CompiledModel, x: Tensor, windows: bool = False) -> None:
    model = decoder(windows)
    loss = model(x)
    loss.backward()
    result = lockstep_step(done, (x,), {})
    assert abs(result.loss - loss.detach()) <= 1e-10 * abs(loss.detach())
    for name, param in model.named_parameters():
        assert (result.grads[name] - param.grad).norm() <= 1e-9 * param.grad.norm(), name


def attention(plan: Plan) -> list[PlanRow]:
    return [row for row in plan.rows if row.busiest is not None]


def cuts(row: PlanRow) -> list[str]:
    return [cut.split("=")[0] for cut in row.strategy.split(", ")]


@pytest.mark.parametrize(("mesh", "batch"), [(2, 1), (3, 2), (4, 2), (4, 1), (8, 2), ((2, 2), 2), ((2, 4), 2)], ids=str)
@pytest.mark.parametrize("template", ["cp_zero3", None])
def test_what_touches_the_sequence_stays_exact(mesh: Any, batch: int, template: str | None) -> None:
    x = tokens(batch, 24)
    done = compiled(x, mesh, template=template)
    assert done.plan.stripes == done.world_size
    if template is not None:
        assert all({"q1", "s1"} <= set(cuts(row)) and row.busiest == 1 for row in attention(done.plan))
    assert_exact(done, x)


@pytest.mark.parametrize("template", ["cp_zero3", None])
def test_windows_over_the_sequence(template: str | None) -> None:
    x = tokens(2, 12)
    assert_exact(compiled(x, 2, windows=True, template=template), x, windows=True)
