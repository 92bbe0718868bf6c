"""Overhead of a generated program: one rank on a 1-device mesh against eager forward and backward.

    python benchmarks/overhead.py [--runs 20]

Both run in turn, so that the machine's state hits both alike; prints the median of each and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stpart_compiler as st


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> int:
    os.environ["STPART_CACHE"] = "off"  # what is measured is made here
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        intermediate_size=688,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (4, 256))
    compiled = st.compile_model(model, (), {"input_ids": ids, "labels": ids}, mesh=1)
    module = compiled.rank_module(0)

    def eager() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def ours() -> None:
        module.zero_grad()
        module(input_ids=ids, labels=ids).backward()

    for step in (eager, ours, eager, ours):
        step()
    pairs = [(_timed(eager), _timed(ours)) for _ in range(args.runs)]
    base, mine = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = f"ratio {mine / base:.3f} (median of {args.runs})"
    print(f"eager {base * 1e3:.1f} ms, generated program {mine * 1e3:.1f} ms, {ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
