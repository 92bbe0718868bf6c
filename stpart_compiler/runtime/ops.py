"""Communication ops of the generated programs: the `torch.library` namespace `stpart`.

A rank's program is straight-line Python over these ops. Importing this module defines them; each call goes to the
engine that is active on the calling thread (`Engine.activate`). An op that starts a message returns at once. What it
returns is undefined until `wait` was called with its tag, and what it sends must not be written before that.

All ops have fake kernels, so a program runs under FakeTensorMode, and all are marked as having side effects, so
dead-code elimination keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from stpart_compiler.runtime import fused_ops as _fused_ops  # noqa: F401  (graphs use them too)
from stpart_compiler.runtime.engine import current_engine

NAMESPACE = "stpart"

SCHEMAS = {
    "isend": "(Tensor x, int peer, int tag, int channel) -> ()",
    "irecv": "(SymInt[] shape, ScalarType dtype, Device device, int peer, int tag, int channel) -> Tensor",
    "exchange": "(Tensor[] sends, int[] send_peers, int[] send_tags, SymInt[] recv_dims, int[] recv_ndims, "
    "int[] recv_peers, int[] recv_tags, ScalarType dtype, Device device, int channel) -> Tensor[]",
    "wait": "(int[] tags, int channel) -> ()",
    "all_reduce": "(Tensor x, int[] ranks, int tag, int channel) -> Tensor",
    "all_reduce_": "(Tensor(a!) x, int[] ranks, int tag, int channel) -> Tensor(a!)",
    "all_gather": "(Tensor x, int[] ranks, int tag, int channel) -> Tensor",
    "reduce_scatter": "(Tensor x, int[] ranks, int tag, int channel) -> Tensor",
    "all_to_all": "(Tensor x, int[] ranks, int tag, int channel) -> Tensor",
}


def unflatten_shapes(dims: Sequence[int], ndims: Sequence[int]) -> list[Sequence[int]]:
    """Shapes from the flat form that `exchange` takes: [2, 3, 5] with ndims [2, 1] is [2, 3] and [5]."""
    shapes, start = [], 0
    for ndim in ndims:
        shapes.append(dims[start : start + ndim])
        start += ndim
    return shapes


def _isend(x: Tensor, peer: int, tag: int, channel: int) -> None:
    current_engine().isend(x, peer, tag, channel)


def _irecv(shape: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, tag: int, channel: int) -> Tensor:
    return current_engine().irecv(shape, dtype, device, peer, tag, channel)


def _exchange(
    sends: Sequence[Tensor],
    send_peers: Sequence[int],
    send_tags: Sequence[int],
    recv_dims: Sequence[int],
    recv_ndims: Sequence[int],
    recv_peers: Sequence[int],
    recv_tags: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    channel: int,
) -> list[Tensor]:
    buffers = [torch.empty(shape, dtype=dtype, device=device) for shape in unflatten_shapes(recv_dims, recv_ndims)]
    current_engine().exchange(sends, send_peers, send_tags, buffers, recv_peers, recv_tags, channel)
    return buffers


def _wait(tags: Sequence[int], channel: int) -> None:
    current_engine().wait(tags, channel)


def _all_reduce(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return current_engine().all_reduce(x, ranks, tag, channel)


def _all_reduce_in_place(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return current_engine().all_reduce_(x, ranks, tag, channel)


def _all_gather(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return current_engine().all_gather(x, ranks, tag, channel)


def _reduce_scatter(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return current_engine().reduce_scatter(x, ranks, tag, channel)


def _all_to_all(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return current_engine().all_to_all(x, ranks, tag, channel)


def _fake_nothing(*args: Any) -> None:
    return None


def _fake_irecv(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, tag: int, channel: int
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _fake_exchange(
    sends: Sequence[Tensor],
    send_peers: Sequence[int],
    send_tags: Sequence[int],
    recv_dims: Sequence[int],
    recv_ndims: Sequence[int],
    recv_peers: Sequence[int],
    recv_tags: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    channel: int,
) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape in unflatten_shapes(recv_dims, recv_ndims)]


def _fake_same(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_in_place(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return x


def _fake_all_gather(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return x.new_empty((len(ranks), *x.shape))


def _fake_reduce_scatter(x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
    return x.new_empty(x.shape[1:])


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "isend": (_isend, _fake_nothing),
    "irecv": (_irecv, _fake_irecv),
    "exchange": (_exchange, _fake_exchange),
    "wait": (_wait, _fake_nothing),
    "all_reduce": (_all_reduce, _fake_same),
    "all_reduce_": (_all_reduce_in_place, _fake_in_place),
    "all_gather": (_all_gather, _fake_all_gather),
    "reduce_scatter": (_reduce_scatter, _fake_reduce_scatter),
    "all_to_all": (_all_to_all, _fake_same),
}


def _define() -> Any:
    library: Any = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        real, fake = KERNELS[name]
        library.define(name + schema)
        library.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        has_side_effect(packet)
        has_side_effect(packet.default)
    return library


# The ops live as long as their Library object. A reload runs this file again in the same namespace and must keep the
# first one; a second import under a fresh module object finds the ops defined, kept alive by their kernels' globals.
if "LIBRARY" not in globals():
    LIBRARY = None if hasattr(getattr(torch.ops, NAMESPACE), "wait") else _define()
