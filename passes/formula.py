"""What the strategy of an op costs, as expressions: the cost model run on numbers that remember how they were made.

Symbols: b batch (dim 0 of the inputs), s their other dims but the last of numbers, h the size that most dims of
parameters have, n_k another loop dim (k as in the strategy's text); p ranks of the mesh axis (p_r, p_c where several
are wide), q blocks of a dim cut in time alone; e bytes of an element; F peak FLOP/s of a rank, eta the share of it that
is reached, W bytes/s of its memory, sigma the share of it where that depends on the size, l seconds to launch an op, o
to start a transfer; B bytes/s of its link each way, L latency of a message; R seconds of a re-layout inside of a
region. Of several values under one name all but the first have a number behind (e2). Blocks are written n/p where the
sizes at hand divide, else with a ceiling. Where the cost model takes the larger of two, the one that is larger here is
shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from stpart_compiler.cost_models.cluster import Cluster, Device
from stpart_compiler.cost_models.compute import flops
from stpart_compiler.cost_models.traced import Symbols, Traced, expression, value_of
from stpart_compiler.ir.layout import Atom, Digit, Layout
from stpart_compiler.ir.overlap import Expr
from stpart_compiler.ir.rule import OpRule, TensorMap, block_shape
from stpart_compiler.ir.spacetime import SLICE, Port, Strategy, derive
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.inner_rings import inner_op, inner_ring, inner_strategy
from stpart_compiler.passes.own_bytes import op_bytes
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey, reached_from
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import WORK, OpCall
from stpart_compiler.passes.shares import step_shares
from stpart_compiler.passes.timeline import timeline

QUANTITIES = ("compute", "bytes_moved", "memory", "seconds")


@dataclass(frozen=True)
class OpFormulas:
    """Formulas of the ops of a graph under chosen strategies. `again`: ops of forward that backward runs again."""

    graph: Annotated
    costs: Costs
    strategies: Mapping[str, Strategy]
    again: frozenset[str]
    known: dict[str, _Costed] = field(default_factory=dict, compare=False, repr=False)

    def formula(self, name: str, quantity: str) -> Expr:
        """The expression of one of QUANTITIES.

        Raises:
            KeyError: no such op.
            ValueError: no such quantity, or a module path with several ops.
        """
        if quantity not in QUANTITIES:
            raise ValueError(f"formula: {quantity!r} is unknown; expected one of {', '.join(QUANTITIES)}")
        return expression(self._of(name).quantities[quantity])

    def symbols(self, name: str) -> dict[Expr, float]:
        """The values of the symbols in the formulas of an op.

        Raises:
            KeyError, ValueError: as `formula`.
        """
        costed = self._of(name)
        used = {symbol for number in costed.quantities.values() for symbol in expression(number).free_symbols}
        return {symbol: costed.symbols.values[symbol.name] for symbol in sorted(used, key=str)}

    def _of(self, name: str) -> _Costed:
        op = self._op(name)
        if op.name not in self.known:
            self.known[op.name] = self._costed(op)
        return self.known[op.name]

    def _op(self, name: str) -> OpNode:
        if name in self.graph.by_name:
            return self.graph.by_name[name]
        inside = [op.name for op in self.graph.ops if op.module_path == name]
        if len(inside) > 1:
            raise ValueError(f"formula: module {name!r} has several ops: name one of {', '.join(inside)}")
        if not inside:
            raise KeyError(f"formula: no op or module {name!r}; plan.explain(module path) names the ops of a module")
        return self.graph.by_name[inside[0]]

    def _costed(self, op: OpNode) -> _Costed:
        symbols = Symbols()
        strategy = self.strategies[op.name]
        about = op.rule, self.places[op.name], self.hidden, self.costs
        costs = _TracedCosts(_traced(self.costs.cluster, symbols), self.costs.mesh, symbols, *about)
        derived = derive(op.rule, strategy, self.costs.mesh)
        op = costs.sized(op)
        seconds, moved = costs.op(op, strategy, derived)
        lasting = timeline(self.graph, self.costs.link, self.again).lasting
        return _Costed(
            symbols,
            {
                "compute": costs.flops(op, strategy),
                "bytes_moved": moved,
                "memory": op_bytes(costs, op, strategy, derived, lasting),
                "seconds": seconds,
            },
        )

    @cached_property
    def places(self) -> dict[str, frozenset[int]]:
        """Per op, the factors that come from a dim of the inputs that is neither batch nor features."""

        def is_place(key: ValueKey, dim: int) -> bool:
            info = self.graph.values[key]
            return 0 < dim < len(info.shape) - info.dtype.is_floating_point

        return reached_from(self.graph.ops, self.graph.values, "input", is_place)

    @cached_property
    def hidden(self) -> int:
        """The size that most dims of parameters have; 0 where there are none."""
        sizes = [size for info in self.graph.captured.params for size in info.info.shape if size > 1]
        return Counter(sizes).most_common(1)[0][0] if sizes else 0


@dataclass(frozen=True)
class _Costed:
    symbols: Symbols
    quantities: dict[str, Any]


@dataclass(frozen=True)
class _TracedCosts(Costs):
    """The prices of one op on traced numbers.

    `rule`: that of the op, `places`: its factors that are called s; `hidden`: the size called h. `plain`: the prices in
    plain numbers.
    """

    symbols: Symbols
    rule: OpRule
    places: frozenset[int]
    hidden: int
    plain: Costs
    runs: dict[tuple[int, Strategy], list[tuple[int, ...]]] = field(default_factory=dict)

    def extents(self, op: OpNode, strategy: Strategy) -> list[Any]:
        return [self._block(op, strategy, f, with_time=True) for f in range(len(op.rule.factors))]

    def steps(self, strategy: Strategy) -> Any:
        times = [digit for digits in strategy.digits for digit in digits if digit.tau]
        return self._parts(times[0]) if len(times) == 1 and times[0].q == strategy.steps else strategy.steps

    def numel(self, op: OpNode, strategy: Strategy, tensor: TensorMap, port: Port) -> Any:
        with_time = port.motion != SLICE
        return math.prod(self._block(op, strategy, f, with_time) for dim in tensor for f in dim)

    def relayout(self, source: Layout, target: Layout, itemsize: Any) -> Any:
        """Between the ops of a region: a symbol of its own."""
        seconds = self.plain.relayout(source, target, value_of(itemsize))
        return self.symbols.named("R", seconds) if seconds else 0.0

    def flops(self, op: OpNode, strategy: Strategy) -> Any:
        """Of the busiest rank, in all steps."""
        extents, call = self.extents(op, strategy), op.call
        rows = step_shares(op, strategy, self.mesh)
        steps = max((sum(part.share for part in row) for row in rows), default=self.steps(strategy))
        if not isinstance(call.target, Region):
            maps = (op.rule.inputs, op.rule.outputs)
            ins, outs = ([block_shape(tensor, extents) for tensor in tensors] for tensors in maps)
            return flops(call, ins, outs) * steps
        total: Any = 0
        for inner in call.target.body:
            ring = inner_ring(op, strategy, inner, self.mesh)
            if ring is not None:
                total += self.flops(ring.op, ring.strategy)
            elif inner.call.target in WORK or isinstance(inner.call.target, Region):
                total += self.flops(inner_op(op, inner), inner_strategy(strategy, inner, 0))
            else:
                total += flops(inner.call, *inner.shapes(extents))
        return total * steps

    def sized(self, op: OpNode) -> OpNode:
        """The op with the bytes of elements traced."""
        return replace(op, call=self._sized_call(op.call))

    def _sized_call(self, call: Any) -> Any:
        target = call.target
        if isinstance(target, Region):
            body = tuple(replace(x, call=self._sized_call(x.call)) for x in target.body)
            call = replace(call, target=replace(target, body=body))
        operands, results = (
            tuple(None if x is None else replace(x, dtype=_Dtype.of(x.dtype, self.symbols)) for x in infos)
            for infos in (call.operands, call.results)
        )
        return replace(call, operands=operands, results=results)

    def _block(self, op: OpNode, strategy: Strategy, f: int, with_time: bool) -> Any:
        """The largest block of a factor; of factors that are always side by side the first stands for all."""
        key = id(op.rule), strategy
        if key not in self.runs:
            self.runs[key] = _runs(op, strategy)
        run = next(run for run in self.runs[key] if f in run)
        if f != run[0]:
            return 1
        factor, digits = op.rule.factors[f], [d for g in run for d in strategy.digits[op.rule.driver(g)]]
        kept = tuple(replace(d, q=self._parts(d)) for d in digits if with_time or not d.tau)
        size: Any = math.prod(op.rule.factors[g].size for g in run)
        if size > 1:
            size = self.symbols.named(self._role(op, run, size), size)
        return Atom(size, kept, factor.window if kept else None).largest

    def _role(self, op: OpNode, run: tuple[int, ...], size: int) -> str:
        if run[0] in op.batch:
            return "b"
        if run[0] in (self.places if op.rule is self.rule else op.data):
            return "s"
        name = op.rule.factors[run[0]].name
        return "h" if size == self.hidden else f"n_{name if len(run) == 1 else name.rstrip('0123456789')}"

    def _parts(self, digit: Digit) -> Any:
        """The number of blocks that a digit makes: the ranks along its axes, or steps."""
        axes = [axis for axis, _ in digit.coeffs if self.mesh.size[axis] == digit.q]
        if digit.coeffs and not axes:
            return digit.q
        several = sum(size > 1 for size in self.mesh.sizes) > 1
        name = "q" if not digit.coeffs else f"p_{axes[0]}" if several else "p"
        return self.symbols.named(name, digit.q)


def _runs(op: OpNode, strategy: Strategy) -> list[tuple[int, ...]]:
    """The factors, those in one run that are one dim to the op: side by side wherever they occur, and only the first
    cut, evenly. Batch and places stay apart; rows and stripes of a sequence are one, of which stripes may be cut.
    """
    dims = list(_dims(op.call, op.rule, range(len(op.rule.factors))))
    runs: list[tuple[int, ...]] = []
    for f, factor in enumerate(op.rule.factors):
        before = runs[-1] if runs else ()
        alike = before and f not in op.data and factor.kind == op.rule.factors[before[0]].kind
        striped = f in op.stripes and before and op.rule.factors[before[-1]].local and not strategy.digits[before[-1]]
        if (striped and all(_adjacent(dim, before[-1], f) for dim in dims)) or (
            alike
            and not strategy.digits[op.rule.driver(f)]
            and _divides(op, strategy, before[0])
            and all(_adjacent(dim, before[-1], f) for dim in dims)
        ):
            runs[-1] = (*before, f)
        else:
            runs.append((f,))
    return runs


def _dims(call: OpCall, rule: OpRule, names: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Dims of the operands and results, as factors under these names; of a region those of its ops too."""
    for tensor in (*rule.inputs, *rule.outputs):
        yield from (tuple(names[f] for f in dim) for dim in tensor)
    for inner in call.target.body if isinstance(call.target, Region) else ():
        yield from _dims(inner.call, inner.rule, [names[f] for f in inner.factors])


