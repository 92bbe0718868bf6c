"""Op calls on real tensors, whole and in blocks that are combined."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from stpart_compiler.capture import Captured
from stpart_compiler.ir.layout import Digit, form, gather, split
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import COMBINED, HALO, ONLINE, WHOLE, OpRule, refined
from stpart_compiler.ir.spacetime import Strategy, derive, factor_range
from stpart_compiler.passes.rules import Block, OpCall, Operand, is_void, local_call, merge_of, op_call, rule_of
from stpart_compiler.passes.rules.registry import bind

LINE = {q: Mesh(("d",), (q,)) for q in (2, 3, 4)}
GRID = Mesh(("r", "c"), (2, 3))


@dataclass
class Example:
    """A call and the tensors of its operands."""

    call: OpCall
    tensors: list[torch.Tensor]
    rule: OpRule

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        args, kwargs = bind(self.call.args, tensors), bind(self.call.kwargs, tensors)
        return as_list(self.call.target(*args, **kwargs))


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def example(target: Any, *args: Any, **kwargs: Any) -> Example:
    """The call as it would stand in a graph, with the rule that is registered."""
    return example_by(rule_of, target, *args, **kwargs)


def example_by(find: Callable[[OpCall], OpRule | None], target: Any, *args: Any, **kwargs: Any) -> Example:
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []

    def placed(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = item
            tensors.append(item)
            return node
        return type(item)(placed(part) for part in item) if isinstance(item, (list, tuple)) else item

    node = graph.call_function(target, placed(args), {key: placed(value) for key, value in kwargs.items()})
    node.meta["val"] = target(*args, **kwargs)
    call = op_call(node)
    rule = find(call)
    assert rule is not None, f"no rule for {target}"
    return Example(call, tensors, rule)


def check_maps(ex: Example) -> None:
    """Every dim of every tensor has the size that its factors multiply to; what a result lacks is summed or whole."""
    assert len(ex.rule.inputs) == len(ex.tensors)
    assert len(ex.rule.outputs) == len(ex.call.results)
    block = Block(ex.rule, tuple((0, factor.size) for factor in ex.rule.factors))
    for index, tensor in enumerate(ex.tensors):
        assert block.in_shape(index) == tuple(tensor.shape)
    for index, result in enumerate(ex.call.results):
        if result is not None:
            assert block.out_shape(index) == result.shape
    read = {f for tensor in ex.rule.inputs for dim in tensor for f in dim}
    for result, tensor in zip(ex.call.results, ex.rule.outputs, strict=True):
        lacking = read - {f for dim in tensor for f in dim}
        assert result is None or all(ex.rule.factors[f].kind in (*COMBINED, HALO, ONLINE, WHOLE) for f in lacking)


def check_strategy(ex: Example, rule: OpRule, strategy: Strategy, mesh: Mesh) -> None:
    """Blocks of the operands -> the op on every rank -> the results put together, against the whole op."""
    derived = derive(rule, strategy, mesh)
    generator = torch.Generator().manual_seed(1)
    locals_ = [split(x, port.layout, mesh, generator) for x, port in zip(ex.tensors, derived.inputs, strict=True)]
    parts = []
    for rank in range(mesh.world_size):
        block = Block(rule, factor_range(strategy, rule, mesh, rank, 0))
        target, args, kwargs = local_call(ex.call, block)
        mine = [tensors[rank] for tensors in locals_]
        parts.append(as_list(target(*bind(args, mine), **bind(kwargs, mine))))
        for index, part in enumerate(parts[-1]):
            fits = part is None or tuple(part.shape) == block.out_shape(index)
            assert fits, f"{ex.call.target} {rule} with {strategy.describe(rule)}: {part.shape}"
    for index, want in enumerate(ex.run(ex.tensors)):
        if want is not None:
            got = gather([part[index] for part in parts], derived.outputs[index].layout, mesh)
            assert all(part[index].dtype == want.dtype for part in parts)
            assert_close(got, want, f"{ex.call.target} {rule} with {strategy.describe(rule)}")


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    finite = want[want.isfinite()].double().abs()
    scale = 1.0 + (float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(
        got, want, rtol=1e-12, atol=1e-12 * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def cut(rule: OpRule, digits: dict[int, tuple[Digit, ...]]) -> Strategy:
    return Strategy(tuple(digits.get(f, ()) for f in range(len(rule.factors))))


def check_cuts(ex: Example, parts: tuple[int, ...] = (2, 3, 4)) -> None:
    """Every factor alone, every pair of factors, every factor twice, and every minor part of a refined factor."""
    rule = ex.rule
    for f, q in itertools.product(rule.cuttable, parts):
        check_strategy(ex, rule, cut(rule, {f: (form(q, d=1),)}), LINE[q])
    for f, g in itertools.combinations(rule.cuttable, 2):
        check_strategy(ex, rule, cut(rule, {f: (form(2, r=1),), g: (form(3, c=1),)}), GRID)
    for f in rule.cuttable:
        check_strategy(ex, rule, cut(rule, {f: (form(2, r=1), form(3, c=1))}), GRID)
        size = rule.factors[f].size
        if size % 2 == 0 and size > 2 and f not in rule.windowed:
            finer = refined(rule, {f: (2, size // 2)})
            check_strategy(ex, finer, cut(finer, {f + 1: (form(2, d=1),)}), LINE[2])


def check_sums(ex: Example) -> None:
    """Random summands of mixed sign pass through every set of linear operands, alone and beside a cut."""
    rule = ex.rule
    for index, _ in enumerate(rule.linear):
        whole = tuple(() for _ in rule.factors)
        check_strategy(ex, rule, Strategy(whole, 1, index, (form(3, d=1),)), LINE[3])
        for f in rule.cuttable:
            digits = cut(rule, {f: (form(2, r=1),)}).digits
            check_strategy(ex, rule, Strategy(digits, 1, index, (form(3, c=1),)), GRID)


def check_merges(ex: Example, parts: int = 3) -> None:
    """Blocks of an ONLINE factor, one after the other, merged as they are made."""
    for f, factor in enumerate(ex.rule.factors):
        if factor.kind != ONLINE or factor.size < 2:
            continue
        merge, merged = merge_of(ex.call.target), None
        assert merge is not None
        timed = Strategy(tuple((form(parts, 1),) if g == f else () for g in range(len(ex.rule.factors))), parts)
        for t in range(parts):
            block = Block(ex.rule, factor_range(timed, ex.rule, LINE[2], 0, t))
            if is_void(ex.call, block):
                continue
            mine = [
                x[tuple(slice(*block.span(dim)) if dim else slice(None) for dim in tensor)]
                for x, tensor in zip(ex.tensors, ex.rule.inputs, strict=True)
            ]
            target, args, kwargs = local_call(ex.call, block)
            part = as_list(target(*bind(args, mine), **bind(kwargs, mine)))
            merged = part if merged is None else merge.merge(*merged, *part)
        assert merged is not None
        wanted = ex.run(ex.tensors)
        for got, want in zip(merge.finish(*merged, wanted[0].dtype), wanted, strict=True):
            assert_close(got, want, f"{ex.call.target} {ex.rule} merged over {factor.name}")


def check(ex: Example) -> None:
    check_maps(ex)
    check_cuts(ex)
    check_sums(ex)
    check_merges(ex)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, max(high, 1), shape)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


def in_double(item: Any) -> Any:
    """The call with float64 in place of float32, so that blocks can be compared exactly."""
    if isinstance(item, Operand):
        return replace(item, dtype=in_double(item.dtype))
    if isinstance(item, dict):
        return {key: in_double(part) for key, part in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(in_double(part) for part in item)
    return torch.float64 if item is torch.float32 else item


def graph_inputs(captured: Captured, model: nn.Module, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The model's own tensors, and tangents of one."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = [state[info.name].detach() for info in (*captured.params, *captured.buffers) if info.node]
    values += [leaf for info, leaf in zip(captured.inputs, leaves, strict=True) if info.node]
    names = {name for _, name in captured.tangents}
    tangents = [node.meta["val"] for node in captured.gm.graph.nodes if node.name in names]
    return [*values, *(torch.ones(tuple(val.shape), dtype=val.dtype) for val in tangents)]
