"""Which rank module a parameter belongs to, and what it is there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stpart_compiler.ir.artifact import TensorSlot

if TYPE_CHECKING:
    from stpart_compiler.runtime.rank_module import RankModule

# Values hold the module weakly: it holds the parameter.
_OWNERS: Any = WeakIdKeyDictionary()


def own(module: RankModule, slot: TensorSlot, param: Tensor) -> None:
    _OWNERS[param] = (weakref.ref(module), slot)


def owner_of(param: Tensor) -> tuple[RankModule, TensorSlot] | None:
    """The rank module that a parameter belongs to, and its slot there; None for any other tensor."""
    reference, slot = _OWNERS.get(param, (None, None))
    module = reference() if reference is not None else None
    return None if module is None else (module, slot)
