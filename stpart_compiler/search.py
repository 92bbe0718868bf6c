"""The search for a plan on one mesh, or the best of several: solve, generate, compare the exact peak with the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.graphs import Graphs, regions_of
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.build_programs import BuildPrograms, Programs, peak_of
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import UNKNOWN, MakePlan, Screened
from stpart_compiler.passes.problem import SolverOptions
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.refine import RefinePlan
from stpart_compiler.passes.regions import KINDS, kinds_of
from stpart_compiler.passes.solve import InfeasibleError
from stpart_compiler.rivals import SOLVED, fastest, priced_alike

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


class Form(NamedTuple):
    """How the graph of a step is written: sequences in pieces or in stripes, and which regions are one op each."""

    in_pieces: bool
    regions: str | None

    def __str__(self) -> str:
        regions = "without regions" if self.regions is None else f"with regions ({self.regions})"
        return f"the step {regions}{', sequences in pieces' if self.in_pieces else ''}"


@dataclasses.dataclass
class Tried:
    """The plans found of a step written in several forms, bounds of the forms that none was sought of, and failures."""

    gap: float
    found: dict[Form, tuple[Plan, Programs]] = dataclasses.field(default_factory=dict)
    lower: list[float] = dataclasses.field(default_factory=list)
    short: dict[Form, InfeasibleError] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Form | None:
        return min(self.found, key=lambda form: self.found[form][0].seconds, default=None)

    def result(self) -> tuple[Plan, Programs]:
        """Raises:
        InfeasibleError: in no form a plan fits.
        """
        if not self.found:
            raise min(self.short.values(), key=lambda error: error.least)
        plan, programs = cheapest(list(self.found.values()))
        plan.bound_seconds = min([plan.bound_seconds, *self.lower])
        return plan, programs


@dataclasses.dataclass(frozen=True)
class Search:
    """Solve, generate, and compare the exact peak with the limit.

    `pieces`: gives the graphs with sequences in pieces, where those may be better than the ones in stripes.
    """

    graphs: Graphs
    costs: Costs
    limit: int
    options: SolverOptions
    template: str | None
    restrictions: Restrictions
    device: torch.device
    say: Progress
    finer: Mesh | None = None  # the same ranks over more axes, on which the plan is refined
    pieces: Callable[[], Graphs] | None = None
    makers: dict[Form, MakePlan] = dataclasses.field(default_factory=dict)

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
        return self._look(Form(False, None), self.say)

    def within_limit(self, look: Screened, enough: float) -> Screened:
        """A look at this mesh, where its plan does not fit with the least that one within the memory limit takes.

        No bound is made better that is `enough` seconds without a limit.
        """
        if look.nbytes() <= self.limit:
            return look
        self.say(f"memory is short: looking at mesh {self.costs.mesh}")
        least = min(self._lower_within(form, enough) for form in self._forms())
        return dataclasses.replace(look, lower=least, seconds=least)

    def _lower_within(self, form: Form, enough: float) -> float:
        """Seconds that no plan of a form within the memory limit beats; as without a limit if those are `enough`."""
        look = self._look(form)
        if look.lower >= enough or look.nbytes() <= self.limit:
            return look.lower
        self.say(f"looking at {form}")
        return max(look.lower, self._maker(form).lower_within(self._graph(form)))

    def _forms(self) -> list[Form]:
        """The ways to write the step that are looked at first."""
        return [form for plain in self._plain() for form in (plain, *self._with_regions(plain.in_pieces))]

    def _plain(self) -> list[Form]:
        """Without regions, in each way in which sequences may be written."""
        return [Form(in_pieces, None) for in_pieces in ((False, True) if self.pieces is not None else (False,))]

    def _with_regions(self, in_pieces: bool) -> list[Form]:
        """With more and more kinds of regions."""
        graphs = self._graphs(in_pieces)
        names = dict.fromkeys(graphs.named(KINDS[:n]) for n in range(1, len(KINDS) + 1))
        return [Form(in_pieces, name) for name in names if name is not None]

    def _look(self, form: Form, say: Progress = lambda text: None) -> Screened:
        return self._maker(form).screened(self._graph(form), say)

    def _maker(self, form: Form) -> MakePlan:
        new = MakePlan(self.costs, self.options, self.limit, self.template, self.restrictions.whole_parameters)
        return self.makers.setdefault(form, new)

    def _graph(self, form: Form) -> Annotated:
        return self._graphs(form.in_pieces).of(form.regions)

    def _graphs(self, in_pieces: bool) -> Graphs:
        return self.pieces() if in_pieces and self.pieces is not None else self.graphs

    def _form_of(self, plan: Plan) -> Form:
        return Form(plan.stripes != self.graphs.plain.sequences.stripes, plan.regions)

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
        if self.template is not None:
            return self._of_template(self.template)
        return self._fastest(*self._refined(*self._solved()))

    def _of_template(self, template: str) -> tuple[Plan, Programs]:
        tried = Tried(self.options.gap)
        for plain in self._plain():
            if tried.short or any(self._needs_stripes(plan) for plan, _ in tried.found.values()):
                break
            regions = regions_of(self._graphs(plain.in_pieces), template)
            self._try(plain._replace(regions=regions), tried)
        return tried.result()

    def _solved(self) -> tuple[Plan, Programs]:
        """One search over all forms of the step: each is solved only where its bound promises enough.

        Where memory is short, regions may keep less, and run again what they do not: of the way in which sequences are
        written that was better so far, then the best regions of the other one.
        """
        tried = Tried(self.options.gap)
        first = self._try_all(self._plain(), tried)
        best = tried.best
        if best is not None and not tried.found[best][0].solver["memory_binds"]:
            return tried.result()
        in_pieces = (best or first[0]).in_pieces
        self._try_regions(in_pieces, tried)
        best = tried.best
        if self.pieces is not None and best is not None and best.regions is not None:
            self._try_all([best._replace(in_pieces=not in_pieces)], tried)
        return tried.result()

    def _try_regions(self, in_pieces: bool, tried: Tried) -> None:
        """Solve with more and more kinds of regions; while that gains, with one kind less than the best plan has."""
        graphs, forms = self._graphs(in_pieces), self._with_regions(in_pieces)
        if forms:
            self.say("memory is short: looking at regions that keep nothing of their middle")
        seen = set[Form]()
        while forms:
            self._try_all(forms, tried)
            seen.update(forms)
            own = kinds_of(tried.best.regions if tried.best is not None else None)
            fewer = dict.fromkeys(graphs.named(own - {kind}) for kind in KINDS)
            forms = [form for name in fewer if name is not None and (form := Form(in_pieces, name)) not in seen]

    def _try_all(self, forms: list[Form], tried: Tried) -> list[Form]:
        """Solve for the forms that may gain enough, the most promising first; returns them in that order."""
        if len(forms) > 1 or tried.found:
            forms = sorted(forms, key=lambda form: self._look(form).lower)
        for form in forms:
            if not self._is_needless(form, tried):
                self._try(form, tried)
        return forms

    def _is_needless(self, form: Form, tried: Tried) -> bool:
        """Whether a form cannot gain enough over the best so far, or needs as much as one that does not fit."""
        best = tried.best
        if best is None:
            return any(form.regions == other.regions for other in tried.short)
        if form.in_pieces and not best.in_pieces and self._needs_stripes(tried.found[best][0]):
            return True
        enough = _enough([*tried.found.values()], tried.gap)
        lower = self._lower_within(form, enough)
        if lower < enough:
            return False
        tried.lower.append(lower)
        return True

    def _needs_stripes(self, plan: Plan) -> bool:
        """Whether the plan has a ring under a causal mask, which only stripes balance; windows may cost more."""
        goes_round = any(row.busiest is not None and row.moved_bytes for row in plan.rows)
        return goes_round and not self.graphs.plain.sequences.windows

    def _try(self, form: Form, tried: Tried) -> None:
        self.say(f"solving {form}")
        try:
            tried.found[form] = self._run(form)
        except InfeasibleError as error:
            tried.short[form] = error

    def _refined(self, plan: Plan, programs: Programs) -> tuple[Plan, Programs]:
        """A faster plan on the finer mesh, if one is found whose programs fit; else the plan as it is."""
        if self.finer is None:
            return plan, programs
        self.say(f"refining the plan on the mesh {self.finer}")
        costs = Costs(self.costs.cluster, self.finer)
        refine = RefinePlan(costs, self.options, self.limit, self.restrictions.whole_parameters)
        better = refine.apply(self._graph(self._form_of(plan)), plan, self.say)
        if better.mesh == plan.mesh:
            return better, programs
        better.regions = plan.regions
        built = self._build(better)
        if _record_memory(better, built, self.options) > self.limit:
            self.say("the programs on the finer mesh do not fit in the memory limit")
            return dataclasses.replace(plan, bound_seconds=better.bound_seconds), programs
        return better, built

    def _fastest(self, plan: Plan, programs: Programs) -> tuple[Plan, Programs]:
        """The plan, or a yardstick priced almost like it that fits and is faster in simulation."""
        found = [
            (priced[2].seconds, name, form)
            for form, maker in self.makers.items()
            for name, priced in maker.known.priced.items()
        ]
        found.sort(key=lambda item: item[0], reverse=True)
        where, prices = {name: form for _, name, form in found}, {name: seconds for seconds, name, _ in found}
        made = {SOLVED: (plan, programs)}
        for name in priced_alike(plan, prices):
            other = self._maker(where[name]).yardstick(self._graph(where[name]), name)
            if other.digest == plan.digest:
                continue
            self.say(f"{name} is priced almost like the plan: simulating both")
            other.regions = where[name].regions
            other.solver["memory_limit"] = self.limit
            built = self._build(other)
            if _record_memory(other, built, self.options) <= self.limit:
                made[name] = other, built
        return fastest(made, self.costs.cluster) if len(made) > 1 else (plan, programs)

    def _run(self, form: Form) -> tuple[Plan, Programs]:
        """Where the programs' exact peak is over the limit, solve again with less room.

        The solver estimates memory; where it finds nothing, the leanest plan may still fit.
        """
        room = self.limit
        for _ in range(MEMORY_ROUNDS):
            try:
                plan, programs, over = self._attempt(form, room)
            except InfeasibleError as error:
                return self._leanest(form, error.least)
            if over <= 0:
                return plan, programs
            self.say(f"the programs' peak is {format_bytes(over)} over the limit: solving again with less room")
            room = max(0, room - over - self.limit // 200)
        raise _over_limit(plan, self.limit, self.options)

    def _leanest(self, form: Form, least: int) -> tuple[Plan, Programs]:
        """Programs of the plans that need least by the solver's estimate: the first that fit.

        Raises:
            InfeasibleError: none fits; names the least that any of them needs.
        """
        tried: list[Plan] = []
        for slack in LEAN_SLACKS:
            plan, programs, over = self._attempt(form, round(least * slack))
            if over <= 0:
                return plan, programs
            tried.append(plan)
            if over > FAR_OVER * self.limit:
                break
        raise _over_limit(min(tried, key=lambda plan: plan.memory["peak"]), self.limit, self.options)

    def _attempt(self, form: Form, room: int) -> tuple[Plan, Programs, int]:
        """A plan within `room` bytes by the solver's estimate, and how far its programs are over the limit."""
        maker = self._maker(form)
        plan = dataclasses.replace(maker, memory_limit=room).apply(self._graph(form), self.say)
        plan.regions = form.regions
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
        form = self._form_of(plan)
        plan.step_digest = self._graphs(form.in_pieces).plain.digest
        costs = self.costs if plan.mesh == self.costs.mesh else Costs(self.costs.cluster, plan.mesh)
        return BuildPrograms(costs.link, self.device).apply(self._graph(form), plan, self.say)


