"""What a rank holds beside the tensors that a phase makes: whole steps are more than their two programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stpart_compiler.ir.artifact import Port, RankArtifact
from stpart_compiler.ir.layout import local_shape
from stpart_compiler.ir.program import RankProgram

_RESTING = ("param", "buffer", "input", "constant")


@dataclass(frozen=True)
class StepPhase:
    """One program of a step. `kept`: names of its inputs that the caller holds throughout.

    `beside`: bytes of resting tensors that the phase does not take as inputs, yet the rank holds.
    """

    program: RankProgram
    kept: frozenset[str]
    beside: int


def phases_of(artifact: RankArtifact) -> list[StepPhase]:
    """Forward, and backward where there is one."""
    interface = artifact.interface
    phases = [_phase(artifact, artifact.forward, interface.forward_inputs)]
    if artifact.backward is not None:
        phases.append(_phase(artifact, artifact.backward, interface.backward_inputs))
    return phases


def _phase(artifact: RankArtifact, program: RankProgram, ports: tuple[Port, ...]) -> StepPhase:
    named = zip(program.inputs, ports, strict=True)
    kept = frozenset(value.name for value, port in named if port[0] in _RESTING)
    return StepPhase(program, kept, _beside(artifact, ports))


def _beside(artifact: RankArtifact, ports: tuple[Port, ...]) -> int:
    interface = artifact.interface
    seen = set(ports)
    total = 0
    for kind, slots in (("param", interface.params), ("buffer", interface.buffers)):
        for slot in slots:
            if (kind, slot.name) not in seen:
                total += math.prod(local_shape(slot.layout, interface.mesh, artifact.rank)) * slot.dtype.itemsize
    for index, leaf in enumerate(interface.inputs):
        if leaf.shape is not None and leaf.dtype is not None and ("input", index) not in seen:
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total
