"""Rank programs that are right, and the same broken by hand: each is refused with rank, instruction and tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stpart_compiler.ir.program import Builder, Instr, Origin, RankProgram, Value
from stpart_compiler.passes.verify import verify_handover, verify_programs
from stpart_compiler.passes.verify_rank import VerificationError
from stpart_compiler.runtime import ops

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
aten = torch.ops.aten
CPU = torch.device("cpu")
F64 = torch.float64
WORLD = 3
SHAPE = (2, 3)


def ring(rank: int, world: int = WORLD) -> RankProgram:
    """Sum of all ranks' blocks, which travel a ring in double buffers: step t+1's transfer runs beside step t's sum."""
    build = Builder(rank, "forward", CPU)
    x = Value(build.name("x"), SHAPE, F64)
    total = build.call(aten.mul.Tensor, (x, 1.0), shape=SHAPE, dtype=F64, stem="total")
    moving, ahead, behind = x, (rank + 1) % world, (rank - 1) % world
    for step in range(1, world):
        build.origin = Origin("sum", "layers.0", "ring", step)
        tag = build.reserve()
        received, tags = build.exchange([(moving, ahead, tag)], [(SHAPE, F64, behind, tag)], "moved")
        scaled = build.call(aten.mul.Tensor, (total, 2.0), shape=SHAPE, dtype=F64, stem="scaled")
        build.wait(tags, 0)
        moving = received[0]
        total = build.call(aten.add.Tensor, (scaled, moving), shape=SHAPE, dtype=F64, stem="total")
    return RankProgram(rank, "forward", [x], [total], build.body)


def rings() -> list[RankProgram]:
    return [ring(rank) for rank in range(WORLD)]


def place(program: RankProgram, kind: str, number: int = 0) -> int:
    """Position of the instruction of a kind, the `number`-th."""
    return [index for index, instr in enumerate(program.body) if instr.kind == kind][number]


def refused(programs: list[RankProgram], *parts: str) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_programs(programs)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    return str(caught.value)


