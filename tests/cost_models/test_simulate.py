"""Hand-made programs whose time is known by arithmetic, and what must hold for generated ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stpart_compiler as st
from stpart_compiler.cost_models.cluster import Cluster, Device, Hidden, Link
from stpart_compiler.cost_models.liveness import peak_bytes
from stpart_compiler.cost_models.resting import StepPhase
from stpart_compiler.cost_models.simulate import DeadlockError, simulate
from stpart_compiler.cost_models.timeline import COLLECTIVE, COMPUTE, WAIT, Simulation
from stpart_compiler.ir.program import (
    COLLECTIVE_CHANNEL,
    P2P_CHANNEL,
    SMALL_CHANNEL,
    Builder,
    Origin,
    RankProgram,
    Value,
)
from stpart_compiler.runtime import ops

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
aten = torch.ops.aten
F32 = torch.float32
SECOND = 2000.0  # FLOPs: what `Rank.compute` does per second
KILOBYTE = 250  # elements of a float32 message of 1000 bytes

DEVICE = Device("unit", "cpu", (("float32", SECOND),), 2**30, 1e15)
QUEUED = Device("unit", "cuda", (("float32", SECOND),), 2**30, 1e15)
DUPLEX = Link(0.0, 1000.0)


def cluster(link: Link = DUPLEX, device: Device = DEVICE, *outer: tuple[int | None, Link], ranks: int | None = None):
    return Cluster("unit", device, ((ranks, link), *outer))


@dataclass
class Rank:
    """Writes one rank's program in seconds and kilobytes."""

    number: int
    build: Builder = field(init=False)
    inputs: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.build = Builder(self.number, "forward", torch.device("cpu"))
        self.build.origin = Origin("node", f"rank{self.number}")

    def input(self, *shape: int) -> Value:
        self.inputs.append(self.build.value("x", shape, F32))
        return self.inputs[-1]

    def compute(self, seconds: int) -> Value:
        a, b = self.input(10, 10), self.input(10, 10 * seconds)
        return self.build.call(aten.mm.default, (a, b), shape=(10, 10 * seconds), dtype=F32)

    def exchange(self, sends: dict[int, int], recvs: dict[int, int], tag: int = 0) -> tuple[int, ...]:
        """Kilobytes to and from each peer."""
        out = [(self.input(KILOBYTE * size), peer, tag) for peer, size in sends.items()]
        into = [((KILOBYTE * size,), F32, peer, tag) for peer, size in recvs.items()]
        return self.build.exchange(out, into)[1]

    def collective(
        self,
        kind: str,
        shape: Sequence[int],
        out: Sequence[int],
        group: Sequence[int],
        tag: int = 0,
        channel: int = COLLECTIVE_CHANNEL,
    ):
        self.build.collective(kind, self.input(*shape), group, tag, out, channel)
        return (tag,)

    def wait(self, tags: Sequence[int], channel: int = P2P_CHANNEL) -> None:
        self.build.wait(tags, channel)

    def phases(self) -> list[StepPhase]:
        program = RankProgram(self.number, "forward", self.inputs, [], self.build.body)
        return [StepPhase(program, frozenset(), 0)]


def run(ranks: Sequence[Rank], on: Cluster) -> Simulation:
    return simulate([rank.phases() for rank in ranks], on)


def ring(size: int, kilobytes: int, compute: int, on: Cluster) -> Simulation:
    """Each rank sends to the next while it computes."""
    ranks = [Rank(number) for number in range(size)]
    for rank in ranks:
        tags = rank.exchange({(rank.number + 1) % size: kilobytes}, {(rank.number - 1) % size: kilobytes})
        rank.compute(compute)
        rank.wait(tags)
    return run(ranks, on)


def test_a_transfer_shorter_than_the_compute_beside_it_is_hidden():
    found = ring(4, kilobytes=3, compute=5, on=cluster())
    assert (found.seconds, found.exposed_seconds, found.compute_seconds) == (5.0, 0.0, 5.0)
    assert [x.end for x in found.timeline[2].intervals if x.kind == "recv"] == [3.0]


