"""Linear layers under 2-D temporal maps: no redistribution between them, and q-1 exchanges in each of their phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Link
from stpart_compiler.ir.layout import local_shape
from stpart_compiler.ir.program import Instr
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.strategies import is_contraction

INNER, HIDDEN = 12, 18
SOLVER = st.SolverOptions(time_limit_s=30, patience_s=1)
# At these sizes latencies decide on ordinary links; here it is the bytes.
CLUSTER = replace(st.load_cluster("cpu-gloo"), levels=((None, Link(1e-9, 1e7)),))


class Compiled:
    """An MLP under template primepar, with what one device computes."""

    def __init__(
        self, q: int, tokens: tuple[int, ...], *, layers: int = 2, bias: bool = False, activation: bool = True
    ) -> None:
        torch.manual_seed(q)
        widths = [HIDDEN if i % 2 else INNER for i in range(layers + 1)]
        parts: list[nn.Module] = []
        for a, b in pairwise(widths):
            parts += [nn.Linear(a, b, bias=bias), *([nn.GELU()] if activation else [])]
        self.model = nn.Sequential(*parts).double()
        self.x = torch.randn(*tokens, INNER, dtype=torch.float64)
        weight = torch.randn(widths[-1], dtype=torch.float64)
        loss_fn = lambda y: (y * weight).sum()  # noqa: E731
        self.compiled = st.compile_model(
            self.model,
            (self.x,),
            mesh=(q, q),
            template="primepar",
            loss_fn=loss_fn,
            solver=SOLVER,
            cluster=CLUSTER,
        )
        self.loss = loss_fn(self.model(self.x))
        self.loss.backward()

    @property
    def contractions(self) -> list[OpNode]:
        graph, _ = self.compiled._annotated()
        return [op for op in graph.ops if is_contraction(op.rule)]

    @property
    def loss_node(self) -> str | None:
        graph, _ = self.compiled._annotated()
        return graph.captured.outputs[0].node

    def check(self) -> None:
        """Loss and every gradient are those of one device."""
        result = self.compiled.run_in_process(self.x)
        assert abs(result.loss - self.loss) <= 1e-10 * abs(self.loss)
        for name, param in self.model.named_parameters():
            assert (result.grads[name] - param.grad).norm() <= 1e-10 * param.grad.norm(), name

    def messages(self, rank: int) -> Iterator[Instr]:
        for phase in ("forward", "backward"):
            body = getattr(self.compiled.artifacts[rank], phase).body
            yield from (instr for instr in body if instr.kind in ("exchange", "collective"))


CASES = [
    pytest.param((2, (12,), {"activation": False}), id="2x2, 2-D, linear"),
    pytest.param((2, (4, 6), {}), id="2x2, 3-D"),
    pytest.param((2, (12,), {"layers": 3}), id="2x2, 2-D, three layers"),
    pytest.param((3, (18,), {}), id="3x3, 2-D"),
    pytest.param((3, (6, 6), {}), id="3x3, 3-D"),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[int, int, Compiled]:
    q, tokens, options = request.param
    return q, options.get("layers", 2), Compiled(q, tokens, **options)


def test_nothing_is_redistributed(case: tuple[int, int, Compiled]) -> None:
    """The only transfer that is no step of a product is the sum of the loss over ranks."""
    q, _, made = case
    for rank in range(q * q):
        moved = [instr.origin for instr in made.messages(rank) if instr.origin.note != "temporal"]
        assert {where.node for where in moved} == {made.loss_node}, [str(where) for where in moved]
    made.check()


def test_each_phase_exchanges_q_minus_1_times(case: tuple[int, int, Compiled]) -> None:
    """Forward, the weight's gradient and (but for the first layer) the input's: q steps, both operands move between."""
    q, layers, made = case
    names = [op.name for op in made.contractions]
    assert len(names) == 3 * layers - 1
    for rank in range(q * q):
        steps = [instr for instr in made.messages(rank) if instr.origin.note == "temporal"]
        assert all(instr.kind == "exchange" and len(instr.sends) == len(instr.recvs) == 2 for instr in steps)
        found = Counter((instr.origin.node, instr.origin.step) for instr in steps)
        assert found == Counter((name, step) for name in names for step in range(q - 1))


def test_weights_are_used_as_they_rest(case: tuple[int, int, Compiled]) -> None:
    """Each rank holds 1/q² of each weight; neither it nor its gradient changes its layout, not even locally."""
    q, _, made = case
    interface = made.compiled.interface
    graph, _ = made.compiled._annotated()
    still = {info.node for info in graph.captured.params} | {node for node in graph.captured.grads.values()}
    for rank in range(q * q):
        for slot in interface.params:
            assert math.prod(local_shape(slot.layout, interface.mesh, rank)) * q * q == math.prod(slot.shape)
        artifact = made.compiled.artifacts[rank]
        bodies = [*artifact.forward.body, *artifact.backward.body]
        assert not [str(i.origin) for i in bodies if i.origin.note == "re-layout" and i.origin.node in still]


@pytest.mark.parametrize("q", [2, 3])
def test_with_biases_only_biases_are_redistributed(q: int) -> None:
    made = Compiled(q, (6, 6), bias=True)
    for rank in range(q * q):
        for instr in made.messages(rank):
            if instr.origin.note != "temporal":
                sizes = [value.numel for value in (*instr.inputs(), *(out for out in instr.outs if out is not None))]
                assert max(sizes) <= HIDDEN < 36 * INNER // (q * q), str(instr.origin)
    made.check()


def test_beside_a_cut_on_a_third_axis_nothing_of_the_middle_is_redistributed() -> None:
    """{K, P2x2} and {N, P2x2}: outside of the loops no weight moves, no gradient of one, nothing between the layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INNER, 96, bias=False), nn.GELU(), nn.Linear(96, INNER, bias=False)).double()
    x = torch.randn(4, 6, INNER, dtype=torch.float64)
    options = {"mesh": (2, 4), "solver": SOLVER, "cluster": CLUSTER}
    compiled = st.compile_model(model, (x,), loss_fn=torch.sum, template="primepar", **options)
    assert compiled.interface.mesh.sizes == (2, 2, 2)
    graph, placement = compiled._annotated()
    products = [placement.strategies[op.name] for op in graph.ops if is_contraction(op.rule)]
    assert [strategy.steps for strategy in products] == [2] * 5
    for artifact in compiled.artifacts:
        moved = [i for i in (*artifact.forward.body, *artifact.backward.body) if i.kind in ("exchange", "collective")]
        others = [i.origin for i in moved if i.origin.note != "temporal"]
        assert others and not [str(where) for where in others if 96 in graph.values[where.node, 0].shape]
    loss = model(x).sum()
    loss.backward()
    result = compiled.run_in_process(x)
    assert abs(result.loss - loss) <= 1e-10 * abs(loss)
    for name, param in model.named_parameters():
        assert (result.grads[name] - param.grad).norm() <= 1e-10 * param.grad.norm(), name
    space = st.compile_model(model, (x,), loss_fn=torch.sum, template="primepar_space", **options)
    assert space.interface.mesh.sizes == (2, 2, 2)
    assert space.plan.seconds <= compiled.plan.seconds, "its space has these maps too"


def test_one_axis_of_square_size_will_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    loss_fn = torch.sum
    compiled = st.compile_model(model, (x,), mesh=4, template="primepar", loss_fn=loss_fn, solver=SOLVER)
    assert compiled.interface.mesh.sizes == (2, 2)
    loss = loss_fn(model(x))
    assert abs(compiled.run_in_process(x).loss - loss) <= 1e-10 * abs(loss)


def test_needs_a_square() -> None:
    with pytest.raises(ValueError, match="primepar.*two mesh axes of equal size"):
        st.compile_model(nn.Linear(8, 8), (torch.randn(8, 8),), mesh=(2, 3), template="primepar", loss_fn=torch.sum)
