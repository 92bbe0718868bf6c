"""Bytes that generated calls need beside their operands and results, where the target is a function of several ops.

Such functions (attention on a block, merging of its outputs) make tensors on the way, which no `Value` stands for.
How many bytes is found by running the function on meta tensors, once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from stpart_compiler.ir.program import Instr, RankProgram, Value, substituted
from stpart_compiler.runtime.memory import PeakBytes
from stpart_compiler.runtime.random_ops import drawn


@dataclass(frozen=True)
class CountScratch:
    """rank programs -> the same, in place, with the scratch bytes of their instructions."""

    known: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def apply(self, programs: Iterable[RankProgram]) -> None:
        for program in programs:
            for instr in program.body:
                if isinstance(instr.target, FunctionType) and instr.target is not drawn:
                    instr.scratch = self._bytes(instr)

    def _bytes(self, instr: Instr) -> int:
        key = f"{instr.target.__module__}.{instr.target.__qualname__}{substituted((instr.args, instr.kwargs), _text)}"
        if key not in self.known:
            self.known[key] = _measured(instr)
        return self.known[key]


def _text(item: Any) -> Any:
    return f"{item.dtype}{item.shape}" if isinstance(item, Value) else item


def _meta(item: Any) -> Any:
    if isinstance(item, Value):
        return torch.empty(item.shape, dtype=item.dtype, device="meta")
    return torch.device("meta") if isinstance(item, torch.device) else item


def _measured(instr: Instr) -> int:
    """Peak of what the function makes, less its results; 0 where it looks at numbers, which meta tensors have not."""
    args, kwargs = substituted(instr.args, _meta), substituted(instr.kwargs, _meta)
    try:
        with torch.no_grad(), PeakBytes() as counter:
            made = instr.target(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return 0
    del made
    given = sum(value.nbytes for value in instr.outs if value is not None)
    peak: int = counter.peak
    return max(0, peak - given)
