"""What an assignment does and costs, per op class, and what the other strategies there would cost."""

from __future__ import annotations

from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.plan import Alternative, PlanRow
from stpart_compiler.passes.held import Bytes
from stpart_compiler.passes.own_bytes import op_bytes
from stpart_compiler.passes.problem import Problem
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.shares import imbalance
from stpart_compiler.passes.space import Space, strategy_of
from stpart_compiler.passes.step_cost import step_costs
from stpart_compiler.passes.timeline import timeline
from stpart_compiler.passes.uses import Assignment

ALTERNATIVES = 3
"""Number of other strategies a plan row lists."""


def plan_rows(space: Space, problem: Problem, choice: Assignment) -> list[PlanRow]:
    """What an assignment does and costs, per op class."""
    relayout = _relayout_seconds(problem, choice)
    at_points = problem.memory.at_points(choice)
    lasting = timeline(space.graph, space.costs.link, problem.again).lasting
    rows = []
    for klass, choices in enumerate(space.choices):
        index, strategy = strategy_of(space, choice, klass)
        derived = choices.derived[index]
        op = choices.op
        rows.append(
            PlanRow(
                name=op.name,
                module_path=op.module_path,
                op=str(op.call.target).removeprefix("aten."),
                count=choices.count,
                strategy=strategy.describe(op.rule),
                inputs=[_port_text(port.layout, port.motion) for port in derived.inputs],
                outputs=[_port_text(port.layout, port.motion) for port in derived.outputs],
                seconds=choices.seconds[index],
                moved_bytes=choices.moved[index],
                redistribution_seconds=relayout.get(klass, 0.0),
                is_backward=op.is_backward,
                alternatives=_alternatives(problem, choice, klass, op, at_points),
                follows=_follows(space, klass),
                twins={twin.name: twin.module_path for twin in space.graph.classes[klass][1:]},
                again=klass in problem.again_classes,
                loops=step_costs(op, strategy, derived, space.costs),
                busiest=imbalance(op, strategy, space.mesh),
                memory=op_bytes(space.costs, op, strategy, derived, lasting),
            )
        )
    return rows


def _port_text(layout: Layout, motion: str) -> str:
    return f"{layout} moves" if motion == "move" else str(layout)


def _relayout_seconds(problem: Problem, choice: Assignment) -> dict[int, float]:
    """Per consuming op class, seconds of re-layouts of its operands (shared ones are counted at each use)."""
    found: dict[int, float] = {}
    for group in problem.uses:
        for use in group:
            i = 0 if use.from_root is None else use.side(choice, source=True)
            j = 0 if use.to_root is None else use.side(choice, source=False)
            if use.price[i][j]:
                found[use.edge.consumer] = found.get(use.edge.consumer, 0.0) + use.price[i][j] / 1e9
    return found


def _follows(space: Space, klass: int) -> str:
    """Name of the op or parameter that decides for an op; "" where it decides for itself."""
    root = space.choices[klass].root
    if root == klass:
        return ""
    return space.params[-1 - root].names[0] if root < 0 else space.choices[root].op.name


def _alternatives(problem: Problem, choice: Assignment, klass: int, op: OpNode, at_points: Bytes) -> list[Alternative]:
    """The cheapest other strategies of a root with all else as it is. `at_points`: bytes held under `choice`."""
    choices = problem.space.choices[klass]
    if choices.root != klass or len(choices.strategies) == 1:
        return []
    local = problem.local(klass)
    prices, now = local.prices(choice), choice[klass]
    others = sorted((price - prices[now], i) for i, price in enumerate(prices) if i != now)
    found = []
    for more, i in others[:ALTERNATIVES]:
        peak = problem.memory.changed(at_points, choice, klass, i).max()
        compute = (local.own[i] - local.own[now]) / 1e9
        text = choices.strategies[i].describe(op.rule)
        found.append(Alternative(text, more / 1e9, compute, int(peak - at_points.max())))
    return found
