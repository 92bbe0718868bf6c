"""PrimePar's figure 9: where the time of an MLP goes under Megatron and under PrimePar, simulated, beside the paper's.

    python benchmarks/primepar_breakdown.py [--models opt-175b llama2-70b] [--ranks 8 16] [--batches 8 16]
        [--cluster v100-32gb-8x4]

The MLP of a layer (relu between two linear layers; Llama: gated, three) in float32 at sequence 2048, forward and
backward, owing a gradient to what comes before it. All figures of ours are read off simulated timelines of generated
programs; the paper's are printed (figure 9, right) or digitised (left). For OPT-175B on 8 ranks with batch 8 the phases
are shown one by one: Megatron {B,K,K}, the batch cut between 2 hosts and the width in them, and PrimePar {K,P2x2}, the
width cut between hosts and the primitive in them. "waits" is how long the rank waits for a transfer as it is scheduled.
In the paper all collectives are exposed, so each step is also summed up that way. The shares are of such sums,
Megatron's being 1: it cuts the batch between hosts, PrimePar has the best of {K,P2x2}, {B,P2x2} and, on 16, P4x4. Last
the best split of Megatron in that sense, and the speedup over it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property

import torch
from _phases import BETWEEN, IN, Breakdown, breakdown
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import Cluster, load_cluster
from stpart_compiler.cost_models.resting import phases_of
from stpart_compiler.cost_models.simulate import simulate
from stpart_compiler.cost_models.timeline import Simulation
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.layout import Digit, Layout
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.build_programs import BuildPrograms
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import written_plan
from stpart_compiler.passes.problem import BuildProblem
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueInfo
from stpart_compiler.passes.solve import Solve
from stpart_compiler.passes.space import BuildSpace, Restriction
from stpart_compiler.passes.strategies import space_on
from stpart_compiler.passes.templates import TEMPLATES

SEQUENCE = 2048
HOST = 4  # ranks
UNBOUND = 10**14  # bytes: the paper says nothing of memory here
NOTABLE = 0.10  # deviations that are explained
OPTIONS = st.SolverOptions(optimizer="sgd", gap=0.001)

SIZES = {"opt-175b": (12288, 49152, False), "llama2-70b": (8192, 28672, True)}  # hidden, width of the MLP, gated

MEGATRON_MS = {  # figure 9, right: {B,K,K}
    "fc1.F": 167.0,
    "fc2.F": 168.0,
    f"fc2.F {IN}": 24.0,
    "fc2.B": 165.0,
    "fc2.G": 166.0,
    f"fc2.G {BETWEEN}": 364.0,
    "fc1.B": 162.0,
    "fc1.G": 164.0,
    f"fc1.B {IN}": 41.0,
    f"fc1.G {BETWEEN}": 377.0,
}
PRIMEPAR_MS = {  # figure 9, right: {K,P2x2}; which of a layer's backward phases comes first is not printed
    "fc1.F step 0": 81.0,
    "fc1.F step 1": 81.0,
    "fc2.F step 0": 82.0,
    "fc2.F step 1": 82.0,
    f"fc2.F {BETWEEN}": 157.0,
    "fc2.B step 0": 80.0,
    "fc2.B step 1": 88.0,
    "fc2.G step 0": 81.0,
    "fc2.G step 1": 88.0,
    "fc1.B step 0": 85.0,
    "fc1.B step 1": 82.0,
    "fc1.G step 0": 86.0,
    "fc1.G step 1": 82.0,
    f"fc1.B {BETWEEN}": 128.0,
}
SHARES = {  # figure 9, left: compute and collectives of Megatron, of PrimePar, and PrimePar's rings (hidden)
    ("opt-175b", 8, 8): (0.547, 0.453, 0.548, 0.157, 0.042),
    ("opt-175b", 8, 16): (0.694, 0.306, 0.672, 0.192, 0.036),
    ("llama2-70b", 8, 8): (0.528, 0.472, 0.519, 0.242, 0.048),
    ("llama2-70b", 8, 16): (0.655, 0.345, 0.631, 0.203, 0.048),
    ("opt-175b", 16, 8): (0.258, 0.742, 0.254, 0.166, 0.030),
    ("opt-175b", 16, 16): (0.412, 0.588, 0.419, 0.117, 0.030),
    ("llama2-70b", 16, 8): (0.373, 0.627, 0.368, 0.229, 0.048),
    ("llama2-70b", 16, 16): (0.482, 0.518, 0.484, 0.120, 0.042),
}


class MLP(nn.Module):
    """Its input is scaled first, so that the block owes a gradient to what comes before it."""

    def __init__(self, hidden: int, width: int, gated: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(hidden))
        self.fc1 = nn.Linear(hidden, width, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False) if gated else None
        self.fc2 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.square() * self.scale
        middle = torch.relu(self.fc1(y)) if self.gate is None else nn.functional.silu(self.gate(y)) * self.fc1(y)
        return self.fc2(middle)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class Case:
    """A model's MLP on so many ranks with a batch."""

    model: str
    ranks: int
    batch: int

    @property
    def hidden(self) -> int:
        return SIZES[self.model][0]

    @property
    def width(self) -> int:
        return SIZES[self.model][1]

    @property
    def product_flops(self) -> float:
        """FLOPs of a phase of a linear layer on one rank."""
        return 2.0 * self.batch * SEQUENCE * self.hidden * self.width / self.ranks

    @cached_property
    def step(self) -> tuple[MLP, torch.Tensor]:
        with torch.device("meta"):
            return MLP(*SIZES[self.model]), torch.zeros(self.batch, SEQUENCE, self.hidden)

    @cached_property
    def graph(self) -> Annotated:
        return annotate(capture(self.step[0], self.step[1:], loss_fn=loss_of))


