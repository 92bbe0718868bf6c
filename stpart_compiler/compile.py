"""`compile_model`: a model, example inputs and a mesh -> a plan and verified per-rank programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stpart_compiler.capture import Captured, capture
from stpart_compiler.compiled import CompiledModel
from stpart_compiler.cost_models.cluster import Cluster, load_cluster
from stpart_compiler.cost_models.sizes import format_bytes, parse_bytes
from stpart_compiler.grids import coarse_and_fine, grids_to_try
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.ir.artifact import Deferred
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.build_programs import BuildPrograms, Programs, input_slots, peak_of
from stpart_compiler.passes.decompose import Decompose
from stpart_compiler.passes.defer import DeferReductions
from stpart_compiler.passes.fit_plan import FitPlan
from stpart_compiler.passes.formula import OpFormulas
from stpart_compiler.passes.fuse import FuseRegions, FuseScores
from stpart_compiler.passes.make_plan import UNKNOWN, MakePlan, Screened
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.propagate import Annotated, Propagate
from stpart_compiler.passes.refine import RefinePlan
from stpart_compiler.passes.regions import REGIONS
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.solve import InfeasibleError
from stpart_compiler.passes.space import Costs
from stpart_compiler.passes.splits import PriceSplits
from stpart_compiler.passes.templates import template as named_template
from stpart_compiler.pauses import same_random, without_gc
from stpart_compiler.plan_cache import plan_cache
from stpart_compiler.runtime.agree import agree_on_plan, check_world
from stpart_compiler.runtime.buckets import Dynamic, by_leaf
from stpart_compiler.runtime.modes import in_modes

MEMORY_ROUNDS = 5
"""How often the solver's memory estimate is corrected by the exact one of the generated programs."""

LEAN_SLACKS = (1.0, 1.02, 1.1)
"""Room given to the solver, relative to the least it knows of, to find programs that really need least."""

FAR_OVER = 0.5
"""Where programs are over the limit by so much of it, a little more or less room makes no difference."""

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Restrictions:
    """Limits on the plan. `whole_parameters`: every rank holds every parameter whole."""

    whole_parameters: bool = False


