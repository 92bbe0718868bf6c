"""What the templates cost on other splits of the ranks over two axes: a fair yardstick is each on its best mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import MakePlan
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.propagate import Annotated

Progress = Callable[[str], None]


@dataclass(frozen=True)
class PriceSplits:
    """annotated ops, plan -> seconds of its yardsticks, of each template on the mesh where it is fastest.

    `memory_limit`: bytes per rank. Templates on another mesh than the plan's have it in their name: "megatron (4x2)".
    """

    cluster: Cluster
    options: SolverOptions
    memory_limit: int
    whole_parameters: bool = False

    def apply(
        self, graphs: Sequence[Annotated], plan: Plan, progress: Progress = lambda text: None
    ) -> dict[str, float]:
        """`graphs`: the graph of the step, and those with regions that the plan's yardsticks are from."""
        best = {name: (seconds, name) for name, seconds in plan.yardsticks.items()}
        for mesh in splits(plan.mesh.world_size):
            if mesh.sizes == plan.mesh.sizes:
                continue
            text = "x".join(map(str, mesh.sizes))
            progress(f"templates on mesh {text}")
            costs = Costs(self.cluster, mesh)
            for graph in graphs:
                maker = MakePlan(costs, self.options, self.memory_limit, None, self.whole_parameters)
                for name, seconds in maker.priced(graph, frozenset(plan.recompute), progress).items():
                    best[name] = min(best.get(name, (float("inf"), name)), (seconds, f"{name} ({text})"))
        return {label: seconds for seconds, label in best.values()}


def splits(ranks: int) -> list[Mesh]:
    """All ranks on one axis, and on two axes in every way."""
    pairs = [(size, ranks // size) for size in range(2, ranks) if ranks % size == 0]
    return [parse_mesh(ranks), *map(parse_mesh, pairs)]
