"""Check all ranks' programs of one phase against each other, without devices. A program that fails is never run.

What is checked:
    each rank alone  (`_RankCheck`): every value is defined once, before its use; no pending sum is read by an
        instruction that does not allow it, or returned; every started transfer is waited for exactly once; nothing
        touches a receive buffer, or writes a send buffer, between start and wait.
    between ranks  (`_pair_messages`, `_pair_collectives`): every send has exactly one receive with the same channel,
        tag, shape and dtype, and each ordered pair of ranks issues both in one order (NCCL matches by order); members
        of a group issue the same collectives in one order.
    deadlock  (`_Simulation`): with zero buffering, where a wait ends when the other side has started its part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

from stpart_compiler.cost_models.liveness import storage_base, written
from stpart_compiler.ir.program import Instr, Message, RankProgram, Value, collective_kind, sums_in_place


class VerificationError(RuntimeError):
    """The programs of the ranks are wrong, alone or together; the message names rank, instruction and tensor."""


def verify_programs(programs: Sequence[RankProgram]) -> None:
    """Check the programs of all ranks for one phase.

    Raises:
        VerificationError: naming rank, instruction, origin, tensor, peer, and what was expected.
    """
    by_rank = {program.rank: program for program in programs}
    if len(by_rank) != len(programs):
        raise VerificationError(f"two programs of one rank: got ranks {[program.rank for program in programs]}")
    phases = {program.phase for program in programs}
    if len(phases) > 1:
        raise VerificationError(f"programs of several phases: {sorted(phases)}; verify each phase on its own")
    facts = {rank: _RankCheck(program).run() for rank, program in by_rank.items()}
    partners = _Partners()
    _pair_messages(facts, partners)
    _pair_collectives(facts, partners)
    _Simulation(facts, partners).run()


def verify_handover(giving: RankProgram, taking: RankProgram) -> None:
    """Check that one program takes all pending sums that another of its rank gives, its last outputs, as what they are.

    Raises:
        VerificationError: naming rank, tensor, and what was expected.
    """
    count = len(taking.inputs)
    handed = giving.outputs[len(giving.outputs) - count :]
    kept = giving.outputs[: len(giving.outputs) - count]
    lost = [value.name for value in kept if value is not None and value.name in giving.partial]
    if lost:
        raise VerificationError(f"rank {giving.rank}, {giving.phase}: no {taking.phase} takes the pending sums {lost}")
    for given, taken in zip(handed, taking.inputs, strict=True):
        is_ = None if given is None else (given.shape, giving.partial.get(given.name, ()))
        wanted = (taken.shape, taking.partial.get(taken.name, ()))
        if is_ != wanted:
            where = f"rank {giving.rank}: {giving.phase} gives {given}, shape and pending digits {is_}"
            raise VerificationError(f"{where}, where {taking.phase} takes {taken.name}, {wanted}; expected both alike")


def _fail(program: RankProgram, index: int, what: str) -> NoReturn:
    raise VerificationError(f"{_where(program, index)}: {what}")


def _where(program: RankProgram, index: int) -> str:
    origin = str(program.body[index].origin) or "no origin"
    return f"rank {program.rank}, {program.phase}, instruction {index}, {origin}"


def _tensor(value: Value) -> str:
    return f"tensor {value.name}"


def _kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class _Side(NamedTuple):
    """One end of a message: the instruction that starts it, the local tensor, what is known of it."""

    at: int
    value: Value
    message: Message


class _Flight(NamedTuple):
    """A tensor in a transfer under way. `receives`: it is written by the transfer."""

    at: int
    value: Value
    root: str
    receives: bool
    peer: str


class _Wait(NamedTuple):
    """A wait instruction and the (instruction, tag) of the transfers that it ends."""

    at: int
    ends: tuple[tuple[int, int], ...]


@dataclass
class _Facts:
    """What one rank does to others, in program order. Keys: (channel, peer); ranks of a group, sorted."""

    program: RankProgram
    sends: dict[tuple[int, int], list[_Side]] = field(default_factory=dict)
    recvs: dict[tuple[int, int], list[_Side]] = field(default_factory=dict)
    collectives: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    waits: list[_Wait] = field(default_factory=list)


class _RankCheck:
    """One pass over one rank's instructions."""

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.facts = _Facts(program)
        self.root: dict[str, str] = {}  # value name -> name of the value that owns its storage
        self.named: dict[str, list[str]] = {}  # storage -> the values on it
        self.stale: dict[str, int] = {}  # value name -> the reduction that summed in its storage since
        self.flying: dict[tuple[int, int], list[_Flight]] = {}  # (channel, tag) -> tensors under way
        self.busy: dict[str, list[_Flight]] = {}  # storage -> its transfers under way

    def run(self) -> _Facts:
        for value in (*self.program.inputs, *self.program.constants):
            if value.name in self.root:
                raise VerificationError(f"rank {self.program.rank}: two inputs have the name {value.name}")
            self.root[value.name] = value.name
            self.named[value.name] = [value.name]
        for index, instr in enumerate(self.program.body):
            self._instruction(index, instr)
        self._outputs()
        for (channel, tag), flights in self.flying.items():
            first = flights[0]
            what = f"{_tensor(first.value)} ({first.peer}, tag {tag}, channel {channel}) is never waited for"
            _fail(self.program, first.at, f"{what}; expected one wait before the program ends")
        return self.facts

    def _instruction(self, index: int, instr: Instr) -> None:
        for value in instr.inputs():
            if value.name not in self.root:
                _fail(self.program, index, f"{_tensor(value)} is used before it is defined")
            if not instr.partial_ok and value.name in self.program.partial:
                self._dropped_sum(index, value)
            if value.name in self.stale:
                _fail(self.program, index, self._overwritten(value, "read"))
            if self.busy and instr.kind != "view":
                self._check_read(index, value)
        for value in written(instr):
            self._check_written(index, value)
        self._define(index, instr)
        if instr.kind == "exchange":
            self._exchange(index, instr)
        elif instr.kind == "collective":
            self._collective(index, instr)
        elif instr.kind == "wait":
            self._wait(index, instr)

    def _dropped_sum(self, index: int, value: Value) -> NoReturn:
        digits = ", ".join(self.program.partial[value.name])
        what = f"{_tensor(value)} is a pending sum over {digits} and is read as if it were the whole value"
        _fail(self.program, index, f"{what}; expected a reduction before")

    def _overwritten(self, value: Value, how: str) -> str:
        what = f"{_tensor(value)} is {how} after instruction {self.stale[value.name]} has summed in its storage"
        return f"{what}; expected the reduction's own result, or a sum in a copy"

    def _check_read(self, index: int, value: Value) -> None:
        for flight in self.busy.get(self.root[value.name], ()):
            if flight.receives:
                what = f"{_tensor(value)} is read while it is being received ({flight.peer})"
                _fail(self.program, index, f"{what}; expected the wait for {self._started(flight)} before")

    def _check_written(self, index: int, value: Value) -> None:
        for flight in self.busy.get(self.root[value.name], ()):
            what = f"{_tensor(value)} is written while it is in flight ({flight.peer})"
            _fail(self.program, index, f"{what}; expected the wait for {self._started(flight)} before")

    def _started(self, flight: _Flight) -> str:
        return f"the transfer of {flight.value.name} started at instruction {flight.at}"

    def _define(self, index: int, instr: Instr) -> None:
        base = storage_base(instr)
        if base is not None and sums_in_place(instr):
            self.stale |= dict.fromkeys(self.named[self.root[base.name]], index)
        for value in instr.outs:
            if value is None:
                continue
            if value.name in self.root:
                _fail(self.program, index, f"{_tensor(value)} is defined a second time; expected one definition")
            root = self.root[value.name] = value.name if base is None else self.root[base.name]
            self.named.setdefault(root, []).append(value.name)

    def _outputs(self) -> None:
        rank, phase = self.program.rank, self.program.phase
        for position, value in enumerate(self.program.outputs):
            where = f"rank {rank}, {phase}, output {position}"
            if value is None:
                continue
            if value.name not in self.root:
                raise VerificationError(f"{where}: {_tensor(value)} is returned but never defined")
            if value.name in self.stale:
                raise VerificationError(f"{where}: {self._overwritten(value, 'returned')}")
            if value.name in self.program.partial and not self.program.gives_sums:
                digits = ", ".join(self.program.partial[value.name])
                what = f"{_tensor(value)} is a pending sum over {digits}"
                raise VerificationError(f"{where}: {what}; expected a reduction before it is returned")

    def _exchange(self, index: int, instr: Instr) -> None:
        self._check_exchange(index, instr)
        sides = ((instr.sends, self.facts.sends, False), (instr.recvs, self.facts.recvs, True))
        for messages, table, receives in sides:
            for value, message in messages:
                if message.peer == self.program.rank:
                    _fail(self.program, index, f"{_tensor(value)} goes to its own rank; expected another rank")
                side = _Side(index, value, message)
                table.setdefault((instr.channel, message.peer), []).append(side)
                peer = f"from rank {message.peer}" if receives else f"to rank {message.peer}"
                self._start(index, value, receives, peer, (instr.channel, message.tag))

    def _check_exchange(self, index: int, instr: Instr) -> None:
        """The call's arguments say what the facts say, which is what all other checks go by."""
        sends, recvs = instr.sends, instr.recvs
        shapes = [message.shape for _, message in recvs]
        stated = (
            [value for value, _ in sends],
            [message.peer for _, message in sends],
            [message.tag for _, message in sends],
            [size for shape in shapes for size in shape],
            [len(shape) for shape in shapes],
            [message.peer for _, message in recvs],
            [message.tag for _, message in recvs],
        )
        if instr.args[:7] != stated or instr.args[9] != instr.channel or instr.outs != tuple(v for v, _ in recvs):
            names = [value.name for value, _ in (*sends, *recvs)]
            _fail(self.program, index, f"tensors {names}: the messages listed are not those of the call's arguments")
        for value, message in (*sends, *recvs):
            if value.shape != message.shape or value.dtype != message.dtype or value.dtype != instr.args[7]:
                is_, listed = _kind(value.shape, value.dtype), _kind(message.shape, message.dtype)
                what = f"{_tensor(value)} is {is_}, its message with rank {message.peer} is {listed}"
                _fail(self.program, index, f"{what}; expected both alike, in {instr.args[7]}")

    def _collective(self, index: int, instr: Instr) -> None:
        x, out = instr.args[0], instr.outs[0]
        assert isinstance(x, Value) and out is not None
        group = tuple(sorted(instr.group))
        if self.program.rank not in group or len(set(group)) != len(group):
            what = f"{_tensor(x)}: collective over ranks {list(instr.group)}"
            _fail(self.program, index, f"{what}; expected different ranks, and rank {self.program.rank} among them")
        if tuple(instr.args[1]) != instr.group or instr.args[2:4] != (instr.tag, instr.channel):
            _fail(self.program, index, f"{_tensor(x)}: the collective listed is not that of the call's arguments")
        shape = _collective_shape(collective_kind(instr), x.shape, len(group))
        if out.shape != shape or out.dtype != x.dtype:
            expected = "one row per rank in its input" if shape is None else _kind(shape, x.dtype)
            _fail(self.program, index, f"{_tensor(out)} is {_kind(out.shape, out.dtype)}; expected {expected}")
        self.facts.collectives.setdefault(group, []).append(index)
        peer = f"{collective_kind(instr)} over ranks {list(instr.group)}"
        self._start(index, x, False, peer, (instr.channel, instr.tag))
        self._start(index, out, True, peer, (instr.channel, instr.tag))

    def _start(self, index: int, value: Value, receives: bool, peer: str, key: tuple[int, int]) -> None:
        flight = _Flight(index, value, self.root[value.name], receives, peer)
        self.flying.setdefault(key, []).append(flight)
        self.busy.setdefault(flight.root, []).append(flight)

    def _wait(self, index: int, instr: Instr) -> None:
        if (list(instr.tags), instr.channel) != tuple(instr.args):
            _fail(self.program, index, f"wait for tags {list(instr.tags)}: not those of the call's arguments")
        ends: dict[tuple[int, int], None] = {}
        for tag in instr.tags:
            flights = self.flying.pop((instr.channel, tag), None)
            if flights is None:
                what = f"wait for tag {tag} on channel {instr.channel}, but no tensor is in flight under it"
                _fail(self.program, index, f"{what}; expected one wait after each start")
            for flight in flights:
                self._land(flight)
                ends[flight.at, tag] = None
        self.facts.waits.append(_Wait(index, tuple(ends)))

    def _land(self, flight: _Flight) -> None:
        others = [other for other in self.busy[flight.root] if other is not flight]
        if others:
            self.busy[flight.root] = others
        else:
            del self.busy[flight.root]


