"""Turn AOTAutograd's joint graph into one flat graph under the names of the user's model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import _get_attr
from torch.utils._pytree import TreeSpec

from stpart_compiler.capture.breaks import effect_error
from stpart_compiler.capture.names import Call, State, Tied, module_path, user_name
from stpart_compiler.capture.types import Captured, InputInfo, OutputInfo, ParamInfo, TensorInfo

_aten = torch.ops.aten
# The joint graph is functional: nothing writes into these ops' results, so they may be their inputs.
_SAME_VALUE = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default}


def flatten_joint(
    joint: fx.GraphModule,
    traced: fx.GraphModule,
    state: State,
    call: Call,
    out_spec: TreeSpec,
    *,
    training: bool,
    modes: dict[str, bool],
) -> Captured:
    """The flat graph of `joint`, which AOTAutograd made from `traced`, and what its inputs and outputs mean.

    Raises ValueError if the step writes into a parameter, an input or a constant.
    """
    flat = _Flattener(joint, traced, state, call)
    flat.add_placeholders()
    flat.copy_body()
    captured = flat.finish(out_spec, training, modes)
    _annotate(captured)
    return captured


@dataclass
class _Flattener:
    """Copies the joint graph into a new one, in the order that Captured promises."""

    joint: fx.GraphModule
    traced: fx.GraphModule
    state: State
    call: Call

    def __post_init__(self) -> None:
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.copied: dict[fx.Node, fx.Node] = {}
        self.canonical = self.state.canonical()
        self.by_desc: dict[AOTInput, fx.Node] = {
            n.meta["desc"]: n for n in self.joint.graph.find_nodes(op="placeholder")
        }
        self.state_nodes: dict[str, fx.Node] = {}
        for desc, node in self.by_desc.items():
            name = self._state_name(desc)
            if name is not None:
                self.state_nodes[name] = node

    def _state_name(self, desc: AOTInput) -> str | None:
        if not isinstance(desc, (ParamAOTInput, BufferAOTInput)):
            return None
        return self.canonical.get(user_name(desc.target))

    def add_placeholders(self) -> None:
        """Parameters, buffers, tensor inputs, tangents; constants that the model holds become attributes."""
        for prefix, group in (("p", self.state.params), ("b", self.state.buffers)):
            for tied in group:
                self._add_placeholder(f"{prefix}_{tied.names[0]}", self.state_nodes.get(tied.names[0]))
        for position, index in enumerate(self.call.tensor_indices):
            self._add_placeholder(f"in_{self.call.paths[index]}", self.by_desc[PlainAOTInput(position)])
        for desc, node in self.by_desc.items():
            if isinstance(desc, TangentAOTInput):
                self._add_placeholder(f"tangent_{_output_index(desc)}", node)
        for desc, node in self.by_desc.items():
            if node not in self.copied:
                self._add_constant(desc, node)

    def _add_placeholder(self, name: str, old: fx.Node | None) -> None:
        if old is None:
            return
        new = self.graph.placeholder(re.sub(r"\W+", "_", name).rstrip("_"))
        new.meta = dict(old.meta)
        self.copied[old] = new

    def _add_constant(self, desc: AOTInput, old: fx.Node) -> None:
        if isinstance(desc, ForwardTokenAOTInput):
            raise effect_error(self.joint)
        assert isinstance(desc, (ParamAOTInput, BufferAOTInput)), f"unknown input of the joint graph: {desc}"
        value = _get_attr(self.traced, desc.target)
        if isinstance(value, FakeTensor) or value.requires_grad or value.is_meta:
            raise ValueError(
                f"capture: the step uses a tensor that is neither a parameter nor a buffer of the model "
                f"({desc.target}) and {'requires grad' if value.requires_grad else 'has no data'}; register it "
                f"with register_parameter or register_buffer"
            )
        self.copied[old] = self._constant_node(value, old)

    def _constant_node(self, value: torch.Tensor, old: fx.Node) -> fx.Node:
        name = f"constant_{sum(1 for _ in self.root.buffers())}"
        self.root.register_buffer(name, value.detach().clone())
        new = self.graph.get_attr(name)
        new.meta = dict(old.meta)
        return new

    def copy_body(self) -> None:
        """All other nodes, without those that give what they take."""
        for node in self.joint.graph.nodes:
            if node.op == "get_attr":
                self.copied[node] = self._constant_node(_get_attr(self.joint, node.target), node)
            elif node.op == "call_function":
                self.copied[node] = self._simplified(node) or self.graph.node_copy(node, self.copied.__getitem__)

    def _simplified(self, node: fx.Node) -> fx.Node | None:
        if node.target in _SAME_VALUE:
            return self.copied[_operand(node)]
        if node.target is _aten.t.default and self.copied[_operand(node)].target is _aten.t.default:
            return _operand(self.copied[_operand(node)])
        return None

    def finish(self, out_spec: TreeSpec, training: bool, modes: dict[str, bool]) -> Captured:
        """Write the output and describe the whole."""
        old_output = self.joint.graph.output_node()
        old_values: Any = old_output.args[0]
        values = list(zip(old_values, old_output.meta["desc"], strict=True))
        outputs = [self._output(desc.idx, value) for value, desc in values if isinstance(desc, PlainAOTOutput)]
        mutations = dict(self._mutation(d, v) for v, d in values if isinstance(d, InputMutationAOTOutput))
        gradients = dict(self._gradient(d, v) for v, d in values if isinstance(d, GradAOTOutput))
        grads = {tied.names[0]: gradients.get(tied.names[0]) for tied in self.state.params}
        found = [*outputs, *mutations.values(), *(node for node in grads.values() if node is not None)]
        self.graph.output(tuple(found))
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return Captured(
            gm=_LazyGraphModule(self.root, self.graph, "Joint"),  # its code is rarely run, and long
            params=[self._param_info(tied, is_buffer=False) for tied in self.state.params],
            buffers=[self._param_info(tied, is_buffer=True) for tied in self.state.buffers],
            inputs=[self._input_info(index) for index in range(len(self.call.leaves))],
            outputs=[_output_info(index, value) for index, value in enumerate(outputs)],
            mutations={name: node.name for name, node in mutations.items()},
            grads={name: None if node is None else node.name for name, node in grads.items()},
            tangents=self._tangents(),
            in_spec=self.call.spec,
            out_spec=out_spec,
            loss_index=self._loss_index(outputs),
            training=training,
            modes=modes,
        )

    def _output(self, index: int, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        # trace.py put a copy before each output
        assert value.target is _aten.clone.default, f"output {index} is no copy: {value.format_node()}"
        return self.copied[_operand(value)]

    def _mutation(self, desc: InputMutationAOTOutput, value: fx.Node) -> tuple[str, fx.Node]:
        name = self._state_name(desc.mutated_input)
        if name is None or isinstance(desc.mutated_input, ParamAOTInput):
            what = name or self._input_path(desc.mutated_input)
            raise ValueError(
                f"capture: the step writes into {what}; only buffers may change in a step: "
                f"work on a copy (x = x.clone()) or register it as a buffer"
            )
        return name, self.copied[value]

    def _input_path(self, desc: AOTInput) -> str:
        if isinstance(desc, PlainAOTInput):
            return f"its input {self.call.paths[self.call.tensor_indices[desc.idx]]}"
        return f"a constant ({desc.expr()})"

    def _gradient(self, desc: GradAOTOutput, value: fx.Node | None) -> tuple[str | None, fx.Node | None]:
        return self._state_name(desc.grad_of), None if value is None else self.copied[value]

    def _tangents(self) -> list[tuple[int, str]]:
        tangents = [(d, self.copied[n].name) for d, n in self.by_desc.items() if isinstance(d, TangentAOTInput)]
        return [(_output_index(desc), name) for desc, name in tangents]

    def _loss_index(self, outputs: list[Any]) -> int | None:
        """The scalar that is the only differentiable output; in a graph without tangents, the only float output."""
        floats = [i for i, x in enumerate(outputs) if isinstance(x, fx.Node) and x.meta["val"].is_floating_point()]
        tangents = [index for index, _ in self._tangents()]
        [index] = (tangents or floats) if len(tangents or floats) == 1 else [None]
        return index if index is not None and outputs[index].meta["val"].ndim == 0 else None

    def _param_info(self, tied: Tied, *, is_buffer: bool) -> ParamInfo:
        old = self.state_nodes.get(tied.names[0])
        node = None if old is None else self.copied[old]
        info = TensorInfo.of(tied.tensor if node is None else node.meta["val"])
        name, *aliases = tied.names
        return ParamInfo(
            name=name,
            aliases=tuple(aliases),
            node=None if node is None else node.name,
            info=info,
            requires_grad=tied.tensor.requires_grad,
            is_buffer=is_buffer,
            persistent=tied.persistent,
        )

    def _input_info(self, index: int) -> InputInfo:
        path = self.call.paths[index]
        if index not in self.call.tensor_indices:
            return InputInfo(path, None, None, self.call.leaves[index])
        node = self.copied[self.by_desc[PlainAOTInput(self.call.tensor_indices.index(index))]]
        return InputInfo(path, node.name, TensorInfo.of(node.meta["val"]), None)


def _operand(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _output_index(desc: TangentAOTInput) -> int:
    assert isinstance(desc.output, PlainAOTOutput), f"tangent of something that is not an output: {desc}"
    return desc.output.idx


def _output_info(index: int, value: Any) -> OutputInfo:
    return OutputInfo(index, value.name, None) if isinstance(value, fx.Node) else OutputInfo(index, None, value)


def _of_last_summand(node: fx.Node, place: dict[fx.Node, int]) -> str:
    """Autograd adds up gradients outside of any module: that of what was added last, so that layers stay alike."""
    summands = sorted(node.all_input_nodes, key=place.__getitem__, reverse=True) if node.meta["is_backward"] else []
    return next((arg.meta["module_path"] for arg in summands if arg.meta["module_path"]), "")


def _annotate(captured: Captured) -> None:
    """Set module_path and is_backward in each node's meta."""
    tangents = {name for _, name in captured.tangents}
    place = {node: index for index, node in enumerate(captured.gm.graph.nodes)}
    for node in place:
        depends = any(arg.meta["is_backward"] for arg in node.all_input_nodes)
        node.meta["is_backward"] = node.op != "output" and (depends or node.name in tangents)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        path = module_path(next(reversed(stack.values()))[0]) if stack else _of_last_summand(node, place)
        node.meta["module_path"] = path
    owners = {info.node: info.name.rpartition(".")[0] for info in (*captured.params, *captured.buffers)}
    for node in captured.gm.graph.find_nodes(op="placeholder"):
        node.meta["module_path"] = owners.get(node.name, "")
