"""Rewrite ops that can only be cut in pieces: `addmm` as mm and add, `nll_loss_forward` as a gather and sums.

Softmax has a file of its own (`passes/softmax.py`), and so have max, min and their places (`passes/extremes.py`). Norms
over the batch and some losses are expanded by torch's own decompositions (`passes/expand.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.passes import extremes, softmax
from stpart_compiler.passes.expand import EXPANDED, expansion
from stpart_compiler.passes.rules.convolution import geometry

aten = torch.ops.aten

NONE, MEAN = 0, 1  # torch's codes of a loss's `reduction`; 2 is the sum


@dataclass(frozen=True)
class Decompose:
    """graph -> the same graph, in place, without ops whose blocks do not add up; equal views and casts are made once.

    The node with a result keeps its name, so whatever refers to it by name still holds. New nodes carry the meta of the
    node they replace (module path, stack trace, phase), with their own "val".
    """

    def apply(self, gm: fx.GraphModule) -> fx.GraphModule:
        targets = _REWRITES.keys() | EXPANDED
        found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]
        for node in found:
            (_REWRITES.get(node.target) or _expand)(Inserter(node))
        if found:
            _erase_unread(gm.graph)
        _share_views(gm.graph)
        gm.recompile()
        return gm


def _share_views(graph: fx.Graph) -> None:
    """Of equal views the first one stands for all: what several linear layers read is then re-laid out once for them.

    Of equal casts too, as autocast makes one for each layer, but not across phases or regions that run again. Results
    of the step stay, under their own names.
    """
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem or not _may_be_shared(node):
            continue
        where = [node.meta.get(key) for key in ("is_backward", "ac_graph_id") if not is_view(node.target)]
        same = first.setdefault(f"{node.target}{node.args}{node.kwargs}{where}", node)
        if same is not node and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _may_be_shared(node: fx.Node) -> bool:
    return is_view(node.target) or node.target is aten._to_copy.default


def _erase_unread(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


@dataclass(frozen=True)
class Inserter:
    """Adds nodes in front of `node`, and turns nodes into other calls."""

    node: fx.Node

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(target, args, kwargs)
        new.meta = {key: value for key, value in self.node.meta.items() if key not in ("val", "tensor_meta")}
        new.meta["val"] = _value(new)
        return new

    def turn(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
        """The node keeps its name, users and meta, and computes something else to the same effect."""
        node.target, node.args, node.kwargs = target, args, kwargs


def _value(node: fx.Node) -> Any:
    """Fake result of a node."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _addmm(at: Inserter) -> None:
    """bias * beta + (a @ b) * alpha."""
    bias, a, b = at.args
    beta, alpha = at.node.kwargs.get("beta", 1), at.node.kwargs.get("alpha", 1)
    product = at.add(aten.mm.default, a, b)
    if alpha != 1:
        product = at.add(aten.mul.Scalar, product, alpha)
    if beta != 1:
        bias = at.add(aten.mul.Scalar, bias, beta)
    at.turn(at.node, aten.add.Tensor, product, bias)


def _nll_loss(at: Inserter) -> None:
    """Minus the log-probability of each target that is not ignored, weighted, summed or averaged; and their weight."""
    logits, target, weight, reduction, ignored = at.args
    logits_val = _tensor(logits)
    along = 1 if logits_val.ndim > 1 else 0
    valid = at.add(aten.ne.Scalar, target, ignored)
    safe = at.add(aten.where.ScalarOther, valid, target, 0)
    index = at.add(aten.unsqueeze.default, safe, along)
    picked = at.add(aten.squeeze.dim, _picked(at, logits, along, index), along)
    weights = at.add(aten._to_copy.default, valid, dtype=_tensor(picked).dtype)
    if weight is not None:
        weights = at.add(aten.mul.Tensor, weights, at.add(aten.index.Tensor, weight, [safe]))
        picked = at.add(aten.mul.Tensor, picked, weights)
    losses = at.add(aten.where.ScalarOther, valid, at.add(aten.neg.default, picked), 0)
    if reduction == NONE:
        zero = at.add(aten.full.default, [], 0, dtype=logits_val.dtype, device=logits_val.device)
        return _give(at, (_rounded(at, losses, logits_val.dtype), zero))
    total, count = at.add(aten.sum.default, losses), at.add(aten.sum.default, weights)
    made = at.add(aten.div.Tensor, total, count) if reduction == MEAN else total
    return _give(at, [_rounded(at, x, logits_val.dtype) for x in (made, count)])