def _divides(op: OpNode, strategy: Strategy, f: int) -> bool:
    if f in op.data or f in op.rule.windowed:
        return False
    return op.rule.factors[f].size % math.prod(digit.q for digit in strategy.digits[f]) == 0


def _adjacent(dim: tuple[int, ...], one: int, two: int) -> bool:
    """Whether a dim has neither factor, or both side by side in this order, each once."""
    at = [i for i, f in enumerate(dim) if f in (one, two)]
    return not at or ([dim[i] for i in at] == [one, two] and at[1] == at[0] + 1)


@dataclass(frozen=True)
class _Dtype:
    """A dtype whose element size is traced."""

    dtype: torch.dtype
    itemsize: Traced

    @staticmethod
    def of(dtype: torch.dtype, symbols: Symbols) -> _Dtype:
        return _Dtype(dtype, symbols.named("e", dtype.itemsize))


@dataclass(frozen=True)
class _TracedDevice(Device):
    symbols: Symbols | None = field(default=None, compare=False)

    def peak(self, dtype: Any) -> Any:
        assert self.symbols is not None
        return self.symbols.named("F", super().peak(dtype.dtype))

    def efficiency(self, flops: Any, attention: bool = False) -> Any:
        assert self.symbols is not None
        return self.symbols.named("eta", super().efficiency(float(flops), attention))

    def streaming(self, nbytes: Any) -> Any:
        assert self.symbols is not None
        share = super().streaming(float(nbytes))
        return share if share == 1.0 else self.symbols.named("sigma", share)


def _traced(cluster: Cluster, symbols: Symbols) -> Cluster:
    """The cluster with symbols for its figures."""
    given: dict[str, Any] = {f.name: getattr(cluster.device, f.name) for f in fields(Device)}
    given["memory_bandwidth"] = symbols.named("W", cluster.device.memory_bandwidth)
    given["launch_overhead"] = symbols.named("l", cluster.device.launch_overhead)
    if cluster.device.transfer_overhead:
        given["transfer_overhead"] = symbols.named("o", cluster.device.transfer_overhead)
    levels: list[Any] = []
    for ranks, link in cluster.levels:
        figures: dict[str, Any] = {
            "latency": symbols.named("L", link.latency),
            "bandwidth": symbols.named("B", link.bandwidth),
        }
        levels.append((ranks, replace(link, **figures)))
    return replace(cluster, device=_TracedDevice(**given, symbols=symbols), levels=tuple(levels))