def call(target: object, args: tuple[object, ...], out: str | None, shape: tuple[int, ...] = SHAPE) -> Instr:
    outs = () if out is None else (Value(out, shape, F64),)
    return Instr(target, args, {}, outs, Origin("extra", "layers.0", "broken"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_with_double_buffers_is_right(world: int) -> None:
    verify_programs([ring(rank, world) for rank in range(world)])


def test_missing_receive() -> None:
    programs = rings()
    at = place(programs[1], "exchange", 1)
    instr = programs[1].body[at]
    buffer = instr.recvs[0][0]
    zeros = call(aten.mul.Tensor, (programs[1].inputs[0], 0.0), None)
    zeros.outs = (buffer,)
    args = (*instr.args[:3], [], [], [], [], *instr.args[7:])
    programs[1].body[at : at + 1] = [replace(instr, args=args, recvs=(), outs=()), zeros]
    refused(programs, "rank 0", "layers.0: sum (ring, step 2)", "tensor moved", "sent to rank 1", "tag 1", "receive")


def test_missing_send() -> None:
    programs = rings()
    at = place(programs[1], "exchange", 1)
    instr = programs[1].body[at]
    programs[1].body[at] = replace(instr, args=([], [], [], *instr.args[3:]), sends=())
    refused(
        programs,
        "rank 2",
        "step 2",
        "tensor moved_1",
        "received from rank 1",
        "tag 1",
        "expected a send of float64[2, 3]",
    )


def pair(first: Callable[[Builder, Value], Value], second: Callable[[Builder, Value], Value]) -> list[RankProgram]:
    """Programs of two ranks, each made by its own function from an input x."""
    programs = []
    for rank, fill in enumerate((first, second)):
        build = Builder(rank, "forward", CPU)
        x = Value(build.name("x"), SHAPE, F64)
        build.origin = Origin("n", "m", f"of rank {rank}", 7)
        programs.append(RankProgram(rank, "forward", [x], [fill(build, x)], build.body))
    return programs


def exchange_in(
    order: list[int], shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = F64, channel: int = 0
) -> Callable[[Builder, Value], Value]:
    """Sends x and receives from the other rank once per tag, all started in one order."""

    def fill(build: Builder, x: Value) -> Value:
        peer = 1 - build.rank
        for tag in order:
            build.exchange([(x, peer, tag)], [], channel=channel)
            build.exchange([], [(shape, dtype, peer, tag)], f"got{tag}", channel=channel)
        build.wait(sorted(set(order)), channel)
        return x

    return fill


def test_order_of_issue_must_agree() -> None:
    verify_programs(pair(exchange_in([0, 1]), exchange_in([0, 1])))
    refused(
        pair(exchange_in([0, 1]), exchange_in([1, 0])),
        "rank 0",
        "n (of rank 0, step 7)",
        "tensor x",
        "rank 1 receives tag 1 next (tensor got1",
        "one order on channel 0",
    )


def test_channels_do_not_match_each_other() -> None:
    refused(pair(exchange_in([0]), exchange_in([0], channel=1)), "rank 0", "tensor x", "tag 0 on channel 0", "rank 1")


def test_wrong_shape() -> None:
    programs = pair(exchange_in([0]), exchange_in([0], (3, 2)))
    refused(
        programs, "rank 0", "step 7", "tensor x", "float64[2, 3]", "expected float64[3, 2]", "tensor got0 at rank 1"
    )


def test_wrong_dtype() -> None:
    programs = pair(exchange_in([0]), exchange_in([0], SHAPE, torch.float32))
    refused(
        programs, "rank 0", "step 7", "tensor x", "as float64[2, 3]", "expected float32[2, 3]", "tensor got0 at rank 1"
    )


def test_two_messages_under_one_tag() -> None:
    refused(pair(exchange_in([0, 0]), exchange_in([0, 0])), "rank 0", "tensor x", "tag 0", "expected a tag of its own")


def test_message_to_itself_or_to_nobody() -> None:
    def fill(peer: int) -> Callable[[Builder, Value], Value]:
        def fill_(build: Builder, x: Value) -> Value:
            _, tags = build.exchange([(x, peer, 0)], [])
            build.wait(tags, 0)
            return x

        return fill_

    refused(pair(fill(0), fill(0)), "rank 0", "tensor x", "expected another rank")
    refused(pair(fill(5), fill(5)), "rank 0", "tensor x", "rank 5", "expected a rank of [0, 1]")


def test_facts_must_be_those_of_the_call() -> None:
    programs = rings()
    at = place(programs[0], "exchange")
    instr = programs[0].body[at]
    instr.sends = tuple((value, replace(message, peer=2)) for value, message in instr.sends)
    refused(programs, "rank 0", "step 1", "'x', 'moved'", "call's arguments")


def after_own_wait(build: Builder, x: Value) -> Value:
    """Sends only after it has received: two such ranks wait for each other."""
    peer = 1 - build.rank
    tags = [build.rank, peer]
    received, waits = build.exchange([], [(SHAPE, F64, peer, tags[1])], "got")
    build.wait(waits, 0)
    _, waits = build.exchange([(x, peer, tags[0])], [])
    build.wait(waits, 0)
    return received[0]


def test_cyclic_wait() -> None:
    text = refused(
        pair(after_own_wait, after_own_wait), "deadlock", "tensor got (tag 1)", "tensor got (tag 0)", "step 7"
    )
    assert text.index("rank 0, forward, instruction 1") < text.index("rank 1, forward, instruction 2")
    assert "rank 1, forward, instruction 1" in text and "rank 0, forward, instruction 2" in text


def test_rendezvous_sends_deadlock_only_when_both_wait_first() -> None:
    def send_first(build: Builder, x: Value) -> Value:
        peer = 1 - build.rank
        _, waits = build.exchange([(x, peer, build.rank)], [])
        build.wait(waits, 0)
        received, waits = build.exchange([], [(SHAPE, F64, peer, peer)], "got")
        build.wait(waits, 0)
        return received[0]

    verify_programs(pair(send_first, after_own_wait))
    refused(pair(send_first, send_first), "deadlock", "rank 0, forward, instruction 1", "tensor x (tag 0)")


def test_cycle_of_three_ranks_is_named_whole() -> None:
    programs = []
    for rank in range(WORLD):
        build = Builder(rank, "forward", CPU)
        x = Value("x", SHAPE, F64)
        received, tags = build.exchange([], [(SHAPE, F64, (rank - 1) % WORLD, 0)], "got")
        build.wait(tags, 0)
        _, tags = build.exchange([(x, (rank + 1) % WORLD, 0)], [])
        build.wait(tags, 0)
        programs.append(RankProgram(rank, "forward", [x], received, build.body))  # type: ignore[arg-type]
    text = refused(programs, "deadlock")
    assert [text.count(f"rank {rank}, forward, instruction 1") for rank in range(WORLD)] == [1, 1, 1]


def test_send_buffer_written_in_flight() -> None:
    programs = rings()
    at = place(programs[1], "exchange")
    x = programs[1].inputs[0]
    programs[1].body.insert(at + 1, call(aten.add_.Tensor, (x, 1.0), "x_new"))
    refused(programs, "rank 1", "layers.0: extra", "tensor x is written", "to rank 2", "started at instruction 1")


def test_send_buffer_written_through_a_view() -> None:
    programs = rings()
    at = place(programs[1], "exchange")
    row = call(aten.select.int, (programs[1].inputs[0], 0, 0), "row", (3,))
    row.kind = "view"
    fill = call(aten.copy_.default, (row.outs[0], row.outs[0]), "row_new", (3,))
    programs[1].body[at + 1 : at + 1] = [row, fill]
    refused(programs, "rank 1", "tensor row is written", "to rank 2")


def test_send_buffer_may_be_read_in_flight() -> None:
    programs = rings()
    at = place(programs[1], "exchange")
    programs[1].body.insert(at + 1, call(aten.neg.default, (programs[1].inputs[0],), "negative"))
    verify_programs(programs)


@pytest.mark.parametrize("through_view", [False, True])
def test_receive_buffer_read_before_its_wait(through_view: bool) -> None:
    programs = rings()
    at = place(programs[2], "exchange", 1)
    buffer = programs[2].body[at].recvs[0][0]
    view = call(aten.t.default, (buffer,), "view", (3, 2))
    view.kind = "view"
    source = view.outs[0] if through_view else buffer
    extra = [view] if through_view else []
    programs[2].body[at + 1 : at + 1] = [*extra, call(aten.neg.default, (source,), "early")]
    name = "view" if through_view else "moved_1"
    refused(programs, "rank 2", "layers.0: extra", f"tensor {name} is read", "from rank 1", "the transfer of moved_1")


def test_receive_buffer_sent_on_before_its_wait() -> None:
    programs = rings()
    wait = programs[0].body.pop(place(programs[0], "wait"))
    programs[0].body.insert(place(programs[0], "exchange", 1) + 1, wait)
    refused(programs, "rank 0", "step 1", "tensor moved is read", "from rank 2")


def test_transfer_never_waited_for() -> None:
    programs = rings()
    del programs[1].body[place(programs[1], "wait", 1)]
    del programs[1].body[-1]
    programs[1].outputs = [programs[1].inputs[0]]
    refused(programs, "rank 1", "step 2", "tensor moved", "to rank 2", "tag 1", "never waited for")


def test_transfer_waited_for_twice() -> None:
    programs = rings()
    programs[1].body.append(programs[1].body[place(programs[1], "wait", 1)])
    refused(programs, "rank 1", "step 2", "tag 1", "no tensor is in flight", "one wait after each start")


def test_use_before_definition() -> None:
    programs = rings()
    programs[2].body.append(programs[2].body.pop(0))
    refused(programs, "rank 2", "step 1", "tensor total is used before it is defined")


def test_second_definition_and_undefined_output() -> None:
    programs = rings()
    programs[0].body.append(call(aten.neg.default, (programs[0].inputs[0],), "total"))
    refused(programs, "rank 0", "layers.0: extra", "tensor total is defined a second time")
    programs = rings()
    programs[0].outputs = [Value("nowhere", SHAPE, F64)]
    refused(programs, "rank 0", "output 0", "tensor nowhere is returned but never defined")


def partial_pair(**options: bool) -> list[RankProgram]:
    """y is a pending sum over r, passed through a negation, reduced, and returned."""

    def fill(build: Builder, x: Value) -> Value:
        y = build.call(aten.mul.Tensor, (x, 2.0), shape=SHAPE, dtype=F64, stem="y")
        z = build.call(aten.neg.default, (y,), shape=SHAPE, dtype=F64, stem="z", partial_ok=options["negate"])
        tag = build.reserve()
        total = build.collective("all_reduce", z, [0, 1], tag, SHAPE, partial_ok=options["reduce"])
        build.wait([tag], 1)
        return total if options["give_total"] else z

    programs = pair(fill, fill)
    for program in programs:
        program.partial = {"y": ("r",), "z": ("r",)}
    return programs


def test_dropped_partial_sum() -> None:
    verify_programs(partial_pair(negate=True, reduce=True, give_total=True))
    where = ("rank 0", "n (of rank 0, step 7)")
    refused(partial_pair(negate=False, reduce=True, give_total=True), *where, "tensor y is a pending sum over r")
    refused(partial_pair(negate=True, reduce=False, give_total=True), *where, "tensor z is a pending sum over r")
    refused(partial_pair(negate=True, reduce=True, give_total=False), "rank 0", "output 0", "tensor z", "reduction")


def reduce_in(order: list[str], first_tag: int = 0) -> Callable[[Builder, Value], Value]:
    def fill(build: Builder, x: Value) -> Value:
        for tag, kind in enumerate(order, first_tag):
            shape = (
                SHAPE if kind in ("all_reduce", "all_to_all") else (2, *SHAPE) if kind == "all_gather" else SHAPE[1:]
            )
            build.collective(kind, x, [1, 0], tag, shape)
        build.wait(range(first_tag, first_tag + len(order)), 1)
        return x

    return fill


def test_collectives_agree() -> None:
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    verify_programs(pair(reduce_in(kinds), reduce_in(kinds)))


def test_collective_order_mismatch() -> None:
    programs = pair(reduce_in(["all_reduce", "all_gather"]), reduce_in(["all_gather", "all_reduce"]))
    refused(programs, "rank 1", "step 7", "tensor x: all_gather", "expected all_reduce", "as at rank 0")


def test_collective_missing_on_one_rank() -> None:
    programs = pair(reduce_in(["all_reduce"]), reduce_in(["all_reduce", "all_gather"]))
    refused(programs, "rank 1", "instruction 1", "tensor x: all_gather", "in the program of rank 0")


def test_collective_tags_and_result_shapes() -> None:
    refused(pair(reduce_in(["all_reduce"]), reduce_in(["all_reduce"], 1)), "rank 1", "tag 1", "with tag 0 as at rank 0")

    def wrong(build: Builder, x: Value) -> Value:
        out = build.collective("all_gather", x, [0, 1], 0, SHAPE)
        build.wait([0], 1)
        return out

    refused(pair(wrong, wrong), "rank 0", "tensor all_gather is float64[2, 3]", "expected float64[2, 2, 3]")


def test_collective_result_read_before_its_wait() -> None:
    def early(build: Builder, x: Value) -> Value:
        total = build.collective("all_reduce", x, [0, 1], 0, SHAPE)
        result = build.call(aten.neg.default, (total,), shape=SHAPE, dtype=F64, stem="early")
        build.wait([0], 1)
        return result

    refused(pair(early, early), "rank 0", "step 7", "tensor all_reduce is read", "all_reduce over ranks [0, 1]")


def test_collectives_of_overlapping_groups_can_deadlock() -> None:
    """Each rank waits for the collective with the next rank first: nobody starts the other one."""
    programs = []
    for rank in range(WORLD):
        build = Builder(rank, "forward", CPU)
        x = Value("x", SHAPE, F64)
        for low in (rank, (rank - 1) % WORLD):
            build.collective("all_reduce", x, [low, (low + 1) % WORLD], low, SHAPE)
            build.wait([low], 1)
        programs.append(RankProgram(rank, "forward", [x], [x], build.body))
    refused(programs, "deadlock", "tensor x (tag 0)", "tensor x (tag 1)", "tensor x (tag 2)")


def test_one_program_per_rank_and_phase() -> None:
    programs = rings()
    refused([*programs, programs[1]], "two programs of one rank")
    programs[1].phase = "backward"
    refused(programs, "backward", "forward")


def test_large_programs_are_checked_in_seconds() -> None:
    world, steps = 4, 1000
    programs = []
    for rank in range(world):
        build = Builder(rank, "forward", CPU)
        moving = x = Value("x", SHAPE, F64)
        for _ in range(steps):
            tag = build.reserve()
            received, tags = build.exchange(
                [(moving, (rank + 1) % world, tag)], [(SHAPE, F64, (rank - 1) % world, tag)], "moved"
            )
            for _ in range(3):
                x = build.call(aten.add.Tensor, (x, moving), shape=SHAPE, dtype=F64, stem="sum")
            build.wait(tags, 0)
            moving = received[0]
        programs.append(RankProgram(rank, "forward", [Value("x", SHAPE, F64)], [x], build.body))
    start = time.process_time()
    verify_programs(programs)
    per_instruction = (time.process_time() - start) / sum(len(program.body) for program in programs)
    assert per_instruction < 100e-6  # seconds; about 10e-6 on a free core


def test_sums_that_wait_are_taken_by_their_reduction() -> None:
    x, y = Value("x", SHAPE, F64), Value("y", SHAPE, F64)
    pending = {"y": ("r",)}
    giving = RankProgram(0, "accumulate", [x, y], [x, y], [], pending, gives_sums=True)
    verify_programs([giving])
    verify_handover(giving, RankProgram(0, "reduce", [y], [], [], pending))
    for taking, message in (
        (RankProgram(0, "reduce", [], [], []), r"rank 0, accumulate: no reduce takes the pending sums \['y'\]"),
        (
            RankProgram(0, "reduce", [y], [], []),
            r"accumulate gives y, .*\('r',\)\), where reduce takes y, .*expected both",
        ),
        (RankProgram(0, "reduce", [Value("y", (3, 3), F64)], [], [], pending), r"takes y, \(\(3, 3\), .*both alike"),
    ):
        with pytest.raises(VerificationError, match=message):
            verify_handover(giving, taking)
