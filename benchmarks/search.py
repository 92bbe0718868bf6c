"""Search at scale: seconds to the first plan, to within 5 % of the bound and to the end, and memory.

    python benchmarks/search.py [--models opt-175b llama-3-70b mixtral] [--meshes 8 2x4 2x2x2 4x8 2x4x4 8x8x4]

Models are on the meta device; identical layers share their decisions, so two layers stand for all (--layers). Each row
runs in a process of its own. Hosts are of 8 H100; between hosts 50 GB/s a rank are assumed. The gap is that to the
bound; where three axes are refined, to that of the space on the finer mesh. Seconds are wall clock, of the search alone
(no capture, no programs), but for `cpu_s`, those of all cores to the end; a dash: not reached.
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


@without_gc()
def measure(name: str, mesh_text: str, layers: int) -> dict[str, Any]:
    """One case in this process."""
    import torch
    import transformers

    from stpart_compiler.capture import capture
    from stpart_compiler.cost_models.cluster import Link, load_cluster
    from stpart_compiler.graphs import annotate
    from stpart_compiler.grids import coarse_and_fine
    from stpart_compiler.ir.mesh import parse_mesh
    from stpart_compiler.passes.make_plan import MakePlan
    from stpart_compiler.passes.problem import SolverOptions
    from stpart_compiler.passes.refine import RefinePlan
    from stpart_compiler.passes.space import Costs

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
    coarse, fine = coarse_and_fine(mesh)
    options = SolverOptions()
    plans: list[tuple[float, float]] = []  # seconds since the start, of the plan's step
    start, began = time.perf_counter(), time.process_time()

    def note(text: str) -> None:
        now = time.perf_counter() - start
        if text.startswith("template") and text.endswith(" ms"):
            plans.append((now, float(text.split()[-2]) / 1e3))
        if fine is not None and text.startswith(f"{fine}: "):
            plans.append((now, float(text.removeprefix(f"{fine}: ").split()[0]) / 1e3))

    plan = MakePlan(Costs(cluster, coarse), options, cluster.device.memory * 64).apply(graph, note)
    plans.append((time.perf_counter() - start, plan.seconds))
    if fine is not None:
        plan = RefinePlan(Costs(cluster, fine), options, cluster.device.memory * 64).apply(graph, plan, note)
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
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "MESH", "LAYERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], args.one[1], int(args.one[2]))))
        return 0
    for name in args.models:
        for mesh in args.meshes:
            command = [sys.executable, __file__, "--one", name, mesh, str(args.layers)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name} {mesh}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            _show(json.loads(done.stdout.splitlines()[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
