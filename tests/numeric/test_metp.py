"""Template `metp`: attention by groups of heads, a ring of keys and values inside; scores in blocks of 1/p^3."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from slow_ranks import CLUSTER
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.cost_models.liveness import alive_bytes, alive_tensors
from stpart_compiler.graphs import annotate, fuse
from stpart_compiler.ir.layout import form, gather, shard
from stpart_compiler.ir.program import Instr
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.problem import BuildProblem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.space import BuildSpace, Space
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.threads import run_ranks

BATCH, HEADS, LENGTH, DIM, RANKS = 2, 4, 16, 3, 2


class Model(nn.Module):
    """Embedding and one attention with its projections, written out or fused."""

    def __init__(self, written: bool, heads: int = HEADS, pairs: int = HEADS) -> None:
        super().__init__()
        self.written, self.grouped = written, heads != pairs
        self.embedding, self.norm = nn.Embedding(7, 12), nn.LayerNorm(12)
        self.q, self.k, self.v = (nn.Linear(12, count * DIM, bias=False) for count in (heads, pairs, pairs))
        self.out = nn.Linear(heads * DIM, 12, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.written:
            y = torch.softmax(q @ k.transpose(-2, -1) / DIM**0.5, dim=-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return (x + self.out(y.transpose(1, 2).flatten(2))).square().mean()


def attention(compiled: st.CompiledModel, rank: int) -> Iterator[Instr]:
    """Instructions of the attention region, forward and backward, its weights' gathering left out."""
    regions = {row.name for row in compiled.plan.rows if row.op.startswith("fused")}
    for program in compiled.artifacts[rank].programs:
        yield from (instr for instr in program.body if instr.origin.node in regions and instr.origin.note == "temporal")


def called(instr: Instr) -> str:
    """Name of the op or function that an instruction calls."""
    return getattr(instr.target, "__name__", str(instr.target)).split(".")[0]