def _collective_shape(kind: str, shape: tuple[int, ...], members: int) -> tuple[int, ...] | None:
    """Shape of the result. None: the input has no row for each member, which reduce_scatter and all_to_all need."""
    if kind == "all_gather":
        return (members, *shape)
    if kind == "all_reduce":
        return shape
    if not shape or shape[0] != members:
        return None
    return shape[1:] if kind == "reduce_scatter" else shape


@dataclass
class _Partners:
    """(rank, instruction, tag) -> the (rank, instruction)s that must have started for the transfer to end."""

    table: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, rank: int, index: int, tag: int, partner: tuple[int, int]) -> None:
        self.table.setdefault((rank, index, tag), []).append(partner)


def _pair_messages(facts: Mapping[int, _Facts], partners: _Partners) -> None:
    """Find the other end of every message."""
    pairs: dict[tuple[int, int, int], None] = {}  # (channel, sender, receiver), in order of appearance
    for rank, own in facts.items():
        pairs.update(((channel, rank, peer), None) for channel, peer in own.sends)
        pairs.update(((channel, peer, rank), None) for channel, peer in own.recvs)
    for channel, sender, receiver in pairs:
        for rank, peer in ((sender, receiver), (receiver, sender)):
            if rank not in facts:
                table = facts[peer].sends if rank == receiver else facts[peer].recvs
                side = table[channel, rank][0]
                what = f"{_tensor(side.value)} goes to or comes from rank {rank}"
                _fail(facts[peer].program, side.at, f"{what}; expected a rank of {sorted(facts)}")
        _Pair(channel, facts[sender], facts[receiver]).check(partners)


