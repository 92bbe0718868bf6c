"""Forward run again in backward: exact whatever is run again, chosen where memory is short, predicted to the byte."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from forced import Step, run
from slow_ranks import CLUSTER, SOLVER
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.capture import Captured, capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.graphs import Graphs, annotate, fuse
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.bound import FindBound
from stpart_compiler.passes.choose_again import any_set
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import MakePlan
from stpart_compiler.passes.order import marked, may_run_again, orders
from stpart_compiler.passes.peak import TrySets, only_chosen
from stpart_compiler.passes.problem import BuildProblem, evaluate, memory_bytes
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.recompute import FindCuts, MayAgain
from stpart_compiler.passes.solve import InfeasibleError
from stpart_compiler.passes.space import BuildSpace
from stpart_compiler.passes.strategies import enumerate_strategies, is_contraction
from stpart_compiler.search import Restrictions, Search

IDS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))


class Loss(nn.Module):
    """The loss alone of a causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, labels=ids, use_cache=False, return_dict=False)[0]
        return loss


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=50, **sizes))


def gpt2() -> nn.Module:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_positions=8, n_embd=16, n_head=4, vocab_size=50, **off))


def whole(captured: Captured) -> Annotated:
    return annotate(captured)


def fused(captured: Captured) -> Annotated:
    found = fuse(annotate(captured), "all")
    assert found is not None
    return found


@cache
def step(name: str, with_regions: bool) -> Step:
    torch.manual_seed(0)
    model = Loss({"llama": llama, "gpt2": gpt2}[name]()).double()
    return Step(model, (IDS,), graph=fused if with_regions else whole)