def _rounded(at: Inserter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if _tensor(x).dtype == dtype else at.add(aten._to_copy.default, x, dtype=dtype)


def _picked(at: Inserter, logits: Any, along: int, index: fx.Node) -> fx.Node:
    """The log-probabilities at an index; of a log_softmax along the same dim without making the others."""
    parts = softmax.normalized_parts(logits)
    if parts is None or _tensor(parts[1]).shape != _tensor(index).shape:
        return softmax.widened(at, at.add(aten.gather.default, logits, along, index))
    return at.add(aten.sub.Tensor, at.add(aten.gather.default, parts[0], along, index), parts[1])


def _expand(at: Inserter) -> None:
    """Torch's decomposition in place of the node."""
    traced, operands = expansion(at.node)
    inside: dict[fx.Node, Any] = {}
    names = iter(operands)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            inside[node] = next(names)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), inside.__getitem__)
            inside[node] = at.add(node.target, *args, **kwargs)
        else:
            assert node.op == "output", f"{at.node.target}: its decomposition holds a constant, {node.format_node()}"
    (results,) = traced.graph.output_node().args
    _give(at, fx.node.map_arg(results, inside.__getitem__))


def _give(at: Inserter, results: Any) -> None:
    """Let the readers of the node read the results instead, under the names that they have."""
    if isinstance(results, fx.Node):
        at.turn(at.node, aten.alias.default, results)
        return
    for user in list(at.node.users):
        assert user.target is operator.getitem, f"{at.node} is read by {user}, expected getitem"
        at.turn(user, aten.alias.default, results[user.args[1]])
    at.node.graph.erase_node(at.node)


def _glu(at: Inserter) -> None:
    """One half of a dim times the sigmoid of the other. Halves of a cut dim stay cut."""
    one, two = _halves(at, *at.args)
    at.turn(at.node, aten.mul.Tensor, one, at.add(aten.sigmoid.default, two))


def _glu_backward(at: Inserter) -> None:
    grad, x, dim = at.args
    one, two = _halves(at, x, dim)
    gate = at.add(aten.sigmoid.default, two)
    first = at.add(aten.mul.Tensor, grad, gate)
    second = at.add(aten.sigmoid_backward.default, at.add(aten.mul.Tensor, grad, one), gate)
    at.turn(at.node, aten.cat.default, [first, second], dim)


def _halves(at: Inserter, x: Any, dim: Any = -1) -> tuple[fx.Node, fx.Node]:
    half = _tensor(x).shape[dim] // 2
    parts = at.add(aten.split.Tensor, x, half, dim)
    return at.add(operator.getitem, parts, 0), at.add(operator.getitem, parts, 1)


def _dropout(at: Inserter) -> None:
    """The mask drawn by itself, whole on every rank as on one device; what it is applied to may be cut."""
    x, p, train = at.args
    if train is False or p == 0:
        return
    # numbers are drawn in the order of memory, which that of x prescribes
    order = _memory_order(_tensor(x))
    shape = [_tensor(x).shape[dim] for dim in order]
    whole = at.add(aten.empty.memory_format, shape, dtype=torch.bool, device=_tensor(x).device)
    drawn = at.add(aten.bernoulli.p, whole, 1.0 - p)
    mask = at.add(aten.clone.default, drawn)  # backward keeps this one, cut like x
    if order != sorted(order):
        mask = at.add(aten.permute.default, mask, [order.index(dim) for dim in range(len(order))])
    kept = at.add(aten.mul.Tensor, x, mask)
    _give(at, (at.add(aten.mul.Tensor, kept, 1.0 / (1.0 - p) if p < 1 else 0.0), mask))


