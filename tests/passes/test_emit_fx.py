"""Emitted modules compute what the instructions say, free early, keep names and origins, and survive pickling."""

from __future__ import annotations

import copy
import operator
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from stpart_compiler.ir.program import Builder, Instr, Origin, RankProgram, Value
from stpart_compiler.passes.emit_fx import annotated_code, emit_fx
from stpart_compiler.runtime import ops
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.threads import run_ranks

assert ops.NAMESPACE == "stpart"  # the operators exist once this module is imported
aten = torch.ops.aten
CPU = torch.device("cpu")
F64 = torch.float64


def builder(rank: int = 0) -> Builder:
    return Builder(rank, "forward", CPU)


def mlp() -> RankProgram:
    """Linear, split in two, gate, with a scale that is a constant."""
    build = builder()
    x, w = Value(build.name("x"), (4, 3), F64), Value(build.name("w"), (3, 6), F64)
    scale = Value(build.name("scale"), (), F64)
    build.origin = Origin("mm", "layers.0.mlp", "forward")
    h = build.call(aten.mm.default, (x, w), shape=(4, 6), dtype=F64, stem="h")
    build.origin = Origin("split", "layers.0.mlp")
    outs = [("a", (4, 3), F64), ("b", (4, 3), F64)]
    a, b = build.call_multi(aten.split.Tensor, (h, 3), {"dim": 1}, outs, kind="view")
    build.origin = Origin("gate", "layers.0.mlp", "loop", 2)
    y = build.call(aten.mul.Tensor, (a, b), shape=(4, 3), dtype=F64, stem="y")
    z = build.call(aten.mul.Tensor, (y, scale), shape=(4, 3), dtype=F64, stem="z")
    return RankProgram(0, "forward", [x, w], [z, None, h], build.body, constants=[scale])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w, scale = (torch.randn(size, dtype=F64, generator=generator) for size in ((4, 3), (3, 6), ()))
    return x, w, scale


def expected() -> list[Tensor | None]:
    x, w, scale = inputs()
    h = x @ w
    return [h[:, :3] * h[:, 3:] * scale, None, h]


def same(results: Any, wanted: list[Tensor | None]) -> None:
    assert len(results) == len(wanted)
    for result, want in zip(results, wanted, strict=True):
        assert (result is None and want is None) or torch.equal(result, want)


def test_runs_and_clears_its_list() -> None:
    x, w, scale = inputs()
    module = emit_fx(mlp(), {"scale": scale})
    arguments = [x, w]
    same(module(arguments), expected())
    assert arguments == []


def test_nodes_have_names_and_origins() -> None:
    module = emit_fx(mlp(), {"scale": inputs()[2]})
    names = {node.name: node for node in module.graph.nodes}
    assert {"x", "w", "scale", "h", "a", "b", "y", "z"} <= set(names)
    assert names["x"].op == "placeholder" and names["scale"].op == "get_attr"
    assert names["b"].target is operator.getitem and names["b"].args[1] == 1
    assert names["y"].meta["origin"] == Origin("gate", "layers.0.mlp", "loop", 2)


def test_annotated_code_names_the_module_path_and_step() -> None:
    text = annotated_code(emit_fx(mlp(), {"scale": inputs()[2]}))
    lines = text.split("\n")
    assert next(line for line in lines if " h = " in line).endswith("# layers.0.mlp: mm (forward)")
    assert next(line for line in lines if " y = " in line).endswith("# layers.0.mlp: gate (loop, step 2)")
    assert text.count("(loop, step 2)") == 1  # z has the origin of y
    compile(text, "annotated", "exec")


def test_pickle_and_deepcopy() -> None:
    module = emit_fx(mlp(), {"scale": inputs()[2]})
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        same(other(list(inputs()[:2])), expected())
        assert other.code == module.code
        assert [node.meta.get("origin") for node in other.graph.nodes] == [
            node.meta.get("origin") for node in module.graph.nodes
        ]


def test_an_input_given_as_constant_is_no_placeholder() -> None:
    x, w, scale = inputs()
    module = emit_fx(mlp(), {"scale": scale, "w": w})
    assert [node.name for node in module.graph.nodes if node.op == "placeholder"] == ["x"]
    same(module([x]), expected())


