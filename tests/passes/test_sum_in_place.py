"""Which all-reduces may sum in the tensor that they are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stpart_compiler.ir.program import Builder, RankProgram, Value, sums_in_place
from stpart_compiler.passes.sum_in_place import SumInPlace
from stpart_compiler.passes.verify import verify_programs
from stpart_compiler.passes.verify_rank import VerificationError
from stpart_compiler.runtime import ops
from stpart_compiler.runtime.lockstep import run_lockstep

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
aten = torch.ops.aten
SHAPE = (2, 3)

Body = Callable[[Builder, Value], list[Value]]


def neg(build: Builder, x: Value) -> Value:
    return build.call(aten.neg.default, (x,), shape=x.shape, dtype=x.dtype, stem="neg")


def flat(build: Builder, x: Value) -> Value:
    args = (x, [x.numel])
    return build.call(aten.reshape.default, args, shape=(x.numel,), dtype=x.dtype, stem="flat", kind="view")


def reduced(build: Builder, x: Value) -> Value:
    tag = build.reserve()
    total = build.collective("all_reduce", x, [0, 1], tag, x.shape)
    build.wait([tag], 1)
    return total


def made_here(build: Builder, x: Value) -> list[Value]:
    return [reduced(build, neg(build, x))]


def through_a_view(build: Builder, x: Value) -> list[Value]:
    return [reduced(build, flat(build, neg(build, x)))]


def an_input(build: Builder, x: Value) -> list[Value]:
    return [reduced(build, flat(build, x))]


def read_later(build: Builder, x: Value) -> list[Value]:
    made = neg(build, x)
    return [reduced(build, made), neg(build, made)]


def read_later_through_a_view(build: Builder, x: Value) -> list[Value]:
    made = neg(build, x)
    seen = flat(build, made)
    return [reduced(build, made), neg(build, seen)]


def given_as_well(build: Builder, x: Value) -> list[Value]:
    made = neg(build, x)
    return [reduced(build, made), made]


def a_part(build: Builder, x: Value) -> list[Value]:
    args = (neg(build, x), 0, 0, 1)
    part = build.call(aten.slice.Tensor, args, shape=(1, 3), dtype=x.dtype, stem="part", kind="view")
    return [reduced(build, part)]


def given_back(build: Builder, x: Value) -> list[Value]:
    return [reduced(build, build.call(_same, (x,), shape=x.shape, dtype=x.dtype, stem="same"))]


def summed_twice_at_once(build: Builder, x: Value) -> list[Value]:
    made, tags = neg(build, x), (build.reserve(), build.reserve())
    totals = [build.collective("all_reduce", made, [0, 1], tag, x.shape) for tag in tags]
    build.wait(tags, 1)
    return totals


def sent_meanwhile(build: Builder, x: Value) -> list[Value]:
    made, tag, other = neg(build, x), build.reserve(), 1 - build.rank
    (received,), tags = build.exchange([(made, other, tag)], [(x.shape, x.dtype, other, tag)], "moved")
    total = reduced(build, made)
    build.wait(tags, 0)
    return [total, received]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def summed_twice(build: Builder, x: Value) -> list[Value]:
    return [reduced(build, reduced(build, neg(build, x)))]


CASES: list[tuple[Body, list[bool]]] = [
    (made_here, [True]),
    (through_a_view, [True]),
    (an_input, [False]),
    (read_later, [False]),
    (read_later_through_a_view, [False]),
    (given_as_well, [False]),
    (a_part, [False]),
    (given_back, [False]),
    (summed_twice_at_once, [False, False]),
    (sent_meanwhile, [False]),
    (summed_twice, [True, True]),
]


def programs(body: Body) -> list[RankProgram]:
    found = []
    for rank in range(2):
        build = Builder(rank, "forward", torch.device("cpu"))
        x = Value(build.name("x"), SHAPE, torch.float64)
        found.append(RankProgram(rank, "forward", [x], [*body(build, x)], build.body))
    return found


@pytest.mark.parametrize(("body", "expected"), CASES)
def test_which_sums_are_in_place(body: Body, expected: list[bool]) -> None:
    """And all ranks get what they get without."""
    before = programs(body)
    after = [SumInPlace().apply(program) for program in before]
    assert [sums_in_place(instr) for instr in after[0].body if instr.kind == "collective"] == expected
    verify_programs(after)
    blocks = [torch.randn(SHAPE, dtype=torch.float64) for _ in before]
    for own, other in zip(
        *(run_lockstep(each, [[block] for block in blocks]) for each in (before, after)), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(own, other, strict=True))


@pytest.mark.parametrize("body", [read_later, read_later_through_a_view, given_as_well])
def test_a_storage_that_was_summed_in_is_not_read_as_before(body: Body) -> None:
    wrong = programs(body)
    for program in wrong:
        for instr in program.body:
            if instr.kind == "collective":
                instr.target = torch.ops.stpart.all_reduce_.default
    with pytest.raises(VerificationError, match=r"after instruction \d has summed in its storage; expected the red"):
        verify_programs(wrong)
