"""Algorithms of collectives: they send what runs of them on numbers send; prices are those of the simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stpart_compiler.cost_models.cluster import Cluster, Device, Link, groups_along
from stpart_compiler.cost_models.collectives import (
    ALGORITHMS,
    BETWEEN,
    HIERARCHICAL,
    INSIDE,
    RING,
    TREE,
    members,
    phases,
    traffic,
)
from stpart_compiler.cost_models.communication import LinkCost, collective_seconds
from stpart_compiler.cost_models.resting import StepPhase
from stpart_compiler.cost_models.simulate import simulate
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.program import COLLECTIVE_CHANNEL, Builder, RankProgram
from stpart_compiler.runtime import ops

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
F32 = torch.float32
DEVICE = Device("idle", "cuda", (("float32", 1e30),), 2**40, 1e30)
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def ups(low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """(child, parent, depth of the child) in a balanced search tree over ranks low, ..., high - 1."""
    todo = [(low, high, -1, 0)]
    while todo:
        low, high, parent, depth = todo.pop()
        if low >= high:
            continue
        root = (low + high) // 2
        if parent >= 0:
            yield root, parent, depth
        todo += [(low, root, root, depth + 1), (root + 1, high, root, depth + 1)]


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16, 32])
def test_no_rank_of_two_trees_sends_more_than_is_paid_for(n: int) -> None:
    """A half of the tensor goes up and down each of them; the second one's ranks are moved on by one."""
    sent: Counter[int] = Counter()
    deepest = 0
    for moved in (0, 1):
        for child, parent, depth in ups(0, n):
            sent[(child + moved) % n] += 1
            sent[(parent + moved) % n] += 1
            deepest = max(deepest, depth)
    (tree,) = phases("all_reduce", TREE, n)
    assert 2 * deepest <= tree.messages <= traffic("all_reduce", n)[1]
    if n in (2, 3, 7):  # full trees, in which a leaf of one is inside of the other
        assert max(sent.values()) / 2 <= tree.share
    assert tree.share >= traffic("all_reduce", n)[0]


