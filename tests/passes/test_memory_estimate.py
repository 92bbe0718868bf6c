"""The solver's estimate of memory against the exact peak of the programs: never far over it, and hardly ever under."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from slow_ranks import CLUSTER
from transformers import LlamaConfig, LlamaForCausalLM
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
}


@pytest.mark.parametrize("case", CASES)
def test_estimate_is_near_the_exact_peak(case: str) -> None:
    build, template, mesh = CASES[case]
    step = build()
    call = dict(step.kwargs)
    memory = st.compile_model(step.model, (), call, mesh=mesh, cluster=CLUSTER, template=template).plan.memory
    assert UNDER <= memory["solver estimate"] / memory["peak"] <= OVER
