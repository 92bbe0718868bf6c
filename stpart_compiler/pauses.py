"""What building large graphs must not do: pause for garbage, of which there is little, and advance the generators."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Garbage waits until the block ends."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def same_random() -> contextlib.AbstractContextManager[None]:
    """The default generators are afterwards as before: random ops advance them even on fake tensors."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
