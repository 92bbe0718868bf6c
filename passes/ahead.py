"""How far ahead of its use a transfer starts, and how long it may run: for links and products to be busy together.

The transfers of a phase run one after another, in the order in which they are needed. So of resting values the fetch
for the last product begins as long before it as it takes, but at least one product ahead; the one before it begins so
early that it is over when its own product runs and when the next fetch begins. A fetch is taken to be that of a whole
parameter from all ranks, and to take no longer than the product that it is for: what takes longer cannot be hidden, and
would be held in vain. A result of a phase, such as a gradient, is waited for when at least `WAIT_AFTER` products have
run since, with as much work as the one that made it. What is small takes the latency of an all-reduce.

All of this follows from the order of the ops, the cluster and the mesh, not from placements, so that memory can be
counted once per graph.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.compute import arithmetic_seconds, computed, flops
from stpart_compiler.ir.layout import Atom, Layout, form, replicated
from stpart_compiler.ir.program import SMALL
from stpart_compiler.ir.redistribute import redistribution_cost
from stpart_compiler.passes.order import is_heavy, views_of
from stpart_compiler.passes.propagate import Annotated, OpNode
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import OpCall

WAIT_AFTER = 2
"""Heavy ops at least before the second of which the transfer of a phase's result is waited for."""

SAMPLE = 1 << 24
"""Bytes per rank of the tensor whose gathering is priced."""

Picoseconds = int


class Ahead:
    """The heavy ops of a phase, whose ops are `ops`: when they run, and how long their parameters take to come.

    Times are sums of exact numbers, so that layers which are alike get positions which are alike.
    """

    def __init__(self, graph: Annotated, ops: Sequence[OpNode], cost: LinkCost) -> None:
        self._ops = ops
        self._heavy = [t for t, op in enumerate(ops) if is_heavy(op)]
        times: dict[int, tuple[Picoseconds, Picoseconds]] = {}
        for t in self._heavy:
            if ops[t].klass not in times:
                times[ops[t].klass] = _times(graph, ops[t], cost)
        self._work = [times[ops[t].klass][0] for t in self._heavy]
        self._fetch = [min(times[ops[t].klass]) for t in self._heavy]
        self._before = [0, *accumulate(self._work)]
        self._gathering = _gathering(cost)
        latency = _latency(cost)
        self._small = [latency if _reads_small(graph, op) else 0 for op in ops]
        self._made_small = [latency if _makes_small(graph, op) else 0 for op in ops]

    def late_fetch(self) -> OpNode | None:
        """The heavy op that waits longest for its parameters because nothing has come when a phase begins.

        Were all of them fetched from all ranks: of the fetches up to its own, what compute before it does not hide.
        """
        return self._latest(self._heavy, self._fetch, self._work)

    def late_result(self, nbytes: Mapping[str, int]) -> OpNode | None:
        """The heavy op whose result takes longest to come when a phase ends. `nbytes`: of results, by op.

        Were all of them reduced over all ranks: of the reductions from its own on, what compute after it does not hide.
        """
        sent = [round(1e12 * nbytes.get(self._ops[t].name, 0) * self._gathering) for t in self._heavy]
        transfers = [min(pair) for pair in zip(sent, self._work, strict=True)]
        return self._latest(self._heavy[::-1], transfers[::-1], self._work[::-1])

    def _latest(
        self, places: Sequence[int], transfers: Sequence[Picoseconds], work: Sequence[Picoseconds]
    ) -> OpNode | None:
        """Of ops one after another that whose transfer, and those before it, take longest beside the work before it.

        None where that work hides them all.
        """
        late = [sent - done for sent, done in zip(accumulate(transfers), accumulate(work, initial=0), strict=False)]
        at = late.index(max(late)) if late else 0
        return self._ops[places[at]] if late and late[at] > 0 else None

    def seconds(self) -> dict[str, float]:
        """Per heavy op its work, shared by all ranks."""
        return {self._ops[t].name: work / 1e12 for t, work in zip(self._heavy, self._work, strict=True)}

    def begins(self) -> list[int]:
        """Per op, the op before which fetches of resting values for it begin: itself where no heavy op is before it."""
        found = list(range(len(self._ops)))
        start = self._before[-1]
        for t in reversed(range(len(found))):
            number = bisect_left(self._heavy, t)
            start = min(start, self._before[number])
            if number < len(self._heavy) and self._heavy[number] == t:
                start -= self._fetch[number]
            if number:
                needed = min(start, self._before[number] - self._small[t])
                first = max(bisect_right(self._before, needed) - 1, 0)
                found[t] = self._heavy[min(first, number - 1)]
        return found

    def halfway(self, start: int, stop: int) -> int | None:
        """The heavy op within which half of the work from op `start` to `stop` is done; None: there is no work."""
        first, last = bisect_left(self._heavy, start), bisect_left(self._heavy, stop)
        half = (self._before[first] + self._before[last] + 1) // 2
        return self._heavy[bisect_left(self._before, half, first + 1) - 1] if first < last else None

    def end(self, t: int) -> int | None:
        """The heavy op before which a result of the phase is waited for that op t makes; None: the end of the phase."""
        number = bisect_right(self._heavy, t)
        own = max(self._work[number - 1] if number else 0, self._made_small[t])
        last = max(number + WAIT_AFTER - 1, bisect_left(self._before, self._before[number] + own))
        return self._heavy[last] if last < len(self._heavy) else None


