"""Run a step with forced strategies on all ranks in one process, and compare it with one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stpart_compiler.capture import capture
from stpart_compiler.compile import annotate
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.ir.layout import gather, replicated, take
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.codegen import Codegen, Placement
from stpart_compiler.passes.propagate import Annotated, OpNode
from stpart_compiler.passes.schedule import MakeSchedule, Schedule
from stpart_compiler.passes.space import Costs
from stpart_compiler.passes.verify import verify_programs
from stpart_compiler.runtime.lockstep import run_lockstep


class Step:
    """One training step of a model, annotated, and its result on one device."""

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        loss_fn: Callable[[torch.Tensor], torch.Tensor],
        graph: Callable[..., Annotated] = annotate,
    ) -> None:
        self.model = model
        self.x = x
        self.captured = capture(model, (x,), loss_fn=loss_fn)
        self.graph = graph(self.captured)
        loss = loss_fn(model(x))
        loss.backward()
        self.loss = loss.detach()
        self.grads = {name: p.grad for name, p in model.named_parameters()}

    def check(self, mesh: Mesh, forced: dict[str, Strategy], tolerance: float = 1e-10) -> None:
        """Assert that loss and gradients are those of one device."""
        loss, grads = run(self, mesh, forced)
        text = {op.name: forced[op.name].describe(op.rule) for op in self.graph.ops if op.name in forced}
        assert close(loss, self.loss, tolerance), text
        assert all(close(grads[name], grad, tolerance) for name, grad in self.grads.items()), text


def _keep(op: OpNode) -> Strategy:
    return Strategy(tuple(() for _ in op.rule.factors))


def programs(step: Step, mesh: Mesh, forced: dict[str, Strategy]) -> tuple[Placement, Schedule, list]:
    graph = step.graph
    strategies = {op.name: forced.get(op.name, _keep(op)) for op in graph.ops}
    layouts = {
        (info.node, 0): replicated(info.info.shape) for info in step.graph.captured.params if info.node is not None
    }
    cost = Costs(load_cluster(None), mesh).link
    placement = Placement(graph, mesh, strategies, layouts, cost)
    schedule = MakeSchedule().apply(graph, placement.derived, placement.layout)
    pairs = [Codegen(torch.device("cpu")).apply(placement, schedule, rank) for rank in range(mesh.world_size)]
    verify_programs([pair[0] for pair in pairs])
    verify_programs([pair[1] for pair in pairs])
    return placement, schedule, pairs


def run(step: Step, mesh: Mesh, forced: dict[str, Strategy]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    _, schedule, pairs = programs(step, mesh, forced)
    known = {info.node: dict(step.model.named_parameters())[info.name].detach() for info in step.graph.captured.params}
    known |= {
        info.node: dict(step.model.named_buffers())[info.name] for info in step.graph.captured.buffers if info.node
    }
    known |= {info.node: step.x for info in step.graph.captured.inputs if info.node}
    module = step.graph.captured.gm
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
    names = [name for name, grad in step.graph.captured.grads.items() if grad is not None]
    grads = {
        name: gather([out[i] for out in second], schedule.backward.outputs[i][1], mesh) for i, name in enumerate(names)
    }
    assert all(torch.equal(out[0], first[0][0]) for out in first)
    return first[0][0], grads


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return bool((a - b).norm() <= tolerance * max(1.0, float(b.norm())))
