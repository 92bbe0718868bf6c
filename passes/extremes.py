"""Where the largest or smallest element of a dim is, in ops that may be cut along it.

The value is the largest of the blocks' values. The place is the first one where that value stands: the smallest of the
blocks' places, once all know the value. NaN counts as larger and smaller than all else, as in torch.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from stpart_compiler.runtime import fused_ops as _fused_ops  # noqa: F401  (defines them)

if TYPE_CHECKING:
    from stpart_compiler.passes.decompose import Inserter

aten = torch.ops.aten
fused = torch.ops.stpart_fused

_LARGEST = (aten.max.dim, aten.argmax.default)


def place_of_extreme(at: Inserter) -> None:
    """argmax and argmin over one dim."""
    x, dim, keepdim = _arguments(at)
    if dim is not None and x.meta["val"].ndim:
        value = _value(at, x, dim)
        at.turn(at.node, fused.place_of.default, x, value, dim, keepdim, at.node.target in _LARGEST)


def extreme_and_place(at: Inserter) -> None:
    """max and min over one dim: values and places, as far as they are read."""
    x, dim, keepdim = _arguments(at)
    if not x.meta["val"].ndim:
        return
    largest = at.node.target in _LARGEST
    value = _value(at, x, dim)
    for user in list(at.node.users):
        assert user.target is operator.getitem, f"{at.node} is read by {user}, expected getitem"
        if user.args[1] == 1:
            at.turn(user, fused.place_of.default, x, value, dim, keepdim, largest)
        elif keepdim:
            at.turn(user, aten.alias.default, value)
        else:
            at.turn(user, aten.squeeze.dim, value, dim)
    at.node.graph.erase_node(at.node)


def _arguments(at: Inserter) -> tuple[fx.Node, Any, bool]:
    """x, dim and keepdim, by position or keyword."""
    given = {**dict(zip(("self", "dim", "keepdim"), at.args, strict=False)), **at.node.kwargs}
    return given["self"], given.get("dim"), given.get("keepdim", False)


def _value(at: Inserter, x: fx.Node, dim: int) -> fx.Node:
    """The largest or smallest along dim, which keeps size 1."""
    op = aten.amax.default if at.node.target in _LARGEST else aten.amin.default
    return at.add(op, x, [dim], True)
