"""Say in the user's terms why a model could not be captured."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import traceback
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from stpart_compiler.capture.types import GraphBreakError

if TYPE_CHECKING:
    from stpart_compiler.capture.trace import Step

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
# Dynamo says so where the model's own code raised; anything else is a construct that it cannot trace.
_MODEL_RAISED = ("RuntimeError when making fake tensor call", "Observed exception")
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_FIX = (
    "capture needs one graph: replace the construct by tensor operations of static shape (torch.where, masks), "
    "move it out of forward, or decide it from Python values that do not depend on tensor data"
)
_FIX_RNN = (
    "write the recurrence as a loop over nn.RNNCell, nn.GRUCell or nn.LSTMCell, which can be captured; "
    "torch._dynamo.config.allow_rnn = True lets dynamo try the module itself, which fails for some dtypes and devices"
)


def retry_or_explain(error: Exception, step: Step, inputs: Sequence[torch.Tensor], mode: FakeTensorMode) -> None:
    """Return if tracing may succeed now; else raise the model's own exception, or a GraphBreakError.

    Tracing may succeed once dataclasses of the model's output, if not known to pytree, are registered there. Runs the
    model on fakes, without a tracer around it.
    """
    try:
        with mode:
            output = step(*inputs)
    except Exception as own:
        if isinstance(own, TypeError):
            refuse_wrong_call(step.model, *step.example())
        if not any(reason in str(error) for reason in _MODEL_RAISED) or isinstance(own, _DATA_DEPENDENT):
            raise graph_break(error) from error
        own.add_note("capture: the model raised this on the example inputs, before anything was compiled")
        raise own from None
    if not register_dataclasses(output):
        raise graph_break(error) from error


def refuse_wrong_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError, as Python would, if the model's forward takes no such arguments."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__}.forward() {error}; example_args and example_kwargs must fit forward{signature}"
        ) from None


def register_dataclasses(output: Any) -> bool:
    """Make the dataclasses in a nest known to pytree; whether there were any new ones."""
    found = False
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(output) if dataclasses.is_dataclass(leaf)}:
        found = True
        for cls in sorted(unknown, key=lambda cls: cls.__qualname__):
            torch.export.register_dataclass(cls)
    return found


def graph_break(error: Exception) -> GraphBreakError:
    """The error for a construct that stops the tracer: where it stands, what it is, what to do."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith((_TORCH, _OWN))]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the model"
    code = f" in `{frames[-1].line}`" if frames and frames[-1].line else ""
    reason = re.split(r"\n\s*(?:Hint|Developer debug context|Caused by|from user code)", str(error))[0].strip()
    fix = _FIX_RNN if "RNN, GRU, or LSTM" in reason else _FIX
    return GraphBreakError(f"{where}: the model cannot be captured as one graph{code}: {reason}\n{fix}")


def refuse_dynamic_shapes(graph: fx.GraphModule) -> None:
    """Raise GraphBreakError at the first op whose result's shape, or whose value, depends on tensor data."""
    for node in graph.graph.nodes:
        if node.meta.get("unbacked_bindings") or isinstance(node.meta.get("example_value"), torch.SymInt):
            raise GraphBreakError(
                f"{_place(node)}: `{node.name}` ({node.target}) gives a Python number or a shape that depends on "
                f"tensor data\n{_FIX}"
            )


def effect_error(graph: fx.GraphModule) -> GraphBreakError:
    """The error for an op with a side effect in a fixed order, such as printing or checking values."""
    node = next(n for n in graph.graph.nodes if n.op == "call_function" and n.target is with_effects)
    return GraphBreakError(
        f"{_place(node)}: {node.args[1]} has a side effect that must happen in order, which programs of several ranks"
        " cannot keep; use a variant without (torch.linalg.inv_ex instead of inv, no prints or checks of values)"
    )


def _place(node: fx.Node) -> str:
    return user_line(node) or "the model"


def user_line(node: fx.Node) -> str:
    """Innermost file:line of the user's model that a node comes from, "" where unknown."""
    return _innermost_line(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=10_000)
def _innermost_line(stack_trace: str) -> str:
    lines = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [(file, line) for file, line in lines if not file.startswith((_TORCH, _OWN))]
    return ":".join(own[-1]) if own else ""
