"""Softmax and cross entropy in ops that may be cut along the dim they normalise, such as a vocabulary.

All that a block needs to know of the others is a number for each row, the logsumexp. With it log_softmax is x minus
that number, what a loss picks of it is picked from x, and nothing of the size of x is written between the two. The
softmax of attention scores keeps its own kernel: cutting the keys is what fused attention is for.

Torch's kernels compute bfloat16 and float16 in float32 inside and round the result. So do the parts here: the number
for each row is a float32, with which x is promoted, and only what has an eager counterpart is rounded.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from stpart_compiler.runtime import fused_ops as _fused_ops  # noqa: F401  (defines them)

if TYPE_CHECKING:
    from stpart_compiler.passes.decompose import Inserter

aten = torch.ops.aten
fused = torch.ops.stpart_fused

_PRODUCTS_WITH_WEIGHTS = (aten.mm.default, aten.addmm.default)
_OTHER_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
_NLL_GRADS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
MEAN = 1  # torch's code of a loss's `reduction`
_WIDE = (torch.float32, torch.float64)
_SAME = (aten.alias.default, aten.detach.default)


def log_softmax(at: Inserter) -> None:
    """x - logsumexp(x)."""
    x, dim, to_float = at.args
    if to_float:
        x = at.add(aten._to_copy.default, x, dtype=torch.float32)
    turn_rounded(at, _dtype(x), aten.sub.Tensor, x, _logsumexp(at, x, dim))


def _logsumexp(at: Inserter, x: fx.Node, dim: int) -> fx.Node:
    return at.add(aten.logsumexp.default, widened(at, x), [dim], True)


def widened(at: Inserter, x: fx.Node) -> fx.Node:
    """x in float32 where its type is narrower."""
    return x if _is_wide(x) else at.add(aten._to_copy.default, x, dtype=torch.float32)


def turn_rounded(at: Inserter, dtype: torch.dtype, target: Any, *args: Any, **kwargs: Any) -> None:
    """The node becomes this call, whose operands are wide, rounded to a dtype."""
    if dtype in _WIDE:
        at.turn(at.node, target, *args, **kwargs)
    else:
        at.turn(at.node, aten._to_copy.default, at.add(target, *args, **kwargs), dtype=dtype)


def log_softmax_backward(at: Inserter) -> None:
    """grad - softmax * sum(grad)."""
    grad, out, dim, dtype = at.args
    found = normalized_parts(out)
    if found is None or dtype != _dtype(grad):
        return
    if _behind(grad).target in _NLL_GRADS:
        rows, index = _picks(at, _behind(grad))
        if _shape(index) == _shape(found[1]):
            turn_rounded(at, dtype, fused.cross_entropy_grad.default, rows, *found, index, dim)
            return
    smoothed = _smoothed(grad, dim)
    if smoothed is not None:
        loss, spread = smoothed
        rows, index = _picks(at, loss)
        if _shape(index) == _shape(found[1]):
            picked = at.add(fused.cross_entropy_grad.default, rows, *found, index, dim)
            evenly = spread.all_input_nodes[0]
            total = at.add(aten.mul.Scalar, widened(at, evenly), _shape(found[0])[dim])
            rest = at.add(fused.minus_softmax.default, widened(at, spread), *found, total)
            turn_rounded(at, dtype, aten.add.Tensor, picked, rest)
            return
    grad = widened(at, grad)
    total = at.add(aten.sum.dim_IntList, grad, [dim], True)
    turn_rounded(at, dtype, fused.minus_softmax.default, grad, *found, total)


def _smoothed(grad: fx.Node, dim: int) -> tuple[fx.Node, fx.Node] | None:
    """Of the gradient of a loss with label smoothing: that of its nll_loss, and what all classes of a row get alike."""
    node = _behind(grad)
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    for one, two in itertools.permutations(map(_behind, node.all_input_nodes)):
        alike = two.target is aten.expand.default and _shape(two.all_input_nodes[0])[dim] == 1
        if one.target in _NLL_GRADS and alike and len(_shape(two.all_input_nodes[0])) == len(_shape(two)):
            return one, two
    return None


def sum_over_dims(at: Inserter) -> None:
    """The sum of log-probabilities over all classes, as label smoothing takes it: sum(x) - n * logsumexp(x)."""
    x, dims, *keep = at.args
    found = normalized_parts(x) if isinstance(x, fx.Node) else None
    if found is None or at.node.kwargs or len(dims) != 1 or _shape(found[1])[dims[0]] != 1:
        return
    logits, shift = found
    total = at.add(aten.sum.dim_IntList, widened(at, logits), dims, True)
    made = at.add(aten.sub.Tensor, total, at.add(aten.mul.Scalar, shift, _shape(logits)[dims[0]]))
    if not (keep and keep[0]):
        made = at.add(aten.squeeze.dim, made, dims[0])
    turn_rounded(at, _dtype(x), aten.alias.default, made)


def _picks(at: Inserter, loss: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Of the gradient of a nll_loss: what each row counts for, and the class that it picks, both with a dim of 1."""
    grad, logits, target, weight, reduction, ignored, total = loss.args
    assert isinstance(grad, fx.Node)
    grad = widened(at, grad)
    along = 1 if isinstance(logits, fx.Node) and len(_shape(logits)) > 1 else 0
    valid = at.add(aten.ne.Scalar, target, ignored)
    index = at.add(aten.where.ScalarOther, valid, target, 0)
    if weight is not None:
        # widened too: of a number and a tensor the tensor's type would be that of the product
        grad = at.add(aten.mul.Tensor, grad, widened(at, at.add(aten.index.Tensor, weight, [index])))
    if reduction == MEAN:
        assert isinstance(total, fx.Node)
        grad = at.add(aten.div.Tensor, grad, _unrounded(total))
    rows = at.add(aten.where.ScalarOther, valid, grad, 0)
    return at.add(aten.unsqueeze.default, rows, along), at.add(aten.unsqueeze.default, index, along)