def test_the_rest_of_a_longer_transfer_is_exposed():
    found = ring(4, kilobytes=8, compute=5, on=cluster())
    assert (found.seconds, found.exposed_seconds) == (8.0, 3.0)
    (wait,) = (x for x in found.timeline[0].intervals if x.kind == WAIT)
    assert (wait.start, wait.end, wait.module_path) == (5.0, 8.0, "rank0")


@pytest.mark.parametrize(("hidden", "seconds"), [(1.0, 5.0), (0.5, 6.5), (0.0, 8.0)])
def test_compute_and_the_transfers_beside_it_disturb_each_other(hidden: float, seconds: float):
    """3 s of transfer beside 5 s of compute, in a loop or in a re-layout; of two at once it is paid once."""
    of_loops, of_others = (replace(cluster(), hidden=Hidden(*parts)) for parts in ((hidden, 1.0), (1.0, hidden)))
    for step, on in ((0, of_loops), (None, of_others)):
        ranks = [Rank(0), Rank(1)]
        for rank in ranks:
            rank.build.origin = Origin("node", step=step)
            tags = [rank.exchange({1 - rank.number: 1}, {1 - rank.number: 1}, tag) for tag in (0, 1, 2)]
            rank.compute(5)
            for each in tags:
                rank.wait(each)
        found = run(ranks, on)
        assert found.seconds == pytest.approx(seconds)
        assert found.exposed_seconds == pytest.approx(seconds - 5.0)


def test_both_directions_share_a_link_that_is_not_full_duplex():
    assert ring(4, kilobytes=3, compute=1, on=cluster(Link(0.5, 1000.0, full_duplex=False))).seconds == 6.5


def test_messages_to_several_peers_share_the_way_out_and_their_latencies_follow_each_other():
    ranks = [Rank(0), Rank(1), Rank(2)]
    ranks[0].wait(ranks[0].exchange({1: 3, 2: 3}, {}))
    for rank in ranks[1:]:
        rank.wait(rank.exchange({}, {0: 3}))
    found = run(ranks, cluster(Link(1.0, 1000.0)))
    # the first goes alone from 1 to 2; then both at half rate until it is done, at 6; then the rest of the second
    assert [rank.end for rank in found.timeline] == [7.0, 6.0, 7.0]


def test_ranks_of_a_host_share_its_network_card():
    inside = (4, Link(0.0, 1e6))
    pairs = {0: 4, 1: 5, 2: 6}
    ranks = [Rank(number) for number in range(8)]
    for source, target in pairs.items():
        ranks[source].wait(ranks[source].exchange({target: 2}, {}))
        ranks[target].wait(ranks[target].exchange({}, {source: 2}))
    for shared_by, seconds in ((1, 2.0), (4, 6.0)):
        outer = Link(0.0, 1000.0, shared_by=shared_by)
        assert run(ranks, Cluster("hosts", DEVICE, (inside, (8, outer)))).seconds == pytest.approx(seconds)


def test_a_wait_is_for_the_transfer_under_way_that_ends_last():
    one, other = Rank(0), Rank(1)
    tags = [rank.exchange({1 - rank.number: 2}, {}, tag=7 + rank.number) for rank in (one, other)]
    other.compute(1)
    for rank, sent in zip((one, other), tags, strict=True):
        received = rank.exchange({}, {1 - rank.number: 2}, tag=8 - rank.number)
        rank.wait((*sent, *received))
    found = run([one, other], cluster())
    # rank 0 receives from 0 to 2, and sends from 1 on, when rank 1 comes to that, to 3
    assert [(x.kind, seconds) for x, seconds in found.timeline[0].waits] == [("send", 2.0), ("recv", 1.0)]
    assert [(x.kind, seconds) for x, seconds in found.timeline[1].waits] == [("recv", 2.0)]


def test_a_message_starts_when_both_ends_are_there():
    early, late = Rank(0), Rank(1)
    early.wait(early.exchange({1: 2}, {}))
    late.compute(3)
    late.wait(late.exchange({}, {0: 2}))
    found = run([early, late], cluster())
    assert (found.timeline[0].end, found.timeline[0].exposed_seconds) == (5.0, 5.0)
    assert (found.timeline[1].end, found.timeline[1].exposed_seconds) == (5.0, 2.0)
    assert [(x.kind, seconds) for x, seconds in found.timeline[0].waits] == [("send", 2.0), ("wait", 3.0)]


