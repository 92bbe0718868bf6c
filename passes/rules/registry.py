"""Registry of factor rules and block programs.

`@rule(op, ...)` registers a function `OpCall -> OpRule` (None: no rule for this call), `@tagged(tag)` one for all ops
with a tag. `@localized(op, ...)` registers how the op is run on one block when its non-tensor arguments depend on
sizes; without one the arguments stay as they are. `WORK[op]` says how much of a block is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from stpart_compiler.cost_models.compute import Computed
from stpart_compiler.ir.combine import neutral
from stpart_compiler.ir.layout import Range
from stpart_compiler.ir.program import substituted
from stpart_compiler.ir.rule import COMBINED, SUM, DimMap, OpRule, TensorMap
from stpart_compiler.runtime import local_ops
from stpart_compiler.runtime.random_ops import drawn


@dataclass(frozen=True)
class Operand:
    """Stand-in for the `index`-th tensor operand of a call (order of occurrence in args, then kwargs)."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class OpCall:
    """One op call of the graph: `args` and `kwargs` as there, with `Operand`s for tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[Operand | None, ...]  # by position in the op's result tuple; None where it is no tensor

    @cached_property
    def text(self) -> str:
        """Equal for calls with the same op, shapes, dtypes and other arguments."""
        return f"{self.target}{self.args}{self.kwargs}{self.results}"

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Argument by position or keyword."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


Span = tuple[tuple[int, int, int, int], ...]
"""Of runtime.local_ops: per factor of a dim, major to minor, (stride, size, low, high)."""


def span_of(sizes: Sequence[int], ranges: Sequence[Range]) -> Span:
    """The span of a dim whose factors have these sizes and ranges, major to minor."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return tuple((stride, size, *span) for stride, size, span in zip(strides, sizes, ranges, strict=True))


@dataclass(frozen=True)
class Block:
    """The part of the loop nest that is run: an index range per factor of `rule` (already refined)."""

    rule: OpRule
    ranges: tuple[Range, ...]

    def extent(self, dim: DimMap) -> int:
        return math.prod(self.ranges[f][1] - self.ranges[f][0] for f in dim)

    def shape(self, tensor: TensorMap) -> tuple[int, ...]:
        return tuple(self.extent(dim) for dim in tensor)

    def in_shape(self, index: int) -> tuple[int, ...]:
        return self.shape(self.rule.inputs[index])

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.shape(self.rule.outputs[index])

    def span(self, dim: DimMap) -> Range:
        """Index range of a whole tensor dim; only its outermost factor may be cut.

        Raises:
            ValueError: an inner factor is cut, so the block is no contiguous range.
        """
        if self.extent(dim) == 0:
            return 0, 0
        inner = 1
        span = (0, 1)
        for f in reversed(dim):
            low, high = self.ranges[f]
            if span != (0, inner) and (high - low) != 1:
                name = self.rule.factors[f].name
                raise ValueError(f"factor {name}: a minor factor of its dim is cut; no contiguous range")
            span = (low * inner + span[0], (high - 1) * inner + span[1])
            inner *= self.rule.factors[f].size
        return span

    def digits(self, dim: DimMap) -> Span:
        """The block's part of a tensor dim."""
        return span_of([self.rule.factors[f].size for f in dim], [self.ranges[f] for f in dim])

    def is_cut(self, dim: DimMap) -> bool:
        """Whether the block holds only a part of a tensor dim."""
        return self.extent(dim) != math.prod(self.rule.factors[f].size for f in dim)


@dataclass(frozen=True)
class Merge:
    """How results of one block after another are merged, where the op has an ONLINE factor.

    `merge(*merged, *results) -> merged`; `finish(*merged, dtype of the first result) -> results`; `dtypes(results'
    dtypes)`: those in which results are merged.
    """

    merge: Callable[..., Any]
    finish: Callable[..., Any]
    dtypes: Callable[[Sequence[torch.dtype]], Sequence[torch.dtype]]


@dataclass(frozen=True)
class Work:
    """What is computed of a block, where a mask leaves out scores.

    `dims(call, rule)`: the dims of operands that decide; none where all is computed. `done(*spans)`: of non-empty spans
    of these dims; a block with a share of 0 contributes nothing to sums and merges, and is not computed.
    """

    dims: Callable[[OpCall, OpRule], tuple[DimMap, ...]]
    done: Callable[..., Computed]


LocalCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
RuleFn = Callable[[OpCall], "OpRule | None"]
LocalFn = Callable[[OpCall, Block], LocalCall]

RULES: dict[Any, RuleFn] = {}
TAGGED: dict[torch.Tag, RuleFn] = {}
LOCALIZERS: dict[Any, LocalFn] = {}
WORK: dict[Any, Work] = {}
MERGES: dict[Any, Merge] = {}
OF_CALLS: dict[Any, dict[str, LocalFn]] = {}  # localizers of single calls, by their text, whose rule was discovered


