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
            operands.append(Operand(len(operands), *_described(item.meta["val"])))
            return operands[-1]
        if isinstance(item, (list, tuple)):
            return tuple(read(part) for part in item) if isinstance(item, tuple) else [read(part) for part in item]
        return item

    args = tuple(read(arg) for arg in node.args)
    kwargs = {name: read(value) for name, value in node.kwargs.items()}
    results = enumerate(_results(node.meta["val"]))
    return OpCall(
        node.target, args, kwargs, tuple(operands), tuple(Operand(i, *made) if made else None for i, made in results)
    )


class OpCalls:
    """`op_call` of the nodes of a graph. Calls of the same text are one object: those of identical layers, say."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], OpCall] = {}
        self.described: dict[fx.Node, Described | None] = {}

    def __call__(self, node: fx.Node) -> tuple[OpCall, list[fx.Node]]:
        """The call, and the nodes that are its operands."""
        operands: list[fx.Node] = []
        arguments = [self._key(node.args, operands)]
        arguments += [(name, self._key(value, operands)) for name, value in node.kwargs.items()]
        key = (node.target, _results(node.meta["val"]), *arguments)
        if key not in self.known:
            self.known[key] = op_call(node)
        return self.known[key], operands

    def _key(self, item: Any, operands: list[fx.Node]) -> Any:
        if isinstance(item, fx.Node) and (tensor := self._tensor(item)):
            operands.append(item)
            return tensor
        if isinstance(item, (list, tuple)):
            return (type(item), *[self._key(part, operands) for part in item])
        return repr(item)  # 1, 1.0 and True are equal

    def _tensor(self, node: fx.Node) -> Described | None:
        if node not in self.described:
            value = node.meta["val"]
            self.described[node] = _described(value) if isinstance(value, torch.Tensor) else None
        return self.described[node]


Described = tuple[tuple[int, ...], torch.dtype]


def _described(value: torch.Tensor) -> Described:
    return tuple(map(int, value.shape)), value.dtype


def _results(value: Any) -> tuple[Described | None, ...]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_described(v) if isinstance(v, torch.Tensor) else None for v in values)
