"""Places of images cut over ranks: every strategy that does so is executed, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from forced import Step, is_exact, run
from slow_ranks import SOLVER
from torch import nn
from zoo import ConformerBlock

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.ir.layout import form
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.strategies import enumerate_strategies


def images() -> Step:
    """Two dims of places: strided, dilated, grouped, pooled; sizes that no mesh divides; a single image."""
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, (3, 5), stride=(2, 1), padding=(1, 2))
    second = nn.Conv2d(4, 4, 3, padding=(2, 0), dilation=(2, 1), groups=2)
    pools = nn.MaxPool2d(3, stride=2, padding=1), nn.AvgPool2d(2, stride=1, padding=1, count_include_pad=False)
    last = nn.ConvTranspose2d(4, 2, 3, stride=2)
    model = nn.Sequential(first, nn.Tanh(), pools[0], second, nn.Tanh(), pools[1], last).double()
    return Step(model, (torch.randn(1, 2, 15, 11, dtype=torch.float64),), _loss)


def signals() -> Step:
    """One dim of places: a kernel wider than a block, a causal depthwise one, one that skips places."""
    torch.manual_seed(0)
    depthwise = nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(3, 3, 4, groups=3)
    model = nn.Sequential(nn.Conv1d(2, 3, 7, padding=3), nn.Tanh(), *depthwise, nn.Tanh(), nn.Conv1d(3, 2, 1, stride=3))
    return Step(model.double(), (torch.randn(2, 2, 8, dtype=torch.float64),), _loss)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape)).sin().sum()


STEPS = {step.__name__: step() for step in (images, signals)}


def places(op: OpNode) -> list[int]:
    """Factors of the op that drive windows."""
    return sorted({op.rule.driver(f) for f in op.rule.windowed})


def cuts_places(op: OpNode, strategy: Strategy) -> bool:
    return any(strategy.digits[f] for f in places(op))


@pytest.mark.parametrize("spec", [3, 4, (2, 2)], ids=str)
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
    assert len(forced) == 12 + len(tanh)
    assert is_exact(step, *run(step, mesh, forced))


class Branches(nn.Module):
    """Two convolutions of one sum over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.one, self.two = (nn.Conv1d(4, 4, 3, stride, 1, bias=False) for stride in (1, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sum(x)
        return self.one(x) * self.two(x)


def test_a_pending_sum_that_backward_reads_through_a_window_is_saved_without_its_halo() -> None:
    """Other ops of backward read it too, and nothing can be sent of blocks that overlap."""
    torch.manual_seed(0)
    step, mesh = Step(Branches().double(), (torch.randn(1, 4, 9, dtype=torch.float64),), _loss), parse_mesh(3)
    products = [op for op in step.graph.ops if places(op)]
    gradients = [op for op in products if len(op.operands) == 3]
    total = (products[0].name, 0)
    one, _ = (op for op in gradients if total in op.operands)
    assert is_exact(
        step,
        *run(step, mesh, {total[0]: along(products[0], mesh, {"i": "d"}), one.name: along(one, mesh, {"p0": "d"})}),
    )


SLOW_LINKS = st.Cluster(
    "slow links", Device("slow", "cpu", (("float64", 1e8),), 2**34, 1e9), ((None, Link(1e-6, 2e7)),)
)


class Residual(nn.Module):
    """A stem with max pooling, a residual block with BatchNorm, and a head over the mean of the places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3))
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head((x + self.block(x)).relu().mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "shape", "mesh", "halos"),
    [(Residual(), (1, 3, 34, 30), (2, 2), "34@r+halo, 30@c+halo"), (ConformerBlock(), (1, 26, 16), (4,), "26@d+halo")],
    ids=["residual", "conformer"],
)
def test_a_batch_of_one_is_cut_by_places(
    model: nn.Module, shape: tuple[int, ...], mesh: tuple[int, ...], halos: str
) -> None:
    """The solver does so where ranks would be idle or whole images would travel."""
    torch.manual_seed(0)
    model = model.double()
    single = copy.deepcopy(model)
    x = torch.randn(shape, dtype=torch.float64)
    compiled = st.compile_model(model, (x,), loss_fn=_loss, mesh=mesh, cluster=SLOW_LINKS, solver=SOLVER)
    read = [layout for row in compiled.plan.rows if "conv" in row.op for layout in row.inputs]
    assert any(halos in layout for layout in read), read
    result = compiled.run_in_process(x)
    loss = _loss(single(x))
    loss.backward()
    assert result.loss is not None
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-10, atol=1e-10)
    for name, param in single.named_parameters():
        torch.testing.assert_close(result.grads[name], param.grad, rtol=1e-10, atol=1e-10)
