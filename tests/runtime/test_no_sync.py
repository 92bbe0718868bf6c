"""Gradient accumulation with one reduction: against eager, by messages, and in the states between two reductions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_ranks import CLUSTER
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.layout import gather
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.runtime.engine import CommTimeoutError, Engine
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.threads import run_ranks

SOLVER = st.SolverOptions(time_limit_s=1, patience_s=0.1, yardsticks=False)
VOCABULARY, WIDTH, HIDDEN = 11, 6, 9


class Net(nn.Module):
    """Tied weights, a norm, a frozen parameter, an unused one; sizes that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.norm = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.frozen, self.unused = nn.Parameter(torch.rand(WIDTH), False), nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = (x + self.down(torch.tanh(self.norm(self.up(x))))) * self.frozen
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.norm = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 7), nn.LayerNorm(7)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(self.embedding(ids)))).double().square().mean()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 7), nn.Linear(7, 5)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(torch.tanh(self.up(self.embedding(ids)))).float().square().mean()


DTYPES = {Net: torch.float64, Small: torch.float64, Autocast: torch.float32}


def net(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind().to(DTYPES[kind])


def batch(seed: int, rows: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, 3), generator=torch.Generator().manual_seed(seed))


BATCHES = [batch(0), batch(1), batch(2)]


@lru_cache
def annotated(kind: type[nn.Module]) -> Annotated:
    return annotate(capture(net(kind), (BATCHES[0],)))


@lru_cache
def compiled(mesh: Any = 2, template: str | None = "zero3", kind: type[nn.Module] = Net) -> st.CompiledModel:
    """Captured once for all meshes."""
    graph = annotated(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stpart_compiler.compile.capture", lambda *args, **kwargs: graph.captured)
        patch.setattr("stpart_compiler.graphs.annotate", lambda *args, **kwargs: graph)
        model = net(kind)
        return st.compile_model(model, (BATCHES[0],), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER)


def on_ranks(done: st.CompiledModel, fn: Callable[[RankModule, Engine], Any], timeout_s: float = 30.0) -> list[Any]:
    return run_ranks(done.world_size, lambda r, engine: fn(done.rank_module(r, engine), engine), timeout_s=timeout_s)


def grads_of(module: RankModule) -> dict[str, Tensor | None]:
    return {slot.name: param.grad for slot, param in module.param_slots()}


def accumulate(module: RankModule, batches: Sequence[Tensor], synced: int) -> None:
    """Backward of every batch; that of number `synced` reduces."""
    for number, ids in enumerate(batches):
        with nullcontext() if number == synced else module.no_sync():
            module(ids).backward()


def check(
    done: st.CompiledModel, found: list[dict[str, Tensor | None]], model: nn.Module, tolerance: float = 1e-10
) -> None:
    """The ranks' gradients make up the model's own."""
    for slot in done.interface.params:
        blocks = [grads[slot.name] for grads in found]
        expected = model.get_parameter(slot.name).grad
        if expected is None:
            assert blocks == [None] * len(blocks), slot.name
            continue
        whole = gather([block for block in blocks if block is not None], slot.layout, done.plan.mesh)
        assert whole.dtype == expected.dtype
        assert (whole - expected).norm() <= tolerance * expected.norm(), slot.name


def eager(model: nn.Module, batches: Sequence[Tensor]) -> Any:
    for ids in batches:
        model(ids).backward()
    return model


PLANS: list[tuple[Any, str | None, type[nn.Module]]] = [
    (2, "data", Net), (2, "zero3", Net), (3, "zero3", Net), ((2, 2), "megatron", Net), ((2, 2), "primepar", Net),
    (2, None, Small), ((2, 2), None, Small),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "template", "kind"), PLANS)
def test_reductions_happen_once_and_gradients_are_those_of_eager(
    mesh: Any, template: str | None, kind: type[nn.Module]
) -> None:
    done = compiled(mesh, template, kind)

    def rank(module: RankModule, engine: Engine) -> Any:
        module(BATCHES[0]).backward()
        messages = [engine.message_totals()]
        module.zero_grad()
        for number, ids in enumerate(BATCHES):
            with module.no_sync() if number < 2 else nullcontext():
                module(ids).backward()
            messages.append(engine.message_totals())
        assert engine.outstanding == []
        return grads_of(module), messages

    found = on_ranks(done, rank)
    check(done, [grads for grads, _ in found], eager(net(kind), BATCHES))
    for index, (_, (plain, *waiting, last)) in enumerate(found):
        reduce = done.deferred(index).reduce
        moved = sum(len(i.sends) + len(i.recvs) + (i.kind == "collective") for i in reduce.body)
        assert last == plain, "what is left out comes once"
        assert waiting[0] == waiting[1]
        assert sum(number for number, _ in plain.values()) - sum(number for number, _ in waiting[0].values()) == moved
        assert moved


