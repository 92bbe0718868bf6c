"""Check one rank's program of one phase by itself; what others must know of it is noted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

from stpart_compiler.cost_models.liveness import storage_base, written
from stpart_compiler.ir.program import Instr, Message, RankProgram, Value, collective_kind, sums_in_place


class VerificationError(RuntimeError):
    """The programs of the ranks are wrong, alone or together; the message names rank, instruction and tensor."""


def fail(program: RankProgram, index: int, what: str) -> NoReturn:
    raise VerificationError(f"{place_text(program, index)}: {what}")


def place_text(program: RankProgram, index: int) -> str:
    origin = str(program.body[index].origin) or "no origin"
    return f"rank {program.rank}, {program.phase}, instruction {index}, {origin}"


def tensor_text(value: Value) -> str:
    return f"tensor {value.name}"


def kind_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class Side(NamedTuple):
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


class Wait(NamedTuple):
    """A wait instruction and the (instruction, tag) of the transfers that it ends."""

    at: int
    ends: tuple[tuple[int, int], ...]


@dataclass
class Facts:
    """What one rank does to others, in program order. Keys: (channel, peer); ranks of a group, sorted."""

    program: RankProgram
    sends: dict[tuple[int, int], list[Side]] = field(default_factory=dict)
    recvs: dict[tuple[int, int], list[Side]] = field(default_factory=dict)
    collectives: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)


class RankCheck:
    """One pass over one rank's instructions."""

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.facts = Facts(program)
        self.root: dict[str, str] = {}  # value name -> name of the value that owns its storage
        self.named: dict[str, list[str]] = {}  # storage -> the values on it
        self.stale: dict[str, int] = {}  # value name -> the reduction that summed in its storage since
        self.flying: dict[tuple[int, int], list[_Flight]] = {}  # (channel, tag) -> tensors under way
        self.busy: dict[str, list[_Flight]] = {}  # storage -> its transfers under way

    def run(self) -> Facts:
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
            what = f"{tensor_text(first.value)} ({first.peer}, tag {tag}, channel {channel}) is never waited for"
            fail(self.program, first.at, f"{what}; expected one wait before the program ends")
        return self.facts

    def _instruction(self, index: int, instr: Instr) -> None:
        for value in instr.inputs():
            if value.name not in self.root:
                fail(self.program, index, f"{tensor_text(value)} is used before it is defined")
            if not instr.partial_ok and value.name in self.program.partial:
                self._dropped_sum(index, value)
            if value.name in self.stale:
                fail(self.program, index, self._overwritten(value, "read"))
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
        what = f"{tensor_text(value)} is a pending sum over {digits} and is read as if it were the whole value"
        fail(self.program, index, f"{what}; expected a reduction before")

    def _overwritten(self, value: Value, how: str) -> str:
        what = f"{tensor_text(value)} is {how} after instruction {self.stale[value.name]} has summed in its storage"
        return f"{what}; expected the reduction's own result, or a sum in a copy"

    def _check_read(self, index: int, value: Value) -> None:
        for flight in self.busy.get(self.root[value.name], ()):
            if flight.receives:
                what = f"{tensor_text(value)} is read while it is being received ({flight.peer})"
                fail(self.program, index, f"{what}; expected the wait for {self._started(flight)} before")

    def _check_written(self, index: int, value: Value) -> None:
        for flight in self.busy.get(self.root[value.name], ()):
            what = f"{tensor_text(value)} is written while it is in flight ({flight.peer})"
            fail(self.program, index, f"{what}; expected the wait for {self._started(flight)} before")

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
                fail(self.program, index, f"{tensor_text(value)} is defined a second time; expected one definition")
            root = self.root[value.name] = value.name if base is None else self.root[base.name]
            self.named.setdefault(root, []).append(value.name)

    def _outputs(self) -> None:
        rank, phase = self.program.rank, self.program.phase
        for position, value in enumerate(self.program.outputs):
            where = f"rank {rank}, {phase}, output {position}"
            if value is None:
                continue
            if value.name not in self.root:
                raise VerificationError(f"{where}: {tensor_text(value)} is returned but never defined")
            if value.name in self.stale:
                raise VerificationError(f"{where}: {self._overwritten(value, 'returned')}")
            if value.name in self.program.partial and not self.program.gives_sums:
                digits = ", ".join(self.program.partial[value.name])
                what = f"{tensor_text(value)} is a pending sum over {digits}"
                raise VerificationError(f"{where}: {what}; expected a reduction before it is returned")

    def _exchange(self, index: int, instr: Instr) -> None:
        self._check_exchange(index, instr)
        sides = ((instr.sends, self.facts.sends, False), (instr.recvs, self.facts.recvs, True))
        for messages, table, receives in sides:
            for value, message in messages:
                if message.peer == self.program.rank:
                    fail(self.program, index, f"{tensor_text(value)} goes to its own rank; expected another rank")
                side = Side(index, value, message)
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
            fail(self.program, index, f"tensors {names}: the messages listed are not those of the call's arguments")
        for value, message in (*sends, *recvs):
            if value.shape != message.shape or value.dtype != message.dtype or value.dtype != instr.args[7]:
                is_, listed = kind_text(value.shape, value.dtype), kind_text(message.shape, message.dtype)
                what = f"{tensor_text(value)} is {is_}, its message with rank {message.peer} is {listed}"
                fail(self.program, index, f"{what}; expected both alike, in {instr.args[7]}")

    def _collective(self, index: int, instr: Instr) -> None:
        x, out = instr.args[0], instr.outs[0]
        assert isinstance(x, Value) and out is not None
        group = tuple(sorted(instr.group))
        if self.program.rank not in group or len(set(group)) != len(group):
            what = f"{tensor_text(x)}: collective over ranks {list(instr.group)}"
            fail(self.program, index, f"{what}; expected different ranks, and rank {self.program.rank} among them")
        if tuple(instr.args[1]) != instr.group or instr.args[2:4] != (instr.tag, instr.channel):
            fail(self.program, index, f"{tensor_text(x)}: the collective listed is not that of the call's arguments")
        shape = _collective_shape(collective_kind(instr), x.shape, len(group))
        if out.shape != shape or out.dtype != x.dtype:
            expected = "one row per rank in its input" if shape is None else kind_text(shape, x.dtype)
            fail(self.program, index, f"{tensor_text(out)} is {kind_text(out.shape, out.dtype)}; expected {expected}")
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
            fail(self.program, index, f"wait for tags {list(instr.tags)}: not those of the call's arguments")
        ends: dict[tuple[int, int], None] = {}
        for tag in instr.tags:
            flights = self.flying.pop((instr.channel, tag), None)
            if flights is None:
                what = f"wait for tag {tag} on channel {instr.channel}, but no tensor is in flight under it"
                fail(self.program, index, f"{what}; expected one wait after each start")
            for flight in flights:
                self._land(flight)
                ends[flight.at, tag] = None
        self.facts.waits.append(Wait(index, tuple(ends)))

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