def rule(*ops: Any) -> Callable[[RuleFn], RuleFn]:
    """Register a factor rule for op overloads; one of a library that may not be loaded goes by its name."""

    def register(fn: RuleFn) -> RuleFn:
        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = fn
        return fn

    return register


def tagged(tag: torch.Tag) -> Callable[[RuleFn], RuleFn]:
    """Register a factor rule for all op overloads with a tag that have no rule of their own."""

    def register(fn: RuleFn) -> RuleFn:
        assert tag not in TAGGED, f"two rules for {tag}"
        TAGGED[tag] = fn
        return fn

    return register


def localized(*ops: Any) -> Callable[[LocalFn], LocalFn]:
    """Register how op overloads are called on a block."""

    def register(fn: LocalFn) -> LocalFn:
        for op in ops:
            assert op not in LOCALIZERS, f"two localizers for {op}"
            LOCALIZERS[op] = fn
        return fn

    return register


def merge_of(target: Any) -> Merge | None:
    """How results of one block after another of an op are merged; None where it has no ONLINE factor."""
    own = getattr(target, "merge", None)
    return own if isinstance(own, Merge) else MERGES.get(target)


def is_void(call: OpCall, block: Block) -> bool:
    """Whether a block contributes nothing: it is empty, or masked as a whole."""
    if _is_empty(call, block):
        return True
    work = WORK.get(call.target)
    dims = work.dims(call, block.rule) if work is not None else ()
    return work is not None and bool(dims) and not work.done(*(block.digits(dim) for dim in dims)).share


def rule_of(call: OpCall) -> OpRule | None:
    """The factor rule of a call, or None when the op has none."""
    fused = getattr(call.target, "rule", None)
    if isinstance(fused, OpRule):
        return fused
    fn = RULES.get(call.target) or RULES.get(str(call.target)) or _tagged_rule(call.target)
    found = fn(call) if fn else None
    if found is None:
        return None
    kept = tuple(operands for operands in found.linear if keeps_sums(call, operands))
    return found if kept == found.linear else replace(found, linear=kept)


def _tagged_rule(target: Any) -> RuleFn | None:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:  # blocks would not draw what the whole op draws
        return None
    return next((fn for tag, fn in TAGGED.items() if tag in target.tags), None)


def draws(call: OpCall) -> bool:
    """Whether a call draws from torch's default generator. Attention without dropout does not, whatever its tags."""
    tags = call.target.tags if isinstance(call.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags and rule_of(call) is None


def keeps_sums(call: OpCall, operands: frozenset[int]) -> bool:
    """Whether summands survive the types: not when they are narrowed or booleans."""
    ins = [call.operands[i].dtype for i in operands]
    outs = [r.dtype for r in call.results if r is not None]
    return all(i != torch.bool and torch.promote_types(i, o) == o for i in ins for o in outs)


def bind(item: Any, operands: Sequence[Any]) -> Any:
    """Arguments with each `Operand` replaced by what stands for it."""
    return substituted(item, lambda part: operands[part.index] if isinstance(part, Operand) else part)


def local_call(call: OpCall, block: Block) -> LocalCall:
    """Target and arguments that compute one block (tensor arguments are still `Operand`s).

    Most kernels refuse empty operands, or give what is no sum of nothing: empty blocks are not computed.
    """
    if draws(call):
        return drawn, (call.target, *call.args), call.kwargs
    if _is_empty(call, block):
        return _empty_call(call, block)
    discovered = OF_CALLS.get(call.target)
    fn = discovered.get(call.text) if discovered else None
    fn = fn or LOCALIZERS.get(call.target) or LOCALIZERS.get(str(call.target))
    return fn(call, block) if fn else (call.target, call.args, call.kwargs)


def _is_empty(call: OpCall, block: Block) -> bool:
    ranges = zip(block.rule.factors, block.ranges, strict=True)
    return bool(call.operands) and any(low >= high and factor.size for factor, (low, high) in ranges)


def _empty_call(call: OpCall, block: Block) -> LocalCall:
    """Results of a block without elements: empty where they are cut alike, else neutral: zeros in a sum."""
    made = [(block.out_shape(i), r.dtype) if r is not None else None for i, r in enumerate(call.results)]
    kinds = {factor.kind for factor, (low, high) in zip(block.rule.factors, block.ranges, strict=True) if low >= high}
    other = kinds & (COMBINED - {SUM})
    if other and made[0]:
        return local_ops.full_beside, (call.operands[0], *made[0], neutral(other.pop(), made[0][1])), {}
    if len(made) > 1 or _gives_list(call.target):
        return local_ops.zeros_beside, (call.operands[0], made), {}
    return local_ops.zero_beside, (call.operands[0], *(made[0] or ())), {}


def _gives_list(target: Any) -> bool:
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else []
    return bool(returns) and isinstance(returns[0].type, torch.ListType)
