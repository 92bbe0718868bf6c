"""A plan as a table: per module what its ops do, how they are placed, what they move and what they cost."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.ir.plan import Plan, PlanRow, layers_folded

_COLUMNS = ("module", "op", "phase", "count", "strategy", "operands -> results", "moved", "time", "re-layout")
_RIGHT = ("count", "moved", "time", "re-layout", "memory")


def plan_table(plan: Plan, verbose: bool = False, most: int | None = None, width: int = 170) -> str:
    """Plain text table of a plan, a row per class of identical ops, grouped by module in the order of the step.

    Layers that repeat are one row, with their number in the path written as `*` and counted. "time" (of all that the
    row counts) is that of the busiest rank; "moved" are bytes that it sends during the op, "re-layout" is the time to
    bring operands into place. Rows that cost nothing, such as views, are left out unless `verbose`. `most`: keep only
    that many rows, the most expensive ones. `width`: characters a line; longer cells are wrapped.
    """
    rows = [row for row in plan.rows if verbose or price(row) > 0]
    kept = rows if most is None else sorted(rows, key=price, reverse=True)[:most]
    chosen = {id(row) for row in kept}
    lines = [
        line
        for module, group in by_module([r for r in rows if id(r) in chosen]).items()
        for line in _lines(module, group)
    ]
    text = plain_table(_COLUMNS, lines, width, _RIGHT)
    left_out = len(rows) - len(kept)
    return f"{text}... {left_out} cheaper rows\n" if left_out else text


def _lines(module: str, rows: list[PlanRow]) -> list[tuple[str, ...]]:
    """A table's lines of one module, whose name stands in the first."""
    return [(module if index == 0 else "", *row_cells(row)) for index, row in enumerate(rows)]


def price(row: PlanRow) -> float:
    """Seconds of all that a row counts, with the re-layouts of operands."""
    return row.count * row.seconds + row.redistribution_seconds


def by_module(rows: list[PlanRow]) -> dict[str, list[PlanRow]]:
    """Rows by the path of their module, in which the layers that a row stands for are written as `*`."""
    groups: dict[str, list[PlanRow]] = {}
    for row in rows:
        path = layers_folded(row.module_path) if row.count > 1 else row.module_path
        groups.setdefault(path or "(no module)", []).append(row)
    return groups


def row_cells(row: PlanRow) -> list[str]:
    """The cells of a row, from "op" to "re-layout"."""
    return [
        row.op.removesuffix(".default"),
        "backward" if row.is_backward else "forward, again" if row.again else "forward",
        str(row.count),
        row.strategy if row.busiest is None else f"{row.strategy}; busiest rank {row.busiest:.2f}x the mean",
        f"{', '.join(row.inputs)} -> {', '.join(row.outputs)}",
        format_bytes(row.count * row.moved_bytes) if row.moved_bytes else "",
        time_text(row.count * row.seconds),
        time_text(row.redistribution_seconds),
    ]


def time_text(seconds: float) -> str:
    """Seconds as ms or us; nothing where there are none."""
    if not seconds:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def plain_table(columns: Sequence[str], lines: Sequence[Sequence[str]], width: int, right: Collection[str] = ()) -> str:
    """Plain text, without colours and without blanks at line ends; the columns named in `right` are aligned there.

    A line whose first cell is empty goes with the one before.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=index == 0)
    grouped = any(not line[0] for line in lines)
    for line, following in zip(lines, [*lines[1:], ("end",)], strict=True):
        table.add_row(*line, end_section=grouped and bool(following[0]))
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n")) + "\n"
