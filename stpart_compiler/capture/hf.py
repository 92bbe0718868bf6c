"""How Hugging Face models are called, so that their users need not write wrappers."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn


def is_hf_model(model: nn.Module) -> bool:
    """Whether the model is a transformers PreTrainedModel. Never imports transformers: such a model has done it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def hf_overrides(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments that make the output a ModelOutput without a cache, whatever the config says."""
    overrides: dict[str, Any] = {"return_dict": True}
    if "use_cache" in inspect.signature(model.forward).parameters:
        overrides["use_cache"] = False
    return overrides


def has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call gives labels, by name or by position: then the model computes its own loss."""
    return _argument(model, args, kwargs, "labels") is not None


@contextlib.contextmanager
def eager_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Within: causal masks are made as in eager mode, so that SDPA gets is_causal where that is all there is to mask.

    Transformers makes the whole mask [batch, 1, q, kv] whenever it is traced, because it cannot tell an export for any
    length from a capture for one, and cannot look whether position_ids hold packed sequences. Ours are of one length,
    and nothing is packed where the caller gives no position_ids.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not is_hf_model(model):
        yield
        return
    changes: dict[str, Any] = {"is_torchdynamo_exporting": _false}
    if _argument(model, args, kwargs, "position_ids") is None:
        changes["find_packed_sequence_indices"] = _none
    present = {name: change for name, change in changes.items() if hasattr(masking, name)}
    with mock.patch.multiple(masking, **present) if present else contextlib.nullcontext():
        yield


def _false() -> bool:
    return False


def _none(position_ids: torch.Tensor) -> None:
    return None


def _argument(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    names = list(inspect.signature(model.forward).parameters)
    return (dict(zip(names, args, strict=False)) | kwargs).get(name)
