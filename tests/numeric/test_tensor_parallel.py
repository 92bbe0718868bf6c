"""Tensor parallel templates: what linear layers and attention send, and gradients against one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import pytest
import slow_ranks
import torch
from lockstep_step import lockstep_step
from torch import nn

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Link
from stpart_compiler.ir.program import Instr
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.strategies import is_contraction

SOLVER = st.SolverOptions(time_limit_s=20, patience_s=0.5, yardsticks=False)
# Transfers take about as long as compute, so that it pays to have both at once. Each rank is a host: no gaps in links.
CLUSTER = replace(slow_ranks.CLUSTER, levels=((1, Link(1e-9, 1e8)), (None, Link(1e-9, 1e8))))


class Mlps(nn.Module):
    """ids [batch, sequence] -> [batch, sequence, width]: an embedding and two MLPs without norms and biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)
        sizes = (width, hidden, width, hidden, width)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x


class Case:
    """A plan of a template, with what one device computes."""

    def __init__(self, template: str, mesh: Any, shape: tuple[int, int], width: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.model = Mlps(width, hidden).double()
        self.ids = torch.randint(0, 10, shape)
        loss_fn = lambda y: y.square().sum()  # noqa: E731
        self.compiled = st.compile_model(
            self.model, (self.ids,), mesh=mesh, template=template, loss_fn=loss_fn, cluster=CLUSTER, solver=SOLVER
        )
        self.loss = loss_fn(self.model(self.ids))
        self.loss.backward()

    def check(self) -> None:
        result = lockstep_step(self.compiled, (self.ids,), {})
        assert abs(result.loss - self.loss) <= 1e-10 * abs(self.loss)
        for name, param in self.model.named_parameters():
            assert (result.grads[name] - param.grad).norm() <= 1e-10 * param.grad.norm(), name

    @cached_property
    def ops(self) -> dict[str, OpNode]:
        graph, _ = self.compiled._annotated()
        return {op.name: op for op in graph.ops}

    @property
    def products(self) -> list[str]:
        return [name for name, op in self.ops.items() if is_contraction(op.rule)]

    def messages(self, rank: int) -> list[Instr]:
        artifact = self.compiled.artifacts[rank]
        bodies = [*artifact.forward.body, *artifact.backward.body]
        return [instr for instr in bodies if instr.kind in ("exchange", "collective")]

    def operand(self, target: str) -> str:
        """The first operand of the one op of that name."""
        (op,) = [op for op in self.ops.values() if target in str(op.call.target)]
        return op.operands[0][0]

    @property
    def loss_node(self) -> str:
        graph, _ = self.compiled._annotated()
        return str(graph.captured.outputs[0].node)


UNEVEN = [("async_tp", 3, (2, 7), 8, 10), ("async_tp", (2, 2), (3, 7), 5, 9), ("async_tp", (2, 4), (4, 8), 8, 16)]
UNEVEN += [("summa", (2, 3), (3, 7), 7, 10), ("summa", (3, 2), (4, 5), 7, 10), ("summa", (2, 4), (1, 7), 7, 9)]


@pytest.mark.parametrize("options", UNEVEN, ids=str)
def test_gradients_are_those_of_one_device(options: tuple[Any, ...]) -> None:
    case = Case(*options)
    loops = [name for name in case.products if case.compiled.plan.strategies[name].steps > 1]
    if options[0] == "async_tp":  # what backward fetches of forward is hidden: some of its products need no loop
        assert {*case.products[:4]} <= {*loops} and len(loops) >= 8
    else:
        assert not loops
    case.check()


def test_linear_layers_of_async_tp_send_one_block_between_steps() -> None:
    """Beside that only the embedding, whose table is cut by features, and the loss send anything."""
    case = Case("async_tp", 4, (2, 8), 8, 16)
    case.check()
    assert len(case.products) == 12
    assert not case.compiled.plan.params["table.weight"].is_replicated
    for rank in range(4):
        steps = [instr for instr in case.messages(rank) if instr.origin.note == "temporal"]
        assert all(len(instr.sends) == len(instr.recvs) == 1 for instr in steps)
        found = Counter((instr.origin.node, instr.origin.step) for instr in steps)
        assert found == Counter((name, step) for name in case.products for step in range(3))
        others = {instr.origin.node for instr in case.messages(rank) if instr.origin.note != "temporal"}
        assert others == {"embedding", case.operand("embedding_dense_backward"), case.loss_node}


def test_summa_reduces_only_the_loss() -> None:
    """Else blocks are gathered, and sums scattered, along one axis each; all that rests is cut on both."""
    case = Case("summa", (2, 2), (4, 8), 8, 16)
    case.check()
    plan = case.compiled.plan
    assert all({axis for d in layout.digits for axis, _ in d.coeffs} == {"r", "c"} for layout in plan.params.values())
    for name in case.products:
        assert sum(len(digits) for digits in plan.strategies[name].digits) == 2, "both axes are in use"
    for rank in range(4):
        messages = [instr for instr in case.messages(rank) if instr.origin.node != case.loss_node]
        collectives = [instr for instr in messages if instr.kind == "collective"]
        assert len(messages) - len(collectives) <= 2, "a gradient may be made along another dim than it rests"
        kinds = Counter(instr.target.__name__.split(".")[0] for instr in collectives)
        assert kinds.keys() == {"all_gather", "reduce_scatter"}
        assert all(len(instr.group) == 2 for instr in collectives)


class Attention(nn.Module):
    """x [batch, sequence, 4 * heads], written out: batch and heads are one dim of its products, as in Bloom."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(4 * heads, 4 * heads, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        each = (layer(x).view(batch, length, self.heads, 4) for layer in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2).reshape(batch * self.heads, length, 4) for y in each)
        mixed = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        return self.out(mixed.view(batch, self.heads, length, 4).transpose(1, 2).reshape(batch, length, width))


def test_megatron_cuts_heads_that_share_a_dim_with_the_batch() -> None:
    """Products of attention then send nothing: no sum of scores over parts of a head."""
    torch.manual_seed(0)
    model, x = Attention(3).double(), torch.randn(4, 5, 12, dtype=torch.float64)
    loss_fn = lambda y: y.square().sum()  # noqa: E731
    options = {"mesh": (2, 3), "template": "megatron", "cluster": CLUSTER, "solver": SOLVER}
    compiled = st.compile_model(model, (x,), loss_fn=loss_fn, **options)
    graph, _ = compiled._annotated()
    products = {op.name for op in graph.ops if "bmm" in str(op.call.target)}
    assert len(products) == 6
    for name in products:
        assert sorted(len(digits) for digits in compiled.plan.strategies[name].digits) == [0, 0, 0, 1, 1]
    bodies = [instr for artifact in compiled.artifacts for instr in (*artifact.forward.body, *artifact.backward.body)]
    assert not products & {instr.origin.node for instr in bodies if instr.kind in ("exchange", "collective")}
    result, loss = lockstep_step(compiled, (x,), {}), loss_fn(model(x))
    loss.backward()
    assert abs(result.loss - loss) <= 1e-10 * abs(loss)
    for name, param in model.named_parameters():
        assert (result.grads[name] - param.grad).norm() <= 1e-10 * param.grad.norm(), name


def test_summa_needs_two_axes() -> None:
    with pytest.raises(ValueError, match="template 'summa': needs two mesh axes .* got mesh d=3"):
        Case("summa", 3, (4, 8), 8, 16)
    assert Case("summa", 4, (4, 8), 8, 16).compiled.interface.mesh.sizes == (2, 2)
