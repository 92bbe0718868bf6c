"""Regions are composed in an order that can run."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate, fuse
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.regions import REGIONS
from stpart_compiler.passes.rules.region import Region


@cache
def eager_llama() -> Annotated:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    return annotate(capture(model, (), {"input_ids": ids, "labels": ids}))


@pytest.mark.parametrize("kind", REGIONS)
def test_bodies_make_what_they_read(kind: str) -> None:
    """Also what views inside of them look at, such as the halves of queries in rotary embeddings."""
    fused = fuse(eager_llama(), kind)
    assert fused is not None
    regions = [op.call.target for op in fused.ops if isinstance(op.call.target, Region)]
    assert regions
    for region in regions:
        assert all(source < j for j, inner in enumerate(region.body) for source, _ in inner.sources)
