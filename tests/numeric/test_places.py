"""Places of images cut over ranks: every strategy that does so is executed, forward and backward."""

from __future__ import annotations

import pytest
import torch
from forced import Step, is_exact, run
from torch import nn

from stpart_compiler.ir.layout import form
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.strategies import enumerate_strategies


def images() -> Step:
    """Two dims of places: strided, dilated, grouped, padded unevenly; sizes that no mesh divides; a single image."""
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, (3, 5), stride=(2, 1), padding=(1, 2))
    second = nn.Conv2d(4, 4, 3, padding=(2, 0), dilation=(2, 1), groups=2)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.ConvTranspose2d(4, 2, 3, stride=2)).double()
    return Step(model, (torch.randn(1, 2, 9, 7, dtype=torch.float64),), _loss)


def signals() -> Step:
    """One dim of places: a kernel wider than a block, then a depthwise one, then one that skips places."""
    torch.manual_seed(0)
    first, depthwise = nn.Conv1d(2, 3, 7, padding=3), nn.Conv1d(3, 3, 4, padding=2, groups=3)
    model = nn.Sequential(first, nn.Tanh(), depthwise, nn.Tanh(), nn.Conv1d(3, 2, 1, stride=3)).double()
    return Step(model, (torch.randn(2, 2, 8, dtype=torch.float64),), _loss)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape)).sin().sum()


STEPS = {step.__name__: step() for step in (images, signals)}


def places(op: OpNode) -> list[int]:
    """Factors of the op that drive windows."""
    return sorted({op.rule.driver(f) for f in op.rule.windowed})


def cuts_places(op: OpNode, strategy: Strategy) -> bool:
    return any(strategy.digits[f] for f in places(op))


@pytest.mark.parametrize("spec", [2, 3, 4, (2, 2)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_every_strategy_that_cuts_places(name: str, spec: object) -> None:
    """Several ops at once: the i-th strategy of each."""
    step, mesh = STEPS[name], parse_mesh(spec)
    found = {}
    for op in step.graph.ops:
        options = enumerate_strategies(op.rule, mesh, op.movable)
        found[op.name] = [s for s in options if cuts_places(op, s)]
    found = {op: options for op, options in found.items() if options}
    assert len(found) >= 6
    for i in range(max(map(len, found.values()))):
        step.check(mesh, {op: options[i % len(options)] for op, options in found.items()})


def along(op: OpNode, mesh: Mesh, dims: dict[str, str]) -> Strategy:
    """Factors cut by axes, by their names."""
    digits = [(form(mesh.size[dims[f.name]], **{dims[f.name]: 1}),) if f.name in dims else () for f in op.rule.factors]
    return Strategy(tuple(digits))


def test_both_dims_of_places_over_a_square_mesh() -> None:
    """All ops of a step: images stay cut by rows and columns from the first op to the last, corners are exchanged."""
    step, mesh = STEPS["images"], parse_mesh((2, 2))
    forced = {op.name: along(op, mesh, {"p0": "r", "p1": "c"}) for op in step.graph.ops if places(op)}
    tanh = [op for op in step.graph.ops if "tanh" in op.name]
    forced |= {op.name: along(op, mesh, {"b": "r", "c": "c"}) for op in tanh}
    assert len(forced) == 8 + len(tanh)
    assert is_exact(step, *run(step, mesh, forced))
