"""Warnings that the user's code gives while it is traced: collected, and shown once the trace is done."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._guards import TracingContext

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TRACED_CALL = "invoke_and_store_as_constant"  # dynamo's function that runs what has no trace
_warn = warnings.warn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **options: Any) -> None:
    """`warnings.warn` while dynamo traces. Run for traced code, it does not find the user's frames on the stack."""
    if sys._getframe(1).f_code.co_name != _TRACED_CALL:
        _warn(message, category, stacklevel + 1, source, **options)
        return
    frames = TracingContext.extract_stack()
    frame = frames[-min(max(stacklevel, 1), len(frames))]
    warnings.warn_explicit(message, category or UserWarning, frame.filename, frame.lineno or 0)


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Within: warnings are collected, those that traced code gives by `warnings.warn` too."""
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(warnings, "warn", _traced_warn):
        warnings.simplefilter("always")
        yield caught


def show_warnings(caught: Iterable[warnings.WarningMessage]) -> None:
    """Show those of the user's code, each once, and tell in our words what dynamo says of it."""
    shown = set()
    for warning in caught:
        text, place = str(warning.message), (warning.filename, warning.lineno)
        if warning.filename.startswith(_TORCH):
            _tell_changed(text)
        elif (text, place) not in shown:
            shown.add((text, place))
            warnings.warn_explicit(warning.message, warning.category, *place)


def _tell_changed(message: str) -> None:
    """Warn of modules that assign to their own attributes in forward; dynamo lists what Python does on the way."""
    for source in re.findall(r"\"L\['self'\]([^\"]*)\"", message):
        names = re.findall(r"\._modules\['([^']+)'\]", source)
        if source.endswith("]") and names[:2] == ["_export_root", "model"]:
            warnings.warn(
                f"capture: module {'.'.join(names[2:]) or '(the model)'} assigns to an attribute of its own in forward;"
                " the compiled step does not, and reads the value of compile time: make it a buffer (register_buffer)",
                stacklevel=2,
            )