def _times(graph: Annotated, op: OpNode, cost: LinkCost) -> tuple[Picoseconds, Picoseconds]:
    """Of a heavy op whose work all ranks share, and of gathering the parameters that it reads."""
    compute = arithmetic_seconds(op.call, _work(op.call) / cost.mesh.world_size, cost.cluster.device)
    own = parameters(graph)
    read = sum(graph.values[key].nbytes for key in op.operands if key[0] in own)
    return round(1e12 * compute), round(1e12 * read * _gathering(cost))


def _reads_small(graph: Annotated, op: OpNode) -> bool:
    """Whether an op reads a small parameter."""
    own = parameters(graph)
    return any(key[0] in own and graph.values[key].nbytes <= SMALL for key in op.operands)


def _makes_small(graph: Annotated, op: OpNode) -> bool:
    made = [graph.values[op.name, r] for r, result in enumerate(op.call.results) if result is not None]
    return all(value.nbytes <= SMALL for value in made)


def _latency(cost: LinkCost) -> Picoseconds:
    """Of an all-reduce over all ranks."""
    axes = tuple(axis for axis, n in cost.mesh.size.items() if n > 1)
    n = cost.mesh.world_size
    return round(1e12 * cost("all_reduce", n, 0.0, axes, 2 * (n - 1))) if axes else 0


def _work(call: OpCall) -> float:
    """FLOPs of an op as a whole."""
    if isinstance(call.target, Region):
        return sum(_work(inner.call) for inner in call.target.body)
    ins = [operand.shape for operand in call.operands]
    outs = [result.shape for result in call.results if result is not None]
    return flops(call, ins, outs) * computed(call, ins).share


@lru_cache(maxsize=4)
def parameters(graph: Annotated) -> frozenset[str]:
    """Names of parameters and of views of them."""
    keys = {key for key, info in graph.values.items() if info.kind == "param"}
    return views_of(graph, keys) | {name for name, _ in keys}


@lru_cache(maxsize=64)
def _gathering(cost: LinkCost) -> float:
    """Seconds a byte to bring a tensor to every rank of which each has a part."""
    size = SAMPLE * cost.mesh.world_size
    parts = tuple(form(n, **{axis: 1}) for axis, n in cost.mesh.size.items() if n > 1)
    spread = Layout(((Atom(size, parts),),))
    return redistribution_cost(spread, replicated((size,)), cost.mesh, 1, cost) / size if parts else 0.0