@pytest.mark.parametrize(
    ("kind", "shape", "out", "seconds"),
    [
        ("all_reduce", (1000,), (1000,), 6 * 0.5 + 6.0),  # 4 kB: 2 * 3/4 of it, in 6 messages
        ("all_gather", (250,), (4, 250), 3 * 0.5 + 3.0),
        ("reduce_scatter", (4, 250), (250,), 3 * 0.5 + 3.0),
        ("all_to_all", (4, 250), (4, 250), 3 * 0.5 + 3.0),
    ],
)
def test_a_collective_starts_with_its_last_member_and_costs_what_the_cost_model_says(kind, shape, out, seconds):
    ranks = [Rank(number) for number in range(4)]
    for rank in ranks:
        if rank.number:
            rank.compute(rank.number)
        rank.wait(rank.collective(kind, shape, out, range(4)), COLLECTIVE_CHANNEL)
    found = run(ranks, cluster(Link(0.5, 1000.0)))
    assert [rank.end for rank in found.timeline] == pytest.approx([3 + seconds] * 4)
    assert [rank.exposed_seconds for rank in found.timeline] == pytest.approx([3 + seconds - n for n in range(4)])


@pytest.mark.parametrize(("device", "first", "second"), [(DEVICE, 4.0, 4.0), (QUEUED, 2.0, 4.0)])
def test_exchanges_of_an_accelerator_follow_one_another(device, first, second):
    """Two at once share the link; one behind the other, the first has it alone."""
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        other = 1 - rank.number
        tags = [rank.exchange({other: 2}, {other: 2}, tag) for tag in (0, 1)]
        for each in tags:
            rank.wait(each)
    found = run(ranks, cluster(DUPLEX, device))
    ends = sorted(x.end for x in found.timeline[0].intervals if x.kind == "send")
    assert ends == [first, second]


@pytest.mark.parametrize(("device", "ends"), [(DEVICE, [2.0, 2.0, 4.0]), (QUEUED, [2.0, 4.0, 6.0])])
def test_a_gloo_group_runs_two_collectives_at_once(device: Device, ends: list[float]):
    """Next to no bytes, two messages of a second each."""
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        tags = [rank.collective("all_reduce", (1,), (1,), (0, 1), tag) for tag in (0, 1, 2)]
        for each in tags:
            rank.wait(each, COLLECTIVE_CHANNEL)
    found = run(ranks, cluster(Link(1.0, 1e9), device))
    assert sorted(x.end for x in found.timeline[0].intervals if x.kind == COLLECTIVE) == pytest.approx(ends)


@pytest.mark.parametrize(("device", "seconds"), [(DEVICE, 5.5), (QUEUED, 4.0)])
def test_small_collectives_take_nothing_from_accelerators(device: Device, seconds: float):
    """3 s beside 4 s of compute, half of it hidden; large ones cost either device the other half."""
    for channel, expected in ((SMALL_CHANNEL, seconds), (COLLECTIVE_CHANNEL, 5.5)):
        ranks = [Rank(0), Rank(1)]
        for rank in ranks:
            tags = rank.collective("all_reduce", (750,), (750,), (0, 1), 0, channel)
            rank.compute(4)
            rank.wait(tags, channel)
        found = run(ranks, replace(cluster(DUPLEX, device), hidden=Hidden(collectives=0.5)))
        assert found.seconds == pytest.approx(expected)


def test_a_transfer_takes_its_rank_time_to_start():
    """3 s behind 5 s of compute cost that alone; a collective also the latency of its messages."""
    link = Link(0.0, 1000.0, latencies=(("all_reduce", 1.0),))
    on = cluster(link, replace(DEVICE, transfer_overhead=0.25))
    assert ring(4, kilobytes=3, compute=5, on=on).seconds == 5.25
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.wait(rank.collective("all_reduce", (750,), (750,), (0, 1)), COLLECTIVE_CHANNEL)
    assert run(ranks, on).seconds == pytest.approx(0.25 + 2 * 1.0 + 3.0)