def test_data_parallel_sends_nothing_in_a_backward_that_waits() -> None:
    def rank(module: RankModule, engine: Engine) -> None:
        with module.no_sync():
            loss = module(BATCHES[0])
            before = engine.message_totals()
            loss.backward()
            assert engine.message_totals() == before

    on_ranks(compiled(2, "data"), rank)


def test_what_follows_a_reduction_waits_with_it() -> None:
    """Of two summands of a tied weight's gradient one is re-laid out before they are added, of a bias before a view."""
    deferred = compiled((2, 2), "primepar").deferred(0)
    assert {"embedding.weight", "down.bias"} <= set(deferred.reduced)
    assert [slot.params for slot in deferred.sums].count(("embedding.weight",)) == 2


def test_sums_of_batches_of_several_sizes_wait_together() -> None:
    done, batches = compiled(), [batch(0), batch(1, rows=3), batch(2), batch(3, rows=3)]

    def rank(module: RankModule, engine: Engine) -> Any:
        accumulate(module, batches, synced=3)
        reduced = engine.message_totals()
        module(batches[3]).backward()
        assert engine.message_totals() == reduced
        return grads_of(module)

    check(done, on_ranks(done, rank), eager(net(), [*batches, batches[3]]))


def test_a_reduction_comes_amid_the_batches_and_two_forwards_before_their_backwards() -> None:
    done = compiled()

    def rank(module: RankModule, engine: Engine) -> Any:
        accumulate(module, BATCHES, synced=1)
        with pytest.raises(RuntimeError, match=r"AdamW.step: rank \d holds sums of gradients that were not reduced"):
            torch.optim.AdamW(module.parameters()).step()
        losses = [module(ids) for ids in BATCHES[:2]]
        with module.no_sync(), module.no_sync():
            losses[0].backward()
        losses[1].backward()
        return grads_of(module)

    check(done, on_ranks(done, rank), eager(net(), [*BATCHES, *BATCHES[:2]]))


def test_sums_under_autocast_are_as_wide_as_the_gradients() -> None:
    done, batches = compiled((2, 2), "primepar", Autocast), BATCHES * 4

    def rank(module: RankModule, engine: Engine) -> Any:
        accumulate(module, batches, synced=11)
        return grads_of(module)

    check(done, on_ranks(done, rank), eager(net(Autocast), batches), tolerance=1e-2)
    deferred = done.deferred(0)
    made = deferred.accumulate.outputs[len(deferred.grads) :]
    assert torch.bfloat16 in {value.dtype for value in made if value is not None}
    assert (
        {slot.dtype for slot in deferred.sums} == {value.dtype for value in deferred.reduce.inputs} == {torch.float32}
    )


