"""Norms that regions read are run again under template metp, however they are written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from transformers import LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.passes.templates import TEMPLATES

LAYERS, LENGTH, WIDTH = 2, 256, 32


def metp() -> st.CompiledModel:
    """A Llama in bfloat16, whose norms are written in seven ops, two of them casts."""
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(torch.bfloat16)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
    options = {"mesh": 2, "template": "metp", "cluster": replace(CLUSTER, device=DEVICE), "solver": SOLVER}
    return st.compile_model(model, (), {"input_ids": ids, "labels": ids}, **options)


DEVICE = replace(CLUSTER.device, peak_flops=(*CLUSTER.device.peak_flops, ("bfloat16", 1e8)))


def test_norms_written_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer its two inputs are kept beside what attention gives, as METP counts, and nothing in float32."""
    again = metp()
    monkeypatch.setitem(TEMPLATES, "metp", replace(TEMPLATES["metp"], again=lambda graph: frozenset()))
    once = metp()
    norm = Counter(["_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mul"])
    ops = Counter(name.rstrip("_0123456789") for name in again.plan.recompute)
    assert ops == Counter({op: (2 * LAYERS + 1) * count for op, count in norm.items()})
    assert not once.plan.recompute
    for figure in ("solver estimate", "peak"):
        assert again.plan.memory[figure] < 0.85 * once.plan.memory[figure]
    kept = [value for value in again.artifacts[0].forward.outputs if value is not None and value.shape[-1:] == (WIDTH,)]
    counted = Counter(value.dtype for value in kept)
    assert counted == {torch.bfloat16: 2 * LAYERS + 1}
