"""Formulas of ops: with the sizes put in they give the numbers that plans were made with; known ones come out."""

from __future__ import annotations

import dataclasses
import math
import random
from functools import lru_cache
from typing import Any

import pytest
import sympy as sp
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.cost_models.traced import Symbols, Traced, expression
from stpart_compiler.graphs import annotate, fuse
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.ir.plan import Plan, PlanRow
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.formula import OpFormulas
from stpart_compiler.passes.make_plan import MakePlan
from stpart_compiler.passes.order import is_heavy
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.space import BuildSpace
from stpart_compiler.presets import PRESETS, causal_lm

QUICK = SolverOptions(time_limit_s=3.0, patience_s=0.3, yardsticks=False)
LAYERS = {"llama-tiny": "num_hidden_layers", "gpt2-tiny": "n_layer"}


@lru_cache(maxsize=4)
def graph_of(name: str) -> Annotated:
    preset = PRESETS[name]
    model = causal_lm(dataclasses.replace(preset, config={**preset.config, LAYERS[name]: 1}), "meta")
    ids = torch.zeros(4, 24, dtype=torch.long, device="meta")
    return annotate(capture(model, (), {"input_ids": ids, "labels": ids}))


def planned(name: str, template: str | None, mesh: Any) -> Plan:
    graph = graph_of(name)
    if template == "metp":
        fused = fuse(graph, "all")
        assert fused is not None
        graph = fused
    costs = Costs(load_cluster("v100-32gb-8x4"), parse_mesh(mesh))
    plan = MakePlan(costs, QUICK, 10**12, template).apply(graph)
    plan.formulas = OpFormulas(graph, costs, plan.strategies, frozenset(plan.recompute))
    return plan


def different(rows: list[PlanRow]) -> list[PlanRow]:
    """One of each kind of row: the others cost the same for the same reason."""
    return list({(row.op, row.strategy, *row.inputs, *row.outputs): row for row in rows}.values())


@pytest.mark.parametrize(
    ("name", "template", "mesh"),
    [
        ("llama-tiny", "primepar", (2, 2)),
        ("llama-tiny", "metp", 2),
        ("gpt2-tiny", "megatron", (2, 4)),
        ("gpt2-tiny", None, 3),
    ],
)
def test_formulas_give_the_numbers_of_the_plan(name: str, template: str | None, mesh: Any) -> None:
    plan = planned(name, template, mesh)
    for row in different(plan.rows):
        values = plan.symbols(row.name)
        found = {q: plan.formula(row.name, q).subs(values) for q in ("bytes_moved", "memory", "seconds")}
        assert found["bytes_moved"] == row.moved_bytes, row
        assert found["memory"] == row.memory, row
        assert float(found["seconds"]) == pytest.approx(row.seconds, rel=1e-12), row
    if template == "megatron":  # heads and their size are one dim to the projection
        b, s, h, e, p_r = sp.symbols("b s h e p_r", positive=True)
        product = next(row for row in plan.rows if row.module_path.endswith("attn.c_proj") and row.op.startswith("mm"))
        assert plan.formula(product.name, "memory") == b * s * h * e / p_r
        assert plan.formula(product.name, "compute").free_symbols >= {b, s, h}
    if template == "metp":  # keys and values go round inside of a loop over heads
        b, s, p = sp.symbols("b s p", positive=True)
        loops = [row for row in plan.rows if any(cut.endswith("=t") for cut in row.strategy.split(", "))]
        inside = [plan.formula(row.name, "bytes_moved") for row in loops]
        assert inside and all(moved.subs(p, 1) == 0 and moved.free_symbols >= {b, s, p} for moved in inside)
    if template in ("primepar", "metp"):
        assert any(row.moved_bytes for row in plan.rows)


def test_formulas_give_the_prices_of_the_space() -> None:
    """For strategies drawn from all that the solver chooses among, of products and attention."""
    graph, mesh = graph_of("llama-tiny"), parse_mesh((2, 2))
    costs = Costs(load_cluster("pcie-l40s-8"), mesh)
    draw = random.Random(0)
    heavy = [choices for choices in BuildSpace(costs).apply(graph).choices if is_heavy(choices.op)]
    for choices in heavy[:12]:
        for s in draw.sample(range(len(choices.strategies)), min(2, len(choices.strategies))):
            formulas = OpFormulas(graph, costs, {choices.op.name: choices.strategies[s]}, frozenset())
            values = formulas.symbols(choices.op.name)
            moved, seconds = (formulas.formula(choices.op.name, q).subs(values) for q in ("bytes_moved", "seconds"))
            assert moved == choices.moved[s] and float(seconds) == pytest.approx(choices.seconds[s], rel=1e-12)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 12)
        self.up = nn.Linear(12, 20, bias=False)
        self.down = nn.Linear(20, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.table(ids)))).square().mean()


def test_the_products_of_a_plan_in_named_symbols() -> None:
    compiled = st.compile_model(
        Mlp(), (torch.zeros(4, 6, dtype=torch.long),), mesh=2, template="ring", cluster="h100-80gb-8"
    )
    plan = compiled.plan
    b, s, h, k, p, e = sp.symbols("b s h n_k p e", positive=True)
    assert plan.formula("mm", "compute") == 2 * b * s * h * k / p
    assert plan.formula("mm", "bytes_moved") == (p - 1) * e * h * k / p
    assert plan.symbols("mm").items() >= {b: 4, s: 6, h: 12, k: 20, p: 2, e: 4}.items()
    total = sum(row.count * plan.formula(row.name, "compute").subs(plan.symbols(row.name)) for row in plan.rows)
    assert total == 6 * 2 * (4 * 6) * 12 * 20 // 2, "two products forward, four backward"
    with pytest.raises(ValueError, match=r"formula: module 'up' has several ops: name one of t, view"):
        plan.formula("up", "compute")
    with pytest.raises(ValueError, match=r"formula: 'weight' is unknown; expected one of compute, bytes_moved, memory"):
        plan.formula("mm", "weight")
    with pytest.raises(KeyError, match=r"formula: no op or module 'side'"):
        plan.formula("side", "compute")
    with pytest.raises(ValueError, match=r"formula: a plan that was read from a file does not know its ops"):
        Plan.from_json(plan.to_json()).formula("mm", "compute")


def test_traced_numbers() -> None:
    symbols = Symbols()
    n, q, again, other = (symbols.named(*at) for at in (("n", 7), ("q", 3), ("n", 7), ("n", 8)))
    assert (n.expr, again.expr, other.expr) == (n.expr, n.expr, sp.Symbol("n2", positive=True))
    uneven, even = -(-n // q), -(-other // 4)
    assert (uneven.value, uneven.expr) == (3, sp.ceiling(n.expr / q.expr))
    assert (even.value, even.expr) == (2, other.expr / 4)
    made = 1.5 * math.prod([2, n, q]) + max(n, other) / 4 - sum([q, q]) + (10 - n) + 12 / q
    assert made.value == 1.5 * 42 + 2.0 - 6 + 3 + 4.0
    assert sp.simplify(made.expr - (3 * n.expr * q.expr + other.expr / 4 - 2 * q.expr + 10 - n.expr + 12 / q.expr)) == 0
    assert made.expr.subs({n.expr: 7, other.expr: 8, q.expr: 3}) == 66 == made.value
    assert min(n, 7.5) is n and n > q and n == 7 and bool(n - 7) is False and math.log(n) == math.log(7)
    assert expression(1.5) == sp.Rational(3, 2) and expression(math.pi) == sp.Float(math.pi)
    assert isinstance(2 // q, Traced)