@pytest.mark.parametrize(("inside", "hosts"), [(4, 2), (2, 3), (3, 4)])
def test_a_hierarchical_sum_is_the_sum(inside: int, hosts: int) -> None:
    """On numbers: scattered in each host, summed between hosts, gathered; each phase sends what it is said to."""
    n = inside * hosts
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n * inside, dtype=torch.float64, generator=generator) for _ in range(n)]
    scatter, between, gather = phases("all_reduce", HIERARCHICAL, n, hosts)
    held: dict[int, torch.Tensor] = {}
    for part in members(range(n), INSIDE, inside):
        for i, rank in enumerate(part):
            held[rank] = sum((values[other].chunk(inside)[i] for other in part), torch.zeros(n))
    assert scatter[2:] == pytest.approx(((inside - 1) * held[0].numel() / (n * inside), inside - 1))
    for like in members(range(n), BETWEEN, inside):
        total = torch.stack([held[rank] for rank in like]).sum(0)
        held |= dict.fromkeys(like, total)
    assert between.share == pytest.approx(traffic("all_reduce", hosts)[0] * held[0].numel() / (n * inside))
    for part in members(range(n), INSIDE, inside):
        torch.testing.assert_close(torch.cat([held[rank] for rank in part]), sum(values[1:], values[0]))
    assert gather[2:] == scatter[2:]
    assert sum(phase.share for phase in (scatter, between, gather)) == pytest.approx(traffic("all_reduce", n)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hierarchical_collective_sends_is_what_a_ring_does(kind: str) -> None:
    found = phases(kind, HIERARCHICAL, 24, 3)
    assert sum(phase.share for phase in found) == pytest.approx(traffic(kind, 24)[0])
    assert not phases(kind, HIERARCHICAL, 3, 3) and not phases(kind, HIERARCHICAL, 3, 1)


def test_the_cheaper_algorithm_is_taken_by_size() -> None:
    both, ring = Link(1e-5, 1e9, algorithms=(RING, TREE)), Link(1e-5, 1e9)
    assert collective_seconds("all_reduce", 100, 8, both) == pytest.approx(6e-5 + 2e-7)
    assert collective_seconds("all_reduce", 1e9, 8, both) == collective_seconds("all_reduce", 1e9, 8, ring)
    assert collective_seconds("all_gather", 100, 8, both) == collective_seconds("all_gather", 100, 8, ring)


def test_between_hosts_that_share_a_link_a_hierarchical_sum_sends_less() -> None:
    """Two hosts of four: a ring takes 7/4 of the tensor over each network card, this one the tensor once."""
    cards = Link(0.0, 1e9, shared_by=4, algorithms=(RING, HIERARCHICAL))
    cost = LinkCost(Cluster("hosts", DEVICE, ((4, Link(0.0, 1e30)), (8, cards))), Mesh(("d",), (8,)))
    assert cost("all_reduce", 8, 2 * 7 / 8 * 1e9, ("d",), 14) == pytest.approx(1.0)


def seconds_of(kind: str, groups: tuple[tuple[int, ...], ...], numel: int, cluster: Cluster) -> float:
    """Of a collective in all groups at once, simulated. `numel`: of a member's part."""
    steps = []
    for group in groups:
        n = len(group)
        shape, out = {
            "all_reduce": ((n * numel,), (n * numel,)),
            "all_gather": ((numel,), (n, numel)),
            "reduce_scatter": ((n, numel), (numel,)),
        }[kind]
        for rank in group:
            build = Builder(rank, "forward", torch.device("cpu"))
            x = build.value("x", shape, F32)
            build.collective(kind, x, group, 0, out)
            build.wait((0,), COLLECTIVE_CHANNEL)
            steps.append((rank, RankProgram(rank, "forward", [x], [], build.body)))
    phases_of = [[StepPhase(program, frozenset(), 0)] for _, program in sorted(steps, key=lambda step: step[0])]
    return simulate(phases_of, cluster).seconds


EFFICIENCY = (("all_reduce", ((1e3, 0.1), (1e6, 0.7))), ("all_gather", ((1.0, 0.5),)))
LINKS = st.builds(
    Link,
    latency=st.sampled_from([0.0, 1e-5]),
    bandwidth=st.sampled_from([4e9, 2e10]),
    full_duplex=st.booleans(),
    efficiency=st.sampled_from([(), EFFICIENCY]),
)
CARDS = st.builds(
    Link,
    latency=st.sampled_from([0.0, 3e-5]),
    bandwidth=st.sampled_from([5e8, 1e9]),
    full_duplex=st.booleans(),
    shared_by=st.sampled_from([1, 4]),
    algorithms=st.lists(st.sampled_from(ALGORITHMS), min_size=1, unique=True).map(tuple),
    efficiency=st.sampled_from([(), EFFICIENCY]),
)

MESHES = [parse_mesh(sizes) for sizes in (8, 16, (2, 4), (4, 2), (2, 8), (8, 2), (2, 2, 2), (2, 3))]


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    mesh=st.sampled_from(MESHES),
    numel=st.sampled_from([1, 1000, 10**6]),
    inner=LINKS,
    outer=CARDS,
    data=st.data(),
)
def test_prices_are_those_of_the_simulation(
    kind: str, mesh: Mesh, numel: int, inner: Link, outer: Link, data: st.DataObject
) -> None:
    """By whatever algorithm, in all groups at once, over links that hosts of four share or do not."""
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.axes), min_size=1, unique=True)))
    groups = groups_along(axes, mesh)
    n = math.prod(mesh.size[axis] for axis in axes)
    cluster = Cluster("hosts", DEVICE, ((4, inner), (16, outer)))
    share, messages = traffic(kind, n)
    priced = LinkCost(cluster, mesh)(kind, n, share * n * numel * 4.0, axes, messages)
    taken = seconds_of(kind, groups, numel, cluster)
    assert taken == pytest.approx(priced, rel=1e-6)
