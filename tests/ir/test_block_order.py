"""Blocks of dims with unequal sizes arrive in their places, and replicas of a sum get the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from stpart_compiler.ir.layout import Layout, coordinate, form, gather, shard, take
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import Builder, Instr, Pending, RankProgram, Value
from stpart_compiler.ir.redistribute import PlainCost, redistribute
from stpart_compiler.passes.emit_redistribute import emit_redistribution
from stpart_compiler.runtime import ops as _ops  # noqa: F401  (defines the ops that the programs call)
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.lockstep import run_lockstep
from stpart_compiler.runtime.threads import run_ranks

SQUARE, NINE = Mesh(("r", "c"), (2, 2)), Mesh(("r", "c"), (3, 3))
SHAPE = (8, 4, 16)  # paths are found for cuts sorted by size: dims in another order than that


def _placements(mesh: Mesh) -> list[Layout]:
    """Every cut of the dims by both axes, in both orders where they share a dim."""
    digits = [form(mesh.size[axis], **{axis: 1}) for axis in mesh.axes]
    layouts = [shard(SHAPE, {})]
    for one, two in itertools.product((None, 0, 1, 2), repeat=2):
        for order in ((0, 1), (1, 0)):
            cuts: dict[int, tuple] = {}
            for i in order:
                dim = (one, two)[i]
                if dim is not None:
                    cuts[dim] = (*cuts.get(dim, ()), digits[i])
            layouts.append(shard(SHAPE, cuts))
    return list(dict.fromkeys(layouts))


def _programs(source: Layout, target: Layout, mesh: Mesh, cost: PlainCost) -> list[RankProgram]:
    plan = redistribute(source, target, mesh, cost)
    whole = torch.empty(source.shape)
    programs = []
    for rank in range(mesh.world_size):
        builder = Builder(rank, "forward", torch.device("cpu"))
        value = builder.value("x", take(whole, _summed(source), mesh, rank).shape, torch.float64)
        made = emit_redistribution(builder, value, plan, mesh)
        out = made.finish() if isinstance(made, Pending) else made
        programs.append(RankProgram(rank, "forward", [value], [out], builder.body))
    return programs


def _summed(layout: Layout) -> Layout:
    return Layout(layout.dims)


@pytest.mark.parametrize("cost", [PlainCost(0.0), PlainCost(1.0)], ids=["bytes", "messages"])
def test_every_pair_of_placements(cost: PlainCost) -> None:
    x = torch.arange(512, dtype=torch.float64).reshape(SHAPE)
    for source, target in itertools.permutations(_placements(SQUARE), 2):
        programs = _programs(source, target, SQUARE, cost)
        out = run_lockstep(programs, [[take(x, source, SQUARE, rank)] for rank in range(4)])
        found = [tensors[0] for tensors in out]
        assert all(block is not None for block in found)
        assert torch.equal(gather(found, target, SQUARE), x), f"{source} -> {target}"


def _bound(item: object, values: dict[str, torch.Tensor]) -> object:
    if isinstance(item, Value):
        return values[item.name]
    return [_bound(part, values) for part in item] if isinstance(item, list) else item


def _call(instr: Instr, values: dict[str, torch.Tensor]) -> None:
    result = instr.target(*(_bound(arg, values) for arg in instr.args), **instr.kwargs)
    results: Sequence[torch.Tensor] = result if instr.multi else (result,)
    values.update({out.name: x for out, x in zip(instr.outs, results, strict=False) if out is not None})


PENDING = {"r": {"r": 1}, "c": {"c": 1}, "r+c": {"r": 1, "c": 1}, "r-c": {"r": 1, "c": 2}}
SUMS = [*itertools.combinations(PENDING, 1), *itertools.combinations(PENDING, 2)]


@pytest.mark.parametrize("pending", SUMS, ids=" ".join)
def test_replicas_of_a_sum_have_the_same_bits(pending: tuple[str, ...]) -> None:
    """A backend adds in the order of ranks: along a skewed form each group would start with another summand."""
    digits = tuple(form(3, **PENDING[name]) for name in pending)
    torch.manual_seed(0)
    table = {key: torch.randn(6, 5, dtype=torch.float64) for key in itertools.product(range(3), repeat=len(digits))}
    source = Layout(shard((6, 5), {}).dims, digits)
    for target in (shard((6, 5), {}), shard((6, 5), {0: (form(3, r=1),)}), shard((6, 5), {0: (form(3, c=1),)})):
        for cost in (PlainCost(0.0), PlainCost(1.0)):
            programs = _programs(source, target, NINE, cost)

            def run(rank: int, engine: Engine, programs: list[RankProgram] = programs) -> torch.Tensor:
                engine.begin_step()
                values = {"x": table[tuple(digit.value(NINE.coords[rank]) for digit in digits)]}
                for instr in programs[rank].body:
                    _call(instr, values)
                out = programs[rank].outputs[0]
                assert out is not None
                return values[out.name].contiguous()

            found = run_ranks(9, run)
            torch.testing.assert_close(gather(found, target, NINE), sum(table.values()))
            blocks: dict[str, set[bytes]] = {}
            for rank, block in enumerate(found):
                blocks.setdefault(str(coordinate(target, NINE, rank)), set()).add(block.numpy().tobytes())
            assert all(len(bits) == 1 for bits in blocks.values()), f"{source} -> {target}"