@pytest.mark.parametrize("mesh", [1, 2, (2, 2)], ids=str)
@pytest.mark.parametrize(("name", "with_regions"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_everything_run_again(name: str, with_regions: bool, mesh: object) -> None:
    """Products in their last strategy: temporal, with re-layouts around it."""
    known, grid = step(name, with_regions), parse_mesh(mesh)
    ops = known.graph.ops
    heavy = [op for op in ops if is_contraction(op.rule) or op.rule.loops]
    forced = {op.name: enumerate_strategies(op.rule, grid, op.movable)[-1] for op in heavy}
    again = frozenset(op.name for op in ops if may_run_again(known.graph, op))
    assert not [key for key in orders(known.graph, again).saved if key[0] in again]
    same(run(known, grid, forced, again), run(known, grid, forced))


def same(one: tuple[torch.Tensor, dict[str, torch.Tensor]], two: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    """Bit by bit."""
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(grad, two[1][name]) for name, grad in one[1].items())


def test_some_run_again() -> None:
    """Every second op: what is run again reads saved values and such that are made again, also through views."""
    known = step("llama", False)
    may = [op.name for op in known.graph.ops if may_run_again(known.graph, op)]
    expected = run(known, parse_mesh(2), {})
    for again in (may[::2], may[1::2]):
        same(run(known, parse_mesh(2), {}, frozenset(again)), expected)


class Blocks(nn.Module):
    """A residual chain with much that is cheap to make again."""

    def __init__(self, depth: int, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            part = partial(self._block, layer)
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return x.square().mean()

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + layer(x).sin() * torch.sigmoid(x)


@cache
def blocks(checkpointed: bool = False) -> Graphs:
    torch.manual_seed(0)
    x = torch.zeros(64, 8, 32, dtype=torch.float64)
    captured = capture(Blocks(4, 32, checkpointed).double(), (x,))
    return Graphs(annotate(captured), Dumper(None))


def search(graphs: Graphs, limit: int, mesh: int = 2, *, yardsticks: bool = False) -> Plan:
    costs = Costs(load_cluster(CLUSTER), parse_mesh(mesh))
    options = replace(SOLVER, yardsticks=yardsticks)
    return Search(graphs, costs, limit, options, None, Restrictions(), torch.device("cpu"), lambda text: None).run()[0]


def test_limits() -> None:
    """As the limit falls, the step takes longer but for the gap, fits, and more is run again; the least named works."""
    free = search(blocks(), 2**40, mesh=1, yardsticks=True)
    assert not free.recompute
    plans = [free]
    with pytest.raises(InfeasibleError) as short:
        search(blocks(), 1000, mesh=1)
    for part in (0.75, 0.4, 0.0):
        limit = round(short.value.least + part * (free.memory["peak"] - short.value.least))
        plan = search(blocks(), limit, mesh=1, yardsticks=True)
        assert plan.memory["peak"] <= limit
        assert plan.memory["solver estimate"] == pytest.approx(plan.memory["peak"], rel=0.02)
        plans.append(plan)
    assert all(tighter.seconds >= (1 - SOLVER.gap) * wider.seconds for wider, tighter in pairwise(plans))
    assert plans[-1].seconds > free.seconds
    assert 0 < len(plans[1].recompute) < len(plans[-1].recompute)
    assert "run again in backward" in plan.summary()
    for plan in plans:  # templates too run again what the plan does, rather than not to fit
        assert {"data", "zero3", "megatron"} <= plan.yardsticks.keys()
        assert min(plan.yardsticks.values()) >= (1 - 1e-9) * plan.seconds


def test_a_limit_that_no_plan_comes_near_is_not_short() -> None:
    """Also where no plan can be proven to be the best: that is not for want of memory."""
    graph, costs = step("llama", False).graph, Costs(load_cluster(CLUSTER), parse_mesh((2, 2)))
    options, said = replace(SOLVER, gap=0.0, yardsticks=False), list[str]()
    plan = MakePlan(costs, options, 2**40).apply(graph, said.append)
    assert plan.bound_seconds < plan.seconds
    assert not plan.solver["memory_binds"] and not plan.recompute
    assert not [line for line in said if "memory is short" in line]


def test_bound_where_only_what_runs_again_costs() -> None:
    """Values are used without a price in backward, and with one where the op that reads them runs again there."""
    space = BuildSpace(Costs(load_cluster(CLUSTER), parse_mesh((2, 2)))).apply(step("llama", False).graph)
    free = FindBound().apply(BuildProblem(SOLVER).apply(space))
    assert FindBound(2**40).apply(any_set(space, SOLVER)).lower == pytest.approx(free.lower, rel=0.01)


def test_kept_in_json() -> None:
    """A plan from before there was recomputation has none."""
    plan = search(blocks(checkpointed=True), 2**40)
    assert plan.recompute
    assert Plan.from_json(plan.to_json()).recompute == plan.recompute
    data = json.loads(plan.to_json())
    del data["recompute"]
    for row in data["rows"]:
        del row["again"]
    assert Plan.from_json(json.dumps(data)).recompute == []


@pytest.mark.parametrize("name", ["data", "zero3", "megatron", "ring"])
def test_estimate_of_templates(name: str) -> None:
    graphs = Graphs(step("llama", False).graph, Dumper(None))
    costs = Costs(load_cluster(CLUSTER), parse_mesh(2))
    found = Search(graphs, costs, 2**40, SOLVER, name, Restrictions(), torch.device("cpu"), lambda text: None)
    plan, _ = found.run()
    assert 0.98 <= plan.memory["solver estimate"] / plan.memory["peak"] <= 1.05


def test_marks_of_the_user() -> None:
    """What is inside of a checkpoint is run again, what leaves it is saved."""
    graph = blocks(checkpointed=True).plain
    names = marked(graph)
    assert names
    plan = search(blocks(checkpointed=True), 2**40)
    saved = {key[0] for key in orders(graph, frozenset(plan.recompute)).saved}
    assert set(plan.recompute) <= names
    assert not saved & names
    assert plan.memory["peak"] < search(blocks(), 2**40).memory["peak"]
    relaxed = replace(SOLVER, honour_checkpoints=False)
    costs = Costs(load_cluster(CLUSTER), parse_mesh(2))
    assert MakePlan(costs, relaxed, 2**40).apply(graph).recompute == []


def test_plan_for_other_sizes() -> None:
    torch.manual_seed(0)
    model = Blocks(2, 32, checkpointed=True).double()
    compiled = st.compile_model(model, (torch.randn(8, 4, 32).double(),), mesh=2, cluster=CLUSTER, solver=SOLVER)
    assert compiled.plan.recompute
    x = torch.randn(6, 4, 32, dtype=torch.float64)
    again = st.compile_model(model, (x,), mesh=2, cluster=CLUSTER, solver=SOLVER, plan=compiled.plan)
    assert again.plan.recompute == compiled.plan.recompute
    result = again.run_in_process(x)
    model(x).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


class Decoder(nn.Module):
    """Llama-shaped."""

    def __init__(self, layers: int, checkpointed: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4000, 64), nn.Linear(64, 4000, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.RMSNorm(64), "qkv": nn.Linear(64, 192), "out": nn.Linear(64, 64)}
                | {"norm2": nn.RMSNorm(64), "up": nn.Linear(64, 256), "down": nn.Linear(256, 64)}
            )
            for _ in range(layers)
        )
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            part = partial(self._layer, layer)
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def _layer(self, layer: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + layer["out"](nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + layer["down"](nn.functional.silu(layer["up"](layer["norm2"](x))))


@cache
def decoder(checkpointed: bool) -> Graphs:
    with torch.device("meta"):
        model, ids = Decoder(2, checkpointed), torch.zeros(2, 2**14, dtype=torch.long)
    return Graphs(annotate(capture(model, (ids,))), Dumper(None))


def test_as_lean_as_checkpoints() -> None:
    """Without marks the solver finds a plan that needs no more than one with each layer in a checkpoint."""
    costs = Costs(load_cluster(CLUSTER), parse_mesh(4))

    def least(checkpointed: bool) -> int:
        with pytest.raises(InfeasibleError) as short:
            MakePlan(costs, SOLVER, 1).apply(decoder(checkpointed).of("all"))
        return short.value.least

    assert least(checkpointed=False) <= 1.01 * least(checkpointed=True)


def test_the_least_that_is_named_is_found_again() -> None:
    """Under that limit, by a pass that shares what was worked out under the one that was too small."""
    maker = MakePlan(Costs(load_cluster(CLUSTER), parse_mesh(4)), SOLVER, 1)
    graph = decoder(checkpointed=False).of("all")
    with pytest.raises(InfeasibleError) as short:
        maker.apply(graph)
    plan = replace(maker, memory_limit=short.value.least).apply(graph)
    assert plan.memory["solver estimate"] <= short.value.least


def test_sets_tried() -> None:
    """The quick way to bytes and seconds of one assignment agrees with the problem of the same set."""
    graph = decoder(checkpointed=False).of("all")
    space = BuildSpace(Costs(load_cluster(CLUSTER), parse_mesh((2, 2)))).apply(graph)
    roots = BuildProblem(SOLVER).apply(space).roots
    draw = random.Random(0)
    choice = {root: draw.randrange(count) for root, count in roots.items()}
    trial = TrySets(space, choice, SOLVER)
    may = MayAgain(graph)
    some = [frozenset(draw.sample(sorted(may.classes), len(may.classes) // part)) for part in (2, 3)]
    for classes in (frozenset[int](), *some, *map(may.all_but, FindCuts(may).apply(space, choice)[:2])):
        again = frozenset(op.name for op in graph.ops if op.klass in classes)
        problem = BuildProblem(SOLVER, again=again).apply(only_chosen(space, choice))
        only = dict.fromkeys(problem.roots, 0)
        assert trial.at(again).nbytes == memory_bytes(problem, only)
        assert trial.at(again).seconds == pytest.approx(evaluate(problem, only), rel=1e-5)
