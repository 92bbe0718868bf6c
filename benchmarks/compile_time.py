"""Compile time of a Llama-3-8B-shaped model on the meta device: capture, plan, codegen and verify; seconds and memory.

    python benchmarks/compile_time.py [--layers 32] [--mesh 8 2x4] [--depths 4 16 32 80] [--memory 80] [--no-programs]

Each row runs in a process of its own, so that its peak memory is its own. Costs are those of the h100-80gb-8 preset.
Propagation (`propagate_s`), the lives of values, what may pass sums on, and the step's digest (`walk_s`) go over every
op of every layer. What is solved (`solve_s`: space, prices, memory tables, bounds and CP-SAT, of all templates and the
plan) is per class of ops; it has more to do where memory binds, as it does for some templates at 80 layers. With
`--memory 1000` it binds nowhere.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from stpart_compiler.pauses import without_gc


@without_gc()
def measure(layers: int, mesh_text: str, memory: int, programs: bool) -> dict[str, Any]:
    """One case in this process, like `compile_model` without pauses for garbage."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stpart_compiler.capture import capture
    from stpart_compiler.cost_models.cluster import load_cluster
    from stpart_compiler.graphs import annotate
    from stpart_compiler.ir.mesh import parse_mesh
    from stpart_compiler.passes.build_programs import BuildPrograms
    from stpart_compiler.passes.costs import Costs
    from stpart_compiler.passes.make_plan import MakePlan
    from stpart_compiler.passes.problem import SolverOptions
    from stpart_compiler.passes.space import pending_carriers
    from stpart_compiler.passes.timeline import timeline

    config = LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        intermediate_size=14336,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(4, 8192, dtype=torch.long, device="meta")
    sizes = tuple(int(part) for part in mesh_text.split("x"))
    mesh = parse_mesh(sizes if len(sizes) > 1 else sizes[0])
    row: dict[str, Any] = {"layers": layers, "mesh": mesh_text}

    start = time.perf_counter()
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    row["capture_s"] = time.perf_counter() - start
    row["nodes"] = len(captured.gm.graph.nodes)

    costs = Costs(load_cluster("h100-80gb-8"), mesh)
    start = time.perf_counter()
    graph = annotate(captured, stripes=mesh.world_size)
    row["propagate_s"] = time.perf_counter() - start
    timeline(graph, costs.link, SolverOptions().marked(graph))
    pending_carriers(graph)
    digest = graph.digest
    row["walk_s"] = time.perf_counter() - start - row["propagate_s"]
    first: list[float] = []

    def note(text: str) -> None:
        if ("plan found" in text or (text.startswith("template") and text.endswith(" ms"))) and not first:
            first.append(time.perf_counter() - start)

    plan = MakePlan(costs, SolverOptions(), memory * 2**30).apply(graph, note)
    assert plan.graph_digest == digest
    row["propagate_and_solve_s"] = time.perf_counter() - start
    row["solve_s"] = row["propagate_and_solve_s"] - row["propagate_s"] - row["walk_s"]
    row["first_plan_s"] = first[0] if first else row["propagate_and_solve_s"]
    row["gap_pct"] = 100 * plan.gap
    row["step_ms"] = 1e3 * plan.seconds
    row["best_template"] = min(plan.yardsticks, key=lambda name: plan.yardsticks[name], default="-")
    row["vs_template"] = min(plan.yardsticks.values(), default=plan.seconds) / plan.seconds
    if programs:
        start = time.perf_counter()
        built = BuildPrograms(costs.link, torch.device("cpu")).apply(graph, plan)
        row["codegen_verify_s"] = time.perf_counter() - start
        row["instructions"] = sum(len(a.forward.body) + len(a.backward.body) for a in built.artifacts if a.backward)
    row["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return row


def _show(row: dict[str, Any]) -> None:
    cells = [f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()]
    print("  ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", nargs="*", default=["8", "2x4"])
    parser.add_argument("--depths", nargs="*", type=int, default=[4, 16, 80], help="further depths, solved on mesh 8")
    parser.add_argument("--memory", type=int, default=80, help="limit per rank in GiB")
    parser.add_argument("--no-programs", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("LAYERS", "MESH", "MEMORY", "PROGRAMS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.one[1], int(args.one[2]), args.one[3] == "1")))
        return 0
    cases = [(args.layers, mesh, not args.no_programs) for mesh in args.mesh]
    cases += [(depth, args.mesh[0], False) for depth in args.depths]
    for layers, mesh, programs in cases:
        command = [sys.executable, __file__, "--one", str(layers), mesh, str(args.memory), str(int(programs))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        _show(json.loads(done.stdout.splitlines()[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
