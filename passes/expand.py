"""Ops that torch itself writes in simpler ones: its decompositions, traced and put in place of the op.

Batch statistics, group norms and losses then consist of sums and pointwise ops, which can be cut exactly: a sum over
the whole batch is a pending sum on every rank. What stays one op (softmax, layer norm) has kernels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

EXPANDED: frozenset[Any] = frozenset(
    {
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
        aten.batch_norm_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.cudnn_batch_norm.default,
        aten.cudnn_batch_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_backward.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.huber_loss.default,
        aten.huber_loss_backward.default,
        aten.smooth_l1_loss.default,
        aten.smooth_l1_loss_backward.default,
        aten.soft_margin_loss.default,
        aten.soft_margin_loss_backward.default,
        aten.addmv.default,
        aten.addr.default,
        aten.baddbmm.default,
    }
)


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    return {op: decomposition_table[op] for op in EXPANDED} | {aten.var_mean.correction: var_mean}


def var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean by two sums, so that the reduced dims may be cut."""
    dims = list(range(x.ndim)) if not dim else [d % x.ndim for d in dim]
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.mean.dim(x, dims, True)
    spread = aten.sum.dim_IntList(aten.square.default(x - mean), dims, True)
    variance = spread / max(0, count - (1 if correction is None else correction))
    if keepdim:
        return variance, mean
    kept = [size for d, size in enumerate(x.shape) if d not in dims]
    return variance.view(kept), mean.view(kept)


def expansion(node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """What a node computes, as a graph over its tensor operands, and these operands.

    The nodes of the graph have fake results in `meta["val"]`.
    """
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def call(*tensors: Any) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    operands = [leaves[i] for i in at]
    with torch.no_grad():
        traced = make_fx(call, decomposition_table=_table())(*(operand.meta["val"].detach() for operand in operands))
    traced.graph.eliminate_dead_code()
    return traced, operands
