"""Whole models on many meshes: the solved plan and every template against one device, in float64.

Hugging Face computes norms, rotary angles and the loss in float32 whatever the model's dtype; norms and loss are
replaced here by the same formulas in the model's own dtype. Three ranks run as a thread and a gloo group each, other
numbers of them in lockstep.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from lockstep_step import lockstep_step
from once import traced_before, traced_once
from slow_ranks import CLUSTER
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.strategies import is_contraction

MESHES = [2, 3, (4,), (8,), (2, 2), (2, 4)]  # of a plain 4 or 8 the solver would choose the axes
COMPARED_ON = [2, 3, (2, 2)]  # with the templates, which are priced beside the plan
SQUARE = [4, (2, 2)]  # an axis of 4 can be taken as 2 x 2
SPATIAL = ("data", "zero3", "megatron", "megatron_sp", "ulysses_zero3")

SOLVER = st.SolverOptions(time_limit_s=20, patience_s=0.5, yardsticks=False)
COMPARED = replace(SOLVER, yardsticks=True)


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    following = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), following.view(-1), ignore_index=-100)


def _language_model(kind: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 64, "attn_implementation": attention, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **common))


class Case:
    """A language model captured once, with the loss and gradients of one device."""

    def __init__(self, kind: str, attention: str) -> None:
        self.model = _language_model(kind, attention).double()
        self.model.loss_function = _loss
        ids = torch.randint(0, 64, (4, 16))
        labels = ids.clone()
        labels[0, :5] = -100
        self.call = {"input_ids": ids, "labels": labels}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_llama.LlamaRMSNorm, "forward", _rms_norm)
            loss = self.model(**self.call, use_cache=False).loss
            loss.backward()
            self.captured = capture(self.model, (), self.call)
        self.loss = loss.detach()
        self.graphs: dict[int, Annotated] = {}

    def graph(self, stripes: int) -> Annotated:
        if stripes not in self.graphs:
            self.graphs[stripes] = annotate(self.captured, stripes=stripes)
        return self.graphs[stripes]

    def compile(self, mesh: Any, template: str | None, solver: st.SolverOptions = SOLVER) -> st.CompiledModel:
        with traced_before(self.captured, self.graph):
            return st.compile_model(
                self.model, (), self.call, mesh=mesh, template=template, cluster=CLUSTER, solver=solver
            )


@lru_cache
def _case(kind: str, attention: str) -> Case:
    return Case(kind, attention)


def _check_step(compiled: st.CompiledModel, case: Case) -> None:
    in_threads = compiled.world_size == 3
    result = compiled.run_in_process(**case.call) if in_threads else lockstep_step(compiled, (), case.call)
    assert result.loss is not None
    assert abs(result.loss - case.loss) <= 1e-9 * abs(case.loss)
    _check_grads(result.grads, case.model)


def _check_grads(grads: dict[str, torch.Tensor | None], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert grads.keys() == set(names)
    for name in names:
        expected, found = model.get_parameter(name).grad, grads[name]
        if expected is None:
            assert found is None, name
        else:
            assert found is not None, name
            assert (found - expected).norm() <= 1e-9 * expected.norm(), name


def _temporal(compiled: st.CompiledModel) -> list[str]:
    return [name for name, strategy in compiled.plan.strategies.items() if strategy.steps > 1]


def _cut(compiled: st.CompiledModel, case: Case) -> list[str]:
    """Matmuls of which each rank does a part."""
    ops = [op.name for op in case.graph(compiled.plan.stripes).ops if is_contraction(op.rule)]
    return [name for name in ops if any(compiled.plan.strategies[name].digits)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_solved(kind: str, mesh: Any) -> None:
    case = _case(kind, "sdpa")
    compared = mesh in COMPARED_ON
    compiled = case.compile(mesh, None, COMPARED if compared else SOLVER)
    assert _cut(compiled, case)
    if compared:
        simulated = compiled.plan.solver.get("simulated")
        assert compiled.plan.seconds <= min(compiled.plan.yardsticks.values()) or simulated
        assert simulated is None or compiled.simulate().seconds == min(simulated.values())
    _check_step(compiled, case)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("template", SPATIAL)
def test_spatial_template(kind: str, mesh: Any, template: str) -> None:
    case = _case(kind, "sdpa")
    compiled = case.compile(mesh, template)
    assert not _temporal(compiled)
    _check_step(compiled, case)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("template", ["ring", "cp_zero3", "metp"])
def test_ring(kind: str, mesh: Any, template: str) -> None:
    case = _case(kind, "sdpa")
    compiled = case.compile(mesh, template)
    assert _temporal(compiled)
    _check_step(compiled, case)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    # Three axes make a large space, so one model is enough there.
    [*itertools.product(["llama", "gpt2"], SQUARE), ("gpt2", (2, 4))],
    ids=str,
)
def test_primepar(kind: str, mesh: Any) -> None:
    case = _case(kind, "sdpa")
    compiled = case.compile(mesh, "primepar")
    assert _temporal(compiled)
    _check_step(compiled, case)


@pytest.mark.parametrize(
    ("kind", "mesh"), [("llama", 2), ("gpt2", 3), ("gpt2", 8), ("llama", (2, 2)), ("gpt2", (2, 4))], ids=str
)
def test_async_tp(kind: str, mesh: Any) -> None:
    """Loops where they pay: not where 3 ranks share 16 tokens, and the largest block is computed three times."""
    case = _case(kind, "sdpa")
    compiled = case.compile(mesh, "async_tp")
    assert bool(_temporal(compiled)) == (mesh != 3)
    _check_step(compiled, case)


@pytest.mark.parametrize(("kind", "mesh"), [("gpt2", (2, 2)), ("llama", (2, 3)), ("gpt2", (4, 2))], ids=str)
def test_summa(kind: str, mesh: Any) -> None:
    case = _case(kind, "sdpa")
    compiled = case.compile(mesh, "summa")
    assert not _temporal(compiled)
    _check_step(compiled, case)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("mesh", "template"),
    [(2, None), (3, None), ((2, 2), None), (2, "megatron"), (3, "ring"), ((2, 2), "primepar")],
    ids=str,
)
def test_eager_attention(kind: str, mesh: Any, template: str | None) -> None:
    case = _case(kind, "eager")
    _check_step(case.compile(mesh, template), case)


class Plain(nn.Module):
    """[batch, 6] -> [batch, 6] over `hidden` features."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.requires_grad_(False)


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 3)


