"""Run all ranks' instruction lists in one thread, with mailboxes instead of a network.

Deterministic and without set-up, for checking many plans. Receive buffers hold NaN (or the largest integer) until they
are waited for, so reading one too early shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from stpart_compiler.ir.program import Instr, RankProgram, Value, collective_kind, sums_in_place

Box = dict[tuple[int, int, int, int], torch.Tensor]  # (source, destination, tag, channel) -> message
Pool = dict[tuple[tuple[int, ...], int, int], dict[int, torch.Tensor]]  # (group, tag, channel) -> by rank


@dataclass
class _Rank:
    program: RankProgram
    env: dict[str, torch.Tensor]
    position: int = 0
    arrivals: dict[tuple[int, int], list[Callable[[], bool]]] = field(default_factory=dict)
    released: dict[int, list[str]] = field(default_factory=dict)


def run_lockstep(
    programs: Sequence[RankProgram], inputs: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor | None]]:
    """Outputs per rank of one phase.

    Raises:
        RuntimeError: no rank can go on; names each rank's instruction.
    """
    ranks = [_start(program, given) for program, given in zip(programs, inputs, strict=True)]
    box: Box = {}
    pool: Pool = {}
    while any(rank.position < len(rank.program.body) for rank in ranks):
        if not any([_advance(rank, box, pool) for rank in ranks]):
            stuck = [
                f"rank {r.program.rank} at {r.program.body[r.position].origin}"
                for r in ranks
                if r.position < len(r.program.body)
            ]
            raise RuntimeError(f"lockstep: deadlock: {'; '.join(stuck)}")
    return [[None if v is None else rank.env[v.name] for v in rank.program.outputs] for rank in ranks]


def _start(program: RankProgram, given: Sequence[torch.Tensor]) -> _Rank:
    rank = _Rank(program, {v.name: x for v, x in zip(program.inputs, given, strict=True)})
    last: dict[str, int] = {}
    for position, instr in enumerate(program.body):
        for value in (*instr.inputs(), *(v for v in instr.outs if v is not None)):
            last[value.name] = position
    kept = {v.name for v in program.outputs if v is not None}
    for name, position in last.items():
        if name not in kept:
            rank.released.setdefault(position, []).append(name)
    return rank


def _advance(rank: _Rank, box: Box, pool: Pool) -> bool:
    """Run a rank until it has to wait; whether it got anywhere."""
    moved = False
    while rank.position < len(rank.program.body) and _run(rank, rank.program.body[rank.position], box, pool):
        for name in rank.released.get(rank.position, ()):
            rank.env.pop(name, None)
        rank.position += 1
        moved = True
    return moved


def _run(rank: _Rank, instr: Instr, box: Box, pool: Pool) -> bool:
    if instr.kind == "wait":
        return _wait(rank, instr)
    if instr.kind == "exchange":
        _exchange(rank, instr, box)
    elif instr.kind == "collective":
        _collective(rank, instr, pool)
    else:
        args = [_looked_up(item, rank.env) for item in instr.args]
        result = instr.target(*args, **{key: _looked_up(item, rank.env) for key, item in instr.kwargs.items()})
        results = result if instr.multi else (result,)
        for value, tensor in zip(instr.outs, results, strict=True):
            if value is not None:
                assert tuple(tensor.shape) == value.shape, (
                    f"{instr.origin}: {value} is {tuple(tensor.shape)}, not {value.shape}"
                )
                assert tensor.dtype == value.dtype, f"{instr.origin}: {value} is {tensor.dtype}, not {value.dtype}"
                rank.env[value.name] = tensor
    return True


def _looked_up(item: Any, env: dict[str, torch.Tensor]) -> Any:
    if isinstance(item, Value):
        return env[item.name]
    return type(item)([_looked_up(part, env) for part in item]) if isinstance(item, (list, tuple)) else item


def _poisoned(value: Value) -> torch.Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.full(value.shape, float("nan"), dtype=value.dtype)
    return torch.full(
        value.shape, True if value.dtype == torch.bool else torch.iinfo(value.dtype).max, dtype=value.dtype
    )


def _exchange(rank: _Rank, instr: Instr, box: Box) -> None:
    here = rank.program.rank
    for value, message in instr.sends:
        box[(here, message.peer, message.tag, instr.channel)] = rank.env[value.name].clone()
        rank.arrivals.setdefault((message.tag, instr.channel), [])
    for value, message in instr.recvs:
        buffer = rank.env[value.name] = _poisoned(value)
        key = (message.peer, here, message.tag, instr.channel)
        rank.arrivals.setdefault((message.tag, instr.channel), []).append(partial(_receive, buffer, key, box))


def _receive(buffer: torch.Tensor, key: tuple[int, int, int, int], box: Box) -> bool:
    if key not in box:
        return False
    buffer.copy_(box.pop(key))
    return True


def _collective(rank: _Rank, instr: Instr, pool: Pool) -> None:
    (out,) = instr.outs
    assert out is not None
    here = rank.program.rank
    buffer = rank.env[out.name] = _poisoned(out)
    shared = pool.setdefault((instr.group, instr.tag, instr.channel), {})
    x = instr.inputs()[0]
    shared[here] = rank.env[x.name].clone()
    if sums_in_place(instr):  # what it holds from now on, under any name, is not what it held
        rank.env[x.name].copy_(_poisoned(x))

    def arrive() -> bool:
        if len(shared) < len(instr.group):
            return False
        parts = [shared[member] for member in instr.group]
        buffer.copy_(_reduced(collective_kind(instr), parts, instr.group.index(here)))
        return True

    rank.arrivals.setdefault((instr.tag, instr.channel), []).append(arrive)


def _reduced(name: str, parts: list[torch.Tensor], position: int) -> torch.Tensor:
    if name == "all_reduce":
        return torch.stack(parts).sum(0)
    if name == "all_gather":
        return torch.stack(parts)
    if name == "reduce_scatter":
        return torch.stack([part[position] for part in parts]).sum(0)
    assert name == "all_to_all", name
    return torch.stack([part[position] for part in parts])


def _wait(rank: _Rank, instr: Instr) -> bool:
    """Complete what has arrived; True once nothing of these tags is left."""
    done = True
    for tag in instr.tags:
        left = [arrive for arrive in rank.arrivals.get((tag, instr.channel), ()) if not arrive()]
        rank.arrivals[(tag, instr.channel)] = left
        done = done and not left
    return done
