"""One rank's communication engine: starts messages, keeps their handles, waits with a timeout, counts.

An `Engine` belongs to one rank and is found by the `stpart` ops through a thread-local (`Engine.activate`). It speaks
to the other ranks through a `Transport`. `ranks` of a collective may come in any order (skewed layouts), while groups
are sorted: positions are mapped here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stpart_compiler.ir.program import SMALL_CHANNEL, Group
from stpart_compiler.runtime.transport import GlooTransport, Started, TorchTransport, Transport, flat_bytes

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
_REDUCIBLE = frozenset((*_REAL, torch.complex64, torch.complex128))

FORMING = (-1, -1)
"""Channel and tag that forming groups is labelled with."""

Peer = int | tuple[int, ...]
"""The other side of a message: one rank, or all ranks of a collective."""


class CommTimeoutError(RuntimeError):
    """A message did not arrive: timeout, a peer that died, or a run that was stopped because another rank failed.

    `follows`: the cause lies with another rank, which closed its connections or stopped the run.
    """

    follows = False


@dataclass(frozen=True)
class Label:
    """Where a message comes from, for error messages. `step`: the temporal step, None outside of time loops."""

    node: str
    module_path: str
    peer: Peer
    step: int | None = None


class Message(NamedTuple):
    """One message of the current step.

    `kind`: send, recv, all_reduce, all_gather, reduce_scatter or all_to_all. `nbytes`: bytes of the tensor sent or
    received; for a collective, of this rank's input.
    """

    kind: str
    nbytes: int
    peer: Peer
    channel: int
    tag: int


class _Pending(NamedTuple):
    """A started message; `work` is None where nothing had to move. `tensors` keeps its memory alive."""

    kind: str
    peer: Peer
    work: Any
    tensors: tuple[Tensor, ...] = ()
    finish: Callable[[], object] | None = None


class _Order(NamedTuple):
    """The caller's order of ranks against the sorted order of a group; the maps are None where they are the same."""

    ranks: tuple[int, ...]
    to_caller: tuple[int, ...] | None
    to_sorted: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def _order(ranks: tuple[int, ...]) -> _Order:
    in_order = tuple(sorted(ranks))
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"the ranks of a collective must differ from each other, got {list(ranks)}")
    if in_order == ranks:
        return _Order(in_order, None, None)
    return _Order(in_order, tuple(map(in_order.index, ranks)), tuple(map(ranks.index, in_order)))


def _plain(x: Tensor) -> Tensor:
    """Contiguous, with no lazy conjugation or negation: the memory is the value."""
    return x.resolve_conj().resolve_neg().contiguous()


_LOCAL = threading.local()


def active_engine() -> Engine | None:
    """The engine that is active on this thread, if any."""
    engine: Engine | None = getattr(_LOCAL, "engine", None)
    return engine


def current_engine() -> Engine:
    """The engine that is active on this thread. Raises RuntimeError where there is none."""
    engine = active_engine()
    if engine is None:
        raise RuntimeError("a stpart op ran with no active engine on this thread: call it inside engine.activate()")
    return engine


