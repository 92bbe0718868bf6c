"""Bytes that a parameter occupies on a rank for the whole of training: itself, its gradient, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerModel:
    """How many tensors of the parameter's size and dtype the optimizer keeps per parameter."""

    name: str
    states: int


_STATES = {"adamw": 2, "momentum": 1, "sgd": 0}
OPTIMIZERS = {name: OptimizerModel(name, states) for name, states in _STATES.items()}


def optimizer_model(optimizer: str | OptimizerModel) -> OptimizerModel:
    """The model of a named optimizer.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(optimizer, OptimizerModel):
        return optimizer
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"optimizer {optimizer!r} is unknown; use one of {known}, or give an OptimizerModel")
    return OPTIMIZERS[optimizer]


def parameter_bytes(numel: int, itemsize: int, optimizer: str | OptimizerModel, requires_grad: bool) -> int:
    """Bytes of a local parameter of `numel` elements: with gradient and optimizer state if it is trained.

    Raises:
        ValueError: the optimizer is unknown.
    """
    copies = 2 + optimizer_model(optimizer).states if requires_grad else 1
    return numel * itemsize * copies
