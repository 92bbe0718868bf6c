"""From a plan to verified programs of every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stpart_compiler.capture import Captured
from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.liveness import MemoryReport, peak_bytes
from stpart_compiler.cost_models.memory import optimizer_model
from stpart_compiler.cost_models.resting import phases_of
from stpart_compiler.ir.artifact import InputSlot, Interface, OutputSlot, Port, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import Layout, local_shape, replicated
from stpart_compiler.ir.plan import Plan
from stpart_compiler.ir.program import RankProgram, groups_of
from stpart_compiler.passes.codegen import Codegen, Placement
from stpart_compiler.passes.propagate import Annotated, ValueKey
from stpart_compiler.passes.schedule import MakeSchedule, Phase, Schedule
from stpart_compiler.passes.scratch import CountScratch
from stpart_compiler.passes.verify import verify_programs


@dataclass
class Programs:
    """All ranks' programs with their interface."""

    interface: Interface
    artifacts: list[RankArtifact]
    schedule: Schedule
    placement: Placement

    def optimizer_bytes(self, optimizer: str) -> int:
        """Bytes of optimizer state on the fullest rank."""
        states = optimizer_model(optimizer).states
        return states * self._local_bytes([s for s in self.interface.params if s.requires_grad and s.used])

    def parameter_bytes(self) -> int:
        """Bytes of parameters on the fullest rank."""
        return self._local_bytes(self.interface.params)

    def _local_bytes(self, slots: Sequence[TensorSlot]) -> int:
        mesh = self.interface.mesh
        return max(
            sum(math.prod(local_shape(s.layout, mesh, rank)) * s.dtype.itemsize for s in slots)
            for rank in range(mesh.world_size)
        )


@dataclass(frozen=True)
class BuildPrograms:
    """plan -> schedule -> codegen -> verify, for every rank."""

    cost: LinkCost
    device: torch.device

    def apply(self, graph: Annotated, plan: Plan, progress: Callable[[str], None] = lambda text: None) -> Programs:
        placement = place(graph, plan, self.cost)
        schedule = MakeSchedule(self.cost).apply(graph, placement.derived, placement.layout, frozenset(plan.recompute))
        pairs = [Codegen(self.device).apply(placement, schedule, rank) for rank in range(plan.mesh.world_size)]
        progress(f"codegen: {sum(_length(pair) for pair in pairs)} instructions on {len(pairs)} ranks")
        verify_programs([forward for forward, _ in pairs])
        backwards = [backward for _, backward in pairs if backward is not None]
        if backwards:
            verify_programs(backwards)
        progress("verify: ok")
        CountScratch().apply(program for pair in pairs for program in pair if program is not None)
        interface = make_interface(graph, plan, schedule, pairs)
        constants = _constants(graph)
        artifacts = [RankArtifact(rank, interface, *pair, constants) for rank, pair in enumerate(pairs)]
        return Programs(interface, artifacts, schedule, placement)


def _length(pair: tuple[RankProgram, RankProgram | None]) -> int:
    return sum(len(program.body) for program in pair if program is not None)


def place(graph: Annotated, plan: Plan, cost: LinkCost) -> Placement:
    """A plan bound to its graph."""
    nodes = {info.name: info.node for info in graph.captured.params}
    layouts: dict[ValueKey, Layout] = {}
    for name, layout in plan.params.items():
        node = nodes[name]
        assert node is not None, f"plan places the unused parameter {name}"
        layouts[(node, 0)] = layout
    return Placement(graph, plan.mesh, plan.strategies, layouts, cost)


def _constants(graph: Annotated) -> dict[str, torch.Tensor]:
    module = graph.captured.gm
    return {node.name: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}


