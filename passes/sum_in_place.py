"""Let an all-reduce sum in the tensor that it is given, where nothing else reads that tensor's storage any more.

Before: `all_reduce` sums in a copy, so that for a moment both are there. After: `all_reduce_` where the program made
the storage, the value, of real numbers, fills it, and neither a later instruction nor the caller reads any value on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload

from stpart_compiler.cost_models.liveness import storage_base
from stpart_compiler.ir.program import Instr, RankProgram, Value, collective_kind
from stpart_compiler.runtime.local_ops import full_beside, zero_beside, zeros_beside

_MAKERS = (zero_beside, zeros_beside, full_beside)

Span = tuple[int, int]
"""The first and the last instruction of something."""


@dataclass(frozen=True)
class SumInPlace:
    """one rank's program -> the same with fewer copies."""

    def apply(self, program: RankProgram) -> RankProgram:
        if not any(_is_sum(instr) for instr in program.body):
            return program
        owner = _owners(program)
        reads = _reads(program, owner)
        body = [
            _in_place(instr) if _is_sum(instr) and _is_free(instr.inputs()[0], index, owner, reads) else instr
            for index, instr in enumerate(program.body)
        ]
        return replace(program, body=body)


def _is_sum(instr: Instr) -> bool:
    return instr.kind == "collective" and collective_kind(instr) == "all_reduce" and len(instr.group) > 1


def _in_place(instr: Instr) -> Instr:
    return replace(instr, target=torch.ops.stpart.all_reduce_.default)


def _owners(program: RankProgram) -> dict[str, Value]:
    """Value -> the value that owns its storage, of values whose storage an operator of the program makes.

    Functions of several ops may give back what they are given; operators say in their schema where they do. The results
    of a block without elements are made.
    """
    owner: dict[str, Value] = {}
    for instr in program.body:
        base = storage_base(instr)
        makes = isinstance(instr.target, OpOverload) or instr.target in _MAKERS
        for value in instr.outs:
            if value is not None and base is None and makes:
                owner[value.name] = value
            elif value is not None and base is not None and base.name in owner:
                owner[value.name] = owner[base.name]
    return owner


def _reads(program: RankProgram, owner: dict[str, Value]) -> dict[str, list[Span]]:
    """Owner of a storage -> from where to where it is read: by transfers until their wait, by callers past the end."""
    ends = {(instr.channel, tag): index for index, instr in enumerate(program.body) for tag in instr.tags}
    found: dict[str, list[Span]] = {}
    for index, instr in enumerate(program.body):
        tags = {message.tag for _, message in instr.sends} | ({instr.tag} if instr.kind == "collective" else set())
        end = max((ends[instr.channel, tag] for tag in tags), default=index)
        _note(found, owner, instr.inputs(), (index, end))
    past = len(program.body)
    _note(found, owner, program.outputs, (past, past))
    return found


def _note(found: dict[str, list[Span]], owner: dict[str, Value], values: Iterable[Value | None], span: Span) -> None:
    for value in values:
        if value is not None and value.name in owner:
            found.setdefault(owner[value.name].name, []).append(span)


def _is_free(value: Value, index: int, owner: dict[str, Value], reads: dict[str, list[Span]]) -> bool:
    """Whether a value has a storage of its own that no one else needs while and after the instruction runs."""
    base = owner.get(value.name)
    if base is None or value.dtype.is_complex:
        return False
    return base.nbytes == value.nbytes and all(end < index for start, end in reads[base.name] if start != index)
