"""Static memory of one rank's program: which storages are alive at each instruction, and the peak.

The rule is that of the emitted code (`passes/emit_fx.py`): a value is dropped after the instruction that reads it last,
so inputs and results of an instruction coexist; a value that nobody reads is dropped at once, an input that nobody
reads is held to the end. A storage lives as long as any value on it. Buffers of a transfer, sent and received, are also
held by the engine until the wait; all_reduce sums in its result and lets go of its input. What a function of several
ops makes on the way (`Instr.scratch`) is alive while it runs. Not counted: results that have no `Value`, temporaries
inside of kernels, and what the engine needs to bring the rows of a collective over ranks in another order than
ascending into place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from stpart_compiler.ir.program import Instr, Origin, RankProgram, Value, collective_kind, values_in

LISTED = 10
"""Number of tensors a report lists."""


@dataclass(frozen=True)
class AliveTensor:
    """A storage alive at the peak, named after the value that owns it."""

    name: str
    nbytes: int
    origin: Origin


@dataclass(frozen=True)
class MemoryReport:
    """Peak of a program in bytes, and where it is. `index`: position in the body, -1 before the first instruction.

    `largest`: the largest storages alive there, descending.
    """

    peak_bytes: int
    index: int
    origin: Origin
    largest: tuple[AliveTensor, ...]


@dataclass(slots=True)
class _Storage:
    """One storage: allocated in instruction `start`, dropped after instruction `end` (None: until the end)."""

    value: Value
    start: int
    end: int | None
    origin: Origin = field(default_factory=Origin)


def peak_bytes(program: RankProgram, keep: Collection[str] = ()) -> MemoryReport:
    """Peak bytes of tensors during `program`. `keep`: names of inputs that their caller holds throughout.

    Inputs count from the start; those not in `keep` are dropped after their last use.

    Raises:
        ValueError: `keep` names something that is no input.
    """
    storages = _storages(program, keep)
    alive = _alive(program, storages)
    peak = max(alive)
    return _report(program, storages, peak, alive.index(peak) - 1)


def alive_bytes(program: RankProgram, keep: Collection[str] = ()) -> list[int]:
    """Bytes of tensors alive before the first instruction, and while each one runs: one number more than those.

    Raises:
        ValueError: `keep` names something that is no input.
    """
    return _alive(program, _storages(program, keep))


def alive_tensors(
    program: RankProgram, indices: Iterable[int], keep: Collection[str] = ()
) -> Iterator[list[AliveTensor]]:
    """The storages alive while each of some instructions runs (-1: before the first), largest first.

    Raises:
        ValueError: `keep` names something that is no input.
    """
    storages = _storages(program, keep)
    return (_alive_at(storages, index) for index in indices)


def _alive_at(storages: list[_Storage], index: int) -> list[AliveTensor]:
    alive = [s for s in storages if s.start <= index and (s.end is None or s.end >= index)]
    alive.sort(key=lambda s: -s.value.nbytes)
    return [AliveTensor(s.value.name, s.value.nbytes, s.origin) for s in alive]


def _alive(program: RankProgram, storages: list[_Storage]) -> list[int]:
    changes = [0] * (len(program.body) + 2)
    for storage in storages:
        changes[storage.start + 1] += storage.value.nbytes
        if storage.end is not None:
            changes[storage.end + 2] -= storage.value.nbytes
    return list(accumulate(changes[:-1]))


def _report(program: RankProgram, storages: list[_Storage], peak: int, index: int) -> MemoryReport:
    largest = tuple(_alive_at(storages, index)[:LISTED])
    origin = program.body[index].origin if index >= 0 else Origin(note="program start")
    return MemoryReport(peak, index, origin, largest)


def _storages(program: RankProgram, keep: Collection[str]) -> list[_Storage]:
    """All storages of the program with their lifetimes."""
    unknown = set(keep) - {value.name for value in program.inputs}
    if unknown:
        raise ValueError(f"peak_bytes: rank {program.rank}: {sorted(unknown)} in `keep` are no inputs of the program")
    end = _last_uses(program)
    storages: dict[str, _Storage] = {}
    for value in (*program.inputs, *program.constants):
        storages[value.name] = _Storage(value, -1, end.get(value.name), Origin(note="input"))
    owner = dict(storages)
    for index, instr in enumerate(program.body):
        base = storage_base(instr)
        for value in _made(instr):
            drop = end.get(value.name, index)
            if base is None:
                storages[value.name] = owner[value.name] = _Storage(value, index, drop, instr.origin)
            else:
                owner[value.name] = owner[base.name]
                _extend(owner[value.name], drop)
        if instr.scratch:
            inside = Value(f"inside {instr.origin.node} {index}", (instr.scratch,), torch.uint8)
            storages[inside.name] = _Storage(inside, index, index, instr.origin)
    _hold_in_flight(program, owner)
    held = (*keep, *(v.name for v in program.constants), *(v.name for v in program.outputs if v is not None))
    for name in held:
        owner[name].end = None
    return list(storages.values())


def _last_uses(program: RankProgram) -> dict[str, int]:
    """Value name -> instruction that reads it last."""
    last: dict[str, int] = {}
    for index, instr in enumerate(program.body):
        for value in instr.inputs():
            last[value.name] = index
    return last


def _extend(storage: _Storage, index: int) -> None:
    if storage.end is not None:
        storage.end = max(storage.end, index)


def _hold_in_flight(program: RankProgram, owner: dict[str, _Storage]) -> None:
    """Keep the tensors of every transfer until its wait."""
    flying: dict[tuple[int, int], list[Value]] = {}
    for index, instr in enumerate(program.body):
        for tag, value in _transfers(instr):
            flying.setdefault((instr.channel, tag), []).append(value)
        for tag in instr.tags:
            for value in flying.pop((instr.channel, tag), ()):
                _extend(owner[value.name], index)
    for values in flying.values():
        for value in values:
            owner[value.name].end = None


def _transfers(instr: Instr) -> Iterator[tuple[int, Value]]:
    """Tag and tensor of everything that the engine holds once the instruction has started its transfers."""
    for value, message in (*instr.sends, *instr.recvs):
        yield message.tag, value
    if instr.kind == "collective":
        sums_in_result = collective_kind(instr) == "all_reduce"
        for value in (*(() if sums_in_result else instr.inputs()), *_made(instr)):
            yield instr.tag, value


def _made(instr: Instr) -> list[Value]:
    return [value for value in instr.outs if value is not None]


def storage_base(instr: Instr) -> Value | None:
    """The input whose storage the results share: of a view its first argument, of an in-place op what it writes."""
    if instr.kind == "view":
        return values_in(instr.args[0])[0]
    if instr.kind in ("compute", "collective") and _writes(instr.target).returns_written:
        return next(iter(written(instr)), None)
    return None


def written(instr: Instr) -> list[Value]:
    """The inputs that the instruction writes in place, by its operator's schema."""
    writes = _writes(instr.target)
    if not writes.positions and not writes.names:
        return []
    items = [instr.args[i] for i in writes.positions if i < len(instr.args)]
    items += [instr.kwargs[name] for name in writes.names if name in instr.kwargs]
    return [value for item in items for value in values_in(item)]


@dataclass(frozen=True)
class _Writes:
    """Arguments that an operator mutates."""

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    returns_written: bool = False


@cache
def _writes(target: Any) -> _Writes:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return _Writes()
    mutable = [(i, arg) for i, arg in enumerate(schema.arguments) if _is_written(arg)]
    positions = tuple(i for i, arg in mutable if not arg.kwarg_only)
    return _Writes(positions, tuple(arg.name for _, arg in mutable), any(_is_written(r) for r in schema.returns))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