@pytest.mark.parametrize("written", [True, False], ids=["written", "fused"])
def test_attention_of_metp(written: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Model(written).double(), torch.randint(0, 7, (BATCH, LENGTH))
    compiled = st.compile_model(model, (tokens,), mesh=RANKS, template="metp", cluster=CLUSTER)
    loss = model(tokens)
    loss.backward()
    found = compiled.run_in_process(tokens)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-10, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.grads[name], param.grad, rtol=1e-9, atol=1e-12)
    assert max(found.peak_bytes) == pytest.approx(compiled.simulate().peak_bytes, rel=0.01)
    norms = [row for row in compiled.plan.rows if row.op.startswith("native_layer_norm.")]
    (norm,) = (row.name for row in norms if not row.is_backward)
    assert norm in compiled.plan.recompute
    kept = [value.name for value in compiled.artifacts[0].forward.outputs if value is not None]
    assert not [name for name in kept if name.startswith(norm)]
    with torch.no_grad():
        model.q.weight.mul_(1e5)
    extreme = compiled.run_in_process(tokens)  # parameters come from the model
    torch.testing.assert_close(extreme.loss, model(tokens).detach(), rtol=1e-9, atol=0)
    assert all(bool(grad.isfinite().all()) for grad in extreme.grads.values())

    for rank in range(RANKS):
        inside = list(attention(compiled, rank))
        assert any(instr.kind == "exchange" for instr in inside)
        assert not any(instr.kind == "collective" for instr in inside)
        scores = [v for instr in inside if "exp_minus" in str(instr.target) for v in instr.outs if v is not None]
        made = [Counter(called(instr) for instr in program.body) for program in compiled.artifacts[rank].programs]
        if written:  # backward knows each row's logsumexp: of every block the scores again, and four gradients
            assert [found["bmm"] / found["exp_minus"] for found in made] == [2, 5]
            assert made[0]["logsumexp"] and not made[1]["logsumexp"]
            assert made[0]["merge_written"] and not made[1]["merge_written"]
        assert bool(scores) == written
        assert {v.nbytes for v in scores} <= {8 * BATCH * HEADS * LENGTH**2 // RANKS**3}


@pytest.mark.parametrize(("ranks", "heads", "pairs"), [(2, 4, 4), (3, 4, 4), (4, 6, 6), (4, 8, 4)])
def test_weights_are_never_whole(ranks: int, heads: int, pairs: int) -> None:
    """A group's slices of the weights come and its gradients go, of groups of all sizes; sums of gradients add up."""
    torch.manual_seed(0)
    model, tokens = Model(False, heads, pairs).double(), torch.randint(0, 7, (BATCH, 28))  # no rank has 12, 18 or 24
    compiled = st.compile_model(model, (tokens,), mesh=ranks, template="metp", cluster=CLUSTER)
    weights = {f"p_{name}_weight": tuple(getattr(model, name).weight.shape) for name in ("q", "k", "v", "out")}
    wholes = {tuple(order(shape)) for shape in weights.values() for order in (iter, reversed)}
    for program in (program for artifact in compiled.artifacts for program in artifact.programs):
        made = [(instr.origin.node, value) for instr in program.body for value in instr.outs if value is not None]
        assert not [value.name for _, value in made if value.shape in wholes]
        for name, shape in weights.items():
            assert 0 < max(value.numel for node, value in made if node == name) <= math.prod(shape) // 2

    model(tokens).backward()

    def twice(rank: int, engine: Engine) -> list[torch.Tensor | None]:
        module = compiled.rank_module(rank, engine)
        module(tokens).backward()
        once = [param.grad.clone() for _, param in module.param_slots() if param.grad is not None]
        module.zero_grad()
        with module.no_sync():
            module(tokens).backward()
        module(tokens).backward()
        grads = [param.grad for _, param in module.param_slots()]
        for one, both in zip(once, grads, strict=True):
            torch.testing.assert_close(both, 2 * one, rtol=1e-9, atol=1e-12)
        return once

    found = run_ranks(ranks, twice)
    for slot, blocks in zip(compiled.interface.params, zip(*found, strict=True), strict=True):
        whole = gather(list(blocks), slot.layout, compiled.plan.mesh)
        torch.testing.assert_close(whole, model.get_parameter(slot.name).grad, rtol=1e-9, atol=1e-12)


def test_estimates_know_what_comes_in_slices() -> None:
    """Of weights along their heads, which come whole, and beside them: estimated and exact peak, and price."""
    with torch.device("meta"):
        model, tokens = Model(False, 64, 64), torch.zeros(1, 32, dtype=torch.long)
    graph = fuse(annotate(capture(model, (tokens,)), stripes=4), "all")
    assert graph is not None
    beside = st.compile_model(model, (tokens,), mesh=4, template="metp", cluster=CLUSTER).plan
    moved = {f"{name}.weight": int(name == "out") for name in ("q", "k", "v", "out")}
    cuts = {name: shard(beside.params[name].shape, {dim: (form(4, d=1),)}) for name, dim in moved.items()}
    problem = BuildProblem(SolverOptions()).apply(BuildSpace(Costs(load_cluster(CLUSTER), beside.mesh)).apply(graph))
    estimates, peaks, seconds = [], [], []
    for plan in (beside, replace(beside, params={**beside.params, **cuts})):
        made = st.compile_model(model, (tokens,), mesh=4, plan=plan, cluster=CLUSTER)
        choice = chosen(problem.space, plan)
        estimates.append(memory_bytes(problem, choice))
        peaks.append(made.plan.memory["peak"])
        seconds.append((evaluate(problem, choice), made.simulate().seconds))
    assert peaks[0] <= estimates[0] < 1.2 * peaks[0]
    assert peaks[1] <= estimates[1]
    assert peaks[0] < 0.8 * peaks[1]
    assert seconds[0][0] > seconds[1][0]  # more messages
    assert all(priced == pytest.approx(simulated, rel=0.1) for priced, simulated in seconds)


def chosen(space: Space, plan: st.Plan) -> dict[int, int]:
    """The plan as an assignment of the space."""
    found = {
        klass: own.strategies.index(plan.strategies[own.op.name])
        for klass, own in enumerate(space.choices)
        if own.root == klass
    }
    return found | {-1 - i: own.layouts.index(plan.params[own.names[0]]) for i, own in enumerate(space.params)}


def test_alive_tensors_are_those_whose_bytes_are_counted() -> None:
    compiled = st.compile_model(Model(False), (torch.zeros(1, 8, dtype=torch.long),), mesh=RANKS, template="megatron")
    for program in compiled.artifacts[0].programs:
        found = alive_tensors(program, range(-1, len(program.body)))
        assert [sum(x.nbytes for x in alive) for alive in found] == alive_bytes(program)
