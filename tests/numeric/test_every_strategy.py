"""Every strategy that the enumerator emits is executed on every rank and compared with one device."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from forced import Step, is_exact, run
from torch import nn

from stpart_compiler.ir.layout import Digit
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import MOVE, Strategy, derive
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.strategies import FULL_SPACE, enumerate_strategies, is_contraction

EVEN = (4, 6, 12, 12)
UNEVEN = (3, 5, 7, 10)
MESHES = [2, 3, 4, (2, 2), (2, 3), (3, 3), (2, 2, 2)]


def linear_layer(sizes: tuple[int, int, int, int]) -> Step:
    """A linear layer with bias and activation, forward and backward."""
    batch, rows, inner, columns = sizes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inner, columns), nn.Tanh()).double()
    x = torch.randn(batch, rows, inner, dtype=torch.float64)
    weight = torch.randn(columns, dtype=torch.float64)
    return Step(model, (x,), lambda y: (y * weight).sum())


@pytest.fixture(scope="module", params=[EVEN, UNEVEN], ids=["even", "uneven"])
def step(request: pytest.FixtureRequest) -> Step:
    return linear_layer(request.param)


def _contractions(step: Step) -> list[OpNode]:
    return [op for op in step.graph.ops if is_contraction(op.rule)]


def _renamed(strategy: Strategy, names: dict[str, str]) -> Strategy:
    """The strategy with the axes of the mesh called otherwise."""

    def digit(old: Digit) -> Digit:
        return replace(old, coeffs=tuple(sorted((names[axis], coeff) for axis, coeff in old.coeffs)))

    digits = tuple(tuple(map(digit, cut)) for cut in strategy.digits)
    return replace(strategy, digits=digits, pending=tuple(map(digit, strategy.pending)))


def _one_of_each_kind(strategies: list[Strategy], mesh: Mesh) -> list[Strategy]:
    """Of those that differ by the names of axes of one size alone one; not always the same order of axes."""
    orders = [dict(zip(mesh.axes, order, strict=True)) for order in permutations(mesh.axes)]
    kinds: dict[Strategy, list[Strategy]] = {}
    for strategy in strategies:
        least = min((_renamed(strategy, names) for names in orders), key=repr)
        kinds.setdefault(least, []).append(strategy)
    return [kind[n % len(kind)] for n, kind in enumerate(kinds.values())]


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_every_strategy_of_the_matmuls(step: Step, spec: object, request: pytest.FixtureRequest) -> None:
    mesh = parse_mesh(spec)
    space = FULL_SPACE if len(mesh.axes) < 3 else replace(FULL_SPACE, forms=((1, 0), (0, 1), (1, 1)))
    contractions = _contractions(step)
    assert len(contractions) == 2  # forward and the weight's gradient: the input needs none
    options = {op.name: enumerate_strategies(op.rule, mesh, op.movable, space) for op in contractions}
    if mesh.world_size > 6 and not request.config.getoption("--every"):
        options = {name: _one_of_each_kind(found, mesh) for name, found in options.items()}
    for i in range(max(map(len, options.values()))):
        forced = {name: found[i % len(found)] for name, found in options.items()}
        text = {op.name: forced[op.name].describe(op.rule) for op in contractions}
        assert is_exact(step, *run(step, mesh, forced)), text


@pytest.mark.parametrize("spec", [2, 3, (2, 2), (2, 3)], ids=str)
def test_every_strategy_of_the_other_ops(step: Step, spec: object) -> None:
    mesh = parse_mesh(spec)
    for op in step.graph.ops:
        if is_contraction(op.rule):
            continue
        for strategy in enumerate_strategies(op.rule, mesh, op.movable):
            text = f"{op.name}: {strategy.describe(op.rule)}"
            assert is_exact(step, *run(step, mesh, {op.name: strategy})), text


def _described(op: OpNode, mesh: Mesh) -> dict[str, Strategy]:
    """Strategies by their text; of those that let a sum pass, the ones through the first operand."""
    return {s.describe(op.rule): s for s in enumerate_strategies(op.rule, mesh, op.movable) if s.linear < 1}


def test_transposed_blocks_travel_past_ranks_whose_block_is_empty() -> None:
    """Nine columns on four ranks: three blocks of three and an empty one, which is not computed."""
    step, mesh = linear_layer((2, 3, 4, 9)), parse_mesh(4)
    product = _contractions(step)[1]
    turned = step.graph.by_name[product.operands[0][0]]
    assert turned.call.target is torch.ops.aten.t.default
    tried = 0
    for strategy in enumerate_strategies(product.rule, mesh, product.movable):
        wanted = derive(product.rule, strategy, mesh).inputs[0]
        if wanted.motion != MOVE:
            continue
        for other in _described(turned, mesh).values():
            if derive(turned.rule, other, mesh).outputs[0].layout == wanted.layout:
                assert is_exact(step, *run(step, mesh, {product.name: strategy, turned.name: other}))
                tried += 1
    assert tried


def test_a_block_that_stays_in_place_and_becomes_a_summand_is_still_whole_for_others() -> None:
    """On some ranks a re-layout by transfer leaves the block as it is; backward reads it as no summand."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    step = Step(nn.Linear(6, 5).double(), (x,), lambda y: (y.exp() * weight).sum())
    mesh = parse_mesh((2, 2))
    exp = next(op for op in step.graph.ops if op.call.target is torch.ops.aten.exp.default)
    mul = next(op for op in step.graph.ops if op.operands and op.operands[0] == (exp.name, 0))
    forced = {exp.name: _described(exp, mesh)["a=r"], mul.name: _described(mul, mesh)["a=c, pending r"]}
    assert is_exact(step, *run(step, mesh, forced))
