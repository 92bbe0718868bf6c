"""Regions cost what their ops do, and hide what these can: prices by hand, and beside simulations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from mlp_head import HIDDEN, TOKENS, VOCABULARY, WIDTH, mlp_and_head
from slow_ranks import CLUSTER, SOLVER
from transformers import LlamaConfig, LlamaForCausalLM

from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import Cluster, Device, Link
from stpart_compiler.cost_models.resting import phases_of
from stpart_compiler.cost_models.simulate import simulate
from stpart_compiler.graphs import Graphs, annotate, fuse
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.build_programs import BuildPrograms
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import MakePlan
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.space import BuildSpace


def test_a_region_costs_its_products() -> None:
    """On one rank, whatever its blocks: forward's, and in backward the middle's again and two gradients of each."""
    fused = fuse(mlp_and_head())
    assert fused is not None
    device = Device("counts products", "cpu", (("float32", 1.0),), 2**34, 1e30)
    space = BuildSpace(Costs(Cluster("one", device, ((None, Link(0.0, 1.0)),)), parse_mesh(1))).apply(fused)
    product = {"mlp": 2.0 * TOKENS * WIDTH * HIDDEN, "head": 2.0 * TOKENS * WIDTH * VOCABULARY}
    products = {("mlp", False): 2, ("mlp", True): 1 + 4, ("head", False): 1, ("head", True): 1 + 2}
    found = {}
    for own in space.choices:
        if isinstance(own.op.call.target, Region):
            kind = "head" if any(VOCABULARY in operand.shape for operand in own.op.call.operands) else "mlp"
            assert any(strategy.steps > 1 for strategy in own.strategies)
            assert own.seconds == pytest.approx([own.seconds[0]] * len(own.seconds))
            found[kind, own.op.name in fused.backward] = own.seconds[0] / product[kind]
    assert found == pytest.approx(products)


def test_with_memory_to_spare_regions_gain_nothing() -> None:
    """Also over links so slow that every rank had better do all: products may then be repeated in both graphs."""
    device = Device("little", "cpu", (("float32", 1e10),), 2**34, 1e10, launch_overhead=3e-6)
    costs = Costs(Cluster("far", device, ((None, Link(1e-9, 1e7)),)), parse_mesh((2, 4)))
    plain, fused = mlp_and_head(), fuse(mlp_and_head())
    assert fused is not None
    one, two = (MakePlan(costs, SOLVER, 2**40).apply(graph) for graph in (plain, fused))
    assert one.seconds < two.seconds
    assert not any(digits for strategy in one.strategies.values() for digits in strategy.digits)


@cache
def llama() -> Graphs:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        ids = torch.zeros(4, 16, dtype=torch.long)
    return Graphs(annotate(capture(model, (), {"input_ids": ids, "labels": ids})), Dumper(None))


@pytest.mark.parametrize("regions", [None, "head+mlp", "all"])
def test_compute_of_a_region_hides_one_transfer_at_a_time(regions: str | None) -> None:
    """Its parameters come, and its gradients go, over one link as busy as the ranks: priced as simulated."""
    costs = Costs(replace(CLUSTER, levels=((None, Link(1e-9, 5e6)),)), parse_mesh(4))
    plan = MakePlan(costs, SOLVER, 2**40, "zero3").apply(llama().of(regions))
    programs = BuildPrograms(costs.link, torch.device("cpu")).apply(llama().of(regions), plan, lambda text: None)
    found = simulate([phases_of(artifact) for artifact in programs.artifacts], costs.cluster)
    assert found.exposed_seconds > 0.25 * found.seconds
    assert plan.seconds == pytest.approx(found.seconds, rel=0.1)
