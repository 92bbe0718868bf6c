"""Regions are composed in an order that can run, kind by kind."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from mlp_head import mlp_and_head
from slow_ranks import CLUSTER, SOLVER
from transformers import LlamaConfig, LlamaForCausalLM

from stpart_compiler.capture import capture
from stpart_compiler.graphs import Graphs, annotate, fuse
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.propagate import Annotated, OpNode
from stpart_compiler.passes.regions import KINDS, REGIONS, kind_of, kinds_of
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.search import Form, Restrictions, Search, Tried


@cache
def eager_llama() -> Annotated:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    return annotate(capture(model, (), {"input_ids": ids, "labels": ids}))


def regions_in(graph: Annotated) -> list[OpNode]:
    return [op for op in graph.ops if isinstance(op.call.target, Region)]


@pytest.mark.parametrize("regions", REGIONS)
def test_bodies_make_what_they_read(regions: str) -> None:
    """Also what views inside of them look at, such as the halves of queries in rotary embeddings."""
    fused = fuse(eager_llama(), regions)
    assert fused is not None
    found = regions_in(fused)
    assert {kind_of(op.call.target) for op in found if op.name not in fused.backward} == kinds_of(regions)
    for op in found:
        assert all(source < j for j, inner in enumerate(op.call.target.body) for source, _ in inner.sources)


def test_kinds_that_there_are() -> None:
    graphs = Graphs(eager_llama(), Dumper(None))
    assert [graphs.named(kinds_of(regions)) for regions in REGIONS] == list(REGIONS)
    assert graphs.named(()) is None
    few = Graphs(mlp_and_head(), Dumper(None))
    assert few.kinds == {"head", "mlp"}
    assert (few.named(KINDS), few.named(("mlp", "attention")), few.named(("attention",))) == ("all", "mlp", None)


class Listed(Search):
    """Lists what it would solve for; plans without attention's region need too much memory."""

    def _try_all(self, forms: list[Form], tried: Tried) -> list[Form]:
        TRIED.append([form.regions for form in forms])
        for form in forms:
            if "attention" in kinds_of(form.regions):
                plan = SimpleNamespace(seconds=len(kinds_of(form.regions)))
                tried.found[form] = plan, None
        return forms


TRIED: list[list[str | None]] = []


def test_kinds_that_do_not_pay_are_left_out_one_by_one() -> None:
    graphs = Graphs(eager_llama(), Dumper(None))
    costs = Costs(CLUSTER, parse_mesh(1))
    made = (graphs, costs, 0, SOLVER, None, Restrictions(), torch.device("cpu"), lambda text: None)
    TRIED.clear()
    Listed(*made)._try_regions(False, tried := Tried(SOLVER.gap))
    assert TRIED == [["head", "head+mlp", "all"], ["mlp+attention", "head+attention"], ["attention", "mlp"]]
    assert tried.best == Form(False, "attention")
