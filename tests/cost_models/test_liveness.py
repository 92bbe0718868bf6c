"""The static peak equals, to the byte, what PeakBytes sees when the emitted module runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stpart_compiler.cost_models.liveness import peak_bytes
from stpart_compiler.ir.program import Builder, Origin, RankProgram, Value
from stpart_compiler.passes.emit_fx import emit_fx
from stpart_compiler.runtime import ops
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.memory import PeakBytes
from stpart_compiler.runtime.threads import run_ranks

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
aten = torch.ops.aten
CPU = torch.device("cpu")
F64 = torch.float64


def measured(program: RankProgram, keep: set[str], constants: dict[str, Tensor] | None = None) -> int:
    """Peak bytes at run time; the inputs in `keep` stay referenced by the caller."""
    constants = constants or {}
    module = emit_fx(program, constants)
    arguments = [torch.ones(value.shape, dtype=value.dtype) for value in program.inputs]
    held = [x for x, value in zip(arguments, program.inputs, strict=True) if value.name in keep]
    with torch.no_grad(), PeakBytes([*arguments, *constants.values()]) as mode:
        result = module(arguments)
    assert len(result) == len(program.outputs) and len(held) == len(keep)
    return mode.peak


def chain(length: int = 4) -> RankProgram:
    build = Builder(0, "forward", CPU)
    x = y = Value(build.name("x"), (128,), F64)
    for step in range(length):
        build.origin = Origin("add", "m", "chain", step)
        y = build.call(aten.add.Tensor, (y, 1.0), shape=(128,), dtype=F64, stem="y")
    return RankProgram(0, "forward", [x], [y], build.body)


def test_chain_keeps_two_tensors_or_three() -> None:
    program = chain()
    assert peak_bytes(program).peak_bytes == measured(program, set()) == 2 * 1024
    report = peak_bytes(program, {"x"})
    assert report.peak_bytes == measured(program, {"x"}) == 3 * 1024
    assert (report.index, report.origin.step) == (1, 1)
    assert {tensor.name for tensor in report.largest} == {"x", "y", "y_1"}


def test_peak_at_the_start_names_the_inputs() -> None:
    build = Builder(0, "forward", CPU)
    x, w = Value("x", (4,), F64), Value("w", (100,), F64)
    small = build.call(aten.sum.default, (w,), shape=(), dtype=F64, stem="small")
    program = RankProgram(0, "forward", [x, w], [small], build.body)
    report = peak_bytes(program)
    assert report.peak_bytes == measured(program, set()) == 840 and report.index == 0
    empty = RankProgram(0, "forward", [x, w], [None], [])
    report = peak_bytes(empty)
    assert (report.peak_bytes, report.index, report.origin.note) == (832, -1, "program start")
    assert [tensor.name for tensor in report.largest] == ["w", "x"]


def test_views_keep_their_base() -> None:
    build = Builder(0, "forward", CPU)
    x = Value("x", (8, 16), F64)
    big = build.call(aten.mul.Tensor, (x, 2.0), shape=(8, 16), dtype=F64, stem="big")
    outs = [("top", (4, 16), F64), ("bottom", (4, 16), F64)]
    top, bottom = build.call_multi(aten.split.Tensor, (big, 4), {}, outs, kind="view")
    assert top is not None and bottom is not None
    flat = build.call(aten.view.default, (top, [64]), shape=(64,), dtype=F64, stem="flat", kind="view")
    wide = build.call(aten.cat.default, ([big, big, big], 0), shape=(24, 16), dtype=F64, stem="wide")
    result = build.call(aten.sum.default, (wide,), shape=(), dtype=F64, stem="result")
    last = build.call(aten.add.Tensor, (flat, result), shape=(64,), dtype=F64, stem="last")
    program = RankProgram(0, "forward", [x], [last], build.body)
    report = peak_bytes(program)
    # x is gone, big lives through `flat`, wide is three times as large.
    assert report.peak_bytes == measured(program, set()) == 1024 + 3 * 1024 + 8
    assert report.largest[0].name == "wide" and {tensor.name for tensor in report.largest} == {"big", "wide", "result"}


def test_in_place_results_are_not_new() -> None:
    build = Builder(0, "forward", CPU)
    x = Value("x", (128,), F64)
    y = build.call(aten.mul.Tensor, (x, 2.0), shape=(128,), dtype=F64, stem="y")
    added = build.call(aten.add_.Tensor, (y, x), shape=(128,), dtype=F64, stem="added")
    twice = build.call(aten.mul.Tensor, (added, 2.0), shape=(128,), dtype=F64, stem="twice")
    program = RankProgram(0, "forward", [x], [twice], build.body)
    assert peak_bytes(program).peak_bytes == measured(program, set()) == 2048


def test_constants_and_unread_inputs_stay_to_the_end() -> None:
    build = Builder(0, "forward", CPU)
    x, unread, scale = Value("x", (128,), F64), Value("unread", (64,), F64), Value("scale", (32,), F64)
    y = build.call(aten.sum.default, (scale,), shape=(), dtype=F64, stem="y")
    z = build.call(aten.sum.default, (x,), shape=(), dtype=F64, stem="z")
    big = build.call(aten.full.default, ([512], 0.0), {"dtype": F64}, shape=(512,), dtype=F64, stem="big")
    program = RankProgram(0, "forward", [x, unread], [y, z, big], build.body, constants=[scale])
    constants = {"scale": torch.ones(32, dtype=F64)}
    assert peak_bytes(program).peak_bytes == measured(program, set(), constants) == 512 + 256 + 16 + 4096


def test_results_of_several_tensors() -> None:
    build = Builder(0, "forward", CPU)
    x = Value("x", (16, 32), F64)
    outs = [("normed", (16, 32), F64), ("mean", (16, 1), F64), ("rstd", (16, 1), F64)]
    normed, mean, rstd = build.call_multi(aten.native_layer_norm.default, (x, [32], None, None, 1e-5), {}, outs)
    assert normed is not None and rstd is not None
    y = build.call(aten.mul.Tensor, (normed, rstd), shape=(16, 32), dtype=F64, stem="y")
    program = RankProgram(0, "forward", [x], [y, mean], build.body)
    assert peak_bytes(program).peak_bytes == measured(program, set()) == 2 * 4096 + 2 * 128


SIZES = (8, 24, 64)


@st.composite
def random_programs(draw: st.DrawFn) -> tuple[RankProgram, set[str]]:
    """Programs over vectors: new results of several sizes, views, in-place updates, values never read."""
    build = Builder(0, "forward", CPU)
    inputs = [Value(build.name("x"), (draw(st.sampled_from(SIZES)),), F64) for _ in range(draw(st.integers(1, 3)))]
    values = list(inputs)
    for _ in range(draw(st.integers(1, 12))):
        x = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["new", "cat", "view", "place", "full"]))
        if kind == "new":
            new = build.call(aten.mul.Tensor, (x, 2.0), shape=x.shape, dtype=F64)
        elif kind == "cat":
            other = draw(st.sampled_from(values))
            shape = (x.shape[0] + other.shape[0],)
            new = build.call(aten.cat.default, ([x, other], 0), shape=shape, dtype=F64)
        elif kind == "view":
            shape = (max(x.shape[0] // 2, 1),)
            new = build.call(aten.slice.Tensor, (x, 0, 0, shape[0]), shape=shape, dtype=F64, kind="view")
        elif kind == "place":
            new = build.call(aten.add_.Tensor, (x, 1.0), shape=x.shape, dtype=F64)
        else:
            size = draw(st.sampled_from(SIZES))
            new = build.call(aten.full.default, ([size], 1.0), {"dtype": F64}, shape=(size,), dtype=F64)
        values.append(new)
    outputs = draw(st.lists(st.sampled_from(values), max_size=3))
    keep = set(draw(st.lists(st.sampled_from([value.name for value in inputs]), unique=True)))
    return RankProgram(0, "forward", inputs, [*outputs, None], build.body), keep


@given(random_programs())
def test_random_programs_agree_to_the_byte(case: tuple[RankProgram, set[str]]) -> None:
    program, keep = case
    report = peak_bytes(program, keep)
    assert report.peak_bytes == measured(program, keep)
    assert sum(tensor.nbytes for tensor in report.largest) <= report.peak_bytes


def transfer(rank: int, wait_early: bool) -> RankProgram:
    """Both ranks send x and receive; x is read no more, and large temporaries are made before or after the wait."""
    build = Builder(rank, "forward", CPU)
    x = Value("x", (128,), F64)
    y = build.call(aten.mul.Tensor, (x, 2.0), shape=(128,), dtype=F64, stem="y")
    received, tags = build.exchange([(y, 1 - rank, 0)], [((128,), F64, 1 - rank, 0)], "got")
    if wait_early:
        build.wait(tags, 0)
    big = build.call(aten.full.default, ([1024], 1.0), {"dtype": F64}, shape=(1024,), dtype=F64, stem="big")
    small = build.call(aten.sum.default, (big,), shape=(), dtype=F64, stem="small")
    if not wait_early:
        build.wait(tags, 0)
    z = build.call(aten.add.Tensor, (received[0], small), shape=(128,), dtype=F64, stem="z")
    return RankProgram(rank, "forward", [x], [z], build.body)


@pytest.mark.parametrize("wait_early", [True, False])
def test_buffers_in_flight_are_held(wait_early: bool) -> None:
    programs = [transfer(rank, wait_early) for rank in range(2)]
    modules = [emit_fx(program) for program in programs]

    def run(rank: int, engine: Engine) -> int:
        engine.prepare(1)
        arguments = [torch.ones(128, dtype=F64)]
        with PeakBytes(arguments) as mode:
            modules[rank](arguments)
        return mode.peak

    # The sum is made while `big` is alive, beside the buffers that are still held.
    want = (1 if wait_early else 2) * 1024 + 8192 + 8
    assert [peak_bytes(program).peak_bytes for program in programs] == run_ranks(2, run, timeout_s=20) == [want, want]


SHAPES = {"all_reduce": (2, 64), "all_gather": (2, 2, 64), "all_to_all": (2, 64)}


@pytest.mark.parametrize("kind", list(SHAPES))
def test_collectives_hold_what_the_engine_holds(kind: str) -> None:
    """The input of a collective is read no more: only some collectives keep it until the wait."""

    def program(rank: int) -> RankProgram:
        build = Builder(rank, "forward", CPU)
        x = Value("x", (2, 64), F64)
        y = build.call(aten.mul.Tensor, (x, 2.0), shape=(2, 64), dtype=F64, stem="y")
        out = build.collective(kind, y, [0, 1], 0, SHAPES[kind])
        big = build.call(aten.full.default, ([1024], 1.0), {"dtype": F64}, shape=(1024,), dtype=F64, stem="big")
        small = build.call(aten.sum.default, (big,), shape=(), dtype=F64, stem="small")
        build.wait([0], 1)
        return RankProgram(rank, "forward", [x], [out, small], build.body)

    programs = [program(rank) for rank in range(2)]
    modules = [emit_fx(program) for program in programs]

    def run(rank: int, engine: Engine) -> int:
        arguments = [torch.ones(2, 64, dtype=F64)]
        with PeakBytes(arguments) as mode:
            modules[rank](arguments)
        return mode.peak

    assert [peak_bytes(program).peak_bytes for program in programs] == run_ranks(2, run, timeout_s=20)


def test_keep_must_name_inputs() -> None:
    with pytest.raises(ValueError, match=r"\['y'\] in `keep` are no inputs"):
        peak_bytes(chain(), {"x", "y"})


def test_fake_tensors_measure_the_same() -> None:
    program = chain(6)
    with FakeTensorMode():
        assert measured(program, {"x"}) == peak_bytes(program, {"x"}).peak_bytes
