"""Pointwise ops that graphs use where aten would write a whole tensor in between: the `torch.library` namespace
`stpart_fused`. Importing this module defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "stpart_fused"


def _exp_minus(x: Tensor, shift: Tensor) -> Tensor:
    return torch.sub(x, shift).exp_()


def _minus_softmax(grad: Tensor, x: Tensor, shift: Tensor, total: Tensor) -> Tensor:
    return torch.addcmul(grad, _exp_minus(x, shift), total, value=-1)


SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    # exp(x - shift): softmax, given the logsumexp of its rows
    "exp_minus": ("(Tensor x, Tensor shift) -> Tensor", _exp_minus),
    # grad - exp(x - shift) * total: gradient of log_softmax, given the sum of grad over its rows
    "minus_softmax": ("(Tensor grad, Tensor x, Tensor shift, Tensor total) -> Tensor", _minus_softmax),
}


def _fake(*operands: Tensor) -> Tensor:
    return operands[0].new_empty(torch.broadcast_shapes(*(x.shape for x in operands)))


def _define() -> Any:
    library: Any = torch.library.Library(NAMESPACE, "DEF")
    for name, (schema, kernel) in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pointwise,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=library)
    return library


# The ops live as long as their Library object: a reload must keep the first one.
if "LIBRARY" not in globals():
    LIBRARY = None if hasattr(getattr(torch.ops, NAMESPACE), "exp_minus") else _define()
