"""Every kind of op call in the steps of the zoo's models, on the values that it meets there, whole and in blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from blocks import LINE, Example, check_maps, check_strategy, cut, graph_inputs, in_double
from torch import fx
from torch.utils._pytree import tree_leaves
from traced_zoo import by_model, traced

from stpart_compiler.ir.layout import form
from stpart_compiler.passes.rules import OpCall, Operand, op_call, rule_of

aten = torch.ops.aten
_WITHOUT_VALUES = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
_MET: set[object] = set()  # models share most of their calls


class Recorder(fx.Interpreter):
    """Runs a graph and keeps an example of every kind of call that was not met before."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.examples: list[Example] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
            self._note(op_call(n), self.fetch_args_kwargs_from_env(n))
        return super().run_node(n)

    def _note(self, call: OpCall, values: Any) -> None:
        key, rule = kind(call), rule_of(call)
        if key in _MET or rule is None or call.target in _WITHOUT_VALUES:
            return
        _MET.add(key)
        tensors = [x.double() if x.dtype == torch.float32 else x.clone() for x in tensors_in(values)]
        self.examples.append(
            Example(OpCall(*(in_double(getattr(call, f.name)) for f in fields(OpCall))), tensors, rule)
        )


def kind(call: OpCall) -> object:
    """The call but for sizes: operands are equal by type, rank and which dims are of size one."""
    return str(call.target), pattern(call.args), pattern(tuple(sorted(call.kwargs.items())))


def pattern(item: Any) -> object:
    if isinstance(item, Operand):
        return "tensor", item.dtype.is_floating_point, tuple(size == 1 for size in item.shape)
    if isinstance(item, (list, tuple)):
        return tuple(map(pattern, item))
    return min(item, 2) if type(item) is int else item


def tensors_in(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict):
        yield from tensors_in(tuple(item.values()))
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from tensors_in(part)


def recorded(name: str) -> list[Example]:
    step, captured, _ = traced(name)
    recorder = Recorder(captured.gm)
    with torch.no_grad():
        recorder.run(*graph_inputs(captured, step.model, tree_leaves((step.args, dict(step.kwargs)))))
    return recorder.examples


@by_model
def test_calls_of_a_model_hold_in_blocks(name: str) -> None:
    for ex in recorded(name):
        check_maps(ex)
        for f, q in itertools.product(ex.rule.cuttable, (2, 3)):
            check_strategy(ex, ex.rule, cut(ex.rule, {f: (form(q, d=1),)}), LINE[q])
