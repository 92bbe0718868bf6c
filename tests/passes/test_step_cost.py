"""Overlap conditions of a plan's loops: METP's own, and where they hold the simulated loop waits for nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import sympy as sp
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.cost_models.timeline import WAIT
from stpart_compiler.ir.overlap import B, F, LoopOverlap
from stpart_compiler.ir.program import Origin

RATE = 1e9  # FLOP/s
CLUSTER = st.Cluster(
    "products only", Device("d", "cpu", (("bfloat16", RATE),), 2**34, 1e18), ((None, Link(0.0, RATE / 100)),)
)
b, s, p, g = sp.symbols("b s p g", positive=True)
EXPECTED = {
    ("attention", False): s / p,
    ("attention", True): s / p * sp.Rational(5, 4),
    ("mlp", False): b * s / p,
    ("mlp", True): b * s / p * sp.Rational(5, 4),
}


class Attention(nn.Module):
    def __init__(self, causal: bool, kv_heads: int) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.kv = nn.Linear(32, 32, bias=False), nn.Linear(32, 2 * kv_heads * 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, dim=1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class Projected(nn.Module):
    """Attention with its projections: one region, whose ring is inside of a loop over groups of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, causal: bool, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(causal, kv_heads) if kv_heads else Projected()
        self.mlp = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, causal: bool, kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList([Layer(causal, kv_heads)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@cache
def compiled(causal: bool = False, kv_heads: int = 4) -> st.CompiledModel:
    with torch.device("meta"):
        model, tokens = Model(causal, kv_heads).to(torch.bfloat16), torch.zeros(2, 64, dtype=torch.long)
    return st.compile_model(model, (tokens,), mesh=4, cluster=CLUSTER, template="metp")


def loops(model: st.CompiledModel, plan: st.Plan | None = None) -> dict[tuple[str, bool], LoopOverlap]:
    """Those of one of the layers: the ring of attention, and that of weights in the MLP; of two rings the last."""
    found = [
        loop
        for part in ("attention", "mlp")
        for loop in (plan or model.plan).overlap_condition(f"layers.3.{part}").loops
        if part == "mlp" or "b*" in loop.cost.nbytes
    ]
    return {(loop.module_path.split(".")[-1], loop.is_backward): loop for loop in found}


def test_the_conditions_are_those_of_metp() -> None:
    found = loops(compiled())
    assert found.keys() == EXPECTED.keys()
    for key, loop in found.items():
        assert sp.simplify(loop.condition.lhs - EXPECTED[key]) == 0, loop
        assert loop.condition.rhs == F / B
        assert {name: loop.cost.values[name] for name in ("s", "p", "e", "B")} == {
            "s": 64,
            "p": 4,
            "e": 2,
            "B": RATE / 100,
        }
        assert loop.cost.values["F"] == pytest.approx(RATE)
        assert not loop.holds  # F/B is 100, and bs/p is 32
        assert "does not hold" in str(loop)
    other = loops(compiled(causal=True, kv_heads=2))  # half of the scores count; two query heads per head of keys
    for backward in (False, True):
        own = found["attention", backward].condition.lhs
        assert sp.simplify(other["attention", backward].condition.lhs - g / 2 * own) == 0
    assert loops(compiled(), st.Plan.from_json(compiled().plan.to_json())) == found


def test_a_ring_inside_of_a_region_has_the_condition_of_a_ring() -> None:
    found = loops(compiled(kv_heads=0))
    assert found.keys() == EXPECTED.keys()
    for key, loop in found.items():
        assert sp.simplify(loop.condition.lhs - EXPECTED[key]) == 0, loop


@pytest.mark.parametrize("kv_heads", [4, 0], ids=["rings", "nested"])
@pytest.mark.parametrize("key", EXPECTED, ids=str)
def test_the_threshold_is_where_the_simulated_loop_begins_to_wait(key: tuple[str, bool], kv_heads: int) -> None:
    model = compiled(kv_heads=kv_heads)
    loop = loops(model)[key]
    rings = model.plan.overlap_condition("layers.0").loops  # backward of a region makes forward's ring again
    threshold = RATE / min(other.cost.sides[0] for other in rings if other.op == loop.op)  # bytes/s

    def is_in(loop: LoopOverlap, origin: Origin) -> bool:
        """In its first step a loop shares the link with what was fetched before it."""
        return origin.node == loop.op and origin.note == "temporal" and (origin.step or 0) > 0

    def waits(bandwidth: float) -> float:
        found = model.simulate(replace(CLUSTER, levels=((None, Link(0.0, bandwidth)),)))
        return max(
            sum(x.seconds for x in rank.intervals if x.kind == WAIT and is_in(loop, x.instr.origin))
            for rank in found.timeline
        )

    assert waits(1.02 * threshold) == pytest.approx(0, abs=1e-12)
    assert waits(0.95 * threshold) > 1e-6


def test_a_module_without_loops_is_named() -> None:
    with pytest.raises(
        KeyError, match=r"no temporal loop moves anything in module 'norm'; those that have one: layers.0"
    ):
        compiled().plan.overlap_condition("norm")