def on_best_mesh(searches: list[Search], gap: float) -> tuple[Plan, Programs]:
    """The plan on the mesh that promises most; on others too, where they may be faster by more than the wanted gap. The
    plan says what each mesh on which a plan may fit would cost, at least where that was not solved.

    Raises:
        InfeasibleError: on no mesh a plan fits.
    """
    if len(searches) == 1:
        return searches[0].run()
    looked = dict(enumerate(search.screened() for search in searches))
    found: dict[int, tuple[Plan, Programs]] = {}
    short: list[InfeasibleError] = []
    for i in promising([*looked.values()], gap, searches[0].limit):
        if found:
            enough = _enough([*found.values()], gap)
            looked[i] = searches[i].within_limit(looked[i], enough)
            if looked[i].seconds >= enough:
                continue
        del looked[i]
        searches[i].say(f"mesh {searches[i].costs.mesh}")
        try:
            found[i] = searches[i].run()
        except InfeasibleError as error:
            short.append(error)
    if not found:
        raise min(short, key=lambda error: error.least)
    plan, programs = cheapest(list(found.values()))
    plan.bound_seconds = min([plan.bound_seconds, *(each.lower for each in looked.values())])
    seconds = {i: each.seconds for i, each in looked.items()} | {i: other.seconds for i, (other, _) in found.items()}
    plan.solver["meshes"] = {str(searches[i].costs.mesh): seconds[i] for i in sorted(seconds)}
    return plan, programs


def promising(looked: list[Screened], gap: float, limit: int) -> list[int]:
    """Meshes in the order in which they are tried: fastest first, but the first one before all if none can be faster by
    more than the gap. Where the fastest plan needs more than `limit` bytes, those whose plans fit come first."""
    order = sorted(range(len(looked)), key=lambda i: looked[i].seconds)
    if (1 - gap) * looked[0].seconds <= min(each.lower for each in looked):
        order.sort(key=bool)
    if looked[order[0]].nbytes() > limit:
        order.sort(key=lambda i: looked[i].nbytes() > limit)
    return order


def _enough(found: list[tuple[Plan, Programs]], gap: float) -> float:
    """Seconds: what takes as long at least is not faster than the best plan found by more than the gap."""
    return (1 - gap) * min(plan.seconds for plan, _ in found)


def cheapest(found: list[tuple[Plan, Programs]]) -> tuple[Plan, Programs]:
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
