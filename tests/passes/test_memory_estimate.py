"""The solver's estimate of memory against the exact peak of the programs: never far over it, and hardly ever under."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from slow_ranks import CLUSTER
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from zoo import Step, make

import stpart_compiler as st

UNDER, OVER = 0.98, 1.05


def with_vocabulary(vocabulary: int, hidden: int, batch: int) -> Step:
    """A Llama of one layer whose head is most of it."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        intermediate_size=2 * hidden,
        max_position_embeddings=16,
    )
    ids = torch.zeros(batch, 16, dtype=torch.long)
    with torch.device("meta"):
        return Step(LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids})


def gpt2(vocabulary: int) -> Step:
    """Two layers, whose tied embedding is as large a part as the vocabulary says."""
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=vocabulary, n_positions=32)
    ids = torch.zeros(4, 32, dtype=torch.long)
    with torch.device("meta"):
        return Step(GPT2LMHeadModel(config).eval(), (), {"input_ids": ids, "labels": ids})


tiny = partial(make, "llama")
large = partial(with_vocabulary, 4096, 64, 4)
uneven = partial(with_vocabulary, 1001, 56, 5)

CASES = {
    "gathers along an inner dim are unpacked": (large, "summa", (2, 2)),
    "activations gathered along the sequence": (tiny, "megatron_sp", (4,)),
    "gathered in two steps": (tiny, "zero3", (2, 2)),
    "uneven pieces are joined": (large, "zero3", (3,)),
    "a rank without a block sums in place": (large, "data", (3,)),
    "uneven sums are sent in pieces": (large, "ring", (3,)),
    "uneven blocks": (uneven, "cp_zero3", (4,)),
    "weights travel and stay": (tiny, "ring", (4,)),
    "the first slice waits alone": (tiny, "metp", (4,)),
    "two steps of a loop": (large, "metp", (2,)),
    "one layer's gradients are made while another's are sent": (partial(gpt2, 64), "metp", (2, 2)),
    "the next transfer of a row runs ahead of its use": (uneven, "metp", (2, 2)),
    "what was sent is gone when the op runs": (partial(gpt2, 2049), "metp", (2,)),
    "a rank's own piece is cut out at the end": (partial(gpt2, 5025), "megatron_sp", (3,)),
}


@pytest.mark.parametrize("case", CASES)
def test_estimate_is_near_the_exact_peak(case: str) -> None:
    build, template, mesh = CASES[case]
    step = build()
    call = dict(step.kwargs)
    memory = st.compile_model(step.model, (), call, mesh=mesh, cluster=CLUSTER, template=template).plan.memory
    assert UNDER <= memory["solver estimate"] / memory["peak"] <= OVER
