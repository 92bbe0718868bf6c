"""What messages share of links: prices of a loop's step are those of the simulation of its messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stpart_compiler.cost_models.cluster import Cluster, Device, Link
from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.resting import StepPhase
from stpart_compiler.cost_models.simulate import simulate
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.program import P2P_CHANNEL, Builder, RankProgram
from stpart_compiler.ir.spacetime import Shift
from stpart_compiler.runtime import ops

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
F32 = torch.float32
DEVICE = Device("idle", "cuda", (("float32", 1e30),), 2**40, 1e30)
INNER, CARD = Link(0.0, 64e9), Link(0.0, 6.4e9, shared_by=4)
HOSTS = Cluster("hosts", DEVICE, ((4, INNER), (32, CARD)))


def seconds_of(mesh: Mesh, shifts: tuple[Shift, ...], sizes: tuple[int, ...], cluster: Cluster) -> float:
    """Every rank sends, for each shift, so many elements to the rank there, all at once: simulated."""
    steps = []
    for rank in range(mesh.world_size):
        build = Builder(rank, "forward", torch.device("cpu"))
        sends, recvs, inputs = [], [], []
        for tag, (shift, size) in enumerate(zip(shifts, sizes, strict=True)):
            inputs.append(build.value("x", (size,), F32))
            back = {axis: -by for axis, by in shift}
            sends.append((inputs[-1], mesh.shifted(rank, dict(shift)), tag))
            recvs.append(((size,), F32, mesh.shifted(rank, back), tag))
        build.wait(build.exchange(sends, recvs)[1], P2P_CHANNEL)
        steps.append([StepPhase(RankProgram(rank, "forward", inputs, [], build.body), frozenset(), 0)])
    return simulate(steps, cluster).seconds


def test_a_ring_over_hosts_crosses_each_card_once_and_shifts_farther_more_often() -> None:
    """Sixteen ranks in a row are on four cards: to the next rank goes one message over each, by four places four."""
    cost, mesh = LinkCost(HOSTS, parse_mesh((2, 16))), ("r", "c")
    alone, far, outer = (cost.moves(((shift,),)) for shift in (("c", 1), ("c", 4), ("r", 1)))
    assert mesh == cost.mesh.axes
    assert alone.bandwidth([1.0]) == 6.4e9
    assert far.bandwidth([1.0]) == outer.bandwidth([1.0]) == 1.6e9
    both = cost.moves(((("c", 1),), (("r", 1),)))
    assert both.seconds([1e9, 1e9]) == pytest.approx(5 / 6.4)  # of each card one and four messages


LINKS = st.builds(
    Link, latency=st.sampled_from([0.0, 1e-5]), bandwidth=st.sampled_from([4e9, 2e10]), full_duplex=st.booleans()
)
CARDS = st.builds(
    Link,
    latency=st.sampled_from([0.0, 3e-5]),
    bandwidth=st.sampled_from([5e8, 6e9]),
    full_duplex=st.booleans(),
    shared_by=st.sampled_from([1, 2, 4]),
)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.sampled_from([(8,), (16,), (2, 4), (4, 2), (2, 8), (8, 2), (2, 2, 2), (3, 4)]),
    inner=LINKS,
    outer=CARDS,
    data=st.data(),
)
def test_prices_of_moves_are_those_of_the_simulation(
    sizes: tuple[int, ...], inner: Link, outer: Link, data: st.DataObject
) -> None:
    """Exactly for one tensor; of two, a message may run beside the latency of the other, or wait for its other end."""
    mesh = parse_mesh(sizes)
    cluster = Cluster("hosts", DEVICE, ((4, inner), (16, outer)))
    axes = [(axis, size) for axis, size in mesh.size.items() if size > 1]
    drawn = st.lists(st.sampled_from(axes), min_size=1, unique=True)
    shift = drawn.flatmap(lambda some: st.tuples(*(st.tuples(st.just(a), st.integers(1, n - 1)) for a, n in some)))
    shifts = tuple(data.draw(st.lists(shift, min_size=1, max_size=2)))
    numbers = tuple(data.draw(st.sampled_from([10, 10**5, 10**7])) for _ in shifts)
    priced = LinkCost(cluster, mesh).moves(shifts).seconds([4.0 * n for n in numbers])
    taken = seconds_of(mesh, shifts, numbers, cluster)
    if len(shifts) == 1:
        assert taken == pytest.approx(priced, rel=1e-6)
    else:
        assert 0.75 * priced < taken < 1.5 * priced