def make_interface(
    graph: Annotated, plan: Plan, schedule: Schedule, pairs: list[tuple[RankProgram, RankProgram | None]]
) -> Interface:
    """Meaning of every input and output of the programs."""
    captured = graph.captured
    meaning = _meanings(captured)
    forward, backward = schedule.forward, schedule.backward
    saved: list[Port] = [("saved", k) for k in range(len(schedule.saved))]
    outputs: list[Port] = [("output", o.index) for o in captured.outputs if o.node]
    outputs += [("buffer", name) for name in captured.mutations]
    return Interface(
        mesh=plan.mesh,
        params=tuple(_param_slots(captured, plan)),
        buffers=tuple(_buffer_slots(captured)),
        inputs=tuple(input_slots(captured)),
        outputs=tuple(_output_slots(graph)),
        in_spec=captured.in_spec,
        out_spec=captured.out_spec,
        loss_index=captured.loss_index,
        forward_inputs=tuple(meaning[key[0]] for key, _ in forward.inputs),
        forward_outputs=(*outputs, *saved),
        backward_inputs=_backward_inputs(backward, saved, meaning),
        backward_outputs=tuple(_grad_ports(captured)) if backward is not None else (),
        groups=groups_of(program for pair in pairs for program in pair if program is not None),
        channels=1,
        plan_digest=plan.digest,
        training=captured.training,
        modes=captured.modes,
    )


def _meanings(captured: Captured) -> dict[str, Port]:
    """Port of every placeholder and constant of the joint graph."""
    found: dict[str, Port] = {info.node: ("param", info.name) for info in captured.params if info.node}
    found |= {info.node: ("buffer", info.name) for info in captured.buffers if info.node}
    found |= {info.node: ("input", i) for i, info in enumerate(captured.inputs) if info.node}
    found |= {name: ("tangent", index) for index, name in captured.tangents}
    found |= {n.name: ("constant", n.name) for n in captured.gm.graph.nodes if n.op == "get_attr"}
    return found


def _backward_inputs(phase: Phase | None, saved: list[Port], meaning: dict[str, Port]) -> tuple[Port, ...]:
    if phase is None:
        return ()
    return (*saved, *(meaning[key[0]] for key, _ in phase.inputs[len(saved) :]))


def _grad_ports(captured: Captured) -> list[Port]:
    nodes = {info.name: info.node for info in captured.params}
    return [("grad", name) for name, grad in captured.grads.items() if grad is not None and nodes[name] is not None]


def _param_slots(captured: Captured, plan: Plan) -> list[TensorSlot]:
    return [
        TensorSlot(
            info.name,
            info.aliases,
            info.info.shape,
            info.info.dtype,
            plan.params.get(info.name, replicated(info.info.shape)),
            info.requires_grad,
            info.node is not None,
        )
        for info in captured.params
    ]


def _buffer_slots(captured: Captured) -> list[TensorSlot]:
    return [
        TensorSlot(
            info.name,
            info.aliases,
            info.info.shape,
            info.info.dtype,
            replicated(info.info.shape),
            False,
            info.node is not None,
            info.persistent,
        )
        for info in captured.buffers
    ]


def input_slots(captured: Captured) -> list[InputSlot]:
    return [
        InputSlot(
            info.path, info.info.shape if info.info else None, info.info.dtype if info.info else None, info.constant
        )
        for info in captured.inputs
    ]


def _output_slots(graph: Annotated) -> list[OutputSlot]:
    captured = graph.captured
    differentiable = {index for index, _ in captured.tangents}
    slots = []
    for info in captured.outputs:
        if info.node is None:
            slots.append(OutputSlot(False, info.constant))
            continue
        value = graph.values[graph.alias[info.node]]
        slots.append(OutputSlot(True, None, info.index in differentiable, value.dtype, value.shape))
    return slots


def peak_of(programs: Programs) -> tuple[int, MemoryReport]:
    """Largest tensor-level peak over ranks and phases in bytes: parameters, buffers, inputs, activations, gradients.

    Forward's saved values are alive when backward starts; parameters stay through both.
    """
    best: tuple[int, MemoryReport] | None = None
    for artifact in programs.artifacts:
        for phase in phases_of(artifact):
            report = peak_bytes(phase.program, phase.kept)
            total = report.peak_bytes + phase.beside
            if best is None or total > best[0]:
                best = (total, report)
    assert best is not None
    return best
