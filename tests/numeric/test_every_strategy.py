"""Every strategy that the enumerator emits is executed on every rank and compared with one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stpart_compiler.capture import capture
from stpart_compiler.compile import annotate
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.ir.layout import gather, replicated, take
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.codegen import Codegen, Placement
from stpart_compiler.passes.propagate import Annotated, OpNode
from stpart_compiler.passes.schedule import MakeSchedule, Schedule
from stpart_compiler.passes.space import Costs
from stpart_compiler.passes.strategies import FULL_SPACE, enumerate_strategies, is_contraction
from stpart_compiler.passes.verify import verify_programs
from stpart_compiler.runtime.lockstep import run_lockstep

EVEN = (4, 6, 12, 12)
UNEVEN = (3, 5, 7, 10)
MESHES = [2, 3, 4, (2, 2), (2, 3), (3, 3), (2, 2, 2)]


class Step:
    """A linear layer with bias and activation, forward and backward, and its result on one device."""

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        batch, rows, inner, columns = sizes
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(inner, columns), nn.Tanh()).double()
        self.x = torch.randn(batch, rows, inner, dtype=torch.float64)
        weight = torch.randn(columns, dtype=torch.float64)
        loss_fn = lambda y: (y * weight).sum()  # noqa: E731
        self.captured = capture(self.model, (self.x,), loss_fn=loss_fn)
        self.graph: Annotated = annotate(self.captured)
        loss = loss_fn(self.model(self.x))
        loss.backward()
        self.loss = loss.detach()
        self.grads = {name: p.grad for name, p in self.model.named_parameters()}


@pytest.fixture(scope="module", params=[EVEN, UNEVEN], ids=["even", "uneven"])
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


def _keep(op: OpNode) -> Strategy:
    return Strategy(tuple(() for _ in op.rule.factors))


def _programs(step: Step, mesh: Mesh, forced: dict[str, Strategy]) -> tuple[Placement, Schedule, list]:
    graph = step.graph
    strategies = {op.name: forced.get(op.name, _keep(op)) for op in graph.ops}
    layouts = {(info.node, 0): replicated(info.info.shape) for info in step.captured.params if info.node is not None}
    cost = Costs(load_cluster(None), mesh).link
    placement = Placement(graph, mesh, strategies, layouts, cost)
    schedule = MakeSchedule().apply(graph, placement.derived, placement.layout)
    pairs = [Codegen(torch.device("cpu")).apply(placement, schedule, rank) for rank in range(mesh.world_size)]
    verify_programs([pair[0] for pair in pairs])
    verify_programs([pair[1] for pair in pairs])
    return placement, schedule, pairs


def _run(step: Step, mesh: Mesh, forced: dict[str, Strategy]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    _, schedule, pairs = _programs(step, mesh, forced)
    known = {info.node: dict(step.model.named_parameters())[info.name].detach() for info in step.captured.params}
    known |= {info.node: step.x for info in step.captured.inputs if info.node}
    module = step.captured.gm
    known |= {n.name: getattr(module, n.target) for n in module.graph.nodes if n.op == "get_attr"}
    given = [
        [take(known[key[0]], layout, mesh, rank) for key, layout in schedule.forward.inputs]
        for rank in range(mesh.world_size)
    ]
    first = run_lockstep([pair[0] for pair in pairs], given)
    count = len(schedule.saved)
    tangent = torch.ones((), dtype=torch.float64)
    inputs = []
    for rank in range(mesh.world_size):
        saved = first[rank][len(first[rank]) - count :] if count else []
        rest = [
            tangent if key[0].startswith("tangent") else take(known[key[0]], layout, mesh, rank)
            for key, layout in schedule.backward.inputs[count:]
        ]
        inputs.append([*saved, *rest])
    second = run_lockstep([pair[1] for pair in pairs], inputs)
    names = [name for name, grad in step.captured.grads.items() if grad is not None]
    grads = {
        name: gather([out[i] for out in second], schedule.backward.outputs[i][1], mesh) for i, name in enumerate(names)
    }
    assert all(torch.equal(out[0], first[0][0]) for out in first)
    return first[0][0], grads


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 1e-10 * max(1.0, float(b.norm())))


def _contractions(step: Step) -> list[OpNode]:
    return [op for op in step.graph.ops if is_contraction(op.rule)]


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_every_strategy_of_the_matmuls(step: Step, spec: object) -> None:
    mesh = parse_mesh(spec)
    space = FULL_SPACE if len(mesh.axes) < 3 else replace(FULL_SPACE, forms=((1, 0), (0, 1), (1, 1)))
    contractions = _contractions(step)
    assert len(contractions) == 2  # forward and the weight's gradient: the input needs none
    options = {op.name: enumerate_strategies(op.rule, mesh, op.movable, space) for op in contractions}
    for i in range(max(map(len, options.values()))):
        forced = {name: found[i % len(found)] for name, found in options.items()}
        loss, grads = _run(step, mesh, forced)
        text = {op.name: forced[op.name].describe(op.rule) for op in contractions}
        assert _close(loss, step.loss), text
        assert all(_close(grads[name], grad) for name, grad in step.grads.items()), text


@pytest.mark.parametrize("spec", [2, 3, (2, 2), (2, 3)], ids=str)
def test_every_strategy_of_the_other_ops(step: Step, spec: object) -> None:
    mesh = parse_mesh(spec)
    for op in step.graph.ops:
        if is_contraction(op.rule):
            continue
        for strategy in enumerate_strategies(op.rule, mesh, op.movable):
            loss, grads = _run(step, mesh, {op.name: strategy})
            text = f"{op.name}: {strategy.describe(op.rule)}"
            assert _close(loss, step.loss), text
            assert all(_close(grads[name], grad) for name, grad in step.grads.items()), text
