"""A plan as a table: per module what its ops do, how they are placed, what they move and what they cost."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.ir.plan import Plan, PlanRow, layers_folded

_COLUMNS = ("module", "op", "phase", "count", "strategy", "operands -> results", "moved", "time", "re-layout")
_RIGHT = ("count", "moved", "time", "re-layout")


def plan_table(plan: Plan, verbose: bool = False, most: int | None = None, width: int = 170) -> str:
    """Plain text table of a plan, a row per class of identical ops, grouped by module in the order of the step.

    Layers that repeat are one row, with their number in the path written as `*` and counted. "time" (of all that the
    row counts) is that of the busiest rank; "moved" are bytes that it sends during the op, "re-layout" is the time to
    bring operands into place. Rows that cost nothing, such as views, are left out unless `verbose`. `most`: keep only
    that many rows, the most expensive ones. `width`: characters a line; longer cells are wrapped.
    """
    rows = [row for row in plan.rows if verbose or _price(row) > 0]
    kept = rows if most is None else sorted(rows, key=_price, reverse=True)[:most]
    chosen = {id(row) for row in kept}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold", no_wrap=name == "module")
    for module, group in _by_module([row for row in rows if id(row) in chosen]).items():
        for index, row in enumerate(group):
            table.add_row(module if index == 0 else "", *_cells(row), end_section=index == len(group) - 1)
    text = _rendered(table, width)
    left_out = len(rows) - len(kept)
    return f"{text}... {left_out} cheaper rows\n" if left_out else text


def _price(row: PlanRow) -> float:
    return row.count * row.seconds + row.redistribution_seconds


def _by_module(rows: list[PlanRow]) -> dict[str, list[PlanRow]]:
    groups: dict[str, list[PlanRow]] = {}
    for row in rows:
        path = layers_folded(row.module_path) if row.count > 1 else row.module_path
        groups.setdefault(path or "(no module)", []).append(row)
    return groups


def _cells(row: PlanRow) -> list[str]:
    return [
        row.op.removesuffix(".default"),
        "backward" if row.is_backward else "forward, again" if row.again else "forward",
        str(row.count),
        row.strategy,
        f"{', '.join(row.inputs)} -> {', '.join(row.outputs)}",
        format_bytes(row.count * row.moved_bytes) if row.moved_bytes else "",
        _time(row.count * row.seconds),
        _time(row.redistribution_seconds),
    ]


def _time(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _rendered(table: Table, width: int) -> str:
    """Plain text, without colours and without blanks at line ends."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n")) + "\n"
