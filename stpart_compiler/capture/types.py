"""What a capture yields: one flat joint graph, and what each of its inputs and outputs means to the user's model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import TreeSpec


class GraphBreakError(ValueError):
    """The model cannot be captured as one graph: its Python needs tensor values, or calls what cannot be traced."""


@dataclass(frozen=True)
class TensorInfo:
    """Global shape, dtype and device type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorInfo:
        """Describe a tensor with static sizes."""
        return TensorInfo(tuple(int(size) for size in tensor.shape), tensor.dtype, tensor.device.type)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter or buffer, under the first of its names in the model."""

    name: str
    aliases: tuple[str, ...]  # further names of the same (tied) tensor
    node: str | None  # placeholder; None: the step does not use it
    info: TensorInfo
    requires_grad: bool
    is_buffer: bool
    persistent: bool  # part of the state dict


@dataclass(frozen=True)
class InputInfo:
    """A leaf of the call's (args, kwargs): a tensor, or a constant that was traced in and must be equal at run time."""

    path: str  # "input_ids", "args[0].x"
    node: str | None  # placeholder of a tensor; None for a constant
    info: TensorInfo | None
    constant: object


@dataclass(frozen=True)
class OutputInfo:
    """A leaf of the model's output: the node that computes it, or a constant."""

    index: int
    node: str | None
    constant: object


@dataclass
class Captured:
    """One training (or inference) step as a flat graph of aten ops.

    The placeholders of `gm` are the used parameters, the used buffers, the tensor inputs and the tangents, in this
    order and in the order of `params`, `buffers`, `inputs`, `tangents`. Its output is one flat tuple: the leaves of the
    model's output (constants included), the new values of `mutations`, and the gradients of `grads` that exist.

    Each node has in its meta, beside what torch puts there ("val": the fake result): "module_path", the name of the
    module it comes from ("" when unknown), and "is_backward", whether it depends on a tangent.
    """

    gm: fx.GraphModule
    params: list[ParamInfo]
    buffers: list[ParamInfo]
    inputs: list[InputInfo]
    outputs: list[OutputInfo]
    mutations: dict[str, str]  # buffer -> node with its value after the step
    grads: dict[str, str | None]  # parameter -> node with its gradient; None: it gets none
    tangents: list[tuple[int, str]]  # index of a differentiable output, placeholder with its gradient
    in_spec: TreeSpec  # of (args, kwargs)
    out_spec: TreeSpec
    loss_index: int | None  # the output that is a scalar and the only differentiable one
    training: bool
    modes: dict[str, bool]  # name of each module of the model -> whether it was in train mode; "": the model itself

    def digest(self) -> str:
        """SHA-256 over everything a plan depends on; the same in every process that captures the same step."""
        digest = hashlib.sha256()
        for line in self._lines():
            digest.update(line.encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def _lines(self) -> Iterator[str]:
        for node in self.gm.graph.nodes:
            yield _node_line(node)
            if node.op == "get_attr":
                yield _content(getattr(self.gm, node.target))
        yield from (repr(info) for info in (*self.params, *self.buffers, *self.inputs, *self.outputs))
        yield repr((self.mutations, self.grads, self.tangents, self.loss_index, self.training))
        yield f"{self.in_spec} -> {self.out_spec}"


def _node_line(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else (val,)
    results = [(tuple(v.shape), v.stride(), v.dtype) for v in values if isinstance(v, torch.Tensor)]
    return f"{node.name} {node.op} {target} {node.args} {node.kwargs} {results}"


def _target_name(target: Callable[..., object]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _content(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
