"""`compile_model`: a model, example inputs and a mesh -> a plan and verified per-rank programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stpart_compiler.capture import capture
from stpart_compiler.compiled import CompiledModel
from stpart_compiler.cost_models.cluster import Cluster, load_cluster
from stpart_compiler.cost_models.sizes import parse_bytes
from stpart_compiler.graphs import Written
from stpart_compiler.grids import coarse_and_fine, grids_to_try
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.ir.artifact import Deferred
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.build_programs import Programs, input_slots
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.defer import DeferReductions
from stpart_compiler.passes.fit_plan import FitPlan
from stpart_compiler.passes.formula import OpFormulas
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.splits import PriceSplits
from stpart_compiler.pauses import without_gc
from stpart_compiler.plan_cache import plan_cache
from stpart_compiler.runtime.agree import agree_on_plan, check_world
from stpart_compiler.runtime.buckets import Dynamic, by_leaf
from stpart_compiler.runtime.modes import in_modes
from stpart_compiler.search import Progress, Restrictions, Search, on_best_mesh


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

    sequences = graphs.plain.sequences
    # stripes cost more to move only where a batch of one has its pieces side by side, and before windows over places
    pieces = partial(written.of, 1) if sequences.stripes > 1 and (sequences.windows or sequences.single) else None

    def search_on(grid: Mesh) -> Search:
        finer = coarse_and_fine(asked)[1]
        return Search(graphs, Costs(prices, grid), limit, options, template, limits, device, say, finer, pieces)

    cache = plan_cache(graphs.plain, asked, prices, limit, options, template, (limits, device.type, grids))

    def checked(known: Plan) -> tuple[Plan, Programs]:
        return search_on(known.mesh).checked(known)

    def solve() -> tuple[Plan, Programs]:
        if plan is not None:
            graph = graphs.of(plan.regions)
            return checked(FitPlan(Costs(prices, plan.mesh), options).apply(plan, graph, asked))
        known = cache.load()
        if known is not None:
            say(f"plan taken from the cache: {cache.path}")
            return checked(known)
        found, programs = on_best_mesh([search_on(grid) for grid in grids], options.gap)
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


def _bytes(memory_limit: int | str) -> int:
    try:
        return parse_bytes(memory_limit)
    except ValueError as error:
        raise ValueError(f"memory_limit: {error}") from None
