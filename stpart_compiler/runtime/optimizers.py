"""Steps of optimizers that would be silently wrong are refused, and warned of where that cannot be told for sure.

Optimizers that need whole tensors are, for parameters that are cut; and any, while gradients wait for their reduction.
Elementwise ones (SGD, Adam, AdamW and their like) are right on blocks. What this package does not know is let through.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stpart_compiler.runtime.owners import is_changed, owner_of

_USER = 3  # frames from the warning to the user's call of step()

_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# By package and class: classes of other packages may bear these names and know of blocks.
_NEEDS_WHOLE = {
    ("torch", "Adafactor"): "keeps statistics of whole rows, columns and tensors",
    ("torch", "LBFGS"): "takes inner products over whole tensors",
    ("torch", "Muon"): "orthogonalises whole matrices",
    ("transformers", "Adafactor"): "keeps statistics of whole rows, columns and tensors",
}


@cache
def watch_optimizers() -> None:
    """From now on every optimizer of this process is looked at before it steps."""
    register_optimizer_step_pre_hook(refuse_blocks)
    register_optimizer_step_pre_hook(refuse_unreduced)
    register_optimizer_step_pre_hook(warn_of_changed)


def warn_of_changed(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn once for each module whose gradients were written in place by what may not know of blocks.

    torch's own clip_grad_norm_ and GradScaler cannot be seen at work, and leave no other trace.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        owner = owner_of(param) if is_changed(param) else None
        if owner is not None and owner[0] not in _WARNED:
            _WARNED.add(owner[0])
            warnings.warn(
                f"{type(optimizer).__name__}.step: the gradient of {owner[1].name!r}, a parameter that is cut over"
                " ranks, was written in place after backward. torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler"
                " see the blocks of one rank alone and are wrong here: use stpart_compiler.clip_grad_norm_ and"
                " stpart_compiler.GradScaler. Ignore this if each element was changed by itself, alike on all ranks",
                stacklevel=_USER,
            )


def refuse_unreduced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises:
    RuntimeError: sums of gradients of a parameter's rank module wait for their reduction.
    """
    owners = (owner_of(param) for group in optimizer.param_groups for param in group["params"])
    for module in {owner[0] for owner in owners if owner is not None}:
        module.check_reduced(f"{type(optimizer).__name__}.step")


def refuse_blocks(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises:
    ValueError: the optimizer needs whole tensors, and a parameter of it is a block of one.
    """
    need = _need(type(optimizer))
    params = (param for group in optimizer.param_groups for param in group["params"]) if need else ()
    for param in params:
        owner = owner_of(param)
        if owner is not None and owner[1].layout.digits:
            raise ValueError(
                f"{type(optimizer).__name__} {need}, but parameter {owner[1].name!r} is cut over ranks (layout"
                f" {owner[1].layout}): use an optimizer that works element by element, such as AdamW, or keep the"
                ' parameters whole with torch.compile(model, backend="stpart")'
            )


def _need(kind: type[Optimizer]) -> str | None:
    """What an optimizer does with whole tensors; None for those that are right on blocks, or unknown."""
    for base in kind.__mro__:
        found = _NEEDS_WHOLE.get((base.__module__.partition(".")[0], base.__name__))
        if found is not None:
            return found
    return None