class _Pair:
    """All messages from one rank to another on one channel."""

    def __init__(self, channel: int, sender: _Facts, receiver: _Facts) -> None:
        self.channel = channel
        self.sender = sender.program
        self.receiver = receiver.program
        self.sends = sender.sends.get((channel, self.receiver.rank), [])
        self.recvs = receiver.recvs.get((channel, self.sender.rank), [])

    def check(self, partners: _Partners) -> None:
        sent = self._by_tag(self.sends, self.sender, f"sent to rank {self.receiver.rank}")
        received = self._by_tag(self.recvs, self.receiver, f"received from rank {self.sender.rank}")
        for tag, side in sent.items():
            if tag not in received:
                self._unmatched(side, self.sender, f"sent to rank {self.receiver.rank}", "receive", self.receiver)
        for tag, side in received.items():
            if tag not in sent:
                self._unmatched(side, self.receiver, f"received from rank {self.sender.rank}", "send", self.sender)
        for send, recv in zip(self.sends, self.recvs, strict=True):
            self._match(send, recv)
            partners.add(self.sender.rank, send.at, send.message.tag, (self.receiver.rank, recv.at))
            partners.add(self.receiver.rank, recv.at, recv.message.tag, (self.sender.rank, send.at))

    def _by_tag(self, sides: list[_Side], program: RankProgram, what: str) -> dict[int, _Side]:
        table: dict[int, _Side] = {}
        for side in sides:
            if side.message.tag in table:
                text = f"{_tensor(side.value)} is {what} with tag {side.message.tag} on channel {self.channel}"
                first = table[side.message.tag]
                _fail(program, side.at, f"{text}, as {first.value.name} was before; expected a tag of its own")
            table[side.message.tag] = side
        return table

    def _unmatched(self, side: _Side, program: RankProgram, what: str, missing: str, peer: RankProgram) -> NoReturn:
        message = side.message
        text = f"{_tensor(side.value)} is {what} with tag {message.tag} on channel {self.channel}"
        expected = f"a {missing} of {_kind(message.shape, message.dtype)} in the program of rank {peer.rank}"
        _fail(program, side.at, f"{text}; expected {expected}, which has none for this tag")

    def _match(self, send: _Side, recv: _Side) -> None:
        text = f"{_tensor(send.value)} is sent to rank {self.receiver.rank}, tag {send.message.tag}"
        other = f"{_tensor(recv.value)} at {_where(self.receiver, recv.at)}"
        if send.message.tag != recv.message.tag:
            text += f", where rank {self.receiver.rank} receives tag {recv.message.tag} next ({other})"
            expected = f"sends and receives in one order on channel {self.channel}"
            _fail(self.sender, send.at, f"{text}; expected {expected}")
        is_, wanted = (_kind(side.message.shape, side.message.dtype) for side in (send, recv))
        if is_ != wanted:
            _fail(self.sender, send.at, f"{text}, as {is_}; expected {wanted}, as it is received ({other})")


