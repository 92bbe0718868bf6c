"""A given plan at other input sizes: its strategies, worked out and priced anew, or refused by the name of an op."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.ir.plan import Plan


class Mixer(nn.Module):
    """Products over features and over places, so that the sequence length is both batch and feature."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(x @ x.transpose(1, 2), -1)
        y = self.down(torch.tanh(self.up(scores @ x))) + x
        return self.head(y).square().mean()


def mixer() -> nn.Module:
    torch.manual_seed(0)
    return Mixer().double()


def batch(size: int, length: int) -> Tensor:
    return torch.randn(size, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def compiled(x: Tensor, model: nn.Module | None = None, mesh: object = (2, 2), **options: object) -> st.CompiledModel:
    return st.compile_model(model or mixer(), (x,), mesh=mesh, cluster=CLUSTER, solver=SOLVER, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(batch(8, 6)).plan


def assert_like_one_device(done: st.CompiledModel, x: Tensor) -> None:
    model = mixer()
    loss = model(x)
    loss.backward()
    result = done.run_in_process(x)
    torch.testing.assert_close(result.loss, loss.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(result.grads[name], param.grad)


@pytest.mark.parametrize(("size", "length"), [(4, 6), (8, 10), (3, 5)])
def test_other_sizes_keep_the_strategies(plan: Plan, size: int, length: int) -> None:
    x = batch(size, length)
    fitted = compiled(x, plan=plan)
    assert fitted.plan.strategies == plan.strategies and fitted.plan.params == plan.params
    assert any(any(strategy.digits) for strategy in plan.strategies.values())
    assert fitted.plan.graph_digest != plan.graph_digest
    assert_like_one_device(fitted, x)


def test_prices_are_those_of_the_new_sizes(plan: Plan) -> None:
    again = compiled(batch(8, 6), plan=dataclasses.replace(plan, graph_digest="other")).plan
    assert again.seconds == pytest.approx(plan.seconds)
    assert [dataclasses.replace(row, alternatives=[], follows="") for row in plan.rows] == again.rows
    larger = compiled(batch(16, 12), plan=plan).plan
    assert larger.seconds > 1.5 * plan.seconds and larger.memory["peak"] > plan.memory["peak"]
    assert "no bound: given, not solved" in larger.summary()
    assert Plan.from_json(larger.to_json()).digest == larger.digest


def test_an_op_of_other_dims_is_named(plan: Plan) -> None:
    with pytest.raises(ValueError, match=r"plan: op \w+ \(.*\) with the rule .* is made of other dims at these input"):
        compiled(batch(1, 6), plan=plan)


def test_a_model_of_other_parameters_is_refused(plan: Plan) -> None:
    model = mixer()
    model.up, model.down = nn.Linear(12, 16).double(), nn.Linear(16, 12).double()
    texts = r"plan: made for another model.*parameters that differ: \['down.weight', 'up.bias', 'up.weight'\]"
    with pytest.raises(ValueError, match=texts):
        compiled(batch(8, 6), model, plan=plan)


def test_a_cut_that_the_op_forbids_is_refused(plan: Plan) -> None:
    """A plan made by hand, or by other rules: the softmax along the dim of its sums."""
    name = next(name for name in plan.strategies if name.startswith("_softmax") and "backward" not in name)
    strategy = plan.strategies[name]
    digit = next(digit for s in plan.strategies.values() for digits in s.digits for digit in digits)
    cut = dataclasses.replace(strategy, digits=(*strategy.digits[:-1], (digit,)))
    wrong = dataclasses.replace(plan, strategies=plan.strategies | {name: cut})
    with pytest.raises(ValueError, match=rf"plan: op {name} .* must not be cut along \w+ at these input sizes"):
        compiled(batch(4, 6), plan=wrong)
