"""Rewrite ops that can only be cut in pieces: `addmm` as mm and add, `nll_loss_forward` as a gather and sums."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

MEAN, SUM = 1, 2  # torch's codes of a loss's `reduction`


@dataclass(frozen=True)
class Decompose:
    """graph -> the same graph, in place, without ops whose blocks do not add up.

    The node with a result keeps its name, so whatever refers to it by name still holds. New nodes carry the meta of the
    node they replace (module path, stack trace, phase), with their own "val".
    """

    def apply(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in _REWRITES]
        for node in found:
            _REWRITES[node.target](Inserter(node))
        if found:
            gm.graph.lint()
            gm.recompile()
        return gm


@dataclass(frozen=True)
class Inserter:
    """Adds nodes in front of `node`, and turns nodes into other calls."""

    node: fx.Node

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(target, args, kwargs)
        new.meta = {key: value for key, value in self.node.meta.items() if key not in ("val", "tensor_meta")}
        new.meta["val"] = _value(new)
        return new

    def turn(self, node: fx.Node, target: Any, *args: Any) -> None:
        """The node keeps its name, users and meta, and computes something else to the same effect."""
        node.target, node.args, node.kwargs = target, args, {}


def _value(node: fx.Node) -> Any:
    """Fake result of a node."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _addmm(at: Inserter) -> None:
    """bias * beta + (a @ b) * alpha."""
    bias, a, b = at.node.args
    beta, alpha = at.node.kwargs.get("beta", 1), at.node.kwargs.get("alpha", 1)
    product = at.add(aten.mm.default, a, b)
    if alpha != 1:
        product = at.add(aten.mul.Scalar, product, alpha)
    if beta != 1:
        bias = at.add(aten.mul.Scalar, bias, beta)
    at.turn(at.node, aten.add.Tensor, product, bias)


def _nll_loss(at: Inserter) -> None:
    """Minus the log-probability of each target that is not ignored, summed (or averaged), and their number."""
    logits, target, weight, reduction, ignored = at.node.args
    logits_val = _tensor(logits)
    if weight is not None or reduction not in (MEAN, SUM) or logits_val.ndim != 2:
        return
    valid = at.add(aten.ne.Scalar, target, ignored)
    safe = at.add(aten.where.ScalarOther, valid, target, 0)
    index = at.add(aten.unsqueeze.default, safe, 1)
    picked = at.add(aten.squeeze.dim, at.add(aten.gather.default, logits, 1, index), 1)
    losses = at.add(aten.where.ScalarOther, valid, at.add(aten.neg.default, picked), 0)
    total = at.add(aten.sum.default, losses)
    count = at.add(aten.sum.default, at.add(aten._to_copy.default, valid, dtype=logits_val.dtype))
    for user in list(at.node.users):
        assert user.target is operator.getitem, f"{at.node} is read by {user}, expected getitem"
        made = count if user.args[1] == 1 else total
        if made is total and reduction == MEAN:
            at.turn(user, aten.div.Tensor, total, count)
        else:
            at.turn(user, aten.alias.default, made)
    at.node.graph.erase_node(at.node)


def _tensor(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node}: expected a tensor"
    return value


_REWRITES: dict[Any, Callable[[Inserter], None]] = {
    aten.addmm.default: _addmm,
    aten.nll_loss_forward.default: _nll_loss,
}
