"""Programs made with strategies that a test picks, run on all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stpart_compiler.capture import Captured, capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.layout import Layout, gather, replicated, take
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import RankProgram
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.codegen import Codegen, Placement
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.schedule import MakeSchedule, Schedule
from stpart_compiler.passes.verify import verify_programs
from stpart_compiler.runtime.lockstep import run_lockstep


class Step:
    """A model's step and its result on one device. Without `loss_fn` the model gives the loss."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[torch.Tensor, ...],
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        graph: Callable[[Captured], Annotated] = annotate,
    ) -> None:
        self.model = model
        self.args = args
        self.graph = graph(capture(model, args, loss_fn=loss_fn))
        self.captured = self.graph.captured
        loss = loss_fn(model(*args)) if loss_fn else model(*args)
        loss.backward()
        self.loss = loss.detach()
        self.grads = {name: p.grad for name, p in model.named_parameters()}

    def check(
        self,
        mesh: Mesh,
        forced: dict[str, Strategy],
        again: frozenset[str] = frozenset(),
        rest: dict[ValueKey, Layout] | None = None,
    ) -> None:
        """Assert that with these strategies loss and gradients are those of one device. `again`: ops run twice.

        `rest`: layouts of parameters; whole where there is none.
        """
        text = {op.name: forced[op.name].describe(op.rule) for op in self.graph.ops if op.name in forced}
        assert is_exact(self, *run(self, mesh, forced, again, rest)), (text, rest)


def keep(op: OpNode) -> Strategy:
    return Strategy(tuple(() for _ in op.rule.factors))


def programs(
    step: Step,
    mesh: Mesh,
    forced: dict[str, Strategy],
    again: frozenset[str] = frozenset(),
    rest: dict[ValueKey, Layout] | None = None,
) -> tuple[Schedule, list[tuple[RankProgram, RankProgram]]]:
    """Programs in which the named ops have the given strategies, and all others run whole on every rank."""
    graph = step.graph
    strategies = {op.name: forced.get(op.name, keep(op)) for op in graph.ops}
    layouts = {(info.node, 0): replicated(info.info.shape) for info in step.captured.params if info.node is not None}
    layouts |= rest or {}
    cost = Costs(load_cluster(None), mesh).link
    placement = Placement(graph, mesh, strategies, layouts, cost)
    schedule = MakeSchedule(placement.cost).apply(graph, placement.derived, placement.layout, again)
    pairs = []
    for rank in range(mesh.world_size):
        forward, backward = Codegen(torch.device("cpu")).apply(placement, schedule, rank)
        assert backward is not None
        pairs.append((forward, backward))
    verify_programs([pair[0] for pair in pairs])
    verify_programs([pair[1] for pair in pairs])
    return schedule, pairs


def run(
    step: Step,
    mesh: Mesh,
    forced: dict[str, Strategy],
    again: frozenset[str] = frozenset(),
    rest: dict[ValueKey, Layout] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by name."""
    schedule, pairs = programs(step, mesh, forced, again, rest)
    assert schedule.backward is not None
    known = _known(step)
    given = [
        [take(known[key[0]], layout, mesh, rank) for key, layout in schedule.forward.inputs]
        for rank in range(mesh.world_size)
    ]
    first: list[Any] = run_lockstep([pair[0] for pair in pairs], given)
    count = len(schedule.saved)
    tangent = torch.ones_like(step.loss)
    inputs = []
    for rank in range(mesh.world_size):
        saved = first[rank][len(first[rank]) - count :] if count else []
        rest = [
            tangent if key[0].startswith("tangent") else take(known[key[0]], layout, mesh, rank)
            for key, layout in schedule.backward.inputs[count:]
        ]
        inputs.append([*saved, *rest])
    second: list[Any] = run_lockstep([pair[1] for pair in pairs], inputs)
    names = [name for name, grad in step.captured.grads.items() if grad is not None]
    outputs = schedule.backward.outputs
    grads = {name: gather([out[i] for out in second], outputs[i][1], mesh) for i, name in enumerate(names)}
    assert all(torch.allclose(out[0], first[0][0], rtol=0, atol=0, equal_nan=True) for out in first)
    return first[0][0], grads


def _known(step: Step) -> dict[str, torch.Tensor]:
    """Tensors of the joint graph's placeholders and constants."""
    module = step.captured.gm
    params = dict(step.model.named_parameters())
    known = {info.node: params[info.name].detach() for info in step.captured.params if info.node}
    buffers = dict(step.model.named_buffers())
    known |= {info.node: buffers[info.name] for info in step.captured.buffers if info.node}
    known |= {info.node: x for info, x in zip(step.captured.inputs, step.args, strict=True) if info.node}
    return known | {n.name: getattr(module, n.target) for n in module.graph.nodes if n.op == "get_attr"}


def is_exact(step: Step, loss: torch.Tensor, grads: dict[str, torch.Tensor]) -> bool:
    """Whether loss and gradients are those of one device."""
    return _close(loss, step.loss) and all(_close(grads[name], grad) for name, grad in step.grads.items())


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(), b.nan_to_num()
    return bool((a - b).norm() <= 1e-10 * max(1.0, float(b.norm())))