@without_gc()
def compile_model(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any,
    memory_limit: int | str | None = None,
    cluster: str | Path | Cluster | None = None,
    template: str | None = None,
    plan: Plan | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    training: bool = True,
    solver: SolverOptions | None = None,
    device: torch.device | str = "cpu",
    dump_dir: str | Path | None = None,
    progress: Progress | None = None,
    restrictions: Restrictions | None = None,
    dynamic: Dynamic | None = None,
) -> CompiledModel:
    """Trace one step of `model`, choose a plan for `mesh`, and generate a verified program per rank.

    Args:
        model: may be on the meta device for planning. Not changed.
        example_args, example_kwargs: global inputs (real or meta tensors); they fix shapes and dtypes.
        mesh: `4`, `(2, 2)`, `{"r": 2, "c": 2}` or a torch DeviceMesh. A plain number of ranks leaves the axes to the
            solver: two axes are tried as well, inside of a host, or the inner one within a level of the cluster.
            `{"d": 4}` and `(4,)` are one axis.
        memory_limit: bytes or a text such as "16GiB", per rank; None: the cluster device's memory.
        cluster: preset name, path of a TOML, or Cluster; None: a generic preset of the device type.
        template: None solves; else one of `templates()`, the named plan.
        plan: use this plan, made before for the same model and mesh; the sizes of the inputs may be others.
        loss_fn: takes the model's output, gives a scalar; traced into the step.
        training: False compiles forward alone.
        solver: seed, time limit, gap, workers, optimizer.
        device: type of the ranks' devices.
        dump_dir: write what each pass made there, numbered.
        progress: called with a line of text as the work goes on.
        restrictions: limits on the plan.
        dynamic: input -> `Buckets` (or several, of several dims). Rank modules then pad calls of other sizes up to the
            next bucket and cut outputs back: one program per bucket instead of one per size. The model must leave
            padded places out: by an attention mask, labels of -100, a loss that is a mean over valid tokens. The first
            padded call is run without padding too, and refused where the results differ:

                tokens = st.Buckets(dim=1, sizes=(128, 256, 512), pad=0)
                dynamic={"input_ids": tokens, "labels": st.Buckets(dim=1, sizes=(128, 256, 512), pad=-100)}

    Raises:
        ValueError: a bad mesh, limit, cluster, template or plan; the message says what was expected.
        TypeError: an argument of another type than expected, or inputs that the model's forward does not take.
        GraphBreakError: the model cannot be captured as one graph.
        InfeasibleError: no plan fits in the memory limit.
    """
    _check_kinds(example_args, example_kwargs, plan, loss_fn, solver)
    if plan is not None and template is not None:
        raise ValueError(f"template: {template!r} beside a plan, which says all that it would; give one of them")
    say = progress or (lambda text: None)
    options = solver or SolverOptions()
    asked = parse_mesh(mesh)
    check_world(asked)
    device = torch.device(device)
    prices = load_cluster(cluster, device.type)
    limit = _bytes(memory_limit) if memory_limit is not None else prices.device.memory
    prices.check_mesh(asked)
    grids = grids_to_try(mesh, asked, prices, template, plan)
    dumper = Dumper(dump_dir)
    say("capture")
    captured = capture(model, tuple(example_args), dict(example_kwargs or {}), loss_fn=loss_fn, training=training)
    buckets = by_leaf(dynamic or {}, input_slots(captured))
    written = Written(captured, dumper)
    graphs = written.of(asked.world_size if plan is None else plan.stripes)
    say(f"propagate: {len(graphs.plain.ops)} ops in {len(graphs.plain.classes)} classes")
    limits = restrictions or Restrictions()

    def search_on(grid: Mesh, stripes: int) -> Search:
        finer = coarse_and_fine(asked)[1]
        return Search(written.of(stripes), Costs(prices, grid), limit, options, template, limits, device, say, finer)

    cache = plan_cache(graphs.plain, asked, prices, limit, options, template, (limits, device.type, grids))

    def checked(known: Plan) -> tuple[Plan, Programs]:
        return search_on(known.mesh, known.stripes).checked(known)

    def solve() -> tuple[Plan, Programs]:
        if plan is not None:
            graph = graphs.of(plan.regions)
            return checked(FitPlan(Costs(prices, plan.mesh), options).apply(plan, graph, asked))
        known = cache.load()
        if known is not None:
            say(f"plan taken from the cache: {cache.path}")
            return checked(known)
        sequences = graphs.plain.sequences
        found, programs = _on_best_mesh([search_on(grid, sequences.stripes) for grid in grids], options.gap)
        if sequences.windows or (sequences.single and not _keys_go_round(found)):
            say("solving with sequences in pieces, which may be cheaper to move")
            grid = found.mesh if found.mesh in grids else grids[0]  # a refined plan has another mesh
            found, programs = _cheapest([(found, programs), search_on(grid, 1).run()])
        if options.spatial_only and options.yardsticks and template is None:
            used = written.of(found.stripes)
            kinds = [used.plain, *([used.of(found.regions)] if found.regions else [])]
            priced = PriceSplits(prices, options, limit, limits.whole_parameters)
            found.yardsticks = priced.apply(kinds, found, say)
        cache.store(found)
        return found, programs

    decided, programs = agree_on_plan(graphs.plain.digest, solve, checked)
    dumper.plan(decided)
    dumper.programs(programs.artifacts)

    def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledModel:
        with in_modes(model, captured.modes):
            return compile_model(
                model,
                args,
                kwargs,
                mesh=asked,
                memory_limit=limit,
                cluster=prices,
                plan=decided,
                loss_fn=loss_fn,
                training=training,
                solver=options,
                device=device,
                progress=progress,
            )

    def defer() -> list[Deferred]:
        return DeferReductions(device).apply(programs.placement, programs.schedule, programs.artifacts)

    graph = written.of(decided.stripes).of(decided.regions)
    decided.formulas = OpFormulas(graph, Costs(prices, decided.mesh), decided.strategies, frozenset(decided.recompute))
    made = (decided, programs.interface, programs.artifacts, graph, programs.placement)
    return CompiledModel(*made, model, again, defer, buckets)


def _check_kinds(args: object, kwargs: object, plan: object, loss_fn: object, solver: object) -> None:
    """Raises:
    TypeError: an argument of `compile_model` is of another type than expected.
    """
    arguments = "a tuple of the model's arguments; one argument is (x,)"
    checks = (
        ("example_args", args, isinstance(args, (tuple, list)), arguments),
        ("example_kwargs", kwargs, kwargs is None or isinstance(kwargs, Mapping), "a dict of the model's keywords"),
        ("plan", plan, plan is None or isinstance(plan, Plan), "a Plan; Plan.from_json(text) reads a saved one"),
        ("loss_fn", loss_fn, loss_fn is None or callable(loss_fn), "a function of the model's output"),
        (
            "solver",
            solver,
            solver is None or isinstance(solver, SolverOptions),
            "SolverOptions, as in SolverOptions()",
        ),
    )
    for name, given, fits, expected in checks:
        if not fits:
            raise TypeError(f"{name}: got {type(given).__name__}, expected {expected}")


