"""Transfers: ring collectives' numbers, duplex, order, temporal loops, and memory of parameters."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stpart_compiler.cost_models.cluster import Cluster, Device, Link, load_cluster
from stpart_compiler.cost_models.communication import (
    COLLECTIVES,
    LinkCost,
    collective_seconds,
    exchange_seconds,
    p2p_seconds,
    temporal_seconds,
)
from stpart_compiler.cost_models.memory import OptimizerModel, parameter_bytes
from stpart_compiler.ir.mesh import Mesh

LINK = Link(1e-5, 1e9)
HALF = Link(1e-5, 1e9, full_duplex=False)
GIB = 2**30


def test_ring_all_reduce_of_1_gib_on_8_ranks():
    expected = 2 * 7 / 8 * GIB / 1e9 + 14 * 1e-5
    assert collective_seconds("all_reduce", GIB, 8, LINK) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_other_rings_send_all_but_their_own_part(kind):
    assert collective_seconds(kind, GIB, 8, LINK) == pytest.approx(7 / 8 * GIB / 1e9 + 7e-5, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_all_reduce_counts_what_a_simulated_ring_sends(n):
    """Runs a ring on numbers: its result must be the sum, and its messages those that are paid for."""
    pieces = [[10 * rank + piece for piece in range(n)] for rank in range(n)]
    totals = [sum(pieces[rank][piece] for rank in range(n)) for piece in range(n)]
    sent = 0
    for step in range(2 * (n - 1)):
        offset = 0 if step < n - 1 else 1 + (n - 1)  # reduce first, then hand the finished pieces round
        moving = [(rank, (rank - step + offset) % n) for rank in range(n)]
        values = [pieces[rank][piece] for rank, piece in moving]
        for (rank, piece), value in zip(moving, values, strict=True):
            target = pieces[(rank + 1) % n]
            target[piece] = target[piece] + value if step < n - 1 else value
        sent += 1
    assert all(own == totals for own in pieces)
    expected = sent * (1e-5 + GIB / n / 1e9)
    assert collective_seconds("all_reduce", GIB, n, LINK) == pytest.approx(expected, rel=1e-12)


def test_half_duplex_pays_both_directions_of_an_exchange_but_not_of_p2p():
    assert exchange_seconds(1e9, HALF) == pytest.approx(2 + 1e-5)
    assert exchange_seconds(1e9, LINK) == p2p_seconds(1e9, LINK) == p2p_seconds(1e9, HALF) == pytest.approx(1 + 1e-5)
    assert collective_seconds("exchange", 1e9, 2, HALF) == exchange_seconds(1e9, HALF)


def test_messages_pay_latency_each():
    assert p2p_seconds(0, LINK, 5) == pytest.approx(5e-5)
    assert p2p_seconds(0, LINK, 0) == 0


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_group_of_one_is_free(kind):
    assert collective_seconds(kind, GIB, 1, LINK) == 0


@given(st.sampled_from(COLLECTIVES), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 64))
def test_more_bytes_are_never_cheaper(kind, one, other, n):
    low, high = sorted((one, other))
    assert collective_seconds(kind, low, n, LINK) <= collective_seconds(kind, high, n, LINK)
    assert collective_seconds(kind, low, n, LINK) <= collective_seconds(kind, low, n, HALF)
    assert collective_seconds(kind, low, n, LINK) <= collective_seconds(kind, low, n + 1, LINK)


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match=r"collective 'gossip' is unknown; use one of all_reduce, "):
        collective_seconds("gossip", 1, 2, LINK)
    with pytest.raises(ValueError, match=r"communication 'gossip' is unknown; use one of p2p, all_reduce"):
        LinkCost(load_cluster(None), Mesh(("d",), (2,)))("gossip", 2, 1.0, ("d",), 1)


def test_temporal_loop_takes_the_larger_of_compute_and_transfer():
    assert temporal_seconds(2.0, 1.0, 4) == pytest.approx(3 * 2.0 + 2.0)
    assert temporal_seconds(0.5, 1.0, 4) == pytest.approx(3 * 1.0 + 0.5)
    assert temporal_seconds(0.5, 1.0, 1) == 0.5
    assert temporal_seconds(0.5, 1.0, 4, hidden=0.8) == pytest.approx(3 * (1.0 + 0.2 * 0.5) + 0.5)
    assert temporal_seconds(0.5, 1.0, 4, odd=[2.0], last=3.0) == pytest.approx(2 * 1.0 + 2.0 + 3.0)


def test_link_cost_takes_the_link_of_the_axes_and_the_bytes_as_counted():
    fast, slow = Link(1e-6, 1e10), Link(1e-5, 1e9)
    device = Device("d", "cpu", (("float32", 1e12),), GIB, 1e11)
    cost = LinkCost(Cluster("c", device, ((4, fast), (8, slow))), Mesh(("x", "y"), (2, 4)))
    assert cost("all_reduce", 4, 1e9, ("y",), 6) == pytest.approx(0.1 + 6e-6)
    assert cost("all_reduce", 2, 1e9, ("x",), 2) == pytest.approx(1 + 2e-5)
    assert cost("p2p", 8, 1e9, ("x", "y"), 1) == pytest.approx(1 + 1e-5)
    assert cost("all_reduce", 1, 1e9, (), 0) == 0
    assert cost == LinkCost(cost.cluster, cost.mesh)
    assert hash(cost) == hash(LinkCost(cost.cluster, cost.mesh))


def test_a_transfer_costs_its_start_too():
    device = Device("d", "cpu", (("float32", 1e12),), GIB, 1e11)
    mesh = Mesh(("d",), (4,))
    devices = device, replace(device, transfer_overhead=0.5)
    plain, slow = (LinkCost(Cluster("c", each, ((None, LINK),)), mesh) for each in devices)
    for kind in (*COLLECTIVES, "p2p"):
        assert slow(kind, 4, 1e6, ("d",), 3) == pytest.approx(0.5 + plain(kind, 4, 1e6, ("d",), 3))
        assert slow(kind, 1, 1e6, (), 0) == 0


def test_link_cost_agrees_with_the_collective_it_describes():
    mesh = Mesh(("d",), (8,))
    for cluster in map(load_cluster, ("cpu-gloo", "h100-80gb-8")):
        link = cluster.link_for(("d",), mesh)
        wire = 2 * 7 / 8 * GIB
        assert LinkCost(cluster, mesh)("all_reduce", 8, wire, ("d",), 14) == collective_seconds(
            "all_reduce", GIB, 8, link
        )


def test_mesh_larger_than_the_cluster_is_refused_at_once():
    with pytest.raises(ValueError, match="joins 8 ranks"):
        LinkCost(load_cluster("a100-80gb-8"), Mesh(("d",), (9,)))


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 4), ("momentum", 3), ("sgd", 2)])
def test_parameter_bytes(optimizer, copies):
    assert parameter_bytes(1000, 2, optimizer, True) == copies * 2000
    assert parameter_bytes(1000, 2, optimizer, False) == 2000


def test_own_and_unknown_optimizers():
    assert parameter_bytes(10, 4, OptimizerModel("three", 3), True) == 200
    with pytest.raises(ValueError, match=r"optimizer 'adagrad' is unknown; use one of adamw, momentum, sgd"):
        parameter_bytes(1, 4, "adagrad", True)
