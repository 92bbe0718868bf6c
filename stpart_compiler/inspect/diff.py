"""Two plans of one step beside each other: what differs, per class of identical ops and parameters, and in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.inspect.table import by_module, plain_table, price, row_cells, time_text
from stpart_compiler.ir.plan import Plan, PlanRow, layers_folded

_COLUMNS = (
    "module",
    "plan",
    "op",
    "phase",
    "count",
    "strategy",
    "operands -> results",
    "moved",
    "time",
    "re-layout",
    "memory",
)
_RIGHT = ("count", "moved", "time", "re-layout", "memory")
_TOTALS = ("per step and rank", "a", "b", "b / a")
_NAMED = 3
"""Names shown of what differs, where the plans are for other graphs."""


@dataclass(frozen=True)
class PlanDiff:
    """What differs between two plans; `str()` shows it.

    `rows`: pairs of op classes that are placed otherwise or cost otherwise, None where only one plan has the op.
    `params`: (names, folded over layers and counted; layout at rest in each plan). `alike`: op classes that do not
    differ.
    """

    plans: tuple[Plan, Plan]
    rows: list[tuple[PlanRow | None, PlanRow | None]]
    params: list[tuple[str, str, str]]
    alike: int

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False, width: int = 170) -> str:
        """Plain text tables: totals, parameters, ops. Ops that cost nothing in either plan only if `verbose`."""
        heads = [f"{name}: {plan.headline()}" for name, plan in zip("ab", self.plans, strict=True)]
        parts = ["\n".join(heads), self._totals(width)]
        if self.params:
            parts.append(plain_table(("parameters", "a at rest", "b at rest"), self.params, width))
        shown = [pair for pair in self.rows if verbose or any(row is not None and price(row) > 0 for row in pair)]
        if shown:
            parts.append(_ops(shown, width))
        hidden = len(self.rows) - len(shown)
        parts.append(
            f"{self.alike} op classes are alike" + (f", {hidden} that cost nothing differ" if hidden else "") + "\n"
        )
        return "\n".join(parts)

    def _totals(self, width: int) -> str:
        return plain_table(_TOTALS, list(self._total_rows()), width, _TOTALS[1:])

    def _total_rows(self) -> Iterator[tuple[str, str, str, str]]:
        one, two = self.plans
        yield _total("predicted step", one.seconds, two.seconds, time_text)
        for name, (a, b) in _sums(one, two).items():
            yield _total(name, a, b, time_text)
        moved = [float(sum(row.count * row.moved_bytes for row in plan.rows)) for plan in self.plans]
        yield _total("moved beside compute", moved[0], moved[1], _bytes_text)
        for name in dict.fromkeys((*one.memory, *two.memory)):
            yield _total(f"memory, {name}", one.memory.get(name, 0), two.memory.get(name, 0), _bytes_text)


def diff(plan_a: Plan, plan_b: Plan) -> PlanDiff:
    """What differs between two plans of one step; their meshes, clusters and regions may be others.

    Raises:
        TypeError: not two plans.
        ValueError: the plans are for other graphs; names what differs.
    """
    for name, plan in (("plan_a", plan_a), ("plan_b", plan_b)):
        if not isinstance(plan, Plan):
            raise TypeError(
                f"{name}: got {type(plan).__name__}, expected a Plan; Plan.from_json(text) reads a saved one"
            )
    _check_same_step(plan_a, plan_b)
    ones, twos = ({row.name: row for row in plan.rows} for plan in (plan_a, plan_b))
    names = dict.fromkeys((*ones, *twos))
    pairs = [(ones.get(name), twos.get(name)) for name in names]
    rows = [(one, two) for one, two in pairs if one is None or two is None or _placed(one) != _placed(two)]
    return PlanDiff((plan_a, plan_b), rows, _params(plan_a, plan_b), len(pairs) - len(rows))


def _check_same_step(one: Plan, two: Plan) -> None:
    """Regions change the graph, but not the step that it is made of."""
    if one.graph_digest == two.graph_digest or (one.step_digest and one.step_digest == two.step_digest):
        return
    shapes = [{name: layout.shape for name, layout in plan.params.items()} for plan in (one, two)]
    params = [name for name in dict.fromkeys((*shapes[0], *shapes[1])) if shapes[0].get(name) != shapes[1].get(name)]
    if params:
        raise ValueError(
            f"diff: the plans are for other models: {len(params)} parameters differ, such as "
            + ", ".join(
                f"{name} (a: {_shape(shapes[0], name)}, b: {_shape(shapes[1], name)})" for name in params[:_NAMED]
            )
        )
    a, b = (set(plan.strategies) for plan in (one, two))
    if one.regions == two.regions and a != b:
        raise ValueError(
            "diff: the plans are for other graphs of one model: ops only in a:"
            f" {sorted(a - b)[:_NAMED]}, only in b: {sorted(b - a)[:_NAMED]}"
        )
    raise ValueError(
        "diff: the plans are for the same model over other inputs: their sizes, dtypes or constant arguments differ"
    )


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "none"


def _placed(row: PlanRow) -> tuple[object, ...]:
    costs = row.seconds, row.moved_bytes, row.redistribution_seconds, row.memory
    return row.strategy, row.inputs, row.outputs, row.again, row.count, costs


def _params(one: Plan, two: Plan) -> list[tuple[str, str, str]]:
    """Layouts at rest that differ, one row for parameters of layers that repeat and rest alike."""
    folded: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*one.params, *two.params)):
        a, b = (str(plan.params[name]) for plan in (one, two))
        if a != b:
            folded.setdefault((layers_folded(name), a, b), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} (x{len(names)})", a, b)
        for (pattern, a, b), names in folded.items()
    ]


def _sums(one: Plan, two: Plan) -> dict[str, tuple[float, float]]:
    """Seconds of ops forward and backward, and of re-layouts."""

    def sums(plan: Plan) -> list[float]:
        phases = (sum(r.count * r.seconds for r in plan.rows if r.is_backward == phase) for phase in (False, True))
        return [*phases, sum(r.redistribution_seconds for r in plan.rows)]

    names = ("forward ops", "backward ops", "re-layouts, at each use")
    return dict(zip(names, zip(sums(one), sums(two), strict=True), strict=True))


def _total(name: str, a: float, b: float, text: Callable[[float], str]) -> tuple[str, str, str, str]:
    return name, text(a), text(b), f"{b / a:.3f}" if a else ""


def _bytes_text(nbytes: float) -> str:
    return format_bytes(nbytes) if nbytes else ""


def _ops(pairs: list[tuple[PlanRow | None, PlanRow | None]], width: int) -> str:
    """A line per plan that has it, for each op class; bytes of memory are those of one op."""
    plan_of = {id(row): name for pair in pairs for row, name in zip(pair, "ab", strict=True) if row is not None}
    second = {id(b) for a, b in pairs if a is not None and b is not None}
    lines: list[tuple[str, ...]] = []
    for module, rows in by_module([row for pair in pairs for row in pair if row is not None]).items():
        for index, row in enumerate(rows):
            op, phase, count, *cells = row_cells(row)
            what = ("", "", "") if id(row) in second else (op, phase, count)
            first = module if index == 0 else ""
            lines.append((first, *what, plan_of[id(row)], *cells, _bytes_text(row.memory)))
    return plain_table(_COLUMNS, lines, width, _RIGHT)
