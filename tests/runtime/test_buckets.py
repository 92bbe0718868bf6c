"""Calls padded to buckets of sizes: as exact as without, by few programs, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import Tensor, nn
from torch.nn import functional as F

import stpart_compiler as st
from stpart_compiler.ir.artifact import InputSlot
from stpart_compiler.ir.layout import gather
from stpart_compiler.runtime.buckets import Padding
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.threads import run_ranks

VOCABULARY, WIDTH = 11, 8


class Causal(nn.Module):
    """A language model whose tokens see those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.embedding(ids).cumsum(1)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Pooled(nn.Module):
    """`kind`: what of it does not leave padded places out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.line = kind, nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.line(x))
        if self.kind == "mean":
            return (y - y.detach()).mean() + x.mean()
        if self.kind == "counter":
            self.seen.add_(x.shape[1])
        if self.kind == "dropout":
            y = F.dropout(y, 0.5)
        if self.kind == "twice":
            return y.square().sum(), torch.cat((y, y), 1)
        return y.square().sum()


def call(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    return ids, ids.roll(-1, 1)


def causal() -> nn.Module:
    torch.manual_seed(0)
    return Causal().double()


def on_ranks(done: st.CompiledModel, fn: Callable[[RankModule], Any]) -> list[Any]:
    def rank(index: int, engine: Engine) -> Any:
        return fn(done.rank_module(index, engine))

    return run_ranks(done.world_size, rank, timeout_s=30.0)


def results(model: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """Loss, logits, and the sum of the gradients of both, per call."""
    found = []
    for args in calls:
        loss, logits = model(*args)
        (loss + logits[:, -1].square().sum()).backward()
        found.append((loss.detach(), logits.detach()))
    return found


def test_many_sizes_by_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the batch and the sequence are padded; the first padded call is compiled for its own sizes as well."""
    sizes: Any = [st.Buckets(-1, (8, 16), 0), st.Buckets(0, (4,), 0)]
    labels = [st.Buckets(1, (8, 16), -100), st.Buckets(0, (4,), -100)]
    dynamic = {"args[0]": sizes, "args[1]": labels}
    model = causal()
    done = st.compile_model(model, call(4, 8), mesh=2, dynamic=dynamic, template="data", cluster=CLUSTER)
    captures = []
    capture = st.compile.capture
    monkeypatch.setattr(
        st.compile, "capture", lambda *args, **kwargs: captures.append(args[1]) or capture(*args, **kwargs)
    )
    calls = [call(3, 5), call(2, 7), call(4, 8), call(3, 3)]

    def rank(module: RankModule) -> Any:
        found = results(module, calls)
        with pytest.raises(ValueError, match=r"'args\[0\]': dim -1 has size 17, more than the largest bucket 16"):
            module(*call(4, 17))
        return found, {slot.name: param.grad for slot, param in module.param_slots()}

    found = on_ranks(done, rank)
    assert [tuple(args[0].shape) for args in captures] == [(3, 5)], "the bucket is what was compiled first"
    expected = results(causal(), calls)
    for outputs, _ in found:
        torch.testing.assert_close(outputs, expected)
    model = causal()
    results(model, calls)
    for slot in done.interface.params:
        whole = gather([grads[slot.name] for _, grads in found], slot.layout, done.plan.mesh)
        torch.testing.assert_close(whole, model.get_parameter(slot.name).grad)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", r"padded along dim 1 of 'args\[0\]', output 0 differs from what it is without: .* Give a mask"),
        ("counter", r"padded along dim 1 of 'args\[0\]', buffer 'seen' differs"),
        ("dropout", "dynamic: the step draws random numbers"),
        ("twice", r"dim 1 of output 1 grows from 6 to 8 by padding, as no padded dim of an input does"),
    ],
)
def test_padding_that_changes_the_result_is_refused(kind: str, message: str) -> None:
    model, x = Pooled(kind).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    nn.init.zeros_(model.line.bias)
    dynamic = {"args[0]": st.Buckets(1, (4,), 0.0)}
    done = st.compile_model(model, (torch.cat((x, x)),), mesh=1, dynamic=dynamic, cluster=CLUSTER, solver=SOLVER)
    with pytest.raises(ValueError, match=message):
        done.rank_module(0)(x)


def test_an_output_that_two_inputs_could_cut_is_cut_only_where_they_agree() -> None:
    slots = [InputSlot("x", (4, 4), torch.float64)]
    padding = Padding({(0, dim): st.Buckets(dim, (4,), 0.0) for dim in (0, 1)}, slots)
    x, y = torch.ones(3, 3), torch.ones(2, 3)
    wide, grown = padding.padded([x])
    padding.try_out(grown, ([x], wide), ([x.sum(0)], [wide[0].sum(0)]), ["output 0"])
    assert padding.cut(grown, [x], [wide[0].sum(0)])[0].shape == (3,)
    with pytest.raises(ValueError, match=r"dim 0 of output 0 has the size of dim 0 of 'x', dim 1 of 'x', which differ"):
        padding.cut(grown, [y], [padding.padded([y])[0][0].sum(0)])


def test_hints_are_checked_before_anything_is_planned() -> None:
    model, args = causal(), call(4, 8)
    for dynamic, message in (
        ({"ids": st.Buckets(1, (8,), 0)}, r"dynamic: 'ids' is no tensor input; those are \['args\[0\]', 'args\[1\]'\]"),
        ({"args[0]": st.Buckets(2, (8,), 0)}, r"'args\[0\]' of shape \(4, 8\) has no dim 2"),
        ({"args[0]": st.Buckets(1, (8,), 0.5)}, r"'args\[0\]' is torch.int64, which cannot hold the pad value 0.5"),
        ({"args[0]": [st.Buckets(1, (8,), 0), st.Buckets(-1, (8,), 0)]}, r"'args\[0\]': dim 1 is given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            st.compile_model(model, args, mesh=2, dynamic=dynamic)
    with pytest.raises(ValueError, match=r"Buckets: sizes must be positive and ascending, got \(8, 4\)"):
        st.Buckets(1, (8, 4), 0)
