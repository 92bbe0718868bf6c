"""Attention written out, with its softmax in parts that block after block of the keys can be made of.

softmax is exp(x - logsumexp(x)), as in `passes/softmax.py`: of a block of keys with the block's own logsumexp it is the
block's share in attention, and shares are merged by their logsumexps (online softmax). Backward takes the sum over all
keys of grad * softmax from the output of attention, as fused kernels do: it is the row's sum of grad_out * out, however
linear what lies between softmax and output (dropout, scaling).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from stpart_compiler.capture import Captured
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.passes import softmax
from stpart_compiler.passes.decompose import Inserter

aten = torch.ops.aten
fused = torch.ops.stpart_fused

_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Scalar)


@dataclass(frozen=True)
class WriteOnline:
    """captured step -> the same with the softmax of attention in parts, and the names of those; None where none is."""

    def apply(self, captured: Captured) -> tuple[Captured, frozenset[str]] | None:
        ends = captured.gm.graph.find_nodes(op="call_function", target=aten._softmax_backward_data.default)
        found = [pair for node in ends if (pair := _attention(node)) is not None]
        if not found:
            return None
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in captured.gm.graph.nodes:
            copied[node] = graph.node_copy(node, copied.__getitem__)
        pairs = [pair.copied(copied) for pair in found]
        for pair in pairs:
            _rewrite(pair)
        graph.lint()
        gm = _LazyGraphModule(captured.gm, graph, "Online")
        return dataclasses.replace(captured, gm=gm), frozenset(pair.softmax.name for pair in pairs)


@dataclass(frozen=True)
class _Attention:
    """A softmax and its backward, the product that is attention's output, and the gradient of that."""

    softmax: fx.Node
    backward: fx.Node
    out: fx.Node
    grad_out: fx.Node

    def copied(self, copies: dict[fx.Node, fx.Node]) -> _Attention:
        """The same in a copy of the graph."""
        return _Attention(*(copies[node] for node in (self.softmax, self.backward, self.out, self.grad_out)))


def _attention(backward: fx.Node) -> _Attention | None:
    """What belongs to a softmax between two products of activations, if its last dim is that of keys."""
    grad, made, dim, dtype = backward.args
    assert isinstance(grad, fx.Node)
    if not isinstance(made, fx.Node) or made.target is not aten._softmax.default or made.args[2]:
        return None
    if dim not in (-1, len(_shape(made)) - 1) or dtype != made.meta["val"].dtype:
        return None
    forward, out = _forward_chain(made)
    back, product = _backward_chain(grad)
    if out is None or product is None or forward != back:
        return None
    (probabilities, values), (grad_out, turned) = out.args, product.args
    is_turned = isinstance(turned, fx.Node) and turned.target is aten.transpose.int and turned.args[0] is values
    if not is_turned or not isinstance(grad_out, fx.Node) or _shape(grad_out) != _shape(out):
        return None
    rows = _shape(probabilities)[:-1] if isinstance(probabilities, fx.Node) else None
    return _Attention(made, backward, out, grad_out) if rows and rows.numel() == _shape(made)[:-1].numel() else None


Scales = Counter[tuple[str, Any]]


def _forward_chain(node: fx.Node) -> tuple[Scales, fx.Node | None]:
    """Scales between a softmax and the product that reads it in forward, and that product."""
    scales: Scales = Counter()
    while True:
        readers = [user for user in node.users if not _only_backward(user)]
        if len(readers) != 1:
            return scales, None
        (reader,) = readers
        if reader.target is aten.bmm.default:
            return scales, reader if reader.args[0] is node else None
        if not _passes(reader, scales):
            return scales, None
        node = reader


def _only_backward(node: fx.Node) -> bool:
    """Whether a node is of backward, or a view that only backward reads."""
    if node.meta.get("is_backward"):
        return True
    return is_view(node.target) and all(_only_backward(user) for user in node.users)


def _backward_chain(node: fx.Node) -> tuple[Scales, fx.Node | None]:
    """Scales between the product that makes the gradient and the softmax's backward, and that product."""
    scales: Scales = Counter()
    while node.target is not aten.bmm.default:
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or not _passes(node, scales):
            return scales, None
        node = first
    return scales, node


def _passes(node: fx.Node, scales: Scales) -> bool:
    """Whether a node is linear and keeps rows apart: a view, a cast, a product with what is the same both ways."""
    if node.target in _SCALES or node.target is aten.native_dropout_backward.default:
        kind = "div" if node.target is aten.div.Scalar else "mul"
        for scale in node.args[1:]:
            scales[kind, _behind(scale)] += 1
        return True
    return node.target in (aten._to_copy.default, aten.clone.default) or is_view(node.target)


def _behind(scale: Any) -> Any:
    while isinstance(scale, fx.Node) and scale.target in (aten.alias.default, aten.detach.default):
        (scale,) = scale.all_input_nodes
    return scale


def _rewrite(found: _Attention) -> None:
    at = Inserter(found.softmax)
    x = found.softmax.args[0]
    assert isinstance(x, fx.Node)
    wide = softmax.widened(at, x)
    total = at.add(aten.logsumexp.default, wide, [-1], True)
    softmax.turn_rounded(at, found.softmax.meta["val"].dtype, fused.exp_minus.default, x, total)
    at = Inserter(found.backward)
    grad, made, _, dtype = found.backward.args
    assert isinstance(grad, fx.Node) and isinstance(made, fx.Node) and isinstance(dtype, torch.dtype)
    product = at.add(aten.mul.Tensor, softmax.widened(at, found.grad_out), found.out)
    total = at.add(aten.sum.dim_IntList, product, [-1], True)
    total = at.add(aten.view.default, total, [*_shape(made)[:-1], 1])
    shifted = at.add(aten.sub.Tensor, softmax.widened(at, grad), total)
    softmax.turn_rounded(at, dtype, aten.mul.Tensor, shifted, made)


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape
