"""Rank programs as torch.fx modules: one call_function node per instruction, in program order.

The generated function takes one list, which it clears, and drops every value after the line that reads it last: what is
alive when is what `cost_models/liveness.py` counts. Nothing is eliminated: communication has effects that fx does not
see.
"""

from __future__ import annotations

import copy
import linecache
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen, _custom_builtins

from stpart_compiler.ir.program import Instr, Origin, RankProgram, Value

# Names that the generated function needs for itself.
_RESERVED = frozenset(("self", "args_list", "args_iter", *_custom_builtins))
_ASSIGNED = re.compile(r"\s*(\w+) = ")
_CONSTANT = "constant_"


class ProgramModule(_LazyGraphModule):
    """Module of one rank's program. Its Python code is made at the first call: most ranks' modules are never run here.

    Pickling and deep copying emit the program anew, so edits of the graph are not carried along.
    """

    program: RankProgram

    def __reduce__(self) -> tuple[Any, ...]:
        return emit_fx, (self.program, self._constants())

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        result = emit_fx(copy.deepcopy(self.program, memo), copy.deepcopy(self._constants(), memo))
        memo[id(self)] = result
        return result

    def _constants(self) -> dict[str, torch.Tensor]:
        targets = {node.meta["constant"]: str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        return {name: getattr(self, target) for name, target in targets.items()}


def emit_fx(program: RankProgram, constants: Mapping[str, torch.Tensor] | None = None) -> GraphModule:
    """GraphModule of `program`: called with one list of the inputs (cleared), it returns the list of the outputs.

    `constants`: the tensors of `program.constants`, and of inputs that shall be attributes of the module instead, by
    value name. Each node has its instruction's origin as `meta["origin"]`.

    Raises:
        ValueError: a constant is missing, unknown, or of another shape or dtype; a value is used before it is made.
    """
    constants = constants or {}
    _check_constants(program, constants)
    graph = Graph()
    nodes: dict[str, Node] = {}
    attributes: dict[str, Any] = {}
    for value in (*program.inputs, *program.constants):
        if value.name in constants:
            nodes[value.name] = _get_attr(graph, value, constants[value.name], attributes)
        else:
            nodes[value.name] = _placeholder(graph, value)
    for instr in program.body:
        _emit(graph, nodes, instr)
    graph.output([None if value is None else _mapped(value, nodes) for value in program.outputs])
    graph.set_codegen(_BoxedCodeGen())
    module = ProgramModule(attributes, graph, class_name=f"Rank{program.rank}_{program.phase}")
    module.program = program
    return module


def annotated_code(module: GraphModule) -> str:
    """The generated Python code, with the origin behind each line that starts a new one."""
    origins = {node.name: node.meta["origin"] for node in module.graph.nodes if "origin" in node.meta}
    lines, shown = [], None
    for line in module.code.split("\n"):
        match = _ASSIGNED.match(line)
        origin = origins.get(match.group(1)) if match else None
        is_new = origin is not None and origin != shown and str(origin)
        lines.append(f"{line}  # {origin}" if is_new else line)
        shown = origin if origin is not None else shown
    return "\n".join(lines)


def raised_in(module: GraphModule, error: BaseException) -> Origin | None:
    """The instruction of `module` whose call raised `error`; None where none of them did."""
    traceback, name = error.__traceback__, None
    code = type(module).forward.__code__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            match = _ASSIGNED.match(linecache.getline(code.co_filename, traceback.tb_lineno))
            name = match.group(1) if match else None
        traceback = traceback.tb_next
    return next((node.meta.get("origin") for node in module.graph.nodes if node.name == name), None)


def _check_constants(program: RankProgram, constants: Mapping[str, torch.Tensor]) -> None:
    known = {value.name: value for value in (*program.inputs, *program.constants)}
    missing = [value.name for value in program.constants if value.name not in constants]
    if missing:
        raise ValueError(f"emit_fx: rank {program.rank}: no tensor given for the constants {missing}")
    for name, tensor in constants.items():
        value = known.get(name)
        if value is None:
            raise ValueError(f"emit_fx: rank {program.rank}: {name!r} is no constant and no input of the program")
        if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            raise ValueError(
                f"emit_fx: rank {program.rank}: constant {name!r} must be {value.dtype} of shape {value.shape}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )


def _placeholder(graph: Graph, value: Value) -> Node:
    name = _legal(value.name)
    node = graph.create_node("placeholder", name, name=name)
    # fx would copy a differing target into a second variable, which keeps the tensor alive to the end.
    node.target = node.name
    return node


def _get_attr(graph: Graph, value: Value, tensor: torch.Tensor, attributes: dict[str, Any]) -> Node:
    node = graph.create_node("get_attr", _CONSTANT, name=_legal(value.name))
    node.target = _CONSTANT + node.name
    node.meta["constant"] = value.name
    attributes[node.target] = tensor
    return node


def _legal(name: str) -> str:
    return f"{name}_" if name in _RESERVED else name


def _emit(graph: Graph, nodes: dict[str, Node], instr: Instr) -> None:
    args = _mapped(instr.args, nodes)
    kwargs = {key: _mapped(item, nodes) for key, item in instr.kwargs.items()} if instr.kwargs else None
    node = graph.create_node("call_function", instr.target, args, kwargs, _node_name(instr))
    node.meta["origin"] = instr.origin
    if not instr.multi:
        if instr.outs and instr.outs[0] is not None:
            nodes[instr.outs[0].name] = node
        return
    for position, value in enumerate(instr.outs):
        if value is not None:
            item = graph.create_node("call_function", operator.getitem, (node, position), name=_legal(value.name))
            item.meta["origin"] = instr.origin
            nodes[value.name] = item


def _node_name(instr: Instr) -> str:
    value = next((out for out in instr.outs if out is not None), None)
    if value is None:
        packet = getattr(instr.target, "overloadpacket", instr.target)
        return str(getattr(packet, "__name__", instr.kind))
    return f"{value.name}_outs" if instr.multi else _legal(value.name)


def _mapped(item: Any, nodes: dict[str, Node]) -> Any:
    """`item` with nodes in place of values."""
    if isinstance(item, Value):
        node = nodes.get(item.name)
        if node is None:
            raise ValueError(f"emit_fx: value {item.name!r} is used before it is made")
        return node
    if isinstance(item, tuple):
        return tuple([_mapped(part, nodes) for part in item])
    if isinstance(item, list):
        return [_mapped(part, nodes) for part in item]
    return item
