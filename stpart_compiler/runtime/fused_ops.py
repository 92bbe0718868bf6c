"""Ops that graphs use where aten would write a whole tensor in between: the `torch.library` namespace
`stpart_fused`. Importing this module defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "stpart_fused"


def _exp_minus(x: Tensor, shift: Tensor) -> Tensor:
    return torch.sub(x, shift).exp_()


def _minus_softmax(grad: Tensor, x: Tensor, shift: Tensor, total: Tensor) -> Tensor:
    return torch.addcmul(grad, _exp_minus(x, shift), total, value=-1)


def cross_entropy_grad(rows: Tensor, x: Tensor, shift: Tensor, index: Tensor, dim: int) -> Tensor:
    """rows * (softmax(x) - one at index): rows, shift and index have size 1 along dim. An index of -1 is nowhere."""
    grad = _exp_minus(x, shift).mul_(rows)
    here = torch.where(index < 0, 0, rows)
    return grad.scatter_add_(dim, index.clamp(min=0), -here)


def _place_of(x: Tensor, value: Tensor, dim: int, keepdim: bool, largest: bool) -> Tensor:
    return torch.argmax(x, dim, keepdim) if largest else torch.argmin(x, dim, keepdim)


SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    # exp(x - shift): softmax, given the logsumexp of its rows
    "exp_minus": ("(Tensor x, Tensor shift) -> Tensor", _exp_minus),
    # grad - exp(x - shift) * total: gradient of log_softmax, given the sum of grad over its rows
    "minus_softmax": ("(Tensor grad, Tensor x, Tensor shift, Tensor total) -> Tensor", _minus_softmax),
    # gradient of the cross entropy of logits x, given what each row counts for, and its logsumexp and target
    "cross_entropy_grad": (
        "(Tensor rows, Tensor x, Tensor shift, Tensor index, int dim) -> Tensor",
        cross_entropy_grad,
    ),
    # argmax or argmin, given the value that stands there, with size 1 along dim: blocks need it
    "place_of": ("(Tensor x, Tensor value, int dim, bool keepdim, bool largest) -> Tensor", _place_of),
}
# not element by element: an index names a place in the whole
INDEXED = frozenset({"cross_entropy_grad", "place_of"})


def _fake(*operands: Tensor | int) -> Tensor:
    tensors = [x for x in operands if isinstance(x, Tensor)]
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tensors[0].new_empty(torch.broadcast_shapes(*(x.shape for x in tensors)), dtype=dtype)


def _define() -> Any:
    library: Any = torch.library.Library(NAMESPACE, "DEF")
    for name, (schema, kernel) in SCHEMAS.items():
        library.define(name + schema, tags=() if name in INDEXED else (torch.Tag.pointwise,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        fake = _place_of if name == "place_of" else _fake
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


# The ops live as long as their Library object: a reload must keep the first one.
if "LIBRARY" not in globals():
    LIBRARY = None if hasattr(getattr(torch.ops, NAMESPACE), "exp_minus") else _define()
