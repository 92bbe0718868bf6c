"""Which rank module a parameter belongs to, what it is there, and where it is registered."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stpart_compiler.ir.artifact import TensorSlot

if TYPE_CHECKING:
    from stpart_compiler.runtime.rank_module import RankModule


class Home(NamedTuple):
    """Where a tensor is registered. Read at each call: `.to()` and `load_state_dict(assign=True)` replace tensors."""

    table: dict[str, Tensor]
    key: str

    @property
    def tensor(self) -> Tensor:
        return self.table[self.key]


_VERSION = "_stpart_grad_version"

# Values hold the module weakly: it holds the parameter.
_OWNERS: Any = WeakIdKeyDictionary()


def own(module: RankModule, slot: TensorSlot, param: Tensor) -> None:
    if owner_of(param) is None and slot.layout.digits and param.requires_grad:
        param.register_post_accumulate_grad_hook(_note)
    _OWNERS[param] = (weakref.ref(module), slot)


def _note(param: Tensor) -> None:
    assert param.grad is not None
    vars(param)[_VERSION] = param.grad._version


def allow_change(param: Tensor) -> None:
    """The gradient was just written in place, by what knows that it is a block."""
    if _VERSION in vars(param) and param.grad is not None:
        _note(param)


def is_changed(param: Tensor) -> bool:
    """Whether the gradient of a cut parameter was written in place since backward, not followed by `allow_change`."""
    version = vars(param).get(_VERSION)
    return param.grad is not None and version is not None and param.grad._version != version


def owner_of(param: Tensor) -> tuple[RankModule, TensorSlot] | None:
    """The rank module that a parameter belongs to, and its slot there; None for any other tensor."""
    reference, slot = _OWNERS.get(param, (None, None))
    module = reference() if reference is not None else None
    return None if module is None else (module, slot)