@pytest.mark.parametrize(("channel", "there"), [(COLLECTIVE_CHANNEL, 9.0), (SMALL_CHANNEL, 2.0)])
def test_small_collectives_do_not_queue_behind_large_ones(channel: int, there: float):
    """8 kB and 1 kB among two: one behind the other, or side by side at half the link's rate."""
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        large = rank.collective("all_reduce", (2000,), (2000,), (0, 1), 0)
        rank.wait(rank.collective("all_reduce", (250,), (250,), (0, 1), 1, channel), channel)
        rank.compute(1)
        rank.wait(large, COLLECTIVE_CHANNEL)
    found = run(ranks, cluster(DUPLEX, QUEUED))
    computed = next(x for x in found.timeline[0].intervals if x.kind == COMPUTE and x.seconds == 1.0)
    assert computed.start == pytest.approx(there)


def test_backward_follows_forward_on_each_rank():
    early, late = Rank(0), Rank(1)
    early.compute(1)
    late.compute(4)
    steps = [rank.phases() * 2 for rank in (early, late)]
    assert [rank.end for rank in simulate(steps, cluster()).timeline] == [2.0, 8.0]


def test_a_deadlock_is_named():
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        other = 1 - rank.number
        rank.wait(rank.exchange({}, {other: 1}, tag=rank.number))
        rank.wait(rank.exchange({other: 1}, {}, tag=other))
    with pytest.raises(DeadlockError, match=r"rank 0, forward, instruction 1 .*waits for tags \[0\] with ranks \[1\]"):
        run(ranks, cluster())


def test_a_collective_that_a_member_never_joins_is_a_deadlock():
    ranks = [Rank(0), Rank(1)]
    ranks[0].wait(ranks[0].collective("all_reduce", (4,), (4,), (0, 1)), COLLECTIVE_CHANNEL)
    with pytest.raises(DeadlockError, match=r"rank 0.*waits for tags \[0\] with ranks \[1\]"):
        run(ranks, cluster())


def test_two_ends_of_different_size_and_too_many_ranks_are_refused():
    ranks = [Rank(0), Rank(1)]
    ranks[0].wait(ranks[0].exchange({1: 1}, {}))
    ranks[1].wait(ranks[1].exchange({}, {0: 2}))
    with pytest.raises(ValueError, match=r"message .* has \{1000, 2000\} bytes at its two ends"):
        run(ranks, cluster())
    with pytest.raises(ValueError, match="joins 1 ranks, the step has 2"):
        run(ranks, cluster(ranks=1))


def test_a_view_that_must_copy_takes_its_time():
    device = Device("copies", "cpu", (("float32", 1e15),), 2**30, memory_bandwidth=800.0)
    rank = Rank(0)
    x = rank.input(10, 10)
    turned = rank.build.call(aten.t.default, (x,), shape=(10, 10), dtype=F32, kind="view")
    for value in (x, turned):
        rank.build.call(aten.reshape.default, (value, [100]), shape=(100,), dtype=F32, kind="view")
    found = run([rank], cluster(device=device))
    assert [(x.op, x.seconds) for x in found.timeline[0].intervals] == [("reshape", 1.0)]


@cache
def compiled(template: str) -> st.CompiledModel:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=7168,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(8, 2048, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids}
    return st.compile_model(model, (), call, mesh=4, template=template, cluster="h100-80gb-8")


@pytest.mark.parametrize("template", ["ring", "megatron", "zero3", "metp"])
def test_generated_programs(template):
    found = compiled(template).simulate()
    for rank in found.timeline:
        assert rank.end == pytest.approx(rank.compute_seconds + rank.exposed_seconds)
        assert sum(seconds for _, seconds in rank.waits) == pytest.approx(rank.exposed_seconds)
        spans = sorted((x.start, x.end) for x in rank.intervals if x.kind in ("compute", WAIT))
        assert all(one[1] <= two[0] + 1e-12 for one, two in pairwise(spans))
    assert found.seconds >= found.compute_seconds > 0
    plan = compiled(template).plan
    assert found.peak_bytes == plan.memory["step peak"]
    assert plan.seconds == pytest.approx(found.seconds, rel=0.1)
    estimate = plan.memory["solver estimate"] - plan.memory["optimizer state"]
    assert 0.98 * found.peak_bytes < estimate < 1.05 * found.peak_bytes
    again = compiled(template).simulate()
    assert [rank.intervals for rank in again.timeline] == [rank.intervals for rank in found.timeline]


