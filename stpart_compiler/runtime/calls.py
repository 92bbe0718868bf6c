"""The call of a rank module against the one that was compiled: structure, constants, dtypes and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stpart_compiler.ir.artifact import InputSlot, Interface

Sizes = tuple[tuple[int, ...] | None, ...]
"""Shape of each leaf of a call that is a tensor."""


def call_leaves(interface: Interface, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call, in the order of the input slots.

    Raises:
        ValueError: the call has another structure than the one that was compiled.
    """
    called_args, called_kwargs = tree_unflatten(list(interface.inputs), interface.in_spec)
    if kwargs.keys() == called_kwargs.keys():
        kwargs = {name: kwargs[name] for name in called_kwargs}
    leaves, spec = tree_flatten((args, kwargs))
    if spec != interface.in_spec:
        raise ValueError(
            f"rank module: compiled for a call with {len(called_args)} positional arguments and the keywords "
            f"{list(called_kwargs)}, got {len(args)} positional arguments and the keywords {list(kwargs)}"
            f"{_nesting(args, kwargs, called_args, called_kwargs)}; call it as it was compiled, or compile again for "
            f"this call"
        )
    return leaves


def _nesting(args: tuple[Any, ...], kwargs: dict[str, Any], called_args: Any, called_kwargs: Any) -> str:
    """The first argument that is nested in another way, where number and names agree."""
    if len(args) != len(called_args) or kwargs.keys() != called_kwargs.keys():
        return ""
    pairs = [(f"args[{i}]", x, y) for i, (x, y) in enumerate(zip(args, called_args, strict=True))]
    pairs += [(name, kwargs[name], called_kwargs[name]) for name in kwargs]
    name, x, y = next(pair for pair in pairs if tree_flatten(pair[1])[1] != tree_flatten(pair[2])[1])
    return f", of which {name} is {_kind(x)} instead of {_kind(y)}"


def _kind(item: Any) -> str:
    """What an argument is, without its values."""
    if isinstance(item, InputSlot):
        return "a tensor" if item.shape is not None else repr(item.constant)
    if isinstance(item, Tensor):
        return "a tensor"
    if isinstance(item, (list, tuple)):
        return f"a {type(item).__name__} of {len(item)}"
    if isinstance(item, dict):
        return f"a dict of {sorted(map(str, item))}"
    return type(item).__name__


def call_sizes(leaves: Sequence[Any]) -> Sizes:
    """What one program takes; calls that differ in it need programs of their own."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


def compiled_sizes(interface: Interface) -> Sizes:
    return tuple(slot.shape for slot in interface.inputs)


def differs_in_sizes_only(interface: Interface, leaves: Sequence[Any]) -> bool:
    """Whether a call could run under the same plan: tensors of the same dtypes and ranks, and equal constants."""
    return all(map(_alike, interface.inputs, leaves))


def _alike(slot: InputSlot, leaf: Any) -> bool:
    if slot.shape is None or not isinstance(leaf, Tensor):
        return slot.shape is None and _is_constant(slot, leaf)
    return leaf.dtype == slot.dtype and leaf.dim() == len(slot.shape)


def _is_constant(slot: InputSlot, leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and (leaf is slot.constant or bool(leaf == slot.constant))


def checked_leaf(slot: InputSlot, leaf: Any) -> Any:
    """A leaf as the programs take it.

    Raises:
        ValueError: it is not what was compiled.
    """
    if slot.shape is None:
        if not _is_constant(slot, leaf):
            got = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
            raise ValueError(
                f"input {slot.path!r}: compiled for the constant {slot.constant!r}, got {got}; "
                f"pass the same value, or compile again with this one"
            )
        return leaf
    if not isinstance(leaf, Tensor):
        raise ValueError(f"input {slot.path!r}: expected a tensor of shape {slot.shape}, got {leaf!r}")
    if tuple(leaf.shape) != slot.shape or leaf.dtype != slot.dtype:
        raise ValueError(
            f"input {slot.path!r}: expected {slot.dtype} of shape {slot.shape}, got {leaf.dtype} of shape "
            f"{tuple(leaf.shape)}; inputs are global tensors (the same on every rank); compile for that shape and dtype"
        )
    if leaf.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"input {slot.path!r} requires grad, but inputs get no gradients: pass it detached")
    return leaf.contiguous()