def trained(module: Any, scaler: torch.amp.GradScaler, step: Callable[[Any, Tensor, bool], None]) -> list[Tensor]:
    """Four scaled, clipped steps over three micro-batches each; the second overflows and is left out."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    clip = st.clip_grad_norm_ if isinstance(module, RankModule) else nn.utils.clip_grad_norm_
    norms = []
    for number in range(4):
        for ids in BATCHES:
            step(module, ids, ids is BATCHES[-1])
            if number == 1 and ids is BATCHES[-1]:
                module.get_parameter("up.bias").grad[0] = torch.inf
        scaler.unscale_(optimizer)
        norms.append(clip(module.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms


def test_training_with_a_scaler_and_clipping() -> None:
    done, model = compiled(), net()

    def rank(module: RankModule, engine: Engine) -> Any:
        scaler = st.GradScaler("cpu", init_scale=8.0)

        def step(module: Any, ids: Tensor, last: bool) -> None:
            with nullcontext() if last else module.no_sync():
                scaler.scale(module(ids)).backward()

        norms = trained(module, scaler, step)
        return norms, {slot.name: param.detach() for slot, param in module.param_slots()}

    found = on_ranks(done, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    expected = trained(model, scaler, lambda module, ids, last: scaler.scale(module(ids)).backward())
    for norms, _ in found:
        torch.testing.assert_close(norms, expected)
    for slot in done.interface.params:
        whole = gather([params[slot.name] for _, params in found], slot.layout, done.plan.mesh)
        torch.testing.assert_close(whole, model.get_parameter(slot.name).detach())


def test_zero_grad_drops_what_waits() -> None:
    done = compiled()

    def rank(module: RankModule, engine: Engine) -> Any:
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1), torch.optim.SGD(module.up.parameters(), lr=0.1)]
        for zero in (optimizers[0].zero_grad, module.zero_grad, lambda: module.zero_grad(set_to_none=False)):
            accumulate(module, BATCHES, synced=-1)
            assert module.up.weight.grad is not None and not module.up.weight.grad.any()
            zero()
            module.check_reduced("here")
        accumulate(module, BATCHES[:1], synced=-1)
        optimizers[1].zero_grad()
        accumulate(module, BATCHES[1:], synced=1)
        return grads_of(module)

    found = on_ranks(done, rank)
    model = eager(net(), BATCHES[:1])
    model.up.zero_grad()
    check(done, found, eager(model, BATCHES[1:]))


def test_what_would_lose_sums_is_refused() -> None:
    def rank(module: RankModule, engine: Engine) -> None:
        loss, weight = module(BATCHES[0]), module.up.weight
        accumulate(module, BATCHES[:1], synced=-1)
        scaler = st.GradScaler("cpu")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(torch.ones(()))
        for caller, call in (
            ("clip_grad_norm_", lambda: st.clip_grad_norm_(module, 1.0)),
            ("SGD.step", optimizer.step),
            ("GradScaler", lambda: scaler.unscale_(optimizer)),
        ):
            with pytest.raises(RuntimeError, match=rf"{caller}: rank \d holds sums .* such as of .*zero_grad\(\)"):
                call()
        with pytest.raises(RuntimeError, match=r"call loss.backward\(\) without inputs="):
            torch.autograd.grad(loss, [weight])
        with pytest.raises(RuntimeError, match=r"call loss.backward\(\) without inputs="):
            module(BATCHES[0]).backward(inputs=[weight])
        with pytest.raises(RuntimeError, match="single memory location"):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match="'up.weight' no longer requires grad, but sums of its gradient wait"):
            module(BATCHES[0]).backward()
        weight.requires_grad_(True)
        weight.grad = torch.ones_like(weight)
        with pytest.raises(RuntimeError, match="gradient of 'up.weight' was written while a sum of it waits"):
            optimizer.step()
        module.zero_grad()
        optimizer.step()

    on_ranks(compiled(), rank)


def test_parameters_without_gradients_keep_none() -> None:
    def rank(module: RankModule, engine: Engine) -> None:
        module.up.weight.requires_grad_(False)
        accumulate(module, BATCHES, synced=2)
        absent = {name for name, grad in grads_of(module).items() if grad is None}
        assert absent == {"up.weight", "frozen", "unused.weight", "unused.bias"}

    on_ranks(compiled(), rank)


def test_a_rank_that_enters_alone_stops() -> None:
    failed: dict[int, str] = {}

    def rank(module: RankModule, engine: Engine) -> None:
        try:
            with module.no_sync() if module.rank else nullcontext():
                module(BATCHES[0]).backward()
        except CommTimeoutError as error:
            failed[module.rank] = str(error)
            raise

    with pytest.raises(CommTimeoutError):
        on_ranks(compiled(), rank, timeout_s=0.5)
    assert "(compiling for no_sync)" in failed[1]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own class warns when a TreeSpec is copied
def test_saved_copied_and_pickled_models(tmp_path: Path) -> None:
    done = compiled()
    done.save(tmp_path)
    loaded = st.load_compiled(tmp_path)

    def rank(module: RankModule, engine: Engine) -> Any:
        accumulate(module, BATCHES, synced=2)
        return grads_of(module)

    check(done, on_ranks(loaded, rank), eager(net(), BATCHES))
    single = compiled(1, "data").rank_module(0)
    accumulate(single, BATCHES[:2], synced=1)
    with copy.deepcopy(single).no_sync():
        pass
    with (
        pytest.raises(RuntimeError, match="rank module 0 came without programs for it"),
        pickle.loads(pickle.dumps(compiled(1, "data").rank_module(0))).no_sync(),
    ):
        pass


def test_inference_has_nothing_to_wait_for() -> None:
    model = net()
    done = st.compile_model(model, (BATCHES[0],), mesh=2, cluster=CLUSTER, training=False)

    def rank(module: RankModule, engine: Engine) -> Tensor:
        with module.no_sync():
            return module(BATCHES[0])

    for loss in on_ranks(done, rank):
        torch.testing.assert_close(loss, model(BATCHES[0]).detach())
