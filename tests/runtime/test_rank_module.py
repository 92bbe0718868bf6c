"""Rank modules, the in-process runner and materialisation, on small programs written by hand."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stpart_compiler.ir.artifact import InputSlot, Interface, OutputSlot, Port, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import chunk_range, form, gather, local_shape, replicated, shard, split
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import COLLECTIVE_CHANNEL, P2P_CHANNEL, Builder, Origin, RankProgram, Value
from stpart_compiler.passes.emit_fx import emit_fx
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.materialize import local_block, materialize
from stpart_compiler.runtime.owners import owner_of
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.runner import run_in_process, run_modules
from stpart_compiler.runtime.step import program_labels
from stpart_compiler.runtime.threads import run_ranks

aten = torch.ops.aten
CPU = torch.device("cpu")
F64 = torch.float64


@dataclasses.dataclass
class Output:
    """What the data-parallel model returns."""

    loss: Tensor
    y: Tensor
    tag: str


torch.utils._pytree.register_dataclass(Output)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def slot(name: str, shape: tuple[int, ...], layout: Any = None, **changes: Any) -> TensorSlot:
    made = TensorSlot(name, (), shape, F64, layout or replicated(shape), True, True)
    return dataclasses.replace(made, **changes)


def interface_of(mesh: Mesh, **fields: Any) -> Interface:
    defaults: dict[str, Any] = {
        "mesh": mesh, "params": (), "buffers": (), "inputs": (), "outputs": (), "in_spec": tree_flatten(((), {}))[1],
        "out_spec": tree_flatten(0)[1], "loss_index": None, "forward_inputs": (), "forward_outputs": (),
        "backward_inputs": (), "backward_outputs": (), "groups": (), "channels": 2, "plan_digest": "", "training": True,
    }  # fmt: skip
    return Interface(**(defaults | fields))


def emitted(artifact: RankArtifact) -> tuple[Any, Any]:
    return emit_fx(artifact.forward), emit_fx(artifact.backward) if artifact.backward is not None else None


# A data-parallel linear layer over 2 ranks: y = x @ w.T + b, loss = mean(y**2) + sum(w**2)/4, `seen` counts rows.
ROWS, IN, OUT = 6, 4, 3


def data_parallel(loss_index: int | None = 0) -> list[RankArtifact]:
    mesh = Mesh(("d",), (2,))
    inputs = (InputSlot("args[0]", (ROWS, IN), F64), InputSlot("scale", None, None, 1.0))
    example = Output(torch.zeros(()), torch.zeros(()), "traced")
    interface = interface_of(
        mesh,
        params=(
            slot("linear.weight", (OUT, IN), aliases=("head.weight",)),
            slot("linear.bias", (OUT,)),
            slot("spare.weight", (5,), used=False),
            slot("frozen", (OUT,), requires_grad=False),
        ),
        buffers=(slot("seen", (1,)), slot("scratch", (2,), used=False, persistent=False)),
        inputs=inputs,
        outputs=(
            OutputSlot(True, None, True, F64, ()),
            OutputSlot(True, None, True, F64, (ROWS, OUT)),
            OutputSlot(False, "traced"),
        ),
        in_spec=tree_flatten(((0,), {"scale": 0}))[1],
        out_spec=tree_flatten(example)[1],
        loss_index=loss_index,
        forward_inputs=(("input", 0), ("param", "linear.weight"), ("param", "linear.bias"), ("buffer", "seen"),
                        ("constant", "quarter")),
        forward_outputs=(("output", 0), ("output", 1), ("buffer", "seen"), ("saved", 0), ("saved", 1)),
        backward_inputs=(("saved", 0), ("saved", 1), ("tangent", 0), ("tangent", 1), ("param", "linear.weight"),
                         ("constant", "quarter")),
        backward_outputs=(("grad", "linear.weight"), ("grad", "linear.bias")),
        groups=((COLLECTIVE_CHANNEL, (0, 1)),),
    )  # fmt: skip
    constants = {"quarter": torch.tensor(0.25, dtype=F64)}
    return [RankArtifact(rank, interface, *_data_parallel_programs(rank), constants) for rank in range(mesh.world_size)]


def _all_reduced(b: Builder, x: Value) -> Value:
    tag = b.reserve()
    out = b.collective("all_reduce", x, (0, 1), tag, x.shape)
    b.wait((tag,), COLLECTIVE_CHANNEL)
    return out


def _data_parallel_programs(rank: int) -> tuple[RankProgram, RankProgram]:
    half = ROWS // 2
    b = Builder(rank, "forward", CPU)
    x, w, bias = b.value("x", (ROWS, IN), F64), b.value("w", (OUT, IN), F64), b.value("bias", (OUT,), F64)
    seen, quarter = b.value("seen", (1,), F64), b.value("quarter", (), F64)

    def call(target: Any, args: Any, shape: tuple[int, ...]) -> Value:
        return b.call(target, args, shape=shape, dtype=F64)

    b.origin = Origin("linear", "linear")
    mine = call(aten.slice.Tensor, (x, 0, rank * half, (rank + 1) * half), (half, IN))
    y = call(aten.addmm.default, (bias, mine, call(aten.t.default, (w,), (IN, OUT))), (half, OUT))
    tag = b.reserve()
    gathered = b.collective("all_gather", y, (0, 1), tag, (2, half, OUT))
    squares = call(aten.sum.default, (call(aten.mul.Tensor, (y, y), y.shape),), ())
    part = call(aten.div.Tensor, (squares, ROWS * OUT), ())
    loss = _all_reduced(b, part)
    penalty = call(aten.sum.default, (call(aten.mul.Tensor, (w, w), w.shape),), ())
    loss = call(aten.add.Tensor, (loss, call(aten.mul.Tensor, (penalty, quarter), ())), ())
    b.wait((tag,), COLLECTIVE_CHANNEL)
    whole = call(aten.view.default, (gathered, [ROWS, OUT]), (ROWS, OUT))
    counted = call(aten.add.Tensor, (seen, ROWS), (1,))
    forward = RankProgram(rank, "forward", [x, w, bias, seen, quarter], [loss, whole, counted, mine, y], b.body)

    b = Builder(rank, "backward", CPU, first_tag=b.next_tag)
    mine, y = b.value("mine", (half, IN), F64), b.value("y", (half, OUT), F64)
    dloss, dy, w = b.value("dloss", (), F64), b.value("dy", (ROWS, OUT), F64), b.value("w", (OUT, IN), F64)
    quarter = b.value("quarter", (), F64)
    local = call(aten.slice.Tensor, (dy, 0, rank * half, (rank + 1) * half), (half, OUT))
    scaled = call(aten.mul.Tensor, (call(aten.mul.Tensor, (y, 2.0 / (ROWS * OUT)), y.shape), dloss), y.shape)
    total = call(aten.add.Tensor, (local, scaled), y.shape)
    dw = _all_reduced(b, call(aten.mm.default, (call(aten.t.default, (total,), (OUT, half)), mine), (OUT, IN)))
    decay = call(aten.mul.Tensor, (call(aten.mul.Tensor, (w, 2.0), w.shape), quarter), w.shape)
    dw = call(aten.add.Tensor, (dw, call(aten.mul.Tensor, (decay, dloss), w.shape)), w.shape)
    db = _all_reduced(b, call(aten.sum.dim_IntList, (total, [0]), (OUT,)))
    inputs = [mine, y, dloss, dy, w, quarter]
    return forward, RankProgram(rank, "backward", inputs, [dw, db], b.body)


def weights() -> dict[str, Tensor]:
    return {
        "linear.weight": randn(OUT, IN, seed=1),
        "linear.bias": randn(OUT, seed=2),
        "spare.weight": randn(5, seed=3),
        "frozen": randn(OUT, seed=4),
    }


def module_of(artifact: RankArtifact, engine: Engine | None = None) -> RankModule:
    params = {name: tensor.clone() for name, tensor in weights().items()}
    buffers = {"seen": torch.zeros(1, dtype=F64), "scratch": torch.zeros(2, dtype=F64)}
    return RankModule(artifact, *emitted(artifact), params, buffers, engine)


def reference(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t() + b
    return y.square().mean() + w.square().sum() / 4, y


def on_ranks(fn: Callable[[RankModule, Engine], Any], world: int = 2) -> list[Any]:
    artifacts = data_parallel()
    return run_ranks(world, lambda rank, engine: fn(module_of(artifacts[rank], engine), engine), timeout_s=20)


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_names_ties_and_state_dict() -> None:
    module = module_of(data_parallel()[0])
    assert set(dict(module.named_parameters())) == {"linear.weight", "linear.bias", "spare.weight", "frozen"}
    everything = dict(module.named_parameters(remove_duplicate=False))
    assert everything["head.weight"] is everything["linear.weight"]
    assert set(module.state_dict()) == {*everything, "seen"}
    assert not everything["frozen"].requires_grad
    assert owner_of(everything["head.weight"]) == (module, module.interface.params[0])
    assert owner_of(nn.Parameter(torch.ones(1))) is None
    module.load_state_dict({name: torch.zeros_like(x) for name, x in module.state_dict().items()})
    assert module.get_parameter("linear.weight").abs().sum() == 0


def test_names_of_the_model_may_be_names_of_the_class() -> None:
    interface = interface_of(Mesh(("d",), (1,)), params=(slot("engine.rank", (2,)),), buffers=(slot("forward", (1,)),))
    artifact = RankArtifact(0, interface, RankProgram(0, "forward", [], [], []), None)
    module = RankModule(artifact, *emitted(artifact), {"engine.rank": randn(2)}, {"forward": randn(1)})
    assert list(module.state_dict()) == ["forward", "engine.rank"]
    assert module.engine is None


def test_two_ranks_train_like_one_device() -> None:
    x, target = randn(ROWS, IN, seed=7), randn(ROWS, OUT, seed=8)

    def losses(forward: Callable[[], tuple[Tensor, Tensor]], params: list[Any]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(params, lr=0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss, y = forward()
            total = loss + (y - target).square().sum()
            total.backward()
            optimizer.step()
            found.append(total.detach())
        return found

    def rank(module: RankModule, engine: Engine) -> tuple[list[Tensor], dict[str, Tensor]]:
        def forward() -> tuple[Tensor, Tensor]:
            output = module(x, scale=1.0)
            assert isinstance(output, Output) and output.tag == "traced"
            return output.loss, output.y

        found = losses(forward, list(module.parameters()))
        assert engine.outstanding == []
        assert engine.message_totals()["all_reduce"][0] == 3
        assert module.get_parameter("spare.weight").grad is None and module.get_parameter("frozen").grad is None
        return found, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    w, b = (nn.Parameter(weights()[name]) for name in ("linear.weight", "linear.bias"))
    expected = losses(lambda: reference(x, w, b), [w, b])
    for found, state in on_ranks(rank):
        close(torch.stack(found), torch.stack(expected))
        close(state["linear.weight"], w.detach())
        close(state["linear.bias"], b.detach())
        assert torch.equal(state["spare.weight"], weights()["spare.weight"])
        assert state["seen"].item() == 4 * ROWS


def test_gradients_accumulate_over_two_forwards() -> None:
    batches = [randn(ROWS, IN, seed=seed) for seed in (1, 2)]

    def rank(module: RankModule, engine: Engine) -> Tensor:
        outputs = [module(x, scale=1.0) for x in batches]
        for output in outputs:
            output.loss.backward()
        grad = module.get_parameter("linear.weight").grad
        assert grad is not None
        return grad

    w, b = (weights()[name].requires_grad_() for name in ("linear.weight", "linear.bias"))
    for x in batches:
        reference(x, w, b)[0].backward()
    for grad in on_ranks(rank):
        close(grad, w.grad)


def test_no_grad_runs_the_forward_only() -> None:
    def rank(module: RankModule, engine: Engine) -> None:
        with torch.no_grad():
            output = module(randn(ROWS, IN), scale=1.0)
        assert not output.loss.requires_grad and not output.y.requires_grad
        assert module(randn(ROWS, IN), scale=1.0).loss.requires_grad
        assert not module.get_buffer("seen").requires_grad

    on_ranks(rank)


def test_a_second_backward_is_refused() -> None:
    def rank(module: RankModule, engine: Engine) -> None:
        loss = module(randn(ROWS, IN), scale=1.0).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the same step a second time.*call forward again"):
            loss.backward()

    on_ranks(rank)


def test_a_step_of_the_optimizer_between_forward_and_backward_is_refused() -> None:
    def rank(module: RankModule, engine: Engine) -> None:
        loss = module(randn(ROWS, IN), scale=1.0).loss
        with torch.no_grad():
            module.get_parameter("linear.weight").add_(1.0)
        with pytest.raises(RuntimeError, match="param 'linear.weight' is needed for the gradients, but was modified"):
            loss.backward()

    on_ranks(rank)


CALLS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((torch.zeros(5, IN, dtype=F64),), {"scale": 1.0}, r"args\[0\].*expected .* of shape \(6, 4\).*\(5, 4\)"),
    ((torch.zeros(ROWS, IN),), {"scale": 1.0}, r"args\[0\].*expected torch.float64 .* got torch.float32.*compile for"),
    ((torch.zeros(ROWS, IN, dtype=F64),), {"scale": 2.0}, r"'scale': compiled for the constant 1.0, got 2.0"),
    ((torch.zeros(ROWS, IN, dtype=F64), 1.0), {}, r"1 positional arguments and the keywords \['scale'\], got 2 posit"),
    ((0.0,), {"scale": 1.0}, r"args\[0\].*expected a tensor of shape \(6, 4\), got 0.0"),
    ((randn(ROWS, IN).requires_grad_(),), {"scale": 1.0}, r"args\[0\].*inputs get no gradients"),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), CALLS)
def test_calls_that_were_not_compiled_are_refused(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module_of(data_parallel()[0])(*args, **kwargs)


def test_a_module_needs_its_engine_and_its_blocks() -> None:
    artifact = data_parallel()[1]
    with pytest.raises(RuntimeError, match=r"rank module 1 of 2 has no engine: call attach\(engine\)"):
        module_of(artifact)(randn(ROWS, IN), scale=1.0)
    with pytest.raises(ValueError, match=r"missing parameters \['frozen', .*unknown parameters \['typo'\]"):
        RankModule(artifact, *emitted(artifact), {"typo": randn(1)}, {})
    wrong = weights() | {"frozen": randn(7)}
    with pytest.raises(ValueError, match=r"parameter 'frozen' must be this rank's block, .* of shape \(3,\).*\(7,\)"):
        RankModule(artifact, *emitted(artifact), wrong, {"seen": randn(1), "scratch": randn(2)})

    def attach_other(rank: int, engine: Engine) -> None:
        with pytest.raises(ValueError, match=f"rank module {1 - rank} of 2: the engine is that of rank {rank} of 2"):
            module_of(data_parallel()[1 - rank]).attach(engine)

    run_ranks(2, attach_other, timeout_s=20)


def test_runner_gives_global_results() -> None:
    artifacts, x = data_parallel(), randn(ROWS, IN, seed=9)
    buffers = [{"seen": torch.zeros(1, dtype=F64), "scratch": torch.zeros(2, dtype=F64)} for _ in artifacts]
    programs = [emitted(artifact) for artifact in artifacts]
    result = run_in_process(artifacts, programs, [weights(), weights()], buffers, (x,), {"scale": 1.0}, timeout_s=20)
    w, b = (weights()[name].requires_grad_() for name in ("linear.weight", "linear.bias"))
    loss, y = reference(x, w, b)
    loss.backward()
    close(result.loss, loss.detach())
    close(result.outputs.y, y.detach())
    assert not result.outputs.y.requires_grad
    close(result.grads["linear.weight"], w.grad)
    close(result.grads["linear.bias"], b.grad)
    assert result.grads["head.weight"] is result.grads["linear.weight"]
    assert result.grads["spare.weight"] is None and result.grads["frozen"] is None
    assert set(result.buffers) == {"seen", "scratch"} and result.buffers["seen"].item() == ROWS
    half = ROWS // 2
    reduced = 8 * (1 + OUT * IN + OUT)
    assert result.messages == {"all_gather": (2, 2 * 8 * half * OUT), "all_reduce": (6, 2 * reduced)}
    assert result.messages_per_rank == [{"all_gather": (1, 8 * half * OUT), "all_reduce": (3, reduced)}] * 2
    resting = 8 * (OUT * IN + OUT + 5 + OUT + 1 + 2 + 1 + ROWS * IN)
    assert all(resting < peak < resting + 8 * 200 for peak in result.peak_bytes)


def test_runner_without_a_loss_runs_the_forward() -> None:
    modules = [module_of(artifact) for artifact in data_parallel(loss_index=None)]
    result = run_modules(modules, (randn(ROWS, IN),), {"scale": 1.0}, timeout_s=20)
    assert result.loss is None and result.grads == {}
    assert result.messages["all_reduce"][0] == 2
    with pytest.raises(ValueError, match=r"modules of all ranks of the mesh in rank order, got ranks \[1, 0\]"):
        run_modules(modules[::-1])


def test_runner_compares_the_losses_bit_by_bit() -> None:
    modules = [module_of(artifact) for artifact in data_parallel()]
    with torch.no_grad():
        modules[1].get_parameter("linear.weight")[0, 0] += 1e-14
    with pytest.raises(RuntimeError, match=r"the loss on ranks \[1\] differs from that on rank 0"):
        run_modules(modules, (randn(ROWS, IN),), {"scale": 1.0}, timeout_s=20)


def test_labels_name_node_module_peer_and_step() -> None:
    artifact = data_parallel()[0]
    labels = program_labels(artifact.forward, artifact.backward)
    assert labels[COLLECTIVE_CHANNEL, 0].module_path == "linear" and labels[COLLECTIVE_CHANNEL, 0].peer == (0, 1)
    labels = program_labels(ring(3)[1].forward)
    moves = {(label.peer, label.step) for (channel, _), label in labels.items() if channel == P2P_CHANNEL}
    assert moves == {((2, 0), 1), ((2, 0), 2)}


# A ring of weights over 3 ranks with uneven blocks: y = x @ w, w [4, 7] cut along its columns as 3, 3, 1.
WIDTH = 7


def ring(world: int) -> list[RankArtifact]:
    mesh = Mesh(("d",), (world,))
    layout = shard((IN, WIDTH), {1: (form(world, d=1),)})
    interface = interface_of(
        mesh,
        params=(slot("w", (IN, WIDTH), layout),),
        inputs=(InputSlot("args[0]", (2 * world, IN), F64),),
        outputs=(OutputSlot(True, None, True, F64, (2 * world, WIDTH)), OutputSlot(True, None, False, F64, (IN, 3))),
        in_spec=tree_flatten(((0,), {}))[1],
        out_spec=tree_flatten((0, 0))[1],
        forward_inputs=(("input", 0), ("param", "w")),
        forward_outputs=(("output", 0), ("output", 1)),
        backward_inputs=(("input", 0), ("tangent", 0)),
        backward_outputs=(("grad", "w"),),
        groups=((COLLECTIVE_CHANNEL, tuple(range(world))),),
    )
    return [RankArtifact(rank, interface, *_ring_programs(rank, world)) for rank in range(world)]


def _ring_programs(rank: int, world: int) -> tuple[RankProgram, RankProgram]:
    ranks = tuple(range(world))
    spans = [chunk_range(WIDTH, world, index) for index in ranks]
    b = Builder(rank, "forward", CPU)
    x = b.value("x", (2 * world, IN), F64)
    w = moving = b.value("w", (IN, spans[rank][1] - spans[rank][0]), F64)

    def call(target: Any, args: Any, shape: tuple[int, ...]) -> Value:
        return b.call(target, args, shape=shape, dtype=F64)

    mine = call(aten.slice.Tensor, (x, 0, 2 * rank, 2 * rank + 2), (2, IN))
    columns: dict[int, Value] = {}
    for step in range(world):
        here, following = (rank + step) % world, (rank + step + 1) % world
        arriving, tags = [moving], ()
        if step < world - 1:
            b.origin = Origin("mm", "ring", "move w", step + 1)
            tag = b.reserve()
            shape = (IN, spans[following][1] - spans[following][0])
            arriving, tags = b.exchange([(moving, (rank - 1) % world, tag)], [(shape, F64, (rank + 1) % world, tag)])
        columns[here] = call(aten.mm.default, (mine, moving), (2, moving.shape[1]))
        b.wait(tags, P2P_CHANNEL)
        moving = arriving[0]
    local = call(aten.cat.default, ([columns[i] for i in ranks], 1), (2, WIDTH))
    tag = b.reserve()
    rows = b.collective("all_gather", local, ranks, tag, (world, 2, WIDTH))
    b.wait((tag,), COLLECTIVE_CHANNEL)
    y = call(aten.view.default, (rows, [2 * world, WIDTH]), (2 * world, WIDTH))
    forward = RankProgram(rank, "forward", [x, w], [y, w], b.body)

    b = Builder(rank, "backward", CPU, first_tag=b.next_tag)
    x, dy = b.value("x", (2 * world, IN), F64), b.value("dy", (2 * world, WIDTH), F64)
    low, high = spans[rank]
    part = call(aten.slice.Tensor, (dy, 1, low, high), (2 * world, high - low))
    dw = call(aten.mm.default, (call(aten.t.default, (x,), (IN, 2 * world)), part), (IN, high - low))
    return forward, RankProgram(rank, "backward", [x, dy], [dw], b.body)


@pytest.mark.parametrize("transposed_input", [False, True])
def test_ring_of_uneven_weights(transposed_input: bool) -> None:
    w, x = randn(IN, WIDTH, seed=1), randn(6, IN, seed=2)
    x = x.t().contiguous().t() if transposed_input else x
    artifacts = ring(3)
    layout, mesh = artifacts[0].interface.params[0].layout, artifacts[0].interface.mesh

    def rank(index: int, engine: Engine) -> tuple[Tensor, Tensor]:
        local = {"w": split(w, layout, mesh)[index]}
        module = RankModule(artifacts[index], *emitted(artifacts[index]), local, {}, engine)
        for _ in range(3):  # consecutive steps reuse the tags
            module.zero_grad()
            y, same = module(x)
            assert not same.requires_grad and same is not module.get_parameter("w")
            # the tangent of a sum is expanded, not contiguous
            (y.sum() + y.square().sum()).backward()
        grad = module.get_parameter("w").grad
        assert grad is not None
        return y.detach(), grad

    results = run_ranks(3, rank, timeout_s=20)
    leaf = w.clone().requires_grad_()
    expected = x @ leaf
    (expected.sum() + expected.square().sum()).backward()
    for y, _ in results:
        close(y, expected.detach())
    close(gather([grad for _, grad in results], layout, mesh), leaf.grad)


# Programs of one rank that show what happens to memory.


def one_rank(
    ports: dict[str, tuple[Port, ...]],
    build: Callable[[str, Builder], tuple[list[Value], list[Value | None]]],
    **fields: Any,
) -> RankModule:
    programs = []
    for phase in ("forward", "backward"):
        b = Builder(0, phase, CPU)
        inputs, outputs = build(phase, b)
        programs.append(RankProgram(0, phase, inputs, outputs, b.body))
    names = {f"{phase}_{way}": ports.get(f"{phase}_{way}", ()) for phase in ("forward", "backward")
             for way in ("inputs", "outputs")}  # fmt: skip
    artifact = RankArtifact(0, interface_of(Mesh(("d",), (1,)), **names, **fields), *programs)
    params = {s.name: torch.full(s.shape, 2.0, dtype=F64) for s in artifact.interface.params}
    buffers = {s.name: torch.full(s.shape, 3.0, dtype=F64) for s in artifact.interface.buffers}
    return RankModule(artifact, *emitted(artifact), params, buffers)


def test_saved_values_are_freed_as_backward_uses_them_and_with_the_output() -> None:
    alive: list[weakref.ref[Any]] = []
    seen: list[int] = []

    def make(x: Tensor) -> Tensor:
        made = x * 2
        alive.append(weakref.ref(made.untyped_storage()))
        return made

    def look(x: Tensor) -> Tensor:
        seen.append(sum(reference() is not None for reference in alive))
        return x.clone()

    def build(phase: str, b: Builder) -> tuple[list[Value], list[Value | None]]:
        p = b.value("p", (4,), F64)
        if phase == "forward":
            saved = [b.call(make, (p,), shape=(4,), dtype=F64) for _ in range(2)]
            return [p], [b.call(aten.sum.default, (p,), shape=(), dtype=F64), *saved]
        values = [b.value(name, (4,), F64) for name in ("s0", "s1")]
        tangent = b.value("g", (), F64)
        total = b.call(aten.mul.Tensor, (values[0], tangent), shape=(4,), dtype=F64)
        total = b.call(look, (total,), shape=(4,), dtype=F64)
        total = b.call(aten.add.Tensor, (total, values[1]), shape=(4,), dtype=F64)
        return [*values, tangent], [b.call(look, (total,), shape=(4,), dtype=F64)]

    saved: tuple[Port, ...] = (("saved", 0), ("saved", 1))
    ports: dict[str, tuple[Port, ...]] = {
        "forward_inputs": (("param", "p"),), "forward_outputs": (("output", 0), *saved),
        "backward_inputs": (*saved, ("tangent", 0)), "backward_outputs": (("grad", "p"),),
    }  # fmt: skip
    outputs = (OutputSlot(True, None, True, F64, ()),)
    module = one_rank(ports, build, params=(slot("p", (4,)),), outputs=outputs)
    loss = module()
    loss.backward()
    assert seen == [1, 0]
    assert torch.equal(module.get_parameter("p").grad, torch.full((4,), 8.0, dtype=F64))  # type: ignore[arg-type]
    gc.disable()
    try:
        loss = module()
        assert alive[-1]() is not None
        del loss
        assert alive[-1]() is None, "an output that is dropped frees what was saved for it"
    finally:
        gc.enable()


def test_outputs_that_are_saved_make_no_cycle() -> None:
    def build(phase: str, b: Builder) -> tuple[list[Value], list[Value | None]]:
        p = b.value("p", (4,), F64)
        if phase == "forward":
            y = b.call(aten.exp.default, (p,), shape=(4,), dtype=F64)
            return [p], [y, y, y]
        tangents = [b.value("g0", (4,), F64), b.value("g1", (4,), F64)]
        both = b.call(aten.add.Tensor, (tangents[0], tangents[1]), shape=(4,), dtype=F64)
        return [p, *tangents], [b.call(aten.mul.Tensor, (p, both), shape=(4,), dtype=F64)]

    ports: dict[str, tuple[Port, ...]] = {
        "forward_inputs": (("param", "p"),), "forward_outputs": (("output", 0), ("output", 1), ("saved", 0)),
        "backward_inputs": (("saved", 0), ("tangent", 0), ("tangent", 1)), "backward_outputs": (("grad", "p"),),
    }  # fmt: skip
    twice = (OutputSlot(True, None, True, F64, (4,)),) * 2
    spec = tree_flatten((0, 0))[1]
    module = one_rank(ports, build, params=(slot("p", (4,)),), outputs=twice, out_spec=spec)
    first, second = module()
    (first.sum() + 2 * second.sum()).backward()
    close(module.get_parameter("p").grad, 3 * torch.full((4,), 2.0, dtype=F64).exp())
    first, second = module()
    memory = weakref.ref(first.untyped_storage())
    gc.disable()
    try:
        del first, second
        assert memory() is None
    finally:
        gc.enable()


def test_gradients_share_no_memory_with_each_other_or_the_tangent() -> None:
    def build(phase: str, b: Builder) -> tuple[list[Value], list[Value | None]]:
        if phase == "forward":
            p, q = b.value("p", (4,), F64), b.value("q", (2, 2), F64)
            flat = b.call(aten.view.default, (q, [4]), shape=(4,), dtype=F64)
            return [p, q], [b.call(aten.add.Tensor, (p, flat), shape=(4,), dtype=F64)]
        g = b.value("g", (4,), F64)
        return [g], [g, b.call(aten.view.default, (g, [2, 2]), shape=(2, 2), dtype=F64, kind="view")]

    ports: dict[str, tuple[Port, ...]] = {
        "forward_inputs": (("param", "p"), ("param", "q")), "forward_outputs": (("output", 0),),
        "backward_inputs": (("tangent", 0),), "backward_outputs": (("grad", "p"), ("grad", "q")),
    }  # fmt: skip
    outputs = (OutputSlot(True, None, True, F64, (4,)),)
    module = one_rank(ports, build, params=(slot("p", (4,)), slot("q", (2, 2))), outputs=outputs)
    tangent = randn(4)
    before = tangent.clone()
    module().backward(tangent)
    for param in module.parameters():
        assert param.grad is not None
        param.grad.mul_(2.0)
    assert torch.equal(tangent, before)
    close(module.get_parameter("p").grad, 2 * before)
    close(module.get_parameter("q").grad, 2 * before.view(2, 2))


def test_what_needs_the_old_value_of_a_buffer_keeps_it() -> None:
    def build(phase: str, b: Builder) -> tuple[list[Value], list[Value | None]]:
        p, old, other = b.value("p", (4,), F64), b.value("old", (4,), F64), b.value("other", (4,), F64)
        if phase == "forward":
            y = b.call(aten.mul.Tensor, (p, old), shape=(4,), dtype=F64)
            grown = b.call(aten.add.Tensor, (old, 1.0), shape=(4,), dtype=F64)
            return [p, old, other], [y, old, grown, old]
        g = b.value("g", (4,), F64)
        return [old, g], [b.call(aten.mul.Tensor, (g, old), shape=(4,), dtype=F64)]

    ports: dict[str, tuple[Port, ...]] = {
        "forward_inputs": (("param", "p"), ("buffer", "a"), ("buffer", "b")),
        "forward_outputs": (("output", 0), ("output", 1), ("buffer", "a"), ("buffer", "b")),
        "backward_inputs": (("buffer", "a"), ("tangent", 0)), "backward_outputs": (("grad", "p"),),
    }  # fmt: skip
    module = one_rank(
        ports, build, params=(slot("p", (4,)),), buffers=(slot("a", (4,)), slot("b", (4,))),
        outputs=(OutputSlot(True, None, True, F64, (4,)), OutputSlot(True, None, False, F64, (4,))),
        out_spec=tree_flatten((0, 0))[1],
    )  # fmt: skip
    buffer = module.get_buffer("a")
    y, old = module()
    assert module.get_buffer("a") is buffer and buffer[0] == 4 and module.get_buffer("b")[0] == 3
    assert old[0] == 3 and not old.requires_grad
    y.sum().backward()
    assert module.get_parameter("p").grad[0] == 3  # type: ignore[index]


# Materialisation.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5, dtype=F64)
        self.norm = nn.BatchNorm1d(5, dtype=F64)
        self.last = nn.Linear(5, 4, bias=False, dtype=F64)


def net_interface(model: nn.Module, mesh: Mesh) -> Interface:
    digits = (form(2, r=1, c=1),)

    def made(name: str, tensor: Tensor) -> TensorSlot:
        shape = tuple(tensor.shape)
        layout = shard(shape, {0: digits}) if shape else replicated(shape)
        return slot(name, shape, layout, dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    params = tuple(made(name, tensor) for name, tensor in model.named_parameters())
    return interface_of(mesh, params=params, buffers=tuple(made(name, x) for name, x in model.named_buffers()))


def gathered(interface: Interface, **sources: Any) -> dict[str, Tensor]:
    ranks = range(interface.mesh.world_size)
    parts = [materialize(interface, rank, **sources) for rank in ranks]
    found = {}
    for kind, slots in enumerate((interface.params, interface.buffers)):
        for s in slots:
            blocks = [parts[rank][kind][s.name] for rank in ranks]
            assert [tuple(x.shape) for x in blocks] == [local_shape(s.layout, interface.mesh, rank) for rank in ranks]
            found[s.name] = gather(blocks, s.layout, interface.mesh)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_materialize_from_model_state_dict_initializer_and_modules() -> None:
    torch.manual_seed(5)
    model = Net()
    interface = net_interface(model, Mesh(("r", "c"), (2, 2)))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    same(gathered(interface, model=model), state)
    same(gathered(interface, state_dict={name: x.to(torch.float32) for name, x in state.items()}),
         {name: x.to(torch.float32).to(x.dtype) for name, x in state.items()})  # fmt: skip
    meta = Net().to("meta")
    same(gathered(interface, model=meta, seed=5), state)
    assert all(param.is_meta for param in meta.parameters())
    filled = gathered(interface, model=meta, initializer=lambda name, tensor: tensor.fill_(len(name)))
    same(filled, {name: torch.full_like(tensor, len(name)) for name, tensor in state.items()})


def test_materialized_blocks_own_their_memory() -> None:
    whole = randn(4, 2)
    block = local_block(whole, replicated((4, 2)), Mesh(("d",), (2,)), 0)
    block.zero_()
    assert whole.abs().min() > 0


def test_the_largest_thing_alive_while_initialising_is_one_module() -> None:
    alive: list[weakref.ref[Any]] = []
    most = [0]

    class Big(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if not self.weight.is_meta:
                alive.append(weakref.ref(self.weight.untyped_storage()))
                most[0] = max(most[0], sum(reference() is not None for reference in alive))

    model = nn.Sequential(*(Big(8, 8, bias=False, device="meta", dtype=F64) for _ in range(4)))
    materialize(net_interface(model, Mesh(("r", "c"), (2, 2))), 0, model=model)
    assert len(alive) == 4 and most[0] == 1


def test_materialize_names_what_is_missing_or_wrong() -> None:
    model = Net()
    interface = net_interface(model, Mesh(("r", "c"), (2, 2)))
    state = dict(model.state_dict())
    del state["last.weight"], state["first.bias"]
    with pytest.raises(ValueError, match="the state dict has no first.bias, last.weight"):
        materialize(interface, 0, state_dict=state)
    with pytest.raises(ValueError, match="nothing gives first.weight, .*pass the model, a state dict, or an init"):
        materialize(interface, 0)
    state = model.state_dict() | {"last.weight": randn(3, 3)}
    with pytest.raises(ValueError, match=r"last.weight: expected shape \(4, 5\), got \(3, 3\)"):
        materialize(interface, 0, state_dict=state)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, device="meta", dtype=F64))

    bare = nn.Sequential(Bare())
    with pytest.raises(ValueError, match=r"module Bare does not initialise 0.w .* pass initializer="):
        materialize(net_interface(bare, Mesh(("r", "c"), (2, 2))), 0, model=bare)


def test_transformers_initialise_as_they_do_themselves() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_head=2, n_layer=8, vocab_size=128, n_positions=64)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    found = gathered(net_interface(model, Mesh(("r", "c"), (2, 2))), model=model, seed=3)
    # GPT-2's attention block scales its projection down, which the projection itself knows nothing of.
    assert found["transformer.h.0.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert found["transformer.h.0.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1, vocab_size=32
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = gathered(net_interface(model, Mesh(("r", "c"), (2, 2))), model=model)
    real = transformers.LlamaForCausalLM(config)
    assert torch.equal(found["model.rotary_emb.inv_freq"], real.model.rotary_emb.inv_freq)
    assert found["model.norm.weight"].eq(1).all()
