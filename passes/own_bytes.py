"""Bytes that one op needs on a rank, by strategy: its results, and what it holds beside them while it runs."""

from __future__ import annotations

import math

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.rule import ONLINE, block_shape
from stpart_compiler.ir.spacetime import MOVE, SLICE, Derived, Strategy
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.hops import most_held, moving, skips_blocks
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules import merge_of
from stpart_compiler.passes.rules.region import Region


def op_bytes(
    costs: Costs, op: OpNode, strategy: Strategy, derived: Derived, lasting: frozenset[tuple[int, int]]
) -> int:
    """Bytes of an op's results, unless they are views, and of what it needs besides while it runs.

    `lasting`: as in `Timeline`.
    """
    made = 0
    for tensor, port, result in zip(op.rule.outputs, derived.outputs, op.call.results, strict=True):
        if result is not None and not is_view(op.call.target):
            copies = 1 if port.slices is None else 2  # the slices, and joined
            made += copies * costs.numel(op, strategy, tensor, port) * result.dtype.itemsize
    return made + own_bytes(costs, op, strategy, derived, lasting)


def own_bytes(
    costs: Costs, op: OpNode, strategy: Strategy, derived: Derived, lasting: frozenset[tuple[int, int]]
) -> int:
    """Bytes that an op needs while it runs, beside its operands and results: see `passes/temporal.py`.

    Slices of a result that are the same on all ranks are held with it (`MemoryMaker`): it need not be there whole.
    """
    call, steps = op.call, costs.steps(strategy)
    total = 0
    blocks = _block_bytes(costs, op, strategy)
    if isinstance(call.target, Region):
        total += max(0, call.target.peak_bytes(costs.extents(op, strategy)) - sum(blocks))
    if steps == 1:
        return total
    skips = moving(op, strategy, derived, costs.mesh) if skips_blocks(op, strategy, costs.mesh) else None
    travelling = passing = 0
    for i, (port, operand) in enumerate(zip(derived.inputs, call.operands, strict=True)):
        if port.motion == MOVE:  # the block in use and the one arriving
            is_lasting = (op.klass, i) in lasting
            copies = min(steps - 1, 2) if is_lasting else 1
            if skips is not None:  # those that come early too
                copies = most_held(skips.inputs[i], 0) if is_lasting else most_held(skips.inputs[i], 1) - 1
            nbytes = copies * costs.numel(op, strategy, op.rule.inputs[i], port) * operand.dtype.itemsize
            travelling += nbytes
            passing += nbytes if steps == 2 and skips is None and not is_lasting else 0
    time = strategy.time_factor
    if time is not None and op.rule.factors[time].kind == ONLINE:
        return total + travelling + _merging_bytes(op, blocks)
    joined = moved = 0
    for j, (tensor, port, nbytes, result) in enumerate(
        zip(op.rule.outputs, derived.outputs, blocks, call.results, strict=True)
    ):
        if result is None or port.slices is not None:
            continue
        if port.motion == SLICE:
            joined += costs.numel(op, strategy, tensor, port) * result.dtype.itemsize
        elif port.motion == MOVE:
            early = max(0, most_held(skips.outputs[j], 0) - 2) if skips is not None else 0
            moved += (2 + early) * nbytes
        else:
            total += nbytes
    kept = travelling - passing  # of two steps, the first one sends blocks of operands, the second one has sums
    return total + max(kept + max(passing, moved), moved + joined)  # what travels is gone when slices are joined


def _block_bytes(costs: Costs, op: OpNode, strategy: Strategy) -> list[int]:
    """Per result, bytes of what one step makes of it."""
    extents = costs.extents(op, strategy)
    return [
        math.prod(block_shape(tensor, extents)) * result.dtype.itemsize if result is not None else 0
        for tensor, result in zip(op.rule.outputs, op.call.results, strict=True)
    ]


def _merging_bytes(op: OpNode, blocks: list[int]) -> int:
    """What was merged, the results of one more block, both merged, and the share of the latter; less the results."""
    made = [(n, r.dtype) for n, r in zip(blocks, op.call.results, strict=True) if n and r is not None]
    merge = merge_of(op.call.target)
    assert merge is not None, f"{op.name}: blocks of its keys cannot be merged"
    dtypes = merge.dtypes([dtype for _, dtype in made])
    return 3 * sum(n * to.itemsize // dtype.itemsize for (n, dtype), to in zip(made, dtypes, strict=True))