SHOWN = Case("opt-175b", 8, 8)


@dataclass(frozen=True)
class Partition:
    """One of the paper's partitions: axes that cut the batch alone, and axes that cut the MLP's width alone.

    The other axes are those of the primitive (`temporal`).
    """

    name: str
    mesh: Mesh
    width: int
    batch_axes: frozenset[str]
    width_axes: frozenset[str]
    temporal: bool

    @property
    def restriction(self) -> Restriction:
        return Restriction(self._allows, self._layouts, None if self.temporal else _axes_in_use)

    def _allows(self, op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
        allowed = PRIMEPAR.allow(op, strategy, mesh) if self.temporal and PRIMEPAR.allow else strategy.steps == 1
        return allowed and all(self._may(op, f, axes) for f, axes in enumerate(map(_axes, strategy.digits)))

    def _may(self, op: OpNode, f: int, axes: set[str]) -> bool:
        fits_width = not axes & self.width_axes or op.rule.factors[f].size == self.width
        return fits_width and (not axes & self.batch_axes or f in op.batch)

    def _layouts(self, graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
        """Megatron's weights rest cut along the width's axes; PrimePar's spread over all ranks."""
        if not self.temporal:
            layouts = [layout for layout in layouts if _axes(layout.digits) <= self.width_axes]
        return PRIMEPAR.layouts(graph, value, layouts, mesh) if len(value.shape) > 1 and PRIMEPAR.layouts else layouts


PRIMEPAR = TEMPLATES["primepar"].restriction


def _axes(digits: tuple[Digit, ...]) -> set[str]:
    return {axis for digit in digits for axis, _ in digit.coeffs}


def _axes_in_use(op: OpNode, strategy: Strategy, mesh: Mesh) -> int:
    return len(set().union(*map(_axes, strategy.digits)))


def megatron(case: Case, tensor: int) -> Partition:
    """The width cut over so many neighbouring ranks, the batch over the others."""
    mesh = Mesh(("d", "m"), (case.ranks // tensor, tensor))
    return Partition(f"{mesh.sizes[0]}x{tensor}", mesh, case.width, _set("d"), _set("m"), False)


def primepar(case: Case) -> list[Partition]:
    """The primitive in hosts, the width or the batch cut between them; with 16 ranks also over all of them."""
    mesh = Mesh(("x", "r", "c"), (case.ranks // HOST, 2, 2))
    found = [
        Partition("{K,P2x2}", mesh, case.width, _set(), _set("x"), True),
        Partition("{B,P2x2}", mesh, case.width, _set("x"), _set(), True),
    ]
    if case.ranks == HOST * HOST:
        found.append(Partition("{P4x4}", parse_mesh((HOST, HOST)), case.width, _set(), _set(), True))
    return found


def _set(*names: str) -> frozenset[str]:
    return frozenset(names)


def simulated(graph: Annotated, cluster: Cluster, partition: Partition) -> Simulation:
    """The step under a partition; what it leaves open is solved for."""
    costs = Costs(cluster, partition.mesh)
    space = BuildSpace(costs, space_on(partition.mesh)).apply(graph, partition.restriction)
    problem = BuildProblem(OPTIONS, weights_stay=not partition.temporal).apply(space)
    solution = Solve(OPTIONS, UNBOUND).apply(problem)
    plan = written_plan(graph, space, problem, solution, None, {}, OPTIONS)
    programs = BuildPrograms(costs.link, torch.device("cpu")).apply(graph, plan)
    return simulate([phases_of(artifact) for artifact in programs.artifacts], cluster)


def show_phases(title: str, found: Breakdown, theirs: dict[str, float], flops: float) -> None:
    """A line per phase, in ms. `flops`: of a phase of a linear layer on one rank."""
    print(f"\n{title:30}{'ours':>8}{'paper':>8}{'off by':>8}{'waits':>8}{'rate':>16}{'paper rate':>16}")
    steps = 2 if any(" step " in name for name in theirs) else 1
    for name, row in (found.compute | found.transfers).items():
        paper = theirs.get(name, 0.0) / 1e3
        work, unit = (row.nbytes / 1e9, "GB/s") if name in found.transfers else (flops / steps / 1e12, "TFLOP/s")
        rates = [f"{work / seconds:.2f} {unit}" if paper else "" for seconds in (row.seconds, paper or 1.0)]
        off = row.seconds / paper - 1 if paper else 0.0
        waits = _ms(row.waits) if name in found.transfers else ""
        cells = (_ms(row.seconds), _ms(paper) if paper else "-", f"{off:+.0%}" if paper else "", waits)
        print(f"{name:30}{''.join(f'{cell:>8}' for cell in cells)}{''.join(f'{rate:>16}' for rate in rates)}")
        if abs(off) > NOTABLE:
            print(
                f"  off because the same {work:.3f} {unit[:-2]} go at the rates shown; ours is that of the cluster file"
            )
    for name in sorted(set(theirs) - set(found.compute) - set(found.transfers)):
        print(f"{name:30}{'none':>8}{theirs[name]:>8.1f}")
    waited = sum(row.waits for row in found.rings.values())
    print(f"{'rings in loops':30}{_ms(found.ring):>8}{'':16}{_ms(waited):>8}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def show_paper_case(case: Case, cluster: Cluster) -> None:
    """The phases of the case that the paper shows, and the totals."""
    splits = {"Megatron {B,K,K}": megatron(case, HOST), "PrimePar {K,P2x2}": primepar(case)[0]}
    found = {name: slowest(case.graph, cluster, partition) for name, partition in splits.items()}
    for (name, one), theirs in zip(found.items(), (MEGATRON_MS, PRIMEPAR_MS), strict=True):
        show_phases(name, one, theirs, case.product_flops)
    one, two = found.values()
    print(f"\n{'step in ms':34}{'Megatron':>10}{'PrimePar':>10}{'ratio':>7}{'ours':>10}{'ratio':>7}")
    _total("paper, sum of its phases", sum(MEGATRON_MS.values()), sum(PRIMEPAR_MS.values()))
    _total("simulated, collectives exposed", one.exposed * 1e3, two.exposed * 1e3)
    _total("simulated, as scheduled", one.end * 1e3, two.end * 1e3, solved(case, cluster) * 1e3)


def _total(name: str, megatron_ms: float, primepar_ms: float, ours_ms: float | None = None) -> None:
    ours = f"{ours_ms:>10.0f}{megatron_ms / ours_ms:>7.2f}" if ours_ms is not None else ""
    print(f"{name:34}{megatron_ms:>10.0f}{primepar_ms:>10.0f}{megatron_ms / primepar_ms:>7.2f}{ours}")


def slowest(graph: Annotated, cluster: Cluster, partition: Partition) -> Breakdown:
    """Of the rank that is done last."""
    ranks = simulated(graph, cluster, partition).timeline
    return breakdown(graph, cluster, max(ranks, key=lambda rank: rank.end))


def solved(case: Case, cluster: Cluster) -> float:
    """Seconds of the simulated step of the plan that the solver finds in the whole space."""
    model, x = case.step
    found = st.compile_model(
        model,
        (x,),
        mesh=(case.ranks // 4, 2, 2),
        cluster=cluster,
        memory_limit=UNBOUND,
        loss_fn=loss_of,
        solver=OPTIONS,
    )
    return found.simulate().seconds


def show_shares(case: Case, cluster: Cluster) -> None:
    """A line of figure 9, left: ours with the digitised values behind them."""
    sizes = [2**k for k in range(case.ranks.bit_length()) if 2**k <= case.ranks]
    splits = {size: slowest(case.graph, cluster, megatron(case, size)) for size in sizes}
    one, best = splits[HOST], min(splits, key=lambda size: splits[size].exposed)
    made = {partition.name: slowest(case.graph, cluster, partition) for partition in primepar(case)}
    name, two = min(made.items(), key=lambda item: item[1].exposed)
    paper = SHARES[case.model, case.ranks, case.batch]
    ours = (one.computed, one.collected, two.computed, two.collected, two.ring)
    cells = [f"{x / one.exposed:.3f} {y:.3f}" for x, y in zip(ours, paper, strict=True)]
    cells += [f"{two.collected / one.collected:.2f} {paper[3] / paper[1]:.2f}"]
    cells += [f"{one.exposed / two.exposed:.2f} {1 / (paper[2] + paper[3]):.2f}"]
    cells += [f"{megatron(case, best).name} {splits[best].exposed / two.exposed:.2f}"]
    head = f"{case.model} {case.ranks}g B{case.batch}"
    print(f"{head:20}{name:>9}{''.join(f'{cell:>14}' for cell in cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16], choices=[8, 16])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16], choices=[8, 16])
    parser.add_argument("--cluster", default="v100-32gb-8x4")
    args = parser.parse_args()
    cluster = load_cluster(args.cluster)
    cases = [Case(m, n, b) for n in args.ranks for m in args.models for b in args.batches]
    if SHOWN in cases:
        show_paper_case(SHOWN, cluster)
    heads = ("compute", "collectives", "PP compute", "collectives", "rings", "coll. ratio", "speedup", "best Megatron")
    print(f"\nshares of Megatron's step, ours and the paper's\n{'':29}{''.join(f'{head:>14}' for head in heads)}")
    for case in cases:
        show_shares(case, cluster)


if __name__ == "__main__":
    main()
