"""What the solver predicts of a step, beside the simulation of the generated programs: time and memory, per plan.

    python benchmarks/prediction.py [--meshes 2 4 2x2] [--cluster h100-80gb-8] [--layers 4] [--hidden 2048] [--batch 8]
        [--length 2048] [--plans data ring solved] [--measure 5]

A Llama (bfloat16, on the meta device; float32 with --measure). Columns: the plan's predicted step, the simulated one,
their ratio, the simulated compute, the exposed communication; memory by the solver's estimate and exact (both without
optimizer state). --measure: also forward and backward on local gloo ranks, the median of so many steps; give the file
that `stpart calibrate` wrote as --cluster, and small sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.cli import parse_mesh_text
from stpart_compiler.local_ranks import launch, loss_of
from stpart_compiler.passes.solve import InfeasibleError

HEAD = (
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
WIDTHS = (6, 13, 9, 9, 9, 9, 9, 9, 9, 9, 9)


def model(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(4, options.hidden // 128),
        num_key_value_heads=max(2, options.hidden // 256),
        vocab_size=32768,
        intermediate_size=options.hidden * 7 // 2 // 128 * 128,
        max_position_embeddings=options.length,
    )
    with torch.device("cpu" if options.measure else "meta"):
        return LlamaForCausalLM(config).to(torch.float32 if options.measure else torch.bfloat16)


def line(cells: tuple[object, ...]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def compared(options: argparse.Namespace, mesh: str, name: str) -> tuple[float, float] | None:
    """Prints a row; the ratios of predicted and exact time and memory."""
    ids = torch.zeros(options.batch, options.length, dtype=torch.long, device="cpu" if options.measure else "meta")
    try:
        compiled = st.compile_model(
            model(options),
            (),
            {"input_ids": ids, "labels": ids},
            mesh=parse_mesh_text(mesh),
            cluster=options.cluster,
            template=None if name == "solved" else name,
        )
    except (InfeasibleError, ValueError) as error:
        print(f"{mesh:>6} {name:>12} {' '.join(str(error).split())[:90]}", flush=True)
        return None
    found, plan = compiled.simulate(), compiled.plan
    state = plan.memory["optimizer state"]
    estimate, peak = plan.memory["solver estimate"] - state, found.peak_bytes
    ratios = plan.seconds / found.seconds, estimate / peak
    times = [f"{x * 1e3:.2f}" for x in (plan.seconds, found.seconds)]
    parts = [f"{x * 1e3:.2f}" for x in (found.compute_seconds, found.exposed_seconds)]
    sizes = [f"{x / 2**20:.0f}" for x in (estimate, peak)]
    measured = f"{measure(compiled, ids, options.measure) * 1e3:.2f}" if options.measure else "-"
    print(line((mesh, name, *times, f"{ratios[0]:.3f}", *parts, *sizes, f"{ratios[1]:.3f}", measured)), flush=True)
    return ratios


def measure(compiled: st.CompiledModel, ids: torch.Tensor, steps: int) -> float:
    """Seconds of forward and backward on local ranks: median over steps but the first, of the slowest rank in each."""
    with tempfile.TemporaryDirectory(prefix="stpart") as name:
        directory = Path(name)
        compiled.save(directory)
        torch.save((ids, steps), directory / "job.pt")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        launch(compiled.world_size, Path(__file__).stem, name, 600.0)
        return statistics.median(torch.load(directory / "times.pt"))


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
    parser.add_argument("--meshes", nargs="+", default=["2", "4", "2x2"])
    parser.add_argument("--cluster", default="h100-80gb-8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--measure", type=int, default=0, metavar="STEPS")
    parser.add_argument("--plans", nargs="+", default=[*st.templates(), "solved"])
    options = parser.parse_args()
    print(line(HEAD))
    found = [compared(options, mesh, name) for mesh in options.meshes for name in options.plans]
    errors = [[abs(pair[i] - 1) for pair in found if pair is not None] for i in (0, 1)]
    for what, values in zip(("time", "memory"), errors, strict=True):
        print(f"{what}: median error {statistics.median(values):.1%}, largest {max(values):.1%}, of {len(values)}")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1])) if "RANK" in os.environ else main()