class Engine:
    """The communication of one rank.

    Every operation is asynchronous: it is done after `wait` with its tag and channel. Tags are unique within a step.
    `labels` names the messages for error messages and is set by who loads a program. `messages` lists what was started
    since `begin_step`; empty tensors and groups of one rank move nothing and are not listed.
    """

    def __init__(self, rank: int, world_size: int, transport: Transport, timeout_s: float) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside of 0..{world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.labels: MutableMapping[tuple[int, int], Label] = {}
        self.messages: list[Message] = []
        self.random_state: tuple[torch.device, Tensor] | None = None  # None: draw from the default generator
        self.on_failure: Callable[[CommTimeoutError], None] | None = None
        self._transport = transport
        self._pending: dict[tuple[int, int], list[_Pending]] = {}
        self._aborted: str | None = None

    @contextmanager
    def activate(self) -> Iterator[Engine]:
        """Make this the engine of the `stpart` ops called on this thread."""
        previous = getattr(_LOCAL, "engine", None)
        _LOCAL.engine = self
        try:
            yield self
        finally:
            _LOCAL.engine = previous

    def prepare(self, channels: int, groups: Iterable[Group] = ()) -> None:
        """Form the groups of point-to-point channels 0..channels-1 and of collectives; all ranks pass the same.

        Needed on NCCL. On gloo a group not prepared is formed at its first use, when its members wait for each other.
        Raises CommTimeoutError when a rank does not take part.
        """
        started = time.monotonic()
        try:
            self._transport.prepare(channels, groups)
        except RuntimeError as error:
            self._fail("forming groups", tuple(range(self.world_size)), FORMING[1], FORMING[0], started, error)

    def begin_step(self) -> None:
        """Forget the messages of the last step."""
        self.messages.clear()

    def message_totals(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of this step's messages by kind."""
        totals: dict[str, tuple[int, int]] = {}
        for message in self.messages:
            number, nbytes = totals.get(message.kind, (0, 0))
            totals[message.kind] = (number + 1, nbytes + message.nbytes)
        return totals

    @property
    def outstanding(self) -> list[tuple[int, int]]:
        """(channel, tag) of messages started and not yet waited for."""
        return list(self._pending)

    def abort(self, reason: str) -> None:
        """Stop this rank's communication for good; waits here and on peers fail soon. May be called by any thread."""
        if self._aborted is None:
            self._aborted = reason
            self._transport.abort()

    def release(self) -> list[Any]:
        """End this rank's communication when nothing is under way on any rank; the groups, which end when dropped."""
        self._aborted = "the run that this engine was made for is over; attach the module to another engine"
        self.on_failure = None
        return self._transport.release()

    def isend(self, x: Tensor, peer: int, tag: int, channel: int) -> None:
        """Start sending a contiguous tensor."""
        self.exchange((x,), (peer,), (tag,), (), (), (), channel)

    def irecv(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, peer: int, tag: int, channel: int
    ) -> Tensor:
        """Start receiving into a new tensor, which is returned."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        self.exchange((), (), (), (buffer,), (peer,), (tag,), channel)
        return buffer

    def exchange(
        self,
        sends: Sequence[Tensor],
        send_peers: Sequence[int],
        send_tags: Sequence[int],
        buffers: Sequence[Tensor],
        recv_peers: Sequence[int],
        recv_tags: Sequence[int],
        channel: int,
    ) -> None:
        """Start sends of contiguous tensors and receives into `buffers` together."""
        outgoing = self._parts("send", sends, send_peers, send_tags, channel)
        incoming = self._parts("recv", buffers, recv_peers, recv_tags, channel)
        if not outgoing and not incoming:
            return
        started = time.monotonic()
        try:
            self._check_alive()
            group = self._transport.channel(channel)
            works = self._transport.start_exchange(group, outgoing, incoming)
        except RuntimeError as error:
            _, peer, tag = (*incoming, *outgoing)[0]
            self._fail("exchange", peer, tag, channel, started, error)
        kinds = ["recv"] * len(incoming) + ["send"] * len(outgoing)
        for kind, (x, peer, tag), work in zip(kinds, (*incoming, *outgoing), works, strict=True):
            self.messages.append(Message(kind, x.nbytes, peer, channel, tag))
            self._add(channel, tag, _Pending(kind, peer, work, (x,)))

    def wait(self, tags: Sequence[int], channel: int) -> None:
        """Wait for all messages with these tags on this channel and release their tensors.

        Raises CommTimeoutError, and ValueError for a tag with nothing outstanding.
        """
        for tag in tags:
            entries = self._pending.pop((channel, tag), None)
            if entries is None:
                raise ValueError(f"rank {self.rank}: wait for tag {tag} on channel {channel}, but nothing is under way")
            for entry in entries:
                self._finish(entry, tag, channel)

    def all_reduce(self, x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
        """Sum over `ranks`, in a new tensor; the same bits on all of them."""
        self._check_reducible(x, "all_reduce", tag)
        result = _plain(x.clone(memory_format=torch.contiguous_format))
        self._sum(result, ranks, tag, channel)
        return result

    def all_reduce_(self, x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
        """Sum over `ranks` in x itself; where its strides forbid that, in a copy, which x gets at the end."""
        self._check_reducible(x, "all_reduce_", tag)
        if x.is_complex():  # torch resolves conjugated operands in a copy, which it takes back before the sum is there
            raise ValueError(f"rank {self.rank}: all_reduce_ with tag {tag}: cannot sum {x.dtype}, all_reduce can")
        summed = x.contiguous()
        self._sum(summed, ranks, tag, channel, None if summed is x else lambda: x.copy_(summed))
        return x

    def _sum(
        self, x: Tensor, ranks: Sequence[int], tag: int, channel: int, finish: Callable[[], object] | None = None
    ) -> None:
        numbers = torch.view_as_real(x) if x.is_complex() else x

        def start(group: Any) -> Started:
            return Started(group.allreduce([numbers]), (numbers,), finish)

        self._collective("all_reduce", self._members(ranks, tag), x, start, tag, channel)

    def all_gather(self, x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
        """[len(ranks), *x.shape]: the blocks, of equal shape, in the order of `ranks`."""
        order = self._members(ranks, tag)
        result = x.new_empty((len(ranks), *x.shape))
        if len(ranks) == 1:
            result.copy_(x)

        def start(group: Any) -> Started:
            block = _plain(x)
            rows, finish = _landing(result, order)
            return Started(group._allgather_base(flat_bytes(rows), flat_bytes(block)), (block, rows), finish)

        self._collective("all_gather", order, x, start, tag, channel)
        return result

    def all_to_all(self, x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
        """x: [len(ranks), *block]: row i goes to ranks[i]; row i of the result comes from ranks[i]."""
        order = self._members(ranks, tag, x)
        result = x.new_empty(x.shape)
        if len(ranks) == 1:
            result.copy_(x)

        def start(group: Any) -> Started:
            rows = _sorted_rows(x, order)
            landed, finish = _landing(result, order)
            work = group.alltoall_base(flat_bytes(landed), flat_bytes(rows), [], [])
            return Started(work, (rows, landed), finish)

        self._collective("all_to_all", order, x, start, tag, channel)
        return result

    def reduce_scatter(self, x: Tensor, ranks: Sequence[int], tag: int, channel: int) -> Tensor:
        """x: [len(ranks), *block]: the sum over `ranks` of the row at this rank's own position in `ranks`."""
        self._check_reducible(x, "reduce_scatter", tag)
        order = self._members(ranks, tag, x)
        result = x.new_empty(x.shape[1:])
        if len(ranks) == 1:
            result.copy_(x[0])

        def start(group: Any) -> Started:
            return self._transport.start_reduce_scatter(group, _sorted_rows(x, order), result)

        self._collective("reduce_scatter", order, x, start, tag, channel)
        return result

    def _collective(
        self, kind: str, order: _Order, x: Tensor, start: Callable[[Any], Started], tag: int, channel: int
    ) -> None:
        if len(order.ranks) == 1 or x.numel() == 0:
            self._add(channel, tag, _Pending(kind, order.ranks, None))
            return
        started_at = time.monotonic()
        try:
            self._check_alive()
            started = start(self._transport.group(order.ranks, channel == SMALL_CHANNEL))
        except RuntimeError as error:
            self._fail(kind, order.ranks, tag, channel, started_at, error)
        self.messages.append(Message(kind, x.nbytes, order.ranks, channel, tag))
        self._add(channel, tag, _Pending(kind, order.ranks, *started))

    def _parts(
        self, kind: str, tensors: Sequence[Tensor], peers: Sequence[int], tags: Sequence[int], channel: int
    ) -> list[tuple[Tensor, int, int]]:
        """The messages that move bytes; both ends know the shape, so an empty tensor needs no message."""
        parts = []
        for part in zip(tensors, peers, tags, strict=True):
            x, peer, tag = part
            if peer == self.rank or not 0 <= peer < self.world_size:
                raise ValueError(f"rank {self.rank}: {kind} with tag {tag} names rank {peer}, expected another rank")
            if not x.is_contiguous() or x.is_conj() or x.is_neg():
                raise ValueError(
                    f"rank {self.rank}: {kind} to rank {peer}, tag {tag}: make the tensor contiguous first"
                )
            if x.numel() == 0:
                self._add(channel, tag, _Pending(kind, peer, None))
                continue
            parts.append(part)
        return parts

    def _add(self, channel: int, tag: int, entry: _Pending) -> None:
        self._pending.setdefault((channel, tag), []).append(entry)

    def _finish(self, entry: _Pending, tag: int, channel: int) -> None:
        if entry.work is None:
            return
        started = time.monotonic()
        try:
            entry.work.wait()
        except RuntimeError as error:
            self._fail(entry.kind, entry.peer, tag, channel, started, error)
        if entry.finish is not None:
            entry.finish()

    def _members(self, ranks: Sequence[int], tag: int, rows: Tensor | None = None) -> _Order:
        order = _order(tuple(ranks))
        if self.rank not in order.ranks:
            raise ValueError(f"rank {self.rank}: collective with tag {tag} is among ranks {list(ranks)} without it")
        if rows is not None and (rows.dim() == 0 or rows.shape[0] != len(ranks)):
            raise ValueError(
                f"rank {self.rank}: collective with tag {tag} among {len(ranks)} ranks takes one row for each, "
                f"got shape {list(rows.shape)}"
            )
        return order

    def _check_reducible(self, x: Tensor, kind: str, tag: int) -> None:
        if x.dtype not in _REDUCIBLE:
            raise ValueError(f"rank {self.rank}: {kind} with tag {tag} cannot sum {x.dtype}: convert it first")

    def _check_alive(self) -> None:
        if self._aborted is not None:
            raise RuntimeError(self._aborted)

    def _fail(self, kind: str, peer: Peer, tag: int, channel: int, started: float, error: RuntimeError) -> NoReturn:
        """Raise CommTimeoutError in words of the program, and close the connections so that peers stop as well."""
        waited = time.monotonic() - started
        label = self.labels.get((channel, tag)) or Label("(no label)", "(unknown)", peer)
        cause, follows = self._cause(waited, error)
        failure = CommTimeoutError(
            f"rank {self.rank}: {kind} failed after {waited:.2f} s: {cause}; "
            f"node {label.node}, module {label.module_path}, peer {label.peer}, step {label.step}, "
            f"tag {tag}, channel {channel}"
        )
        failure.follows = follows
        if self.on_failure is not None:
            self.on_failure(failure)
        self.abort(f"rank {self.rank} has failed before")
        raise failure from error

    def _cause(self, waited: float, error: RuntimeError) -> tuple[str, bool]:
        if self._aborted is not None:
            return f"stopped, {self._aborted}", True
        if waited >= 0.95 * self.timeout_s or "Timed out" in str(error):
            return f"no answer within the timeout of {self.timeout_s:g} s", False
        if "onnection" in str(error) or "pair closure" in str(error):
            return "the connection is closed, a peer has stopped", True
        return str(error).splitlines()[0], False


def _landing(result: Tensor, order: _Order) -> tuple[Tensor, Callable[[], object] | None]:
    """Where a group writes its rows, in sorted order, and what brings them into the caller's order afterwards."""
    to_caller = order.to_caller
    if to_caller is None:
        return result, None
    rows = torch.empty_like(result)
    return rows, lambda: torch.stack([rows[index] for index in to_caller], out=result)


def _sorted_rows(x: Tensor, order: _Order) -> Tensor:
    """x: [len(ranks), *block], contiguous and in the sorted order of the ranks."""
    if order.to_sorted is None:
        return _plain(x)
    return _plain(torch.stack([x[index] for index in order.to_sorted]))


_ONLINE = count()


def online_engine(timeout_s: float = 600.0) -> Engine:
    """The engine of this process in the initialised torch.distributed: raw gloo groups on CPU, NCCL on GPUs.

    All ranks make their engines in the same order. Raises RuntimeError where no process group is initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group: call torch.distributed.init_process_group first, or run under torchrun")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if "nccl" in dist.get_backend():
        device = torch.device("cuda", torch.cuda.current_device())
        return Engine(rank, world_size, TorchTransport(device, timeout_s), timeout_s)
    store = dist.distributed_c10d._get_default_store()
    transport = GlooTransport(store, rank, world_size, timeout_s, prefix=f"stpart{next(_ONLINE)}")
    return Engine(rank, world_size, transport, timeout_s)
