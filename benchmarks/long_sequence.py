"""A Llama at a long sequence trains on local ranks (gloo): measured peak bytes and losses of a plan and of a template.

    python benchmarks/long_sequence.py [--length 16384] [--ranks 4] [--hidden 512] [--layers 2] [--vocabulary 32000]
                                       [--plan metp | solved] [--against megatron_sp] [--steps 2]

Batch 1, float32, AdamW. `solved` is the solver's plan under half of what the template is predicted to need. Peaks are
those of the fullest rank over the steps, at tensor level: parameters, optimizer state, inputs, activations, gradients.
The last line says whether the plan's measured peak is at most half of the template's, and how far the losses differ.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.local_ranks import Batch, RankReport, train_on_ranks

MIB = 2**20
STEP_LIMIT_S = 1800.0
ONE_LOSS = 1e-4
"""Largest difference of losses, relative, that still counts as equal in float32."""


def train(name: str, compiled: st.CompiledModel, batches: list[Batch]) -> list[RankReport]:
    predicted = compiled.plan.memory["peak"] / MIB
    print(f"{name}: predicted peak {predicted:.0f} MiB a rank; training", flush=True)
    limit = STEP_LIMIT_S * len(batches)
    return train_on_ranks(compiled, batches, learning_rate=1e-3, timeout_s=STEP_LIMIT_S, limit_s=limit, verbose=False)


def show(name: str, reports: list[RankReport]) -> float:
    """Print a row; gives the measured peak in MiB."""
    peak = max(report.peak_bytes for report in reports) / MIB
    seconds = max(report.seconds[-1] for report in reports)
    losses = "  ".join(f"{loss:.6f}" for loss in reports[0].losses)
    print(f"{name:12s} measured peak {peak:8.1f} MiB   last step {seconds:7.1f} s   losses {losses}", flush=True)
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--plan", choices=["metp", "solved"], default="metp")
    parser.add_argument("--against", choices=st.templates(), default="megatron_sp")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.length,
    )
    model = LlamaForCausalLM(config)
    ids = [torch.randint(args.vocabulary, (1, args.length)) for _ in range(args.steps)]
    batches: list[Batch] = [((), {"input_ids": x, "labels": x}) for x in ids]
    theirs = st.compile_model(model, (), batches[0][1], mesh=args.ranks, template=args.against)
    chosen = {"template": "metp"} if args.plan == "metp" else {"memory_limit": theirs.plan.memory["peak"] // 2}
    ours = st.compile_model(model, (), batches[0][1], mesh=args.ranks, **chosen)
    found = {name: train(name, made, batches) for name, made in ((args.plan, ours), (args.against, theirs))}
    peaks = {name: show(name, reports) for name, reports in found.items()}
    losses = zip(*(reports[0].losses for reports in found.values()), strict=True)
    apart = max(abs(a - b) / abs(b) for a, b in losses)
    share = peaks[args.plan] / peaks[args.against]
    print(f"{args.plan}: {share:.2f} of the peak of {args.against}; largest relative difference of losses {apart:.1e}")
    return 0 if share <= 0.5 and apart <= ONE_LOSS else 1


if __name__ == "__main__":
    sys.exit(main())
