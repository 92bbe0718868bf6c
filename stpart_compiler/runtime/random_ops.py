"""Random ops of the programs: every rank draws what one device would.

Ops that draw random numbers run whole on every rank, in the same order. At the start of a step that draws, the ranks
take over the state of rank 0's default generator, and each goes on from there by itself; rank 0's own generator
advances as it would on one device, those of the others stay as they are. So masks are equal on replicas, the blocks of
a mask that is cut are independent of each other, and a seed gives the same numbers on any mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from stpart_compiler.runtime.engine import Engine, active_engine

# The default generator belongs to the process, whose threads may be ranks.
_LOCK = threading.Lock()

TAG = -1
"""Tag of the message that shares the state: the programs' own tags count from 0."""


def drawn(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a random op, drawn with the rank's own state."""
    engine = active_engine()
    with _LOCK:
        if engine is None or engine.random_state is None:
            return target(*args, **kwargs)
        device, state = engine.random_state
        before = _state(device)
        _set_state(device, state)
        try:
            return target(*args, **kwargs)
        finally:
            engine.random_state = (device, _state(device))
            _set_state(device, before)


def share_state(engine: Engine, device: torch.device) -> None:
    """Take over the state of rank 0's default generator; all ranks call it together."""
    with _LOCK:
        mine = _state(device)
    states = engine.all_gather(mine.to(device), range(engine.world_size), TAG, 0)
    engine.wait((TAG,), 0)
    engine.random_state = (device, states[0].cpu()) if engine.rank else None


def _state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