def softmax(at: Inserter) -> None:
    """exp(x - logsumexp(x)), of features that a linear layer makes."""
    x, dim, to_float = at.args
    if not to_float and _of_weights(x):
        turn_rounded(at, _dtype(x), fused.exp_minus.default, x, _logsumexp(at, x, dim))


def softmax_backward(at: Inserter) -> None:
    """grad * out - out * sum(grad * out)."""
    grad, out, dim, dtype = at.args
    if _unrounded(out).target is not fused.exp_minus.default or dtype != _dtype(grad):
        return
    wide = widened(at, out)
    product = at.add(aten.mul.Tensor, grad, wide)
    total = at.add(aten.sum.dim_IntList, product, [dim], True)
    turn_rounded(at, dtype, aten.addcmul.default, product, wide, total, value=-1)


def nll_loss_backward(at: Inserter) -> None:
    """Of the log-probabilities only the shape is read: that of the logits will do."""
    grad, out, *rest = at.args
    found = normalized_parts(out)
    if found is not None and found[0].meta["val"].is_contiguous():  # images: as the kernel wants them
        at.turn(at.node, at.node.target, grad, found[0], *rest)


def normalized_parts(out: Any) -> tuple[fx.Node, fx.Node] | None:
    """x and logsumexp(x) of a log_softmax that was written as their difference."""
    node = _unrounded(out)
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    x, shift = node.args
    if isinstance(x, fx.Node) and isinstance(shift, fx.Node) and shift.target is aten.logsumexp.default:
        of = shift.args[0]
        assert isinstance(of, fx.Node)
        return (x, shift) if of is x or (_is_cast(of) and of.args[0] is x) else None
    return None


def _unrounded(out: fx.Node) -> fx.Node:
    """What was computed in float32, if it was, before it was rounded to the type of `out`."""
    node = _behind(out)
    return _behind(node.all_input_nodes[0]) if _is_cast(node) and not _is_wide(node) else node


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default


def _behind(node: fx.Node) -> fx.Node:
    while node.target in _SAME:
        (node,) = node.all_input_nodes
    return node


def _of_weights(x: fx.Node) -> bool:
    """Whether the nearest product that x comes from is one with a weight, not one of activations."""
    node = x
    while node.all_input_nodes and node.target not in (*_PRODUCTS_WITH_WEIGHTS, *_OTHER_PRODUCTS):
        node = node.all_input_nodes[0]
    return node.target in _PRODUCTS_WITH_WEIGHTS


def _is_wide(x: fx.Node) -> bool:
    return _dtype(x) in _WIDE


def _shape(x: fx.Node) -> torch.Size:
    shape: torch.Size = x.meta["val"].shape
    return shape


def _dtype(x: fx.Node) -> torch.dtype:
    dtype: torch.dtype = x.meta["val"].dtype
    return dtype
