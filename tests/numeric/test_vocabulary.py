"""Losses and softmax with the vocabulary cut: every strategy of every op, and what the compiler makes of it."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from forced import Step, is_exact, run
from slow_ranks import CLUSTER, SOLVER
from torch import nn
from torch.nn import functional as F

import stpart_compiler as st
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.ir.program import Value
from stpart_compiler.ir.rule import LOGSUMEXP, MIN
from stpart_compiler.passes.rules.registry import Operand
from stpart_compiler.passes.strategies import StrategySpace, enumerate_strategies

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MESHES = [2, 3, 4, (2, 2)]
SPATIAL = StrategySpace(temporal_1d=False, temporal_2d=False, skewed=False)
WEIGHT = torch.linspace(0.5, 1.5, 9, dtype=torch.float64)

LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum") + 10,
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none").square().sum(),
    "ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=2),
    "all ignored": lambda x, y: F.cross_entropy(x, torch.full_like(y, -100)),
    "smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "weights": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT.to(x)),
    "weights and smoothing": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT.to(x), label_smoothing=0.2),
    "images": lambda x, y: F.cross_entropy(x.T[None, :, :, None], y[None, :, None]),
    "one row": lambda x, y: F.cross_entropy(x[0], y[0]),
    "probabilities": lambda x, y: F.cross_entropy(x, x.detach().flip(0).softmax(-1)),
    "softmax": lambda x, y: (x.softmax(-1) * x.detach().sin()).sum(),
    "places": lambda x, y: (
        (x.max(-1).values * (1 + x.round(decimals=1).argmin(-1))).sum() + (x.min(0, True)[1] * x).sum()
    ),
    "largest": lambda x, y: x.logsumexp(-1).sum() + (x.amax(-1) - x.amin(-1)).sum() + x.max(),
}


class Classifier(nn.Module):
    """A loss of a linear layer. One block of four of nine classes is empty where blocks have three."""

    def __init__(self, loss: Loss, classes: int = 9, scale: float = 1.0) -> None:
        super().__init__()
        self.head = nn.Linear(5, classes)
        self.loss, self.scale = loss, scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x) * self.scale, y)


def data(tokens: int = 6, classes: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(tokens, 5, dtype=torch.float64), torch.randint(0, classes, (tokens,))


@pytest.mark.parametrize("name", LOSSES)
def test_every_strategy(name: str) -> None:
    torch.manual_seed(0)
    step = Step(Classifier(LOSSES[name]).double(), data())
    for spec in MESHES:
        mesh = parse_mesh(spec)
        options = {op.name: enumerate_strategies(op.rule, mesh, op.movable, SPATIAL) for op in step.graph.ops}
        for i in range(max(map(len, options.values()))):
            forced = {key: found[i % len(found)] for key, found in options.items()}
            assert is_exact(step, *run(step, mesh, forced)), f"{name} on {mesh}: strategies {i}"


def test_vocabularies_are_cut_and_their_logsumexp_combined() -> None:
    """Nothing of the size of the logits is kept whole, and no op on them is left out."""
    step = Step(Classifier(LOSSES["mean"]).double(), data())
    wide = [op for op in step.graph.ops if any(9 in r.shape for r in op.call.results if isinstance(r, Operand))]
    assert {f.size for op in wide for f in op.rule.factors if f.kind == "whole"} == set()
    assert all(any(op.rule.factors[f].size == 9 for f in op.movable) for op in wide)
    kinds = [f.kind for op in step.graph.ops for f in op.rule.factors]
    assert kinds.count(LOGSUMEXP) == 1


def test_the_places_of_extremes_are_found_in_cut_dims() -> None:
    step = Step(Classifier(LOSSES["places"]).double(), data())
    cut = {
        str(op.call.target): {op.rule.factors[f].kind for f in op.movable}
        for op in step.graph.ops
        if any(f.kind == MIN for f in op.rule.factors)
    }
    assert cut.keys() == {"stpart_fused.place_of.default", "aten.amin.default"}
    assert all(MIN in kinds for kinds in cut.values())


@pytest.mark.parametrize("parts", [2, 4])
def test_extreme_logits_stay_finite(parts: int) -> None:
    torch.manual_seed(0)
    step = Step(Classifier(LOSSES["sum"], scale=1e4).double(), data())
    mesh = parse_mesh(parts)
    for i in range(4):
        options = {op.name: enumerate_strategies(op.rule, mesh, op.movable, SPATIAL) for op in step.graph.ops}
        loss, grads = run(step, mesh, {key: found[-1 - i % len(found)] for key, found in options.items()})
        assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())
        assert is_exact(step, loss, grads)


class Logits(nn.Module):
    """A loss of parameters: nothing else is rounded."""

    def __init__(self, loss: Loss, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x = nn.Parameter((4 * torch.randn(40, 37, dtype=torch.float64)).to(dtype))
        self.loss = loss

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.x, y)


EYE, WEIGHTS = torch.eye(37), torch.linspace(0.5, 1.5, 37)
NARROW: dict[str, Loss] = {name: LOSSES[name] for name in ("mean", "ignored", "smoothing", "images")}
NARROW["weights"] = lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS.to(x))
NARROW["rows"] = lambda x, y: F.cross_entropy(x, y, reduction="none").sum()
NARROW["log_softmax"] = lambda x, y: (x.log_softmax(-1) * torch.cos(x.detach())).mean()
NARROW["softmax"] = lambda x, y: ((x @ EYE.to(x)).softmax(-1) * torch.cos(x.detach())).sum()


HALVES = list(zip(NARROW, itertools.cycle((torch.bfloat16, torch.float16)), strict=False))


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_narrow_types_err_no_more_than_on_one_device(name: str, dtype: torch.dtype) -> None:
    """Against float64 on the same numbers; the vocabulary is cut as it is in wider types."""
    step = Step(Logits(NARROW[name], dtype), (torch.randint(0, 37, (40,)),))
    wide = copy.deepcopy(step.model).double()
    loss = wide(*step.args)
    loss.backward()
    exact, eager = wide.x.grad, step.grads["x"].double()
    logits = [op for op in step.graph.ops if any(37 in r.shape for r in op.call.results if isinstance(r, Operand))]
    assert {f.size for op in logits for f in op.rule.factors if f.kind == "whole"} == set()
    mesh = parse_mesh(3)
    options = {op.name: enumerate_strategies(op.rule, mesh, op.movable, SPATIAL) for op in step.graph.ops}
    for i in range(max(map(len, options.values()))):
        found, grads = run(step, mesh, {key: known[i % len(known)] for key, known in options.items()})
        assert found.dtype == grads["x"].dtype == dtype
        assert abs(found.double() - loss) <= abs(step.loss.double() - loss) + torch.finfo(dtype).eps * abs(loss)
        assert (grads["x"].double() - exact).norm() <= 1.05 * (eager - exact).norm()


def messages(compiled: st.CompiledModel) -> Iterator[Value]:
    """Tensors that any rank sends."""
    programs = [program for a in compiled.artifacts for program in (a.forward, a.backward) if program is not None]
    for instr in itertools.chain.from_iterable(program.body for program in programs):
        if instr.kind in ("exchange", "collective"):
            yield from instr.inputs()


@pytest.mark.parametrize(("mesh", "template"), [(2, "megatron"), (3, "megatron"), ((2, 2), None)])
def test_large_vocabulary_stays_cut_in_a_plan(mesh: object, template: str | None) -> None:
    """As in Megatron-LM: ranks exchange numbers of the tokens, and features, but nothing as large as the vocabulary."""
    torch.manual_seed(0)
    model = Classifier(F.cross_entropy, classes=503).double()
    x, y = data(tokens=4, classes=503)
    compiled = st.compile_model(model, (x, y), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER)
    assert re.search(r"%logsumexp\S* .* logsumexp\([a-z, ]+\) = ", compiled.dump())
    assert max(value.numel for value in messages(compiled)) <= x.numel()
    single = copy.deepcopy(model)
    loss = single(x, y)
    loss.backward()
    result = compiled.run_in_process(x, y)
    assert result.loss is not None
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    for name, param in single.named_parameters():
        torch.testing.assert_close(result.grads[name], param.grad, rtol=1e-10, atol=1e-12)
