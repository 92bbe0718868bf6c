"""Check all ranks' programs of one phase against each other, without devices. A program that fails is never run.

What is checked:
    each rank alone  (`passes/verify_rank.py`): every value is defined once, before its use; no pending sum is read by
        an instruction that does not allow it, or returned; every started transfer is waited for exactly once; nothing
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
from typing import NoReturn

from stpart_compiler.ir.program import Instr, RankProgram, collective_kind
from stpart_compiler.passes.verify_rank import (
    Facts,
    RankCheck,
    Side,
    VerificationError,
    Wait,
    fail,
    kind_text,
    place_text,
    tensor_text,
)


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
    facts = {rank: RankCheck(program).run() for rank, program in by_rank.items()}
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


@dataclass
class _Partners:
    """(rank, instruction, tag) -> the (rank, instruction)s that must have started for the transfer to end."""

    table: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, rank: int, index: int, tag: int, partner: tuple[int, int]) -> None:
        self.table.setdefault((rank, index, tag), []).append(partner)


def _pair_messages(facts: Mapping[int, Facts], partners: _Partners) -> None:
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
                what = f"{tensor_text(side.value)} goes to or comes from rank {rank}"
                fail(facts[peer].program, side.at, f"{what}; expected a rank of {sorted(facts)}")
        _Pair(channel, facts[sender], facts[receiver]).check(partners)


class _Pair:
    """All messages from one rank to another on one channel."""

    def __init__(self, channel: int, sender: Facts, receiver: Facts) -> None:
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

    def _by_tag(self, sides: list[Side], program: RankProgram, what: str) -> dict[int, Side]:
        table: dict[int, Side] = {}
        for side in sides:
            if side.message.tag in table:
                text = f"{tensor_text(side.value)} is {what} with tag {side.message.tag} on channel {self.channel}"
                first = table[side.message.tag]
                fail(program, side.at, f"{text}, as {first.value.name} was before; expected a tag of its own")
            table[side.message.tag] = side
        return table

    def _unmatched(self, side: Side, program: RankProgram, what: str, missing: str, peer: RankProgram) -> NoReturn:
        message = side.message
        text = f"{tensor_text(side.value)} is {what} with tag {message.tag} on channel {self.channel}"
        expected = f"a {missing} of {kind_text(message.shape, message.dtype)} in the program of rank {peer.rank}"
        fail(program, side.at, f"{text}; expected {expected}, which has none for this tag")

    def _match(self, send: Side, recv: Side) -> None:
        text = f"{tensor_text(send.value)} is sent to rank {self.receiver.rank}, tag {send.message.tag}"
        other = f"{tensor_text(recv.value)} at {place_text(self.receiver, recv.at)}"
        if send.message.tag != recv.message.tag:
            text += f", where rank {self.receiver.rank} receives tag {recv.message.tag} next ({other})"
            expected = f"sends and receives in one order on channel {self.channel}"
            fail(self.sender, send.at, f"{text}; expected {expected}")
        is_, wanted = (kind_text(side.message.shape, side.message.dtype) for side in (send, recv))
        if is_ != wanted:
            fail(self.sender, send.at, f"{text}, as {is_}; expected {wanted}, as it is received ({other})")


def _pair_collectives(facts: Mapping[int, Facts], partners: _Partners) -> None:
    """Members of a group issue the same collectives in the same order."""
    groups = {group: None for own in facts.values() for group in own.collectives}
    for group in groups:
        absent = [rank for rank in group if rank not in facts]
        if absent:
            own = next(own for own in facts.values() if group in own.collectives)
            what = f"collective over ranks {list(group)}; expected ranks of {sorted(facts)}"
            fail(own.program, own.collectives[group][0], what)
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
        wanted = f"{_signature(expected)} as at {place_text(reference[0], expected_at)}"
        if position >= len(indices):
            what = f"{tensor_text(expected.args[0])}: {_signature(expected)} over ranks {list(group)}"
            fail(reference[0], expected_at, f"{what}; expected the same in the program of rank {program.rank}")
        instr = program.body[indices[position]]
        if _signature(instr) != _signature(expected):
            what = f"{tensor_text(instr.args[0])}: {_signature(instr)} is collective {position} of ranks {list(group)}"
            fail(program, indices[position], f"{what}; expected {wanted}")


def _signature(instr: Instr) -> str:
    x = instr.args[0]
    return f"{collective_kind(instr)} of {kind_text(x.shape, x.dtype)} with tag {instr.tag}"


def _join(calls: list[_Calls], position: int, partners: _Partners) -> None:
    members = [(program.rank, indices[position]) for program, indices in calls]
    tag = calls[0][0].body[calls[0][1][position]].tag
    for rank, index in members:
        for partner in members:
            if partner[0] != rank:
                partners.add(rank, index, tag, partner)


class _Simulation:
    """Run all ranks until each is done or blocked. Starting never blocks; a wait needs all partners to have started."""

    def __init__(self, facts: Mapping[int, Facts], partners: _Partners) -> None:
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

    def _missing(self, rank: int, wait: Wait) -> tuple[int, int] | None:
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
        where = place_text(self.facts[peer].program, index)
        return f"{place_text(program, wait.at)} waits for tensor {names} (tag {tag}), which needs the start at {where}"


def _moved(instr: Instr, tag: int, peer: int) -> list[str]:
    """Names of the tensors that an instruction exchanges with `peer` under `tag`."""
    if instr.kind == "collective":
        return [value.name for value in instr.inputs()]
    messages = (*instr.sends, *instr.recvs)
    return [value.name for value, message in messages if message.tag == tag and message.peer == peer]
