"""Search at scale: seconds to the first plan, to within 5 % of the bound and to the end, and memory.

    python benchmarks/search.py [--models opt-175b llama-3-70b mixtral] [--meshes 8 2x4 2x2x2 4x8 2x4x4 8x8x4]

Models are on the meta device; identical layers share their decisions, so two layers stand for all (--layers). Each row
runs in a process of its own. Hosts are of 8 H100; between hosts 50 GB/s a rank are assumed. The gap is that to the
bound; where three axes are refined, to that of the finer mesh too. Seconds are wall clock, of the search alone (no
capture, no programs), but for `cpu_s`, those of all cores to the end; a dash: not reached. On a machine that others
use too, give the solver more time (--time-limit).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.pauses import without_gc

SIZES: dict[str, tuple[str, int, int, dict[str, Any]]] = {  # config class, batch, sequence, sizes
    "opt-175b": (
        "OPT",
        8,
        2048,
        {
            "vocab_size": 50272,
            "hidden_size": 12288,
            "word_embed_proj_dim": 12288,
            "ffn_dim": 49152,
            "num_attention_heads": 96,
            "max_position_embeddings": 2048,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "layerdrop": 0.0,
        },
    ),
    "llama-3-70b": (
        "Llama",
        8,
        4096,
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "mixtral": (
        "Mixtral",
        8,
        4096,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}

WITHIN = 0.05
PLENTY = 64
"""Memory of a rank is so many times what it has: the search alone is measured."""


@without_gc()
def measure(name: str, mesh_text: str, layers: int, limit_s: float, trace: bool) -> dict[str, Any]:
    """One case in this process."""
    import torch
    import transformers

    from stpart_compiler.capture import capture
    from stpart_compiler.cost_models.cluster import Link, load_cluster
    from stpart_compiler.graphs import annotate
    from stpart_compiler.grids import coarse_and_fine, grids_to_try
    from stpart_compiler.ir.mesh import parse_mesh
    from stpart_compiler.passes.costs import Costs
    from stpart_compiler.passes.make_plan import MakePlan
    from stpart_compiler.passes.refine import RefinePlan
    from stpart_compiler.search import promising

    family, batch, sequence, sizes = SIZES[name]
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=layers, **sizes)
    with torch.device("meta"):
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config).to(torch.bfloat16)
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    host = load_cluster("h100-80gb-8")
    cluster = replace(host, name="h100 hosts", levels=(*host.levels, (None, Link(10e-6, 50e9))))
    mesh = parse_mesh(tuple(map(int, mesh_text.split("x"))) if "x" in mesh_text else int(mesh_text))
    graph = annotate(captured, stripes=mesh.world_size)
    fine = coarse_and_fine(mesh)[1]
    grids = grids_to_try(mesh, mesh, cluster, None, None)
    options = SolverOptions(time_limit_s=limit_s)
    plans: list[tuple[float, float]] = []  # seconds since the start, of the plan's step
    start, began = time.perf_counter(), time.process_time()

    def note(text: str) -> None:
        now = time.perf_counter() - start
        if trace:
            print(f"{now:7.1f} s, {time.process_time() - began:7.1f} s of CPU: {text}", file=sys.stderr, flush=True)
        words = text.replace(",", "").split()
        if "ms" in words:
            plans.append((now, float(words[words.index("ms") - 1]) / 1e3))

    limit = cluster.device.memory * PLENTY
    makers = [MakePlan(Costs(cluster, grid), options, limit) for grid in grids]
    looked = [maker.screened(graph, note) for maker in makers] if len(makers) > 1 else []
    chosen = makers[promising(looked, options.gap, limit)[0] if looked else 0]
    plan = chosen.apply(graph, note)
    plan.bound_seconds = min(plan.bound_seconds, *(each.lower for each in looked), plan.seconds)
    plans.append((time.perf_counter() - start, plan.seconds))
    if fine is not None:
        plan = RefinePlan(Costs(cluster, fine), options, limit).apply(graph, plan, note)
    near = [at for at, seconds in plans if seconds * (1 - WITHIN) <= plan.bound_seconds]
    best = min(plan.yardsticks, key=lambda key: plan.yardsticks[key])
    return {
        "model": name,
        "mesh": mesh_text,
        "layers": layers,
        "first_s": plans[0][0],
        "within_5pct_s": near[0] if near else None,
        "end_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - began,
        "step_ms": 1e3 * plan.seconds,
        "gap_pct": 100 * plan.gap,
        "planned_on": str(plan.mesh),
        "best_template": best,
        "template_over_plan": plan.yardsticks[best] / plan.seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _show(row: dict[str, Any]) -> None:
    texts = {
        key: "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value
        for key, value in row.items()
    }
    print("  ".join(f"{key}={text}" for key, text in texts.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--meshes", nargs="+", default=["8", "2x4", "2x2x2", "4x8", "2x4x4", "8x8x4"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=SolverOptions().time_limit_s, help="of the solver, seconds")
    parser.add_argument("--trace", action="store_true", help="show what each search reports as it goes on")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "MESH", "LAYERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], args.one[1], int(args.one[2]), args.time_limit, args.trace)))
        return 0
    for name in args.models:
        for mesh in args.meshes:
            command = [sys.executable, __file__, "--one", name, mesh, str(args.layers)]
            command += ["--time-limit", str(args.time_limit), *(["--trace"] if args.trace else [])]
            errors = None if args.trace else subprocess.PIPE
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
            if done.returncode:
                print(f"{name} {mesh}: {(done.stderr or 'failed').strip().splitlines()[-1]}", file=sys.stderr)
                continue
            _show(json.loads(done.stdout.splitlines()[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
