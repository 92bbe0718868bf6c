"""Groups of ranks that messages travel in: raw gloo groups, or those of torch.distributed (NCCL).

Point-to-point messages of one channel travel in a group of their own, so a small message does not queue behind a big
one of another channel. Collectives have one group per set of ranks, sorted as torch's groups are, and another one for
small tensors: collectives of one group follow one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from stpart_compiler.ir.program import SMALL_CHANNEL, Group

# A receive with this tag never has a sender: letting it time out makes gloo close the group's connections.
_ABORT_TAG = 0x7FFFFFFF


class Started(NamedTuple):
    """An operation under way: its handle, the tensors it needs alive, and what fills the result after the wait."""

    work: Any
    tensors: tuple[Tensor, ...] = ()
    finish: Callable[[], object] | None = None


Part = tuple[Tensor, int, int]
"""One message of an exchange: tensor, peer, tag."""


def flat_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as a row of bytes: moving data then needs no dtype support of the backend."""
    return x.reshape(-1).view(torch.uint8)


class Transport(ABC):
    """What an engine needs of a backend. `timeout_s` (seconds) bounds every operation, forming groups too."""

    every_rank_forms = False
    """Whether ranks that are not members take part in forming a group."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timedelta(seconds=timeout_s)
        self._channels: dict[int, Any] = {}
        self._sets: dict[tuple[bool, tuple[int, ...]], Any] = {}

    @abstractmethod
    def form(self, ranks: tuple[int, ...], name: str) -> Any:
        """A new group of the sorted `ranks`; `name` is the same on all of them."""

    @abstractmethod
    def abort(self) -> None:
        """Close all connections of this rank; what waits on them, here and on the peers, fails soon."""

    @abstractmethod
    def start_exchange(self, group: Any, sends: Sequence[Part], recvs: Sequence[Part]) -> list[Any]:
        """Start sends and receives together: one handle for each, receives first."""

    @abstractmethod
    def start_reduce_scatter(self, group: Any, x: Tensor, result: Tensor) -> Started:
        """x: [n, *block], rows in the group's order; result: block."""

    def prepare(self, channels: int, groups: Iterable[Group]) -> None:
        """Form channels 0..channels-1 and the groups, in this order; every rank calls it with the same arguments."""
        if self.world_size == 1:
            return
        for channel in range(channels):
            self.channel(channel)
        for number, group in groups:
            ranks = tuple(sorted(group))
            if len(ranks) > 1 and (self.every_rank_forms or self.rank in ranks):
                self.group(ranks, number == SMALL_CHANNEL)

    def channel(self, channel: int) -> Any:
        """The group of a point-to-point channel. Not prepared: formed now, which waits for all ranks to do the same."""
        group = self._channels.get(channel)
        if group is None:
            group = self._channels[channel] = self.form(tuple(range(self.world_size)), f"channel{channel}")
        return group

    def group(self, ranks: tuple[int, ...], small: bool = False) -> Any:
        """The group of a sorted set of ranks, or theirs for `small` tensors.

        Not prepared: formed now, which waits for its members.
        """
        group = self._sets.get((small, ranks))
        if group is None:
            name = ("small" if small else "ranks") + "_".join(map(str, ranks))
            group = self._sets[small, ranks] = self.form(ranks, name)
        return group

    def release(self) -> list[Any]:
        """Hand out all groups of this rank and forget them: the last reference to a group ends it."""
        found = self.formed()
        self._channels.clear()
        self._sets.clear()
        return found

    def formed(self) -> list[Any]:
        """All groups this rank is a member of."""
        # torch.distributed hands an int to those that are not members.
        return [group for group in [*self._channels.values(), *self._sets.values()] if not isinstance(group, int)]


class GlooTransport(Transport):
    """Raw gloo groups over `store`, which all ranks share. Forming a group involves its members alone."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float, prefix: str = "stpart") -> None:
        super().__init__(rank, world_size, timeout_s)
        self._store = store
        self._prefix = prefix

    def form(self, ranks: tuple[int, ...], name: str) -> Any:
        store = PrefixStore(f"{self._prefix}/{name}", self._store)
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), self.timeout)

    def abort(self) -> None:
        for group in self.formed():
            _close_gloo(group)

    def start_exchange(self, group: Any, sends: Sequence[Part], recvs: Sequence[Part]) -> list[Any]:
        # A gloo send ends only when its receive is there: all receives are posted first.
        works = [group.recv([buffer], peer, tag) for buffer, peer, tag in recvs]
        works += [group.send([x], peer, tag) for x, peer, tag in sends]
        return works

    def start_reduce_scatter(self, group: Any, x: Tensor, result: Tensor) -> Started:
        return _move_and_sum(group, x, result)


class TorchTransport(Transport):
    """Groups of an initialised torch.distributed, on `device`. All must be declared in `prepare`.

    On NCCL a wait orders the current stream and does not block: timeouts are the watchdog's. Sends and receives that
    must progress together have to be in one exchange.
    """

    every_rank_forms = True

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout_s)
        self._device = device
        self._preparing = False

    def prepare(self, channels: int, groups: Iterable[Group]) -> None:
        self._preparing = True
        try:
            super().prepare(channels, groups)
        finally:
            self._preparing = False

    def form(self, ranks: tuple[int, ...], name: str) -> Any:
        if not self._preparing:
            raise ValueError(f"group {name} is not declared: name it in engine.prepare(channels, groups) on all ranks")
        group: Any = dist.new_group(list(ranks), timeout=self.timeout)
        if self.rank in ranks:
            # NCCL makes its communicator in the first collective; a batch of sends must not be the first call.
            group.allreduce([torch.zeros(1, device=self._device)]).wait()
        return group

    def abort(self) -> None:
        for group in self.formed():
            if self._device.type == "cpu":
                _close_gloo(group)
            else:
                group.abort()

    def start_exchange(self, group: Any, sends: Sequence[Part], recvs: Sequence[Part]) -> list[Any]:
        ops = [dist.P2POp(dist.irecv, buffer, peer, group, tag) for buffer, peer, tag in recvs]
        ops += [dist.P2POp(dist.isend, x, peer, group, tag) for x, peer, tag in sends]
        works = dist.batch_isend_irecv(ops)
        # A backend that coalesces gives one handle for the whole batch.
        return works if len(works) == len(ops) else [works[0]] * len(ops)

    def start_reduce_scatter(self, group: Any, x: Tensor, result: Tensor) -> Started:
        if self._device.type == "cpu":
            return _move_and_sum(group, x, result)
        return Started(group._reduce_scatter_base(result.view(-1), x.view(-1)), (x,))


def _move_and_sum(group: Any, x: Tensor, result: Tensor) -> Started:
    """Reduce-scatter as an all-to-all and a local sum: gloo's own is an all-reduce and moves twice the bytes."""
    blocks = torch.empty_like(x)
    work = group.alltoall_base(flat_bytes(blocks), flat_bytes(x), [], [])
    return Started(work, (x,), lambda: torch.sum(blocks, 0, dtype=x.dtype, out=result))


def _close_gloo(group: Any) -> None:
    """gloo's groups have no working abort: a receive that times out closes all connections of its group."""
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
