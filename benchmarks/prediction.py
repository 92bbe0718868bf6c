"""What the solver predicts of a step, beside the simulation of the generated programs: time and memory, per plan.

    python benchmarks/prediction.py [--models llama gpt2] [--hidden 2048] [--meshes 2 4 2x2] [--cluster h100-80gb-8]
        [--layers 4] [--vocabulary 32768] [--batch 8] [--length 2048] [--plans data ring solved] [--measure 5]

bfloat16 on the meta device; float32 with --measure. Columns: the plan's predicted step, the simulated one, their
ratio, the simulated compute, the exposed communication; memory by the solver's estimate and exact (both without
optimizer state). --measure: also forward and backward on local gloo ranks, the least of so many steps, and how the
simulated order of plans agrees with the measured one; give the file that `stpart calibrate` wrote as --cluster, and
small sizes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.cli import parse_mesh_text
from stpart_compiler.local_ranks import launch, loss_of
from stpart_compiler.passes.solve import InfeasibleError

HEAD = (
    "model",
    "mesh",
    "plan",
    "plan ms",
    "sim ms",
    "plan/sim",
    "compute",
    "exposed",
    "est MiB",
    "peak MiB",
    "est/peak",
    "measured",
)
WIDTHS = (10, 6, 13, 9, 9, 9, 9, 9, 9, 9, 9, 9)


class Row(NamedTuple):
    """Seconds of a step and bytes of a plan, as they are estimated, simulated and (0: not) measured."""

    estimated: float
    simulated: float
    measured: float
    estimated_bytes: float
    peak_bytes: float


def llama(options: argparse.Namespace, hidden: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(4, hidden // 128),
        num_key_value_heads=max(2, hidden // 256),
        vocab_size=options.vocabulary,
        intermediate_size=hidden * 7 // 2 // 128 * 128,
        max_position_embeddings=options.length,
    )
    return LlamaForCausalLM(config)


def gpt2(options: argparse.Namespace, hidden: int) -> nn.Module:
    config = GPT2Config(
        n_embd=hidden,
        n_layer=options.layers,
        n_head=max(4, hidden // 64),
        vocab_size=options.vocabulary,
        n_positions=options.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


MODELS = {"llama": llama, "gpt2": gpt2}


def model(options: argparse.Namespace, name: str, hidden: int) -> nn.Module:
    with torch.device("cpu" if options.measure else "meta"):
        return MODELS[name](options, hidden).to(torch.float32 if options.measure else torch.bfloat16)


def line(cells: tuple[object, ...]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def compared(options: argparse.Namespace, which: tuple[str, int], mesh: str, name: str) -> Row | None:
    """Prints a row."""
    ids = torch.zeros(options.batch, options.length, dtype=torch.long, device="cpu" if options.measure else "meta")
    label = f"{which[0]}-{which[1]}"
    try:
        compiled = st.compile_model(
            model(options, *which),
            (),
            {"input_ids": ids, "labels": ids},
            mesh=parse_mesh_text(mesh),
            cluster=options.cluster,
            template=None if name == "solved" else name,
        )
    except (InfeasibleError, ValueError) as error:
        print(f"{label:>10} {mesh:>6} {name:>13} {' '.join(str(error).split())[:90]}", flush=True)
        return None
    found, plan = compiled.simulate(), compiled.plan
    estimated_bytes = plan.memory["solver estimate"] - plan.memory["optimizer state"]
    measured = measure(compiled, ids, options.measure) if options.measure else 0.0
    row = Row(plan.seconds, found.seconds, measured, estimated_bytes, found.peak_bytes)
    times = [f"{x * 1e3:.2f}" for x in row[:2]]
    parts = [f"{x * 1e3:.2f}" for x in (found.compute_seconds, found.exposed_seconds)]
    sizes = [f"{x / 2**20:.0f}" for x in row[3:]]
    ratios = [f"{x:.3f}" for x in (row.estimated / row.simulated, row.estimated_bytes / row.peak_bytes)]
    shown = f"{measured * 1e3:.2f}" if measured else "-"
    print(line((label, mesh, name, *times, ratios[0], *parts, *sizes, ratios[1], shown)), flush=True)
    return row


def print_errors(what: str, ratios: list[float]) -> None:
    errors = [abs(ratio - 1) for ratio in ratios]
    print(f"{what}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)}")


def rank_correlation(left: list[float], right: list[float]) -> float:
    """Spearman's; no number where all on one side are equal."""
    if len(set(left)) == 1 or len(set(right)) == 1:
        return math.nan
    ranks = [[sum(x < y for x in side) + (side.count(y) - 1) / 2 for y in side] for side in (left, right)]
    return statistics.correlation(*ranks)


def measure(compiled: st.CompiledModel, ids: torch.Tensor, steps: int) -> float:
    """Seconds of forward and backward on local ranks, of the slowest one: the least of so many steps after the first.

    As in calibration, since other work on the machine only adds.
    """
    with tempfile.TemporaryDirectory(prefix="stpart") as name:
        directory = Path(name)
        compiled.save(directory)
        torch.save((ids, steps), directory / "job.pt")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        launch(compiled.world_size, Path(__file__).stem, name, 600.0)
        return min(torch.load(directory / "times.pt"))


def run_rank(directory: Path) -> None:
    """Time this process's rank, inside torchrun."""
    ids, steps = torch.load(directory / "job.pt")
    dist.init_process_group("gloo")
    module = st.load_compiled(directory).local_module()
    times = []
    for _ in range(steps + 1):
        dist.barrier()
        start = time.perf_counter()
        loss_of(module, (), {"input_ids": ids, "labels": ids}).backward()
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
        module.zero_grad()
    if module.rank == 0:
        torch.save(times[1:], directory / "times.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    os.environ["STPART_CACHE"] = "off"  # what is measured is made here
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama"], choices=MODELS)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048])
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--meshes", nargs="+", default=["2", "4", "2x2"])
    parser.add_argument("--cluster", default="h100-80gb-8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--measure", type=int, default=0, metavar="STEPS")
    parser.add_argument("--plans", nargs="+", default=[*st.templates(), "solved"])
    options = parser.parse_args()
    print(line(HEAD))
    rows: list[Row] = []
    for which in itertools.product(options.models, options.hidden):
        for mesh in options.meshes:
            tried = [compared(options, which, mesh, name) for name in options.plans]
            some = [row for row in tried if row is not None]
            rows += some
            if options.measure and len(some) > 2:
                agree = rank_correlation([row.simulated for row in some], [row.measured for row in some])
                print(f"{which[0]}-{which[1]}, mesh {mesh}: rank correlation of simulated and measured {agree:.2f}")
    print_errors("estimated time against simulated", [row.estimated / row.simulated for row in rows])
    print_errors("estimated memory against the programs'", [row.estimated_bytes / row.peak_bytes for row in rows])
    if options.measure:
        print_errors("simulated time against measured", [row.simulated / row.measured for row in rows])


if __name__ == "__main__":
    run_rank(Path(sys.argv[1])) if "RANK" in os.environ else main()
