"""Sequences in stripes: exact whatever else touches the sequence, priced by the busiest rank, shown in the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lockstep_step import lockstep_step
from once import traced_once
from slow_ranks import CLUSTER, SOLVER
from torch import Tensor, nn
from torch.nn import functional as F

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.cost_models.compute import causal_share
from stpart_compiler.cost_models.timeline import COMPUTE
from stpart_compiler.inspect.table import plan_table
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
    with traced_once(("decoder", windows, tuple(x.shape))):
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


@pytest.mark.parametrize(("mesh", "batch"), [(3, 2), ((4,), 1), ((8,), 2), ((2, 2), 2)], ids=str)
@pytest.mark.parametrize("template", ["cp_zero3", None])
def test_what_touches_the_sequence_stays_exact(mesh: Any, batch: int, template: str | None) -> None:
    x = tokens(batch, 24)
    done = compiled(x, mesh, template=template)
    if batch > 1:
        assert done.plan.stripes == done.world_size
    if template is not None:
        assert all({"q1", "s1"} <= set(cuts(row)) and row.busiest == 1 for row in attention(done.plan))
    assert_exact(done, x)


def test_windows_over_the_sequence() -> None:
    x = tokens(2, 12)
    done = compiled(x, 2, windows=True, template="cp_zero3")
    assert all(row.moved_bytes for row in attention(done.plan)), "keys go round"
    assert_exact(done, x, windows=True)


def test_a_plan_goes_over_to_other_lengths() -> None:
    """To those that the ranks divide, and to those that they do not: what cuts stripes cuts pieces there."""
    plan = compiled(tokens(2, 16), 4, template="cp_zero3").plan
    for length, stripes, uneven in ((24, 4, []), (13, 1, [13]), (16, 1, [])):
        x = tokens(2, length)
        fitted = compiled(x, 4, plan=plan)
        assert (fitted.plan.stripes, fitted.plan.uneven) == (stripes, uneven)
        assert all(row.moved_bytes for row in attention(fitted.plan)), "keys go round"
        assert_exact(fitted, x)
        plan = Plan.from_json(fitted.plan.to_json())


class Heads(nn.Module):
    """Attention alone, from tokens: [b, s] -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3 * 4 * 16)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.table(tokens).unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


PRODUCTS = st.Cluster("products only", Device("d", "cpu", (("float32", 1e9),), 2**40, 1e18), ((None, Link(0.0, 1e12)),))


def planned(length: int, ranks: int, template: str | None = "cp_zero3") -> st.CompiledModel:
    with torch.device("meta"):
        model, x = Heads(), torch.zeros(2, length, dtype=torch.long)
    return st.compile_model(model, (x,), mesh=(ranks,), cluster=PRODUCTS, template=template)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_price_is_that_of_the_busiest_rank(ranks: int) -> None:
    """In pieces the last rank computes all of nearly every block, in stripes each rank about half of every block."""
    length = 1024 * ranks
    whole, half = 1.0, causal_share(1024)
    busiest = {True: ranks * half, False: (ranks - 1) * whole + half}
    for even in (True, False):
        done = planned(length if even else length - 1, ranks)
        assert done.plan.stripes == (ranks if even else 1)
        rows = attention(done.plan)
        assert len(rows) == 2
        for row, products in zip(rows, (2, 5), strict=True):
            flops = products * 2 * 2 * 4 * 1024 * 1024 * 16
            assert row.seconds == pytest.approx(busiest[even] * flops / 1e9, rel=1e-3)
            computed = [
                sum(x.seconds for x in rank.intervals if x.kind == COMPUTE and x.instr.origin.node == row.name)
                for rank in done.simulate().timeline
            ]
            assert max(computed) == pytest.approx(row.seconds, rel=2e-3)
            assert row.busiest == pytest.approx(max(computed) * ranks / sum(computed), rel=2e-3)
            text = f"busiest rank {row.busiest:.2f}x the mean"
            assert text in plan_table(done.plan, width=300)
            assert text.replace("rank", "rank computes") in done.plan.explain(row.name)
        notes = [line.strip() for line in done.plan.summary().splitlines() if "causal" in line or "pieces" in line]
        uneven = f"sequences cut in pieces, not in stripes, as {ranks} ranks do not divide them: {length - 1}"
        assert notes[1:] == ([] if even else [uneven]) and len(notes) == (0 if even else 2)


def test_the_solver_takes_stripes() -> None:
    """More ranks than heads: the sequence has to be cut."""
    done = planned(4096, 8, None)
    assert all({"q1", "s1"} <= set(cuts(row)) and row.busiest == 1 for row in attention(done.plan))
    assert (
        done.plan.seconds
        <= done.plan.yardsticks["cp_zero3"]
        < min(seconds for name, seconds in done.plan.yardsticks.items() if name != "cp_zero3")
    )