@pytest.mark.parametrize(
    ("constants", "text"),
    [
        ({}, "no tensor given for the constants ['scale']"),
        ({"scale": torch.zeros((), dtype=F64), "v": torch.zeros(1)}, "'v' is no constant and no input"),
        ({"scale": torch.zeros(2, dtype=F64)}, r"'scale' must be torch.float64 of shape ()"),
    ],
)
def test_wrong_constants_are_refused(constants: dict[str, Tensor], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        emit_fx(mlp(), constants)
    assert text in str(caught.value)


def test_use_before_definition_is_refused() -> None:
    program = mlp()
    program.body.reverse()
    with pytest.raises(ValueError, match="value 'y' is used before it is made"):
        emit_fx(program, {"scale": inputs()[2]})


ODD_NAMES = [
    "self",
    "args_list",
    "args_iter",
    "torch",
    "device",
    "inf",
    "iter",
    "x.1",
    "1x",
    "x_1",
    "if",
    "wait",
    "x-1",
]


def test_odd_names_work_and_hold_nothing() -> None:
    """Each input goes into a sum of its own weight; those not read again are freed before the end."""
    build = builder()
    values = [Value(name, (2,), F64) for name in ODD_NAMES]
    total = build.call(aten.full.default, ([2], 0.0), {"dtype": F64, "device": CPU}, shape=(2,), dtype=F64, stem="t")
    for weight, value in enumerate(values):
        total = build.call(
            aten.add.Tensor, (total, value), {"alpha": float(weight)}, shape=(2,), dtype=F64, stem=f"t.{weight}"
        )
    alive: list[bool] = []

    def probe(x: Tensor) -> Tensor:
        alive.append(any(ref() is not None for ref in refs))
        return x

    build.body.append(Instr(probe, (total,), {}, (Value("p", (2,), F64),), Origin()))
    program = RankProgram(0, "forward", values, [Value("p", (2,), F64)], build.body)
    tensors = [torch.tensor([1.0, float(i)], dtype=F64) for i in range(len(values))]
    refs = [weakref.ref(tensor) for tensor in tensors]
    want = torch.stack([tensor * weight for weight, tensor in enumerate(tensors)]).sum(0)
    arguments, tensors = tensors, []
    (result,) = emit_fx(program)(arguments)
    assert torch.equal(result, want) and alive == [False]


def test_unread_results_are_kept_in_the_program_and_effects_stay() -> None:
    build = builder()
    x = Value(build.name("x"), (2,), F64)
    build.call(aten.add_.Tensor, (x, 1.0), shape=(2,), dtype=F64, stem="unread")
    build.call_multi(aten.topk.default, (x, 1), {}, [None, ("place", (1,), torch.int64)])
    module = emit_fx(RankProgram(0, "forward", [x], [], build.body))
    tensor = torch.zeros(2, dtype=F64)
    assert list(module([tensor])) == [] and torch.equal(tensor, torch.ones(2, dtype=F64))
    assert sum(node.op == "call_function" for node in module.graph.nodes) == 3


def ring(rank: int, world: int) -> RankProgram:
    build = builder(rank)
    x = total = moving = Value(build.name("x"), (2, 3), F64)
    for step in range(1, world):
        build.origin = Origin("sum", "m", "ring", step)
        tag = build.reserve()
        received, tags = build.exchange(
            [(moving, (rank + 1) % world, tag)], [((2, 3), F64, (rank - 1) % world, tag)], "moved"
        )
        total = build.call(aten.mul.Tensor, (total, 2.0), shape=(2, 3), dtype=F64, stem="scaled")
        build.wait(tags, 0)
        moving = received[0]
        total = build.call(aten.add.Tensor, (total, moving), shape=(2, 3), dtype=F64, stem="total")
    return RankProgram(rank, "forward", [x], [total], build.body)


def test_ring_runs_on_three_ranks() -> None:
    world = 3
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(2, 3, dtype=F64, generator=generator) for _ in range(world)]
    modules = [pickle.loads(pickle.dumps(emit_fx(ring(rank, world)))) for rank in range(world)]

    def run(rank: int, engine: Engine) -> Tensor:
        engine.prepare(1)
        (result,) = modules[rank]([data[rank].clone()])
        assert engine.outstanding == []
        return result

    for rank, result in enumerate(run_ranks(world, run, timeout_s=20)):
        want = data[rank]
        for step in range(1, world):
            want = want * 2.0 + data[(rank - step) % world]
        assert torch.equal(result, want)


def test_a_program_of_20000_instructions_compiles() -> None:
    build = builder()
    x = y = Value(build.name("x"), (2,), F64)
    for _ in range(20_000):
        y = build.call(aten.add.Tensor, (y, 1.0), shape=(2,), dtype=F64, stem="y")
    module = emit_fx(RankProgram(0, "forward", [x], [y], build.body))
    assert torch.equal(module([torch.zeros(2, dtype=F64)])[0], torch.full((2,), 20_000.0, dtype=F64))