class Tied(nn.Module):
    """One weight in two layers, used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.outer = nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x))) @ self.inner.weight


class Counting(Plain):
    """A buffer that counts calls and one that keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y + self.mean


class Several(Plain):
    """Keywords, and a dict with the loss and outputs that have no gradient."""

    def forward(self, x: torch.Tensor, *, target: torch.Tensor, scale: float) -> dict[str, Any]:  # type: ignore[override]
        y = super().forward(x) * scale
        return {"y": y.detach(), "loss": F.mse_loss(y, target), "largest": y.detach().amax(1), "note": None}


VARIANTS = {
    "plain": Plain,
    "uneven": lambda: Plain(7),
    "frozen": Frozen,
    "unused": Unused,
    "tied": Tied,
    "counting": Counting,
    "several": Several,
}


class Variant:
    """A small model and one call of it. Batch 5: no mesh here divides it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = VARIANTS[name]().double()
        self.x = torch.randn(5, 6, dtype=torch.float64)
        self.call: dict[str, Any] = {}
        self.loss_fn: Any = lambda y: y.square().mean()
        if name == "several":
            self.call = {"target": torch.randn(5, 6, dtype=torch.float64), "scale": 0.5}
            self.loss_fn = None

    def loss_of(self, output: Any) -> torch.Tensor:
        return output["loss"] if self.loss_fn is None else self.loss_fn(output)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in VARIANTS])
@pytest.mark.parametrize("mesh", [2, 3, (2, 2)], ids=str)
@pytest.mark.parametrize("template", [None, "zero3", "megatron", "ring", "metp"], ids=str)
def test_variant(name: str, mesh: Any, template: str | None) -> None:
    variant = Variant(name)
    with traced_once(("variant", name)):
        compiled = st.compile_model(
            variant.model,
            (variant.x,),
            variant.call,
            mesh=mesh,
            template=template,
            loss_fn=variant.loss_fn,
            cluster=CLUSTER,
            solver=SOLVER,
        )
    # All that the module changes in place is changed here first: the compiled model must start from the same state.
    before = {key: buffer.clone() for key, buffer in variant.model.named_buffers()}
    result = compiled.run_in_process(variant.x, **variant.call)
    assert all(torch.equal(buffer, before[key]) for key, buffer in variant.model.named_buffers())
    output = variant.model(variant.x, **variant.call)
    loss = variant.loss_of(output)
    loss.backward()
    assert result.loss is not None
    assert abs(result.loss - loss.detach()) <= 1e-9 * abs(loss.detach())
    _check_grads(result.grads, variant.model)
    assert result.buffers.keys() == before.keys()
    for key, buffer in variant.model.named_buffers():
        torch.testing.assert_close(result.buffers[key], buffer, rtol=1e-12, atol=1e-12)
    if name == "several":
        assert result.outputs.keys() == output.keys()
        assert result.outputs["note"] is None
        for key in ("y", "largest"):
            torch.testing.assert_close(result.outputs[key], output[key], rtol=1e-12, atol=1e-12)


def test_a_second_step_goes_on_from_the_buffers_of_the_first() -> None:
    variant = Variant("counting")
    compiled = st.compile_model(
        variant.model, (variant.x,), mesh=2, loss_fn=variant.loss_fn, cluster=CLUSTER, solver=SOLVER
    )
    first = compiled.run_in_process(variant.x)
    compiled.load_state_dict({**variant.model.state_dict(), **first.buffers})
    second = compiled.run_in_process(variant.x)
    for _ in range(2):
        loss = variant.loss_fn(variant.model(variant.x))
    assert int(second.buffers["calls"]) == int(variant.model.calls) == 2
    assert second.loss is not None
    assert abs(second.loss - loss.detach()) <= 1e-12