def _memory_order(x: torch.Tensor) -> list[int]:
    """Dims from major to minor in the memory of a tensor made like x."""
    strides = torch.empty_like(x).stride()
    return sorted(range(x.ndim), key=lambda dim: -strides[dim])


def _convolution(at: Inserter) -> None:
    """The bias apart: a sum over cut channels must not add it once per block."""
    x, weight, bias, *rest = at.args
    if bias is None:
        return
    product = at.add(aten.convolution.default, x, weight, None, *rest)
    along = [-1, *[1] * (_tensor(weight).ndim - 2)]
    at.turn(at.node, aten.add.Tensor, product, at.add(aten.view.default, bias, along))


def _convolution_backward(at: Inserter) -> None:
    """Each gradient by itself: they are cut along different dims. That of the bias is a sum.

    That of the image is a convolution of the result's with the same weight, the other way round; and the weight of a
    transposed convolution has the gradient of a plain one whose image is the result.
    """
    grad, _, weight, *_, mask = at.args
    turned = _turned_round(at)
    results: list[Any] = [None, None, None]
    if mask[0]:
        results[0] = at.add(aten.convolution.default, grad, weight, None, *turned) if turned else _only(at, 0)
    if mask[1]:
        results[1] = _only(at, 1, turned)
    if mask[2]:
        dims = [d for d in range(_tensor(grad).ndim) if d != 1]
        results[2] = at.add(aten.sum.dim_IntList, grad, dims)
    _give(at, results)


def _only(at: Inserter, which: int, turned: Sequence[Any] | None = None) -> fx.Node:
    """One of the gradients. `turned`: arguments of the convolution the other way round."""
    grad, x, weight, _, *rest, _ = at.args
    only = [i == which for i in range(3)]
    if turned and rest[3]:
        grad, x, rest = x, grad, list(turned)
    call = at.add(aten.convolution_backward.default, grad, x, weight, None, *rest, only)
    return at.add(operator.getitem, call, which)


def _turned_round(at: Inserter) -> tuple[Any, ...] | None:
    """Stride and so on of the convolution that brings the gradient of a result to that of the image.

    None where there is none: a transposed convolution may pad its result further than one stride.
    """
    grad, x, weight, _, *rest, _ = at.args
    stride, pad, dilation, is_transposed, _, groups = rest
    of = geometry(rest, _tensor(weight).shape[2:])
    small, large = (_tensor(y).shape[2:] for y in ((x, grad) if is_transposed else (grad, x)))
    sizes = zip(small, large, of.stride, of.padding, of.spans, strict=True)
    rests = [big - ((n - 1) * s - 2 * p + span) for n, big, s, p, span in sizes]
    if any(r >= s for r, s in zip(rests, of.stride, strict=True)):
        return None
    output_padding = [0] * len(rests) if is_transposed else rests
    return stride, pad, dilation, not is_transposed, output_padding, groups


def _tensor(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node}: expected a tensor"
    return value


_REWRITES: dict[Any, Callable[[Inserter], None]] = {
    aten.addmm.default: _addmm,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss_backward.default: softmax.nll_loss_backward,
    aten.nll_loss2d_backward.default: softmax.nll_loss_backward,
    aten._log_softmax.default: softmax.log_softmax,
    aten._log_softmax_backward_data.default: softmax.log_softmax_backward,
    aten.sum.dim_IntList: softmax.sum_over_dims,
    aten._softmax.default: softmax.softmax,
    aten._softmax_backward_data.default: softmax.softmax_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_dropout.default: _dropout,
    aten.argmax.default: extremes.place_of_extreme,
    aten.argmin.default: extremes.place_of_extreme,
    aten.max.dim: extremes.extreme_and_place,
    aten.min.dim: extremes.extreme_and_place,
    aten.glu.default: _glu,
    aten.glu_backward.default: _glu_backward,
}