@pytest.mark.parametrize("template", ["megatron", "megatron_sp", "async_tp"])
def test_prices_over_hosts_know_what_runs_beside_what(template):
    """Gradients of activations, and activations gathered once more, beside products; loops in hosts beside cards."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, vocab_size=256)
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(32, 2048, dtype=torch.long)
    call, on = {"input_ids": ids, "labels": ids}, "v100-32gb-8x4"
    made = st.compile_model(model, (), call, mesh=(2, 4), template=template, cluster=on, memory_limit=2**40)
    assert made.plan.seconds == pytest.approx(made.simulate().seconds, rel=0.03)


@pytest.mark.parametrize("template", ["data", "zero3", "megatron", "ring"])
def test_prices_know_how_ranks_that_share_cores_wait(template: str):
    """Latency of a message, and the time to start it, are most of a small step; collectives in a row wait in pairs."""
    link = Link(1e-3, 2e9, full_duplex=False, latencies=(("all_gather", 6e-4), ("reduce_scatter", 5e-4)))
    device = Device("core", "cpu", (("float32", 4e10),), 2**34, 2e10, 1e-5, transfer_overhead=2e-4)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=896, num_attention_heads=4, num_hidden_layers=2, vocab_size=512
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(8, 128, dtype=torch.long)
    on = Cluster("cores", device, ((None, link),), hidden=Hidden(0.0, 0.1))
    made = st.compile_model(model, (), {"input_ids": ids, "labels": ids}, mesh=4, template=template, cluster=on)
    assert made.plan.seconds == pytest.approx(made.simulate().seconds, rel=0.16)


def test_with_nothing_hidden_a_step_is_all_its_compute_and_all_its_transfers():
    """A transfer that starts before another one and is waited for after it costs its time too."""
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        long = rank.exchange({1 - rank.number: 4}, {1 - rank.number: 4}, tag=0)
        rank.compute(3)
        rank.wait(rank.exchange({1 - rank.number: 2}, {1 - rank.number: 2}, tag=1))
        rank.wait(long)
    for part, seconds in ((0.0, 4 + 3 + 2), (0.5, 6 + 3 / 2), (1.0, 6)):
        found = run(ranks, replace(cluster(), hidden=Hidden(collectives=part)))
        assert found.seconds == pytest.approx(seconds)


def test_a_weight_is_there_when_its_product_begins():
    for rank in compiled("zero3").simulate().timeline:
        waits = [x for x in rank.intervals if x.kind == WAIT]
        assert any("q_proj" in x.module_path for x in waits)  # no product runs before it
        assert not any("mlp" in x.instr.origin.node or "mlp" in x.module_path for x in waits)


def hidden_share(template: str) -> float:
    """Share of the waiting that goes away once there is something to compute beside the same transfers."""
    base = st.load_cluster("h100-80gb-8")
    idle = replace(base.device, peak_flops=(("bfloat16", 1e30),), memory_bandwidth=1e30, launch_overhead=0.0)
    alone = compiled(template).simulate(replace(base, device=idle))
    assert alone.compute_seconds < 1e-3 * alone.exposed_seconds
    return 1 - compiled(template).simulate().exposed_seconds / alone.exposed_seconds


def test_a_ring_hides_its_transfers_and_megatron_does_not():
    """But for what Megatron reduces of an activation's gradient beside the product that makes a weight's."""
    assert hidden_share("ring") > 0.5
    assert hidden_share("megatron") < 0.3


def test_memory_over_time_has_the_peak_of_the_programs():
    (rank, *_) = compiled("ring").simulate().timeline
    times = [time for time, _ in rank.memory]
    assert times == sorted(times)
    totals = [peak_bytes(phase.program, phase.kept).peak_bytes + phase.beside for phase in rank.phases]
    assert rank.peak_bytes == max(totals)


def test_trace_has_a_process_per_rank_and_slices_that_do_not_cross(tmp_path: Path):
    compiled("ring").simulate().trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {n}" for n in range(4)]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "send", "recv", "collective"} <= tracks
    assert any(e["name"] == "mm model.layers.0.mlp.gate_proj" for e in events)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        spans.sort()
        assert all(one[1] <= two[0] + 1e-6 for one, two in pairwise(spans))