def annotate(captured: Captured, dumper: Dumper | None = None, stripes: int = 1) -> Annotated:
    """Normalize and propagate: decomposed graph with a refined rule per op. `stripes`: see `passes/stripes.py`."""
    dumper = dumper or Dumper(None)
    dumper.graph("capture", captured.gm)
    with without_gc(), same_random():
        captured = dataclasses.replace(captured, gm=Decompose().apply(captured.gm))
        graph = Propagate(stripes).apply(captured)
    dumper.graph("decompose", captured.gm)
    dumper.annotated(graph)
    return graph


def fuse(graph: Annotated, regions: str = "mlp", dumper: Dumper | None = None) -> Annotated | None:
    """The annotated graph with each region as one op; None where there are none. `regions`: one of REGIONS."""
    with without_gc():
        stripes = graph.sequences.stripes
        scores = FuseScores(stripes).apply(graph.captured) if regions == "all" else None
        if scores is not None:
            graph = Propagate(stripes).apply(scores)
        captured = FuseRegions(regions).apply(graph)
        found = Propagate(stripes).apply(captured) if captured is not None else graph if scores is not None else None
    if found is not None:
        (dumper or Dumper(None)).annotated(found)
    return found


def _bytes(memory_limit: int | str) -> int:
    try:
        return parse_bytes(memory_limit)
    except ValueError as error:
        raise ValueError(f"memory_limit: {error}") from None


@dataclasses.dataclass
class Graphs:
    """The annotated graph of a step, op by op and with its regions as one op each."""

    plain: Annotated
    dumper: Dumper
    known: dict[str, Annotated | None] = dataclasses.field(default_factory=dict)

    def fused(self, regions: str) -> Annotated | None:
        """With regions of a kind in REGIONS; None where there are none."""
        if regions not in self.known:
            self.known[regions] = fuse(self.plain, regions, self.dumper)
        return self.known[regions]

    def of(self, regions: str | None) -> Annotated:
        """With these regions, as far as there are any."""
        return (self.fused(regions) if regions else None) or self.plain


@dataclasses.dataclass
class Written:
    """The graphs of a step, with its sequences written in stripes or not (`passes/stripes.py`)."""

    captured: Captured
    dumper: Dumper
    known: dict[int, Graphs] = dataclasses.field(default_factory=dict)

    def of(self, stripes: int) -> Graphs:
        """In so many stripes; 1, or a number that divides no sequence: in none."""
        if stripes not in self.known:
            found = Graphs(annotate(self.captured, self.dumper, stripes), self.dumper)
            self.known[stripes] = self.known[found.plain.sequences.stripes] = found
        return self.known[stripes]


def _keys_go_round(plan: Plan) -> bool:
    """Whether the plan has a ring under a causal mask, which only stripes balance."""
    return any(row.busiest is not None and row.moved_bytes for row in plan.rows)


def regions_of(graphs: Graphs, template: str) -> str | None:
    """Those that a template asks for; without attention where its sequence could not be cut in one."""
    asked = named_template(template).regions
    graph = graphs.fused(asked) if asked == "all" else None
    regions = [op for op in graph.ops if isinstance(op.call.target, Region)] if graph is not None else []
    attends = [op for op in regions if any(inner.rule.loops for inner in op.call.target.body)]
    return asked if all(op.rule.rings for op in attends) else "mlp"