def _pair_collectives(facts: Mapping[int, _Facts], partners: _Partners) -> None:
    """Members of a group issue the same collectives in the same order."""
    groups = {group: None for own in facts.values() for group in own.collectives}
    for group in groups:
        absent = [rank for rank in group if rank not in facts]
        if absent:
            own = next(own for own in facts.values() if group in own.collectives)
            what = f"collective over ranks {list(group)}; expected ranks of {sorted(facts)}"
            _fail(own.program, own.collectives[group][0], what)
        calls = [(facts[rank].program, facts[rank].collectives.get(group, [])) for rank in group]
        longest = max(calls, key=lambda item: len(item[1]))
        for program, indices in calls:
            _same_collectives(longest, (program, indices), group)
        for position in range(len(longest[1])):
            _join(calls, position, partners)


_Calls = tuple[RankProgram, list[int]]


def _same_collectives(reference: _Calls, own: _Calls, group: tuple[int, ...]) -> None:
    program, indices = own
    for position, expected_at in enumerate(reference[1]):
        expected = reference[0].body[expected_at]
        wanted = f"{_signature(expected)} as at {_where(reference[0], expected_at)}"
        if position >= len(indices):
            what = f"{_tensor(expected.args[0])}: {_signature(expected)} over ranks {list(group)}"
            _fail(reference[0], expected_at, f"{what}; expected the same in the program of rank {program.rank}")
        instr = program.body[indices[position]]
        if _signature(instr) != _signature(expected):
            what = f"{_tensor(instr.args[0])}: {_signature(instr)} is collective {position} of ranks {list(group)}"
            _fail(program, indices[position], f"{what}; expected {wanted}")


