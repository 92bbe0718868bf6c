"""Trace a model: strict dynamo capture, then AOTAutograd's joint export, all on fake tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo import functional_export
from torch._functorch import aot_autograd
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export._trace import _restore_state_dict
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from stpart_compiler.capture.breaks import refuse_dynamic_shapes, refuse_wrong_call, retry_or_explain
from stpart_compiler.capture.fake import Faker
from stpart_compiler.capture.flatten import flatten_joint
from stpart_compiler.capture.hf import eager_masks, has_labels, hf_overrides, is_hf_model
from stpart_compiler.capture.names import Call, State
from stpart_compiler.capture.types import Captured
from stpart_compiler.capture.warn import recorded_warnings, show_warnings
from stpart_compiler.pauses import same_random, without_gc

_BUILD_GUARDS = "_suggest_or_raise_constraint_violation"
_COLLECT_METADATA = "run_functionalized_fw_and_collect_metadata"
LossFn = Callable[[Any], torch.Tensor]


class Step(nn.Module):
    """What is traced: the model's call with its constants filled in, the loss, and nothing but tensors as inputs."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, call: Call) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        self.tensor_indices = call.tensor_indices
        self.spec = call.spec
        self.is_hf = is_hf_model(model)
        self.overrides = hf_overrides(model) if self.is_hf else {}
        self.labelled = self.is_hf and has_labels(model, *call.tree())

    def example(self) -> Any:
        """The call's (args, kwargs), with None in the place of tensors."""
        return pytree.tree_unflatten(self.leaves, self.spec)

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for index, tensor in zip(self.tensor_indices, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        output = self.model(*args, **(kwargs | self.overrides))
        if self.loss_fn is not None:
            return self.loss_fn(output)
        return self._main_field(output) if self.is_hf else output

    def _main_field(self, output: Any) -> Any:
        if self.labelled:
            return output.loss
        logits = getattr(output, "logits", None)
        return output if logits is None else logits


def capture(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    training: bool = True,
) -> Captured:
    """Capture one step of the model as a flat joint graph. Nothing is computed and the model is left as it was.

    Parameters, buffers and example inputs may be on the meta device. The graph is specialised to the shapes, dtypes
    and non-tensor values of the example inputs, and to the modes (train or eval) that the modules are in. Inputs get
    no gradients. With `training` false: an inference graph, without tangents and gradients.

    `loss_fn(model_output)` is traced into the step; its value is then the output. Models of transformers are called
    without a cache and give, without a `loss_fn`, the loss alone when `labels` are given, else the logits alone; a
    `loss_fn` gets their ModelOutput (`output.logits`).

    Raises TypeError if `model` is not an nn.Module, or cannot be called with these inputs; GraphBreakError where its
    Python cannot be captured as one graph; ValueError if it writes into its inputs or parameters; and what the model
    itself raises on these inputs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"capture: model must be a torch.nn.Module, got {type(model).__name__}")
    call = Call.of(tuple(example_args), dict(example_kwargs or {}))
    if not hasattr(model.forward, "__wrapped__") and not model._forward_pre_hooks:  # these may take more than is said
        refuse_wrong_call(model, *call.tree())
    modes = {name: module.training for name, module in model.named_modules(remove_duplicate=False)}
    step = Step(model, loss_fn, call)
    faker = Faker(step, call.leaves)
    inputs = [faker.fake(tensor) for tensor in call.tensors]
    with _quiet(), faker.replace_state(step), eager_masks(model, *call.tree()), torch.set_grad_enabled(training):
        state = State.of(step)
        graph = _dynamo_graph(step, inputs, faker.mode)
        refuse_dynamic_shapes(graph)
        _unalias_outputs(graph)
        joint, out_spec = _joint_graph(graph, inputs)
    return flatten_joint(joint, graph, state, call, out_spec, training=training, modes=modes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No pauses for garbage collection, no torch warnings.

    Dynamo would forget all that torch.compile has compiled in this process, and dropouts traced on fake tensors advance
    the generator: neither is to be noticed outside.

    Dynamo's guards are not built either: shapes are static, and nobody will ask whether the graph still fits. Nor is
    Python generated for the graphs on the way, which are interpreted, nor do nodes say what they were traced from, or
    their shapes a second time. That is a quarter of the time.
    """
    with (
        without_gc(),
        warnings.catch_warnings(),
        mock.patch.object(functional_export, _BUILD_GUARDS, _nothing),
        mock.patch.object(fx.GraphModule, "recompile", _nothing),
        mock.patch.object(torch._dynamo, "reset", _nothing),
        mock.patch.object(fx.traceback, "NodeSource", _nothing),
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", _nothing),
        same_random(),
    ):
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield


def _nothing(*args: object) -> None:
    return None


def _dynamo_graph(step: Step, inputs: list[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The forward graph in torch calls, with parameters and buffers as attributes under the step's own names."""
    with torch._dynamo.config.patch(side_effect_replay_policy="warn"), recorded_warnings() as caught:
        try:
            graph = functional_export._dynamo_graph_capture_for_export(step)(*inputs)
        except Exception as error:
            retry_or_explain(error, step, inputs, mode)
            graph = functional_export._dynamo_graph_capture_for_export(step)(*inputs)
    show_warnings(caught)
    _restore_state_dict(step, graph)
    return graph


def _unalias_outputs(graph: fx.GraphModule) -> None:
    """Copy each output, so that AOTAutograd sees no views of inputs or of each other; flatten_joint drops the copies.

    For such views it would ask for the tangent of their base instead of their own.
    """
    output = graph.graph.output_node()
    values: Any = output.args[0]
    with graph.graph.inserting_before(output):
        copies = [graph.graph.call_function(torch.clone, (x,)) if isinstance(x, fx.Node) else x for x in values]
    output.args = (tuple(copies),)


def _joint_graph(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[fx.GraphModule, pytree.TreeSpec]:
    """The joint graph, in which no op writes into a tensor or has another effect.

    Most models write nowhere: tracing them through functional tensors would take a third longer for the same graph.
    """
    try:
        joint, out_spec = _export_joint(graph, inputs, functionalize=False)
    except Exception:
        # What stops this trace stops the other one too, with the message that the user gets; or writes were the cause.
        return _export_joint(graph, inputs, functionalize=True)
    if any(_needs_order(node) for node in joint.graph.nodes):
        return _export_joint(graph, inputs, functionalize=True)
    return joint, out_spec


def _export_joint(
    graph: fx.GraphModule, inputs: list[torch.Tensor], *, functionalize: bool
) -> tuple[fx.GraphModule, pytree.TreeSpec]:
    with contextlib.ExitStack() as stack:
        if not functionalize:
            stack.enter_context(_known_outputs(graph))
        # torch_fn, which this leaves out of the meta, costs a tenth of the time and names what stack_trace shows anyway
        joint = aot_autograd.aot_export_joint_with_descriptors(
            stack,
            graph,
            tuple(inputs),
            decompositions=None,
            disable_functionalization=not functionalize,
            _disable_torch_fn_metadata_mode=True,
        )
    return joint.graph_module, joint.out_spec


def _known_outputs(graph: fx.GraphModule) -> contextlib.AbstractContextManager[object]:
    """AOTAutograd runs forward once before it traces, to see what its outputs are: give it tensors like them at once.

    It also sees then what forward writes into. Where that matters the trace itself shows it (`_needs_order`).
    """
    collect = getattr(aot_autograd, _COLLECT_METADATA)
    outputs: Any = graph.graph.output_node().args[0]
    examples = [
        copy.all_input_nodes[0].meta["example_value"] if isinstance(copy, fx.Node) else copy for copy in outputs
    ]

    def stand_ins(*args: object) -> list[Any]:
        return [_like(x) if isinstance(x, torch.Tensor) else x for x in examples]

    def known(forward: object, **options: Any) -> Any:
        return collect(stand_ins, **options)

    return mock.patch.object(aot_autograd, _COLLECT_METADATA, known)


def _like(example: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
    return new.requires_grad_(example.requires_grad)


def _needs_order(node: fx.Node) -> bool:
    """Whether a node writes into its operands or has another effect; higher-order ops may, for all that we see."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable or has_effects(node.target)
    return isinstance(node.target, torch._ops.HigherOrderOperator)