@dataclasses.dataclass(frozen=True)
class Search:
    """Solve, generate, and compare the exact peak with the limit."""

    graphs: Graphs
    costs: Costs
    limit: int
    options: SolverOptions
    template: str | None
    restrictions: Restrictions
    device: torch.device
    say: Progress
    finer: Mesh | None = None  # the same ranks over more axes, on which the plan is refined
    makers: dict[str | None, MakePlan] = dataclasses.field(default_factory=dict)

    def run(self) -> tuple[Plan, Programs]:
        """The cheapest plan that fits.

        Raises:
            InfeasibleError: none fits; says which demands clash.
        """
        try:
            return self._fitting()
        except InfeasibleError as error:
            raise InfeasibleError(f"{error}{self._clashing()}", error.least) from None

    def screened(self) -> Screened:
        """What to expect of this mesh, from a short search. What it made is used again when the mesh is solved.

        A template is solved so soon that there is nothing to be known before.
        """
        if self.template is not None:
            return UNKNOWN
        self.say(f"looking at mesh {self.costs.mesh}")
        return self._maker(None).screened(self.graphs.plain, self.say)

    def _maker(self, regions: str | None) -> MakePlan:
        new = MakePlan(self.costs, self.options, self.limit, self.template, self.restrictions.whole_parameters)
        return self.makers.setdefault(regions, new)

    def _clashing(self) -> str:
        """Which demand beside the limit could be dropped: the template, or whole parameters."""
        freed = {
            f"template={self.template!r}": self.template is not None and dataclasses.replace(self, template=None),
            "parameters whole on every rank": self.restrictions.whole_parameters
            and dataclasses.replace(self, restrictions=Restrictions()),
        }
        found = ""
        for demand, search in freed.items():
            if search and (least := search._least()) <= self.limit:
                found += f". It clashes with {demand}: without that, {format_bytes(least)} would do"
        return found

    def _least(self) -> int:
        """Bytes that some plan needs, by the solver's estimate."""
        maker = MakePlan(self.costs, self.options, self.limit, None, self.restrictions.whole_parameters)
        return maker.least(self.graphs.plain)

    def _fitting(self) -> tuple[Plan, Programs]:
        """Where memory is short, regions may keep less, and run again what they do not."""
        if self.template is not None:
            return self._run(regions_of(self.graphs, self.template))
        return self._refined(*self._solved())

    def _solved(self) -> tuple[Plan, Programs]:
        found: list[tuple[Plan, Programs]] = []
        short: list[InfeasibleError] = []
        for regions in (None, *REGIONS):
            if regions is not None and self.graphs.fused(regions) is None:
                continue
            if regions is not None:
                self.say("memory is short: solving with more regions that keep nothing of their middle")
            try:
                found.append(self._run(regions))
            except InfeasibleError as error:
                short.append(error)
            if found and not found[-1][0].solver["memory_binds"]:
                break
        if not found:
            raise min(short, key=lambda error: error.least)
        return _cheapest(found)

    def _refined(self, plan: Plan, programs: Programs) -> tuple[Plan, Programs]:
        """A faster plan on the finer mesh, if one is found whose programs fit; else the plan as it is."""
        if self.finer is None:
            return plan, programs
        self.say(f"refining the plan on the mesh {self.finer}")
        costs = Costs(self.costs.cluster, self.finer)
        refine = RefinePlan(costs, self.options, self.limit, self.restrictions.whole_parameters)
        better = refine.apply(self.graphs.of(plan.regions), plan, self.say)
        if better.mesh == plan.mesh:
            return better, programs
        better.regions = plan.regions
        built = self._build(better)
        if _record_memory(better, built, self.options) > self.limit:
            self.say("the programs on the finer mesh do not fit in the memory limit")
            return dataclasses.replace(plan, bound_seconds=better.bound_seconds), programs
        return better, built

    def _run(self, regions: str | None) -> tuple[Plan, Programs]:
        """Where the programs' exact peak is over the limit, solve again with less room.

        The solver estimates memory; where it finds nothing, the leanest plan may still fit.
        """
        room = self.limit
        for _ in range(MEMORY_ROUNDS):
            try:
                plan, programs, over = self._attempt(regions, room)
            except InfeasibleError as error:
                return self._leanest(regions, error.least)
            if over <= 0:
                return plan, programs
            self.say(f"the programs' peak is {format_bytes(over)} over the limit: solving again with less room")
            room = max(0, room - over - self.limit // 200)
        raise _over_limit(plan, self.limit, self.options)

    def _leanest(self, regions: str | None, least: int) -> tuple[Plan, Programs]:
        """Programs of the plans that need least by the solver's estimate: the first that fit.

        Raises:
            InfeasibleError: none fits; names the least that any of them needs.
        """
        tried: list[Plan] = []
        for slack in LEAN_SLACKS:
            plan, programs, over = self._attempt(regions, round(least * slack))
            if over <= 0:
                return plan, programs
            tried.append(plan)
            if over > FAR_OVER * self.limit:
                break
        raise _over_limit(min(tried, key=lambda plan: plan.memory["peak"]), self.limit, self.options)

    def _attempt(self, regions: str | None, room: int) -> tuple[Plan, Programs, int]:
        """A plan within `room` bytes by the solver's estimate, and how far its programs are over the limit."""
        maker = self._maker(regions)
        plan = dataclasses.replace(maker, memory_limit=room).apply(self.graphs.of(regions), self.say)
        plan.regions = regions
        plan.solver["memory_limit"] = room
        programs = self._build(plan)
        return plan, programs, _record_memory(plan, programs, self.options) - self.limit

    def checked(self, plan: Plan) -> tuple[Plan, Programs]:
        """Programs of a given plan, if they fit."""
        programs = self._build(plan)
        if _record_memory(plan, programs, self.options) > self.limit:
            raise _over_limit(plan, self.limit, self.options)
        return plan, programs

    def _build(self, plan: Plan) -> Programs:
        plan.step_digest = self.graphs.plain.digest
        costs = self.costs if plan.mesh == self.costs.mesh else Costs(self.costs.cluster, plan.mesh)
        return BuildPrograms(costs.link, self.device).apply(self.graphs.of(plan.regions), plan, self.say)


def _on_best_mesh(searches: list[Search], gap: float) -> tuple[Plan, Programs]:
    """The plan on the mesh that promises most; on others too, where a plan is known there that fits and is faster by
    more than the wanted gap. The plan says what each mesh would cost.

    Raises:
        InfeasibleError: on no mesh a plan fits.
    """
    if len(searches) == 1:
        return searches[0].run()
    looked = [search.screened() for search in searches]
    found: dict[int, tuple[Plan, Programs]] = {}
    short: list[InfeasibleError] = []
    for i in promising(looked, gap):
        if found and not looked[i].beats(min(plan.seconds for plan, _ in found.values()), gap, searches[i].limit):
            continue
        searches[i].say(f"mesh {searches[i].costs.mesh}")
        try:
            found[i] = searches[i].run()
        except InfeasibleError as error:
            short.append(error)
    if not found:
        raise min(short, key=lambda error: error.least)
    plan, programs = _cheapest(list(found.values()))
    plan.bound_seconds = min(plan.bound_seconds, *(each.lower for each in looked))
    plan.solver["meshes"] = {
        str(search.costs.mesh): found[i][0].seconds if i in found else looked[i].seconds
        for i, search in enumerate(searches)
    }
    return plan, programs


def promising(looked: list[Screened], gap: float) -> list[int]:
    """Meshes in the order in which they are tried: fastest first, but the first one before all if none can be faster by
    more than the gap."""
    order = sorted(range(len(looked)), key=lambda i: looked[i].seconds)
    if (1 - gap) * looked[0].seconds <= min(each.lower for each in looked):
        order.sort(key=bool)
    return order


def _cheapest(found: list[tuple[Plan, Programs]]) -> tuple[Plan, Programs]:
    """The cheaper of the plans, with the yardsticks of all."""
    plan, programs = min(found, key=lambda pair: pair[0].seconds)
    for other, _ in found:
        for name, seconds in other.yardsticks.items():
            plan.yardsticks[name] = min(seconds, plan.yardsticks.get(name, seconds))
    plan.bound_seconds = min(other.bound_seconds for other, _ in found)
    return plan, programs


def _record_memory(plan: Plan, programs: Programs, options: SolverOptions) -> int:
    """Write the exact memory of the programs into the plan; returns the peak with optimizer state."""
    step, _ = peak_of(programs)
    state = programs.optimizer_bytes(options.optimizer)
    held = programs.parameter_bytes()
    plan.memory |= {"step peak": step, "parameters": held, "optimizer state": state, "peak": step + state}
    return step + state


def _over_limit(plan: Plan, limit: int, options: SolverOptions) -> InfeasibleError:
    least, held, state = (plan.memory[name] for name in ("peak", "parameters", "optimizer state"))
    parts = {
        "parameters": held,
        "inputs, activations and gradients at the peak of the step": plan.memory["step peak"] - held,
        f"optimizer state ({options.optimizer})": state,
    }
    return InfeasibleError(
        f"memory_limit: {format_bytes(limit)} per rank is too small; the leanest programs found need"
        f" {format_bytes(least)} ({least} bytes): "
        + ", ".join(f"{format_bytes(nbytes)} of {part}" for part, nbytes in parts.items())
        + f". {_fewest_over(parts, limit)}. Raise the limit, use more ranks, or a smaller batch",
        least,
    )


def _fewest_over(parts: dict[str, int], limit: int) -> str:
    """The fewest parts that are over the limit together."""
    chosen: list[str] = []
    for part in sorted(parts, key=parts.__getitem__, reverse=True):
        chosen.append(part)
        if sum(parts[name] for name in chosen) > limit:
            break
    if len(chosen) == len(parts):
        return "Any two of these would fit, all together do not"
    return f"Over the limit {'alone' if len(chosen) == 1 else 'together'}: {' and '.join(chosen)}"
