"""Fetches of parameters start so early that the link and the products are busy together, and no earlier."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import Cluster, Device, Link
from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.timeline import COMPUTE, WAIT
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.ahead import Ahead
from stpart_compiler.passes.order import is_heavy, orders
from stpart_compiler.passes.propagate import Annotated

WIDTHS = (512, 512, 512, 512, 512, 2048, 512, 512, 512, 512, 2048, 512)
TOKENS = 4096
DEVICE = Device("unit", "cuda", (("float32", 1e12),), 2**33, 1e15)


def on(seconds_of_product: float) -> Cluster:
    """On two ranks, the fetch of a weight takes that part of the time of its product."""
    flops_a_byte = 2 * (TOKENS / 2) / (4 / 2)  # of a rank's half of the tokens, with half of the weight to come
    return Cluster("unit", DEVICE, ((None, Link(0.0, 1e12 / flops_a_byte / seconds_of_product)),))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, m, bias=False) for n, m in pairwise(WIDTHS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Chain(), torch.zeros(TOKENS, WIDTHS[0])


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_large_weight_does_not_wait_behind_a_small_product(share: float) -> None:
    """Fetches in forward cost the time that the link needs, from the start, before some product can run; no more."""
    model, x = chain()
    compiled = st.compile_model(model, (x,), mesh=2, cluster=on(share), template="zero3", loss_fn=torch.sum)
    intervals = compiled.simulate().timeline[0].intervals
    products = [x for x in intervals if x.kind == COMPUTE and x.op == "mm"][: len(WIDTHS) - 1]
    seconds = [x.seconds for x in products]
    fetched = accumulate(share * own for own in seconds)
    late = max(sent - done for sent, done in zip(fetched, accumulate(seconds, initial=0.0), strict=False))
    waits = [x.seconds for x in intervals if x.kind == WAIT and x.start < products[-1].start]
    assert sum(waits) == pytest.approx(late, rel=0.02)


@pytest.mark.parametrize(("inner", "outer"), [(0.1, 0.5), (0.05, 0.9)])
def test_a_fetch_in_two_transfers_hides_as_one_does(inner: float, outer: float) -> None:
    """From the other host and then from the other rank: what waits for the first one holds up neither ranks nor links.

    `inner`, `outer`: about what each takes, as part of a product.
    """
    model, x = chain()
    rate = 1e12 / TOKENS
    hosts = Cluster("unit", DEVICE, ((2, Link(0.0, rate / inner)), (None, Link(0.0, rate / 2 / outer))))
    compiled = st.compile_model(model, (x,), mesh=(2, 2), cluster=hosts, template="zero3", loss_fn=torch.sum)
    assert compiled.simulate().seconds <= 1.02 * compiled.plan.seconds


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_what_a_phase_begins_and_ends_with_is_priced(share: float) -> None:
    """Where the link is as busy as the products, the first fetches and the last reduction hide behind nothing."""
    model, x = chain()
    compiled = st.compile_model(model, (x,), mesh=2, cluster=on(share), template="zero3", loss_fn=torch.sum)
    assert compiled.plan.seconds == pytest.approx(compiled.simulate().seconds, rel=0.02)


def places(graph: Annotated, share: float) -> tuple[list[int], list[int]]:
    """Number of the product at which fetches for each op of forward begin, and those that are products."""
    ops = orders(graph).forward
    heavy = [t for t, op in enumerate(ops) if is_heavy(op)]
    begins = Ahead(graph, ops, LinkCost(on(share), parse_mesh(2))).begins()
    return [heavy.index(begins[t]) for t in heavy], heavy


def test_fetches_begin_in_order_and_one_product_ahead_where_the_link_is_fast() -> None:
    model, x = chain()
    graph = annotate(capture(model, (x,), loss_fn=torch.sum))
    fast, heavy = places(graph, 0.01)
    assert fast == [0, *range(len(heavy) - 1)]
    slow, _ = places(graph, 1.0)
    assert slow == sorted(slow)
    assert slow[4] == 0  # 512 x 2048: as much as the four products before it, whose own fetches come first
    assert all(slow[n] < fast[n] for n in (2, 3, 4))
