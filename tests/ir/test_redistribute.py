"""Redistribution: the steps chosen, their costs, and programs that bring every layout into every other."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stpart_compiler.cost_models.cluster import Cluster, load_cluster
from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.network import Clock, Flow, Network
from stpart_compiler.ir.combine import PAIRWISE, neutral
from stpart_compiler.ir.layout import (
    Atom,
    Digit,
    Layout,
    form,
    gather,
    holders,
    local_shape,
    max_local_numel,
    pending_index,
    replicated,
    shard,
    split,
    take,
)
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.placement import volume
from stpart_compiler.ir.program import SMALL_CHANNEL, Builder, Pending, RankProgram
from stpart_compiler.ir.redistribute import (
    PLAN_ITEMSIZE,
    PlainCost,
    Redistribution,
    Step,
    StepCost,
    redistribute,
    redistribution_cost,
    step_flow,
    step_traffic,
)
from stpart_compiler.ir.relayout import Reach
from stpart_compiler.ir.rule import LOGSUMEXP, MAX, MIN
from stpart_compiler.ir.window import Window
from stpart_compiler.passes.emit_fx import emit_fx
from stpart_compiler.passes.emit_redistribute import emit_redistribution
from stpart_compiler.passes.verify import verify_programs
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.lockstep import run_lockstep
from stpart_compiler.runtime.threads import run_ranks

Layouts = Callable[[Mesh, tuple[int, ...]], st.SearchStrategy[Layout]]

LINE, SQUARE = parse_mesh(4), parse_mesh((2, 2))
MESHES = [parse_mesh(sizes) for sizes in ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))]
D, R, C, RC = form(4, d=1), form(2, r=1), form(2, c=1), form(2, r=1, c=1)
SHAPE = (8, 12)
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 12, 16, 24])


def at(*cuts: tuple[Digit, ...], partial: tuple[Digit, ...] = ()) -> Layout:
    return shard(SHAPE, dict(enumerate(cuts)), partial)


def programs(plan: Redistribution, mesh: Mesh, dtype: torch.dtype = torch.float64) -> list[RankProgram]:
    """All ranks' programs of a redistribution; every rank has used the same tags."""
    made, tags = [], set()
    for rank in range(mesh.world_size):
        builder = Builder(rank, "forward", torch.device("cpu"))
        given_ = builder.value("x", local_shape(plan.source, mesh, rank), dtype)
        out = emit_redistribution(builder, given_, plan, mesh)
        out = out.finish() if isinstance(out, Pending) else out
        made.append(RankProgram(rank, "forward", [given_], [out], builder.body))
        tags.add(builder.next_tag)
    assert len(tags) == 1
    verify_programs(made)
    return made