def _signature(instr: Instr) -> str:
    x = instr.args[0]
    return f"{collective_kind(instr)} of {_kind(x.shape, x.dtype)} with tag {instr.tag}"


def _join(calls: list[_Calls], position: int, partners: _Partners) -> None:
    members = [(program.rank, indices[position]) for program, indices in calls]
    tag = calls[0][0].body[calls[0][1][position]].tag
    for rank, index in members:
        for partner in members:
            if partner[0] != rank:
                partners.add(rank, index, tag, partner)


class _Simulation:
    """Run all ranks until each is done or blocked. Starting never blocks; a wait needs all partners to have started."""

    def __init__(self, facts: Mapping[int, _Facts], partners: _Partners) -> None:
        self.facts = facts
        self.partners = partners.table
        self.position = dict.fromkeys(facts, 0)  # rank -> number of waits done
        self.reach = dict.fromkeys(facts, 0.0)  # rank -> instructions before this one have started
        self.blocked: dict[int, tuple[int, int]] = {}  # rank -> (rank, instruction) that it waits for
        self.watchers: dict[int, list[int]] = {rank: [] for rank in facts}

    def run(self) -> None:
        ready = deque(self.facts)
        while ready:
            rank = ready.popleft()
            if self._advance(rank):
                ready.extend(self.watchers[rank])
                self.watchers[rank] = []
        if self.blocked:
            self._report()

    def _advance(self, rank: int) -> bool:
        """Go on to the next wait that blocks; whether anything was started on the way."""
        before = self.reach[rank]
        waits = self.facts[rank].waits
        self.blocked.pop(rank, None)
        while self.position[rank] < len(waits):
            wait = waits[self.position[rank]]
            self.reach[rank] = wait.at
            missing = self._missing(rank, wait)
            if missing is not None:
                self.blocked[rank] = missing
                self.watchers[missing[0]].append(rank)
                return self.reach[rank] > before
            self.position[rank] += 1
        self.reach[rank] = math.inf
        return self.reach[rank] > before

    def _missing(self, rank: int, wait: _Wait) -> tuple[int, int] | None:
        """A (rank, instruction) that has not started and that the wait needs."""
        for index, tag in wait.ends:
            for partner in self.partners.get((rank, index, tag), ()):
                if partner[1] >= self.reach[partner[0]]:
                    return partner
        return None

    def _report(self) -> NoReturn:
        """Follow who waits for whom until a rank comes up again; every blocked rank waits for a blocked one."""
        rank = next(iter(self.blocked))
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            rank = self.blocked[rank][0]
        cycle = seen[seen.index(rank) :]
        raise VerificationError("deadlock: " + "; ".join(self._waits_for(member) for member in cycle))

    def _waits_for(self, rank: int) -> str:
        program = self.facts[rank].program
        wait = self.facts[rank].waits[self.position[rank]]
        peer, index = self.blocked[rank]
        started, tag = next(end for end in wait.ends if (peer, index) in self.partners.get((rank, *end), ()))
        names = ", ".join(_moved(program.body[started], tag, peer))
        where = _where(self.facts[peer].program, index)
        return f"{_where(program, wait.at)} waits for tensor {names} (tag {tag}), which needs the start at {where}"


def _moved(instr: Instr, tag: int, peer: int) -> list[str]:
    """Names of the tensors that an instruction exchanges with `peer` under `tag`."""
    if instr.kind == "collective":
        return [value.name for value in instr.inputs()]
    messages = (*instr.sends, *instr.recvs)
    return [value.name for value, message in messages if message.tag == tag and message.peer == peer]
