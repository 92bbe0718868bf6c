"""From a graph node to the op call that rules read."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stpart_compiler.passes.rules.registry import OpCall, Operand


def op_call(node: fx.Node) -> OpCall:
    """The call of a graph node, with an `Operand` for each occurrence of a tensor (args, then kwargs, lists flattened).

    Shapes and dtypes come from the fake values in `meta["val"]`.
    """
    operands: list[Operand] = []

    def read(item: Any) -> Any:
        if isinstance(item, fx.Node) and isinstance(item.meta["val"], torch.Tensor):
            operands.append(_described(len(operands), item.meta["val"]))
            return operands[-1]
        if isinstance(item, (list, tuple)):
            return tuple(read(part) for part in item) if isinstance(item, tuple) else [read(part) for part in item]
        return item

    args = tuple(read(arg) for arg in node.args)
    kwargs = {name: read(value) for name, value in node.kwargs.items()}
    return OpCall(node.target, args, kwargs, tuple(operands), _results(node.meta["val"]))


def _described(index: int, value: torch.Tensor) -> Operand:
    return Operand(index, tuple(int(size) for size in value.shape), value.dtype)


def _results(value: Any) -> tuple[Operand | None, ...]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_described(i, v) if isinstance(v, torch.Tensor) else None for i, v in enumerate(values))
