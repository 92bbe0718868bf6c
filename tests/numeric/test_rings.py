"""Rings: keys and values travel past the queries of attention. Every strategy is executed, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forced import Step, programs
from torch import nn

from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import Strategy, derive
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.shares import imbalance
from stpart_compiler.passes.strategies import enumerate_strategies


class Attention(nn.Module):
    """Grouped-query self-attention, with or without a mask. x [b, s, h]."""

    def __init__(self, heads: int, kv_heads: int, dim: int, causal: bool, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.sizes = (heads, kv_heads, dim)
        self.causal = causal
        self.q = nn.Linear(8, heads * dim, bias=False)
        self.kv = nn.Linear(8, 2 * kv_heads * dim, bias=False)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = self.sizes
        q = self.q(x).unflatten(-1, (heads, dim)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * kv_heads, dim)).transpose(1, 2).split(kv_heads, dim=1)
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=kv_heads != heads
        )


def _step(
    length: int, heads: int, kv_heads: int, causal: bool, mask: torch.Tensor | None = None, stripes: int = 1
) -> Step:
    torch.manual_seed(0)
    model = Attention(heads, kv_heads, 4, causal, mask).double()
    weight = torch.randn(length, 4, dtype=torch.float64)
    args = (torch.randn(2, length, 8, dtype=torch.float64),)
    return Step(model, args, lambda y: (y * weight).sum(), lambda captured: annotate(captured, stripes=stripes))


def _banded(length: int) -> torch.Tensor:
    """A sliding window of three keys; the first query sees none of the later blocks, the last none of the first."""
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    seen = (columns <= rows) & (columns > rows - 3)
    return torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)


CASES: dict[str, Callable[[], Step]] = {
    "causal": lambda: _step(8, 4, 4, True),
    "all": lambda: _step(8, 4, 4, False),
    "grouped": lambda: _step(9, 4, 2, True),
    "uneven": lambda: _step(7, 2, 1, True),
    "window": lambda: _step(10, 2, 2, False, _banded(10)),
}


def _attention(step: Step) -> list[OpNode]:
    return [op for op in step.graph.ops if "scaled_dot_product" in op.name]


@pytest.fixture(scope="module", params=CASES)
def step(request: pytest.FixtureRequest) -> Step:
    return CASES[request.param]()


@pytest.mark.parametrize("spec", [2, 3, 4, (2, 2)], ids=str)
def test_every_ring_of_attention(step: Step, spec: object) -> None:
    mesh = parse_mesh(spec)
    forward, backward = _attention(step)
    options = {
        op.name: [s for s in enumerate_strategies(op.rule, mesh, op.movable) if s.steps > 1]
        for op in (forward, backward)
    }
    assert all(options.values()), "no ring"
    for i in range(max(map(len, options.values()))):
        step.check(mesh, {name: found[i % len(found)] for name, found in options.items()})


@pytest.mark.parametrize("spec", [2, 3, 4, (2, 2), (2, 3)], ids=str)
def test_every_way_to_cut_stripes(spec: object) -> None:
    """Each rank has every n-th token. Rings leave no rank with more than its share."""
    mesh = parse_mesh(spec)
    step = _step(3 * mesh.world_size, 4, 2, True, stripes=mesh.world_size)
    forward, backward = _attention(step)
    assert forward.rule.factors[max(forward.rule.loops)].size == mesh.world_size, "keys go round in stripes"
    options = {op.name: enumerate_strategies(op.rule, mesh, op.movable) for op in (forward, backward)}
    if len(mesh.axes) > 1:  # of the others there are many
        options = {name: tuple(s for s in found if s.steps > 1) for name, found in options.items()}
    for i in range(max(map(len, options.values()))):
        step.check(mesh, {name: found[i % len(found)] for name, found in options.items()})
    for op in (forward, backward):
        rings = [s for s in options[op.name] if s.steps > 1]
        assert rings and all(imbalance(op, ring, mesh) == 1 for ring in rings)


@pytest.mark.parametrize(("ranks", "length"), [(3, 6), (4, 8), (4, 7), (4, 5)], ids=str)
def test_masked_blocks_are_not_sent(ranks: int, length: int) -> None:
    """In pieces a block goes to the ranks behind the one that has it, and nowhere else.

    Length 5 leaves the last of four ranks without any. Of one that all pieces divide the price knows each byte.
    """
    mesh, step = parse_mesh(ranks), _step(length, 2, 2, True)
    costs, pieces = Costs(load_cluster(None), mesh), min(ranks, -(-length // -(-length // ranks)))
    forward, backward = _attention(step)
    chosen = {op.name: _ring_of(op, mesh, query) for query, op in enumerate((forward, backward))}
    step.check(mesh, chosen)
    pairs = programs(step, mesh, chosen)[1]
    met = pieces * (pieces - 1) // 2  # pairs of a block and a rank behind it
    for op, phase, messages in (
        (forward, 0, 2 * met),
        (backward, 1, 4 * met + 2),
    ):  # the last block starts one rank further on
        loops = [[i for i in pair[phase].body if i.origin.note == "temporal"] for pair in pairs]
        assert sum(len(instr.sends) for body in loops for instr in body) == messages
        sent = max(sum(value.nbytes for instr in body for value, _ in instr.sends) for body in loops)
        priced = costs.op(op, chosen[op.name], derive(op.rule, chosen[op.name], mesh))[1]
        assert priced == sent if length % ranks == 0 else priced >= sent


def _ring_of(op: OpNode, mesh: Mesh, query: int) -> Strategy:
    """Queries are cut, and keys and values go round. `query`: position of the queries among the operands."""
    (queries,), (keys,) = op.rule.inputs[query][2], op.rule.inputs[query + 1][2]
    found = enumerate_strategies(op.rule, mesh, op.movable)
    return next(s for s in found if s.time_factor == keys and s.digits[queries])
