"""What compilation hands to the runtime: the programs of one rank, and what their inputs and outputs mean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import TreeSpec

from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import Group, RankProgram

Port = tuple[str, int | str]
"""("param", name), ("buffer", name), ("input", flat index), ("constant", name), ("saved", k), ("tangent", flat output
index), ("output", flat output index), ("grad", param name)."""


@dataclass(frozen=True)
class TensorSlot:
    """A parameter or buffer of the model: global shape, where it rests, and its other names if it is tied."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    requires_grad: bool
    used: bool
    persistent: bool = True


@dataclass(frozen=True)
class InputSlot:
    """A leaf of (args, kwargs): a global tensor of fixed shape and dtype, or a constant that must be equal then."""

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    constant: object = None


@dataclass(frozen=True)
class OutputSlot:
    """A leaf of the model's output. `is_tensor` False: the constant is returned as it was traced."""

    is_tensor: bool
    constant: object = None
    differentiable: bool = False
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Interface:
    """Meaning of the programs' inputs and outputs; equal on all ranks.

    `groups`: of collectives. `channels`: number of those of point-to-point messages. `modes`: per module of the model,
    by name, whether it was traced in train mode ("": the model itself).
    """

    mesh: Mesh
    params: tuple[TensorSlot, ...]
    buffers: tuple[TensorSlot, ...]
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    loss_index: int | None
    forward_inputs: tuple[Port, ...]
    forward_outputs: tuple[Port, ...]
    backward_inputs: tuple[Port, ...]
    backward_outputs: tuple[Port, ...]
    groups: tuple[Group, ...]
    channels: int
    plan_digest: str
    training: bool
    modes: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class SumSlot:
    """A value that backward may leave unreduced: where it is then, and the parameters of whose gradients it is a part.

    Sums over several backwards are kept in `dtype`.
    """

    name: str
    layout: Layout
    dtype: torch.dtype
    params: tuple[str, ...]


@dataclass(frozen=True)
class Deferred:
    """Backward of one rank in two programs, for sums over several backwards that are reduced once.

    `accumulate` takes backward's inputs and gives the gradients of the parameters `grads`, then `sums`. `reduce` takes
    sums of these and gives the gradients of the parameters `reduced`. `groups`: of collectives, on all ranks.
    """

    accumulate: RankProgram
    reduce: RankProgram
    grads: tuple[str, ...]
    sums: tuple[SumSlot, ...]
    reduced: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def programs(self) -> list[RankProgram]:
        return [self.accumulate, self.reduce]


@dataclass
class RankArtifact:
    """Everything one rank runs. `constants`: tensors traced into the graph. `deferred` is made when first asked for."""

    rank: int
    interface: Interface
    forward: RankProgram
    backward: RankProgram | None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    deferred: Deferred | None = None

    @property
    def programs(self) -> list[RankProgram]:
        """Forward, and backward if there is one."""
        return [program for program in (self.forward, self.backward) if program is not None]


def messages_digest(programs: Iterable[RankProgram]) -> str:
    """Digest of what ranks send each other, in order: programs made alike have the same."""
    digest = hashlib.sha256()
    for program in programs:
        digest.update(f"{program.rank} {len(program.body)}".encode())
        for instr in program.body:
            if instr.kind in ("exchange", "collective", "wait"):
                sends, recvs = ([message for _, message in part] for part in (instr.sends, instr.recvs))
                facts = (instr.kind, sends, recvs, instr.group, instr.tag, instr.channel, instr.tags)
                digest.update(str(facts).encode())
    return digest.hexdigest()
