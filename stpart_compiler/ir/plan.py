"""A plan: the chosen strategy of every op and the layout at rest of every parameter, with what they cost."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from stpart_compiler.ir.layout import Atom, Layout, digit_from_json, digit_to_json
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.overlap import LoopOverlap, Overlap, StepCost
from stpart_compiler.ir.spacetime import Strategy

FORMAT = 2

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layers_folded(module_path: str) -> str:
    """`layers.*.mlp` for `layers.3.mlp`: the same for all layers that repeat."""
    return _LAYER_NUMBER.sub("*", module_path)


@dataclass(frozen=True)
class Alternative:
    """Another strategy of an op with all else as it is (what follows the op follows).

    What it costs more per step in seconds, and how much of that is compute and transfers of ops, the rest being
    re-layouts; bytes per rank more at the peak.
    """

    strategy: str
    seconds: float
    compute: float
    memory: int


@dataclass
class PlanRow:
    """Cost of one op class, per step on the busiest rank: seconds of compute and transfer, bytes moved per rank.

    `name` is the first of its ops, `twins` are the others, with their module paths. `follows`: the op or parameter
    that decides for it. `loops`: the cost of one temporal step, of loops in which something travels between steps.
    """

    name: str
    module_path: str
    op: str
    count: int
    strategy: str
    inputs: list[str]
    outputs: list[str]
    seconds: float
    moved_bytes: int
    redistribution_seconds: float
    is_backward: bool
    alternatives: list[Alternative] = field(default_factory=list)
    again: bool = False  # run once more in backward
    loops: list[StepCost] = field(default_factory=list)
    follows: str = ""
    twins: dict[str, str] = field(default_factory=dict)
    busiest: float | None = None  # where a mask leaves out scores: work of the busiest rank over the mean of all
    memory: int = 0  # bytes per rank of one op's results (0 for views) and of what it needs besides while it runs


class Formulas(Protocol):
    """Costs of the ops of a plan as expressions: `passes/formula.py`."""

    def formula(self, name: str, quantity: str) -> Any: ...
    def symbols(self, name: str) -> dict[Any, float]: ...


@dataclass
class Plan:
    """Chosen strategies and layouts, reproducible from JSON.

    `strategies` is keyed by graph node, `params` by parameter name. Times are seconds, memory bytes per rank.
    `regions`: which regions of the graph are one op each, None: none. `recompute`: ops of forward that backward runs
    again instead of reading what was saved of them.
    `stripes`: as how many stripes sequences under causal masks are written, of which each rank has some; 1: they are
    cut in pieces. `uneven`: lengths of those that are cut in pieces because the ranks do not divide them.
    `discovered_ops`: those whose rule was found by running them, which is evidence, not proof.
    """

    mesh: Mesh
    graph_digest: str
    torch_version: str
    template: str | None
    strategies: dict[str, Strategy]
    params: dict[str, Layout]
    rows: list[PlanRow]
    seconds: float
    bound_seconds: float
    memory: dict[str, int]
    yardsticks: dict[str, float]
    replicated_ops: list[str]
    discovered_ops: list[str] = field(default_factory=list)
    solver: dict[str, Any] = field(default_factory=dict)
    regions: str | None = None
    recompute: list[str] = field(default_factory=list)
    stripes: int = 1
    uneven: list[int] = field(default_factory=list)
    step_digest: str = ""  # of the graph without regions; the same for all plans of a step
    formulas: Formulas | None = field(default=None, compare=False, repr=False)  # not in the JSON

    @property
    def gap(self) -> float:
        """Proven relative distance to the best plan of the space; 1 where nothing is proven."""
        return 0.0 if self.seconds <= 0 else max(0.0, 1 - self.bound_seconds / self.seconds)

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the programs: mesh, graph, strategies and parameter layouts."""
        data = self._decisions()
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def _decisions(self) -> dict[str, Any]:
        again = {"recompute": self.recompute} if self.recompute else {}
        distinct = {id(s): s for s in self.strategies.values()}  # identical ops share one
        written = {key: strategy_to_json(s) for key, s in distinct.items()}
        return again | {
            "mesh": list(self.mesh.to_dict().items()),
            "graph": self.graph_digest,
            "strategies": {name: written[id(s)] for name, s in self.strategies.items()},
            "params": {name: layout_to_json(layout) for name, layout in self.params.items()},
        }

    def to_json(self) -> str:
        """The whole plan as text; `from_json` gives it back."""
        data = self._decisions() | {
            "format": FORMAT,
            "torch": self.torch_version,
            "template": self.template,
            "rows": [asdict(row) for row in self.rows],
            "seconds": self.seconds,
            "bound_seconds": self.bound_seconds,
            "memory": self.memory,
            "yardsticks": self.yardsticks,
            "replicated_ops": self.replicated_ops,
            "discovered_ops": self.discovered_ops,
            "solver": self.solver,
            "regions": self.regions,
            "stripes": self.stripes,
            "uneven": self.uneven,
            "step": self.step_digest,
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Plan from `to_json` text.

        Raises:
            ValueError: the text is no plan, or of another format version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"plan: not JSON ({error}); expected the text that Plan.to_json() wrote") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"plan: expected a plan of format {FORMAT}, got {found!r}; make the plan anew")
        return Plan(
            mesh=Mesh(tuple(a for a, _ in data["mesh"]), tuple(n for _, n in data["mesh"])),
            graph_digest=data["graph"],
            torch_version=data["torch"],
            template=data["template"],
            strategies={name: strategy_from_json(s) for name, s in data["strategies"].items()},
            params={name: layout_from_json(layout) for name, layout in data["params"].items()},
            rows=[_row(row) for row in data["rows"]],
            seconds=data["seconds"],
            bound_seconds=data["bound_seconds"],
            memory=data["memory"],
            yardsticks=data["yardsticks"],
            replicated_ops=data["replicated_ops"],
            discovered_ops=data.get("discovered_ops", []),
            solver=data["solver"],
            regions=data.get("regions"),
            recompute=data.get("recompute", []),
            stripes=data.get("stripes", 1),
            uneven=data.get("uneven", []),
            step_digest=data.get("step", ""),
        )

    def summary(self) -> str:
        """A few lines: mesh, predicted time and memory, proven gap, ratio to each yardstick."""
        lines = [
            self.headline(),
            f"  predicted step {self.seconds * 1e3:.3f} ms, {self._proof()}",
            "  memory per rank: " + ", ".join(f"{key} {value / 2**20:.1f} MiB" for key, value in self.memory.items()),
        ]
        meshes: dict[str, float] = self.solver.get("meshes", {})
        if len(meshes) > 1:
            tried = (f"{mesh} {seconds * 1e3:.3f} ms" for mesh, seconds in meshes.items())
            lines.append(f"  meshes tried: {', '.join(tried)}")
        if simulated := self.solver.get("simulated"):
            rivals = (f"{name} {seconds * 1e3:.3f} ms" for name, seconds in simulated.items())
            lines.append(f"  priced alike and simulated, the fastest is this plan: {', '.join(rivals)}")
        if self.recompute:
            again = [row for row in self.rows if row.again]
            seconds = sum(row.count * row.seconds for row in again)
            lines.append(f"  run again in backward: {', '.join(row.name for row in again)}; {seconds * 1e3:.3f} ms")
        lines += self._imbalance()
        for template, seconds in sorted(self.yardsticks.items(), key=lambda item: item[1]):
            ratio = seconds / self.seconds if self.seconds else 1.0
            lines.append(f"  {template}: {seconds * 1e3:.3f} ms, {ratio:.2f}x this plan")
        if self.replicated_ops:
            lines.append(f"  ops without a rule (run whole on every rank): {', '.join(self.replicated_ops)}")
        if self.discovered_ops:
            lines.append(f"  rules found by trial: {', '.join(self.discovered_ops)}")
        return "\n".join(lines)

    def _imbalance(self) -> Iterator[str]:
        """Causal attention whose ranks do not all compute as much."""
        uneven = [row for row in self.rows if row.busiest is not None and row.busiest > 1.005]
        for path in dict.fromkeys(layers_folded(row.module_path) for row in uneven):
            most = max(row.busiest or 1.0 for row in uneven if layers_folded(row.module_path) == path)
            yield f"  causal attention in {path or 'the model'}: the busiest rank computes {most:.2f}x the mean"
        if uneven and self.uneven:
            lengths = ", ".join(map(str, self.uneven))
            ranks = self.mesh.world_size
            yield f"  sequences cut in pieces, not in stripes, as {ranks} ranks do not divide them: {lengths}"

    def headline(self) -> str:
        """One line: where the plan comes from, its mesh and digest."""
        name = f"template {self.template}" if self.template else "solved"
        name += ", from the cache" if self.solver.get("cached") else ""
        return f"plan ({name}) on mesh {self.mesh}, digest {self.digest[:12]}"

    def _proof(self) -> str:
        return f"proven within {100 * self.gap:.1f} % of the best" if self.gap < 1 else "no bound: given, not solved"

    def explain(self, name: str) -> str:
        """Why an op (graph node or module path) is placed as it is: its layouts, cost, and the best alternatives here.

        An alternative is priced with all other decisions as they are: what it costs more, of which re-layouts around
        it, and what it needs more at the peak of memory. An op that follows another has none of its own.

        Raises:
            KeyError: no op of that name or module path.
        """
        rows = [row for row in self.rows if name in (row.name, row.module_path, *row.twins, *row.twins.values())]
        if not rows:
            known = ", ".join(sorted({row.module_path for row in self.rows if row.module_path})[:20])
            raise KeyError(f"plan: no op or module {name!r}; module paths include {known}")
        return "\n".join(line for row in rows for line in self._why(row))

    def _why(self, row: PlanRow) -> Iterator[str]:
        phase = "backward" if row.is_backward else "forward and again in backward" if row.again else "forward"
        yield f"{row.name} ({row.op}, {row.module_path}, {phase}, x{row.count}): {row.strategy}"
        yield f"  {', '.join(row.inputs)} -> {', '.join(row.outputs)}"
        yield (
            f"  {row.seconds * 1e6:.1f} us, {row.moved_bytes} bytes moved, re-layout of operands"
            f" {row.redistribution_seconds * 1e6:.1f} us, {row.memory} bytes of memory"
        )
        if row.busiest is not None:
            yield f"  causal mask: the busiest rank computes {row.busiest:.2f}x the mean"
        if row.follows:
            yield f"  follows {row.follows}, which decides for it"
        limit = self.solver.get("memory_limit")
        for other in row.alternatives:
            text = f"  instead {other.strategy}: {other.seconds * 1e6:+.1f} us with all else as it is"
            text += f" (re-layouts {(other.seconds - other.compute) * 1e6:+.1f} us)"
            if other.memory:
                over = limit is not None and self.memory.get("solver estimate", 0) + other.memory > limit
                text += f", {other.memory:+d} bytes at the peak{', over the limit' if over else ''}"
            yield text

    def overlap_condition(self, module_path: str) -> Overlap:
        """When the transfers of a module's temporal loops hide behind their compute (METP's full-overlap condition).

        Derived from the cost formulas: `str()` of it shows each loop's condition with the values that its variables
        have on the plan's cluster. Latency, and ops that are no products, are left out. Of a causal ring half of the
        scores count, as of a rank on average. Layers that repeat have the same condition.

        Raises:
            KeyError: no temporal loop in the module moves anything under this plan.
        """
        wanted = layers_folded(module_path)
        rows = [row for row in self.rows if row.loops]
        found = [row for row in rows if f"{layers_folded(row.module_path)}.".startswith(f"{wanted}.")]
        if not found:
            known = ", ".join(sorted({row.module_path for row in rows})[:20]) or "none"
            raise KeyError(
                f"plan: no temporal loop moves anything in module {module_path!r}; those that have one: {known}"
            )
        loops = ((row, cost) for row in found for cost in row.loops)
        return Overlap(tuple(LoopOverlap(row.name, row.module_path, row.is_backward, cost) for row, cost in loops))

    def formula(self, name: str, quantity: str) -> Any:
        """What one op costs under its strategy, as a sympy expression; `str` or `sympy.latex` shows it.

        `name`: graph node, or path of a module with one op. `quantity`: "compute" (FLOPs of the busiest rank),
        "bytes_moved" (bytes that it sends while the op runs), "memory" (bytes of results and of what it needs besides),
        "seconds".
        With the values of `symbols(name)` the expression gives the number that the solver used: that number is made
        by the same code. Symbols are b, s, h, p, e and others, see `passes/formula.py`.

        Raises:
            KeyError: no such op.
            ValueError: no such quantity, a module with several ops, or the plan was read from a file.
        """
        return self._formulas().formula(name, quantity)

    def symbols(self, name: str) -> dict[Any, float]:
        """The values of the (sympy) symbols in the formulas of an op: `formula(...).subs(symbols(...))`.

        Raises:
            KeyError, ValueError: as `formula`.
        """
        return self._formulas().symbols(name)

    def _formulas(self) -> Formulas:
        if self.formulas is None:
            raise ValueError("formula: a plan that was read from a file does not know its ops; compile_model(plan=...)")
        return self.formulas


def _row(data: dict[str, Any]) -> PlanRow:
    row = PlanRow(**data)
    row.alternatives = [Alternative(**other) for other in data["alternatives"]]
    row.loops = [StepCost(**cost) for cost in data.get("loops", ())]
    return row


def strategy_to_json(strategy: Strategy) -> list[Any]:
    digits = [[digit_to_json(d) for d in factor] for factor in strategy.digits]
    return [digits, strategy.steps, strategy.linear, [digit_to_json(d) for d in strategy.pending]]


def strategy_from_json(data: list[Any]) -> Strategy:
    digits, steps, linear, pending = data
    return Strategy(
        tuple(tuple(digit_from_json(d) for d in factor) for factor in digits),
        steps,
        linear,
        tuple(digit_from_json(d) for d in pending),
    )


def layout_to_json(layout: Layout) -> list[Any]:
    return [[[atom.size, [digit_to_json(d) for d in atom.digits]] for atom in dim] for dim in layout.dims]


def layout_from_json(data: list[Any]) -> Layout:
    return Layout(
        tuple(tuple(Atom(size, tuple(digit_from_json(d) for d in digits)) for size, digits in dim) for dim in data)
    )
