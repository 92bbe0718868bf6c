"""The names of a step's inputs: parameters and buffers by their path in the model, call arguments by theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_ROOT = "model."


def user_name(name: str) -> str:
    """The name in the user's model of what the traced step calls `name`; a loss module's is "loss_fn.weight"."""
    return name.removeprefix(_ROOT)


def module_path(stack_entry: str) -> str:
    """The module's name in the user's model, from its entry in an nn_module_stack: "L['self'].model.a" is "a"."""
    path = re.sub(
        r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]", lambda m: "." + next(filter(None, m.groups())), stack_entry
    )
    path = re.sub(r"^L\.self(\._export_root)?\.?", "", path)
    return "" if path == "model" else user_name(path)


@dataclass(frozen=True)
class Tied:
    """A tensor of the model's state, with all of its names."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    persistent: bool


@dataclass(frozen=True)
class State:
    """Parameters and buffers of a step in the order of the model, tied ones once."""

    params: list[Tied]
    buffers: list[Tied]

    @staticmethod
    def of(step: nn.Module) -> State:
        """Collect them; while the step stands on fakes, so that meta tensors show the device they stand for."""
        transient = {
            f"{prefix}.{name}" for prefix, module in step.named_modules() for name in module._non_persistent_buffers_set
        }
        groups: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        named = (*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        params: list[Tied] = []
        buffers: list[Tied] = []
        for key, names in groups.items():
            kind = params if isinstance(tensors[key], nn.Parameter) else buffers
            tied = Tied(tuple(map(user_name, names)), tensors[key], any(name not in transient for name in names))
            kind.append(tied)
        state = State(params, buffers)
        assert len(state.canonical()) == sum(map(len, groups.values())), "the loss and the model share a name"
        return state

    def canonical(self) -> dict[str, str]:
        """First name of each tensor, by any of its names."""
        return {name: tied.names[0] for tied in (*self.params, *self.buffers) for name in tied.names}


@dataclass(frozen=True)
class Call:
    """The leaves of (args, kwargs), their paths, and how to put them together."""

    leaves: list[Any]
    paths: list[str]
    spec: pytree.TreeSpec
    tensor_indices: list[int] = field(default_factory=list)

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten a call."""
        with_paths, spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in with_paths]
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return Call(leaves, [_path(path) for path, _ in with_paths], spec, indices)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [self.leaves[index] for index in self.tensor_indices]

    def tree(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's args and kwargs."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs


def _path(keys: tuple[Any, ...]) -> str:
    which, *rest = keys
    steps = [_step(key) for key in rest]
    return "args" + "".join(steps) if which.idx == 0 else "".join(steps).removeprefix(".")


def _step(key: Any) -> str:
    match key:
        case pytree.SequenceKey(idx):
            return f"[{idx}]"
        case pytree.MappingKey(name):
            return f".{name}"
        case pytree.GetAttrKey(name):
            return f".{name}"
        case _:
            return str(key)
