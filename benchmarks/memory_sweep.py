"""Step time, the solver's estimate and the exact peak of bytes per rank as the memory limit falls; what is run again.

    python benchmarks/memory_sweep.py [--ranks 1 4] [--layers 2] [--length 8192] [--fractions 1 0.8 0.6 0.5 0.4]

A Llama-shaped model (hidden 2048, 16 heads, 8 KV heads, vocabulary 128256, bfloat16, batch 1) on the meta device and
the h100-80gb-8 preset. The limit is a fraction of what the plan without a limit needs. Peaks are those of the generated
programs (every tensor's life is known), with AdamW's state; step times are predictions.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.passes.solve import InfeasibleError

CLUSTER = "h100-80gb-8"


def model(layers: int, length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=128256,
        intermediate_size=8192,
        max_position_embeddings=length,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    os.environ["STPART_CACHE"] = "off"  # what is measured is made here
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--fractions", type=float, nargs="+", default=[1.0, 0.8, 0.6, 0.5, 0.4])
    options = parser.parse_args()
    ids = torch.zeros(1, options.length, dtype=torch.long, device="meta")
    call = {"input_ids": ids, "labels": ids}
    for ranks in options.ranks:
        free = st.compile_model(model(options.layers, options.length), (), call, mesh=ranks, cluster=CLUSTER).plan
        for fraction in options.fractions:
            limit = round(free.memory["peak"] * fraction)
            start = time.perf_counter()
            try:
                plan = st.compile_model(
                    model(options.layers, options.length), (), call, mesh=ranks, cluster=CLUSTER, memory_limit=limit
                ).plan
            except InfeasibleError as error:
                print(
                    f"ranks={ranks} limit={format_bytes(limit)}: needs at least {format_bytes(error.least)}", flush=True
                )
                continue
            took = time.perf_counter() - start
            estimate, peak = plan.memory["solver estimate"], plan.memory["peak"]
            print(
                f"ranks={ranks} limit={format_bytes(limit)} solver estimate={format_bytes(estimate)}"
                f" exact peak={format_bytes(peak)} difference={100 * (estimate / peak - 1):+.2f} %"
                f" step={plan.seconds * 1e3:.2f} ms regions={plan.regions} run again={len(plan.recompute)} ops"
                f" compiled in {took:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