def check(plan: Redistribution, mesh: Mesh, layout_of_inputs: Callable[[torch.Tensor], torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(plan.source.shape, dtype=torch.float64, generator=generator)
    parts = [layout_of_inputs(part) for part in split(whole, plan.source, mesh, generator)]
    results = run_lockstep(programs(plan, mesh), [[part] for part in parts])
    got = [result for (result,) in results if result is not None]
    for rank, part in enumerate(got):
        assert tuple(part.shape) == local_shape(plan.target, mesh, rank)
    torch.testing.assert_close(gather(got, plan.target, mesh), whole, rtol=0, atol=1e-12)
    if not plan.target.partial:  # also the replicas that gather does not read
        for part, expected in zip(got, split(whole, plan.target, mesh), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)


def strided(part: torch.Tensor) -> torch.Tensor:
    """The same values in memory of another order, as after a transpose."""
    return part.permute(*reversed(range(part.dim()))).contiguous().permute(*reversed(range(part.dim())))


@settings(max_examples=600)
@given(data=st.data(), mesh=st.sampled_from(MESHES), shape=st.lists(SIZES, min_size=1, max_size=2).map(tuple))
def test_every_layout_becomes_every_other(
    data: st.DataObject, mesh: Mesh, shape: tuple[int, ...], layouts: Layouts
) -> None:
    source, target = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    plan = redistribute(source, target, mesh, data.draw(st.sampled_from([None, PlainCost(0.0), PlainCost(1.0)])))
    check(plan, mesh, data.draw(st.sampled_from([lambda part: part, strided])))


WINDOWS = [(1, 1, -1, 1), (1, 1, -2, 5), (2, 1, -1, 1), (3, 1, 0, 0), (1, 2, -2, 1), (1, 3, -4, 2), (1, 1, 2, 2)]


@st.composite
def through_windows(draw: st.DrawFn, layouts: Layouts, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """A layout of which some dims are read through windows by dims of other sizes."""
    made = draw(layouts(mesh, tuple(draw(SIZES) for _ in shape)))
    dims = []
    for atoms, size in zip(made.dims, shape, strict=True):
        window = Window(math.prod(atom.size for atom in atoms), *draw(st.sampled_from(WINDOWS)))
        digits = tuple(digit for atom in atoms for digit in atom.digits)
        dims.append((Atom(size, digits, window if digits and draw(st.integers(0, 3)) else None),))
    return Layout(tuple(dims), made.partial)


@settings(max_examples=100)
@given(data=st.data(), mesh=st.sampled_from(MESHES), shape=st.lists(SIZES, min_size=1, max_size=2).map(tuple))
def test_every_layout_becomes_one_of_halos(
    data: st.DataObject, mesh: Mesh, shape: tuple[int, ...], layouts: Layouts
) -> None:
    """Halos wider than a neighbour's block, empty blocks, corners, sums that stay pending or end on the way."""
    source, target = data.draw(layouts(mesh, shape)), data.draw(through_windows(layouts, mesh, shape))
    plan = redistribute(source, target, mesh, data.draw(st.sampled_from([None, PlainCost(0.0), PlainCost(1.0)])))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator)
    results = run_lockstep(programs(plan, mesh), [[part] for part in split(whole, source, mesh, generator)])
    got = [result for (result,) in results if result is not None]
    for summands in holders(target, mesh).values():
        for ranks in itertools.zip_longest(*summands.values()):
            wanted = take(whole, target.without_partial(), mesh, ranks[0])
            total = sum((got[rank] for rank in ranks), torch.zeros_like(wanted))
            torch.testing.assert_close(total, wanted, rtol=0, atol=1e-12)
    assert redistribution_cost(source, target, mesh, PLAN_ITEMSIZE) >= 0


def test_blocks_in_another_order_are_exchanged_and_not_gathered() -> None:
    """Minor digits are gathered first; the major one is there in both layouts, turned by one rank."""
    turned = form(2, 0, 1, r=1)
    plan = redistribute(at((), (R, C)), at((turned,)), SQUARE)
    assert [step.kind for step in plan.steps] == ["all_gather", "exchange"]
    assert str(plan.steps[0].target) == "[8, 12@r]"


def test_a_halo_costs_what_its_rows_cost() -> None:
    """A kernel of three on four blocks of rows of ten: a row from each neighbour, whatever the size of a block."""
    for rows in (32, 320):
        near = Layout(((Atom(rows, (D,), Window(rows, 1, 1, -1, 1)),), (Atom(10),)))
        (step,) = redistribute(shard((rows, 10), {0: (D,)}), near, LINE).steps
        traffic = step_traffic(step, LINE)
        assert (traffic.kind, traffic.sent, traffic.received, traffic.messages) == ("exchange", 20, 20, 2)
        summed = redistribute(shard((rows, 10), {}, (D,)), near, LINE, PlainCost(0.0))
        assert [step.kind for step in summed.steps] == ["reduce_scatter", "exchange"]
        assert redistribution_cost(shard((rows, 10), {0: (D,)}), near, LINE, 8) == pytest.approx(2 * 10e-6 + 160 / 10e9)


def test_blocks_that_overlap_are_no_parts_of_a_collective() -> None:
    """Two blocks of four of eight rows, as many as there are, but they share two and lack two."""
    mesh = parse_mesh(2)
    d = form(2, d=1)
    windows = Layout(((Atom(8, (d,), Window(2, 2, 1, 0, 3)),), (Atom(4),)))
    for source in (shard((8, 4), {}, (d,)), shard((8, 4), {1: (d,)})):
        plan = redistribute(source, windows, mesh, PlainCost(0.0))
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        results = run_lockstep(programs(plan, mesh), [[part] for part in split(whole, source, mesh, generator)])
        for rank, (got,) in enumerate(results):
            torch.testing.assert_close(got, take(whole, windows, mesh, rank), rtol=0, atol=1e-12)


@settings(max_examples=300)
@given(data=st.data(), mesh=st.sampled_from(MESHES), itemsize=st.sampled_from([2, 4, 8]))
def test_the_cost_is_that_of_the_steps(data: st.DataObject, mesh: Mesh, itemsize: int, layouts: Layouts) -> None:
    """On even sizes, for which blocks scale."""
    shape = (1680, data.draw(st.sampled_from([720, 840])))
    source, target = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    costs: list[StepCost] = [PlainCost(), LinkCost(load_cluster("v100-32gb-8x4"), mesh)]
    cost = data.draw(st.sampled_from(costs))
    plan = redistribute(source, target, mesh, cost)
    got = redistribution_cost(source, target, mesh, itemsize, cost)
    assert got == pytest.approx(steps_seconds(plan, mesh, itemsize, cost), rel=0.02)
    assert (got == 0) == all(step.kind in ("slice", "zero") for step in plan.steps)


def steps_seconds(plan: Redistribution, mesh: Mesh, itemsize: int, cost: StepCost) -> float:
    total = 0.0
    for traffic in (step_traffic(step, mesh) for step in plan.steps):
        if not traffic.messages:
            continue
        kind = "exchange" if traffic.kind == "reduce_exchange" else traffic.kind
        parts = traffic.reaches or [Reach(traffic.axes, traffic.elements, traffic.elements, traffic.messages)]
        total += max(
            cost(kind, traffic.group_size, part.elements * itemsize, part.axes, part.messages, part.mean * itemsize)
            for part in parts
        )
    return total


@settings(max_examples=100)
@given(data=st.data(), mesh=st.sampled_from([parse_mesh((2, 4)), parse_mesh((2, 2, 2))]))
def test_pieces_cost_what_they_take_on_links_that_a_host_shares(
    data: st.DataObject, mesh: Mesh, layouts: Layouts
) -> None:
    """Against all messages of a step put on the network at once: two hosts of four, whose ranks share a link.

    Axes lie within hosts or between them; one that does both costs more than it takes.
    """
    shape = (1 << 14, 1 << 12)
    source, target = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
    cluster = load_cluster("v100-32gb-8x4")
    for step in redistribute(source, target, mesh, LinkCost(cluster, mesh)).steps:
        if step.kind not in ("exchange", "reduce_exchange", "all_to_all"):
            continue
        priced = steps_seconds(Redistribution(step.source, step.target, (step,)), mesh, 4, LinkCost(cluster, mesh))
        taken = seconds_on_network(step, mesh, cluster)
        assert 0.9 * taken <= priced <= 1.6 * taken


def seconds_on_network(step: Step, mesh: Mesh, cluster: Cluster) -> float:
    """When the last message of a step has arrived, of float32."""
    clock = Clock()
    network = Network(cluster, clock)
    ended = [0.0]
    for rank, gives in enumerate(step_flow(step, mesh).gives):
        for peer, box in gives:
            network.send(0.0, Flow(rank, peer, 4.0 * volume(box), lambda now, flow: ended.append(now)))
    clock.run(network.settle)
    return max(ended)


def test_of_a_shared_link_a_busy_rank_has_more_than_its_part() -> None:
    """PrimePar's gradient to where its weight rests on two hosts: half of the ranks send across, for two each."""
    mesh = Mesh(("x", "y", "z"), (2, 2, 2))
    x, y, z = (form(2, **{axis: 1}) for axis in mesh.axes)
    source, target = shard((64, 64), {0: (y,), 1: (z,)}, (x,)), shard((64, 64), {0: (y, z), 1: (x,)})
    (step,) = redistribute(source, target, mesh).steps
    across, everywhere = step_traffic(step, mesh).reaches
    assert (across.axes, across.elements, across.mean, across.messages) == (("x", "z"), 1024, 512, 2)
    assert everywhere.elements == step_traffic(step, mesh).elements
    cost = LinkCost(load_cluster("v100-32gb-8x4"), mesh)
    assert cost("exchange", 2, 1e9, ("x",), 1, 0.5e9) == pytest.approx(
        0.5 * cost("exchange", 2, 1e9, ("x",), 1), rel=1e-3
    )


KNOWN = [
    (LINE, at((D,)), at(), ["all_gather"]),
    (LINE, at(), at((D,)), ["slice"]),
    (LINE, at(partial=(D,)), at((D,)), ["reduce_scatter"]),
    (LINE, at(partial=(D,)), at(), ["all_reduce"]),
    (LINE, at(), at(partial=(D,)), ["zero"]),
    (LINE, at((D,)), at((), (D,)), ["all_to_all"]),
    (LINE, at((D,)), at(partial=(D,)), ["all_gather", "zero"]),
    (SQUARE, at((R,), (C,)), at((R,), (RC,)), ["exchange"]),
    (SQUARE, at((R, C)), at((C, R)), ["exchange"]),
    (SQUARE, at((RC,)), at(), ["all_gather"]),
    (SQUARE, at((R,), (C,)), at((R,)), ["all_gather"]),
    (SQUARE, at((R,), (C,)), at((R, C)), ["all_to_all"]),
    (SQUARE, at((C,), partial=(R,)), at((C, R)), ["reduce_scatter"]),
    (SQUARE, at(partial=(RC,)), at((RC,)), ["reduce_scatter"]),
    (SQUARE, at(partial=(R, C)), at(partial=(R,)), ["all_reduce"]),
    (SQUARE, at(partial=(R, C)), at(partial=(R, RC)), []),
    (SQUARE, at((R,)), at((R,), (C,)), ["slice"]),
]


@pytest.mark.parametrize(
    ("mesh", "source", "target", "kinds"), KNOWN, ids=lambda x: str(x) if isinstance(x, Layout) else ""
)
def test_known_steps(mesh: Mesh, source: Layout, target: Layout, kinds: list[str]) -> None:
    plan = redistribute(source, target, mesh)
    assert [step.kind for step in plan.steps] == kinds
    check(plan, mesh, lambda part: part)


@pytest.mark.parametrize("q", [2, 3, 4, 5])
def test_skewing_one_form_moves_all_but_the_first_row(q: int) -> None:
    mesh = parse_mesh((q, q))
    r, c, rc = form(q, r=1), form(q, c=1), form(q, r=1, c=1)
    (step,) = redistribute(shard((q, q), {0: (r,), 1: (c,)}), shard((q, q), {0: (r,), 1: (rc,)}), mesh).steps
    senders = [rank for rank, gives in enumerate(step_flow(step, mesh).gives) if gives]
    assert len(senders) == q * (q - 1)
    traffic = step_traffic(step, mesh)
    assert (traffic.sent, traffic.received, traffic.messages, traffic.axes) == (1, 1, 1, ("c",))


def test_traffic_of_collectives() -> None:
    """Elements of the busiest rank, by hand, for 8 x 12 = 96 elements on four ranks."""
    cases = {
        "all_gather": (at((D,)), at(), 72, 3),
        "reduce_scatter": (at(partial=(D,)), at((D,)), 72, 3),
        "all_reduce": (at(partial=(D,)), at(), 144, 6),
        "all_to_all": (at((D,)), at((), (D,)), 18, 3),
    }
    for kind, (source, target, elements, messages) in cases.items():
        (step,) = redistribute(source, target, LINE).steps
        traffic = step_traffic(step, LINE)
        assert (traffic.kind, traffic.group_size, traffic.elements) == (kind, 4, elements)
        assert (traffic.messages, traffic.axes, step.groups) == (messages, ("d",), ((0, 1, 2, 3),))


def test_groups_of_skewed_layouts_are_in_block_order() -> None:
    (step,) = redistribute(at((RC,), (R,)), at((), (R,)), SQUARE).steps
    assert step.kind == "all_gather"
    assert step.groups == ((0, 1), (3, 2))


def test_uneven_blocks_go_piece_by_piece() -> None:
    source, target = shard((6,), {0: (D,)}), replicated((6,))
    assert [step.kind for step in redistribute(source, target, LINE).steps] == ["exchange"]
    summed = shard((6,), {}, (D,))
    assert [step.kind for step in redistribute(summed, source, LINE, PlainCost(0.0)).steps] == ["reduce_exchange"]


def test_no_step_where_blocks_lie_alike() -> None:
    source, target = at((R,), (RC,)), at((R,), (Digit((("c", 1), ("r", 3)), 2),))
    assert source != target
    assert redistribute(source, target, SQUARE).steps == ()
    assert redistribution_cost(source, target, SQUARE, 4) == 0


def test_dims_of_several_atoms() -> None:
    """A merged dim is split where the sizes allow; else the dim is made whole on the way."""
    merged, parted = Layout(((Atom(24, (R, C)),),)), Layout(((Atom(4, (R,)), Atom(6, (C,))),))
    assert [step.kind for step in redistribute(merged, parted, SQUARE).steps] == ["all_to_all"]  # 4@r.c, 6 to 4@r, 6@c
    assert redistribute(Layout(((Atom(24, (R,)),),)), parted, SQUARE).steps[0].kind == "slice"
    threes, fours = Layout(((Atom(3), Atom(8, (R,))),)), Layout(((Atom(4), Atom(6, (R,))),))
    plan = redistribute(threes, fours, SQUARE)
    assert [step.kind for step in plan.steps] == ["all_gather", "slice"]
    check(plan, SQUARE, lambda part: part)


def test_direct_exchange_receives_only_what_is_missing() -> None:
    """From rows to columns of another axis: half of the 48 elements is there already, nothing is gathered."""
    (step,) = redistribute(at((R,)), at((), (C,)), SQUARE).steps
    assert step_traffic(step, SQUARE).received == 24


def test_cheaper_links_decide() -> None:
    """Two reductions one after another save messages, one over all ranks saves volume."""
    source = at(partial=(R, C))
    slow_start = redistribute(source, at(), SQUARE, PlainCost(latency=1.0))
    slow_link = redistribute(source, at(), SQUARE, PlainCost(latency=0.0))
    assert [len(step.groups[0]) for step in slow_start.steps] == [2, 2]
    assert [len(step.groups[0]) for step in slow_link.steps] == [4]


def test_costs_of_many_ranks_stay_cheap_to_find() -> None:
    mesh = Mesh(("a", "b"), (16, 16))
    a, b = form(16, a=1), form(16, b=1)
    plan = redistribute(shard((512, 512), {0: (a, b)}), shard((512, 512), {1: (a, b)}), mesh, PlainCost(0.0))
    assert [step.kind for step in plan.steps] == ["all_to_all"]
    assert step_traffic(plan.steps[0], mesh).elements == 1020  # 255/256 of 1024


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_values_that_are_no_floats_move(dtype: torch.dtype) -> None:
    plan = redistribute(at((D,)), at((), (D,)), LINE)
    whole = torch.arange(96).reshape(SHAPE).remainder(3).to(dtype)
    parts = split(whole, plan.source, LINE)
    results = run_lockstep(programs(plan, LINE, dtype), [[part] for part in parts])
    got = [result for (result,) in results if result is not None]
    assert torch.equal(gather(got, plan.target, LINE), whole)


def test_generated_modules_over_gloo() -> None:
    """One redistribution of each kind, on real ranks."""
    wanted = {
        "slice",
        "zero",
        "exchange",
        "reduce_exchange",
        *("all_gather", "all_reduce", "reduce_scatter", "all_to_all"),
    }
    plans = [redistribute(source, target, mesh) for mesh, source, target, _ in KNOWN if mesh.world_size == 4]
    meshes = [mesh for mesh, *_ in KNOWN]
    uneven = redistribute(shard((6,), {}, (D,)), shard((6,), {0: (D,)}), LINE, PlainCost(0.0))
    plans, meshes = [*plans, uneven], [*meshes, LINE]
    assert {step.kind for plan in plans for step in plan.steps} == wanted
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(plan.source.shape, dtype=torch.float64, generator=generator) for plan in plans]
    parts = [split(w, p.source, m, generator) for w, p, m in zip(wholes, plans, meshes, strict=True)]
    modules = [[emit_fx(program) for program in programs(p, m)] for p, m in zip(plans, meshes, strict=True)]

    groups = {(SMALL_CHANNEL, group) for plan in plans for step in plan.steps for group in step.groups}

    def run(rank: int, engine: Engine) -> list[torch.Tensor]:
        engine.prepare(2, sorted(groups))
        return [made[rank]([part[rank]])[0] for made, part in zip(modules, parts, strict=True)]

    results = run_ranks(4, run)
    for i, (plan, mesh, whole) in enumerate(zip(plans, meshes, wholes, strict=True)):
        got = gather([result[i] for result in results], plan.target, mesh)
        torch.testing.assert_close(got, whole, rtol=0, atol=1e-12)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        redistribute(replicated((2, 3)), replicated((3, 2)), LINE)


def test_received_volume_is_bounded_by_the_block() -> None:
    """All pairs of plain layouts on a square: nothing is received twice unless sums are reduced."""
    cuts = [(), (R,), (C,), (R, C), (C, R)]
    found = [at(a, b) for a, b in itertools.product(cuts, repeat=2) if not set(a) & set(b)]
    for source, target in itertools.product(found, repeat=2):
        steps = redistribute(source, target, SQUARE, PlainCost(0.0)).steps
        received = sum(step_traffic(step, SQUARE).received for step in steps)
        assert received <= max_local_numel(target) <= math.prod(SHAPE)


@pytest.mark.parametrize("combine", [MAX, MIN, LOGSUMEXP])
@pytest.mark.parametrize("target", [at(), at((R,)), at((), (C,)), at(partial=(C,))], ids=str)
def test_what_does_not_add_up_combines_before_it_is_used(combine: str, target: Layout) -> None:
    """Parts, some of them neutral, on their way to a whole value, to blocks, and to a pending sum."""
    generator = torch.Generator().manual_seed(0)
    source = Layout(shard(SHAPE, {1: (R,)}).dims, (C,), combine)
    parts = [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2)]
    parts[1][:4] = neutral(combine, torch.float64)
    whole = PAIRWISE[combine](*parts)
    locals_ = [
        take(parts[pending_index(source, SQUARE, rank)[0]], source.without_partial(), SQUARE, rank) for rank in range(4)
    ]
    torch.testing.assert_close(gather(locals_, source, SQUARE), whole, rtol=0, atol=1e-14)
    plan = redistribute(source, target, SQUARE)
    assert not {step.kind for step in plan.steps} & {"all_reduce", "reduce_scatter"}
    results = run_lockstep(programs(plan, SQUARE), [[part] for part in locals_])
    torch.testing.assert_close(gather([out[0] for out in results], target, SQUARE), whole, rtol=0, atol=1e-14)
    assert redistribution_cost(source, target, SQUARE, 8) > 0
    assert source != Layout(source.dims, source.partial)
    assert str(source).endswith(f" {combine}(c)")
