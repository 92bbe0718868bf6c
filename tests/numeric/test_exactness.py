"""What breaks partitioners: losses, views, ties, buffers, odd sizes. Each case on several meshes against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from once import traced_once
from slow_ranks import CLUSTER, SOLVER
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import stpart_compiler as st

PLANS: list[tuple[Any, str | None]] = [(2, None), (3, None), ((2, 2), None), (4, "data"), (3, "megatron_sp")]

Made = tuple[nn.Module, tuple[Any, ...]]
CASES: dict[str, Callable[[], Made]] = {}


def case(make: Callable[[], Made]) -> Callable[[], Made]:
    CASES[make.__name__] = make
    return make


class Function(nn.Module):
    """Layers, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _classifier(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], classes: int = 7, tokens: int = 10) -> Made:
    """A linear layer before a loss on [tokens, classes] and targets, some of them ignored (all of the first half)."""
    target = torch.randint(0, classes, (tokens,))
    target[: tokens // 2] = -100
    model = Function(lambda m, x, y: loss(m.head(x), y), head=nn.Linear(6, classes))
    return model, (torch.randn(tokens, 6), target)


# --- losses


@case
def cross_entropy_mean() -> Made:
    return _classifier(F.cross_entropy)


@case
def cross_entropy_sum() -> Made:
    return _classifier(lambda x, y: F.cross_entropy(x, y, reduction="sum") + 10)


@case
def cross_entropy_none() -> Made:
    return _classifier(lambda x, y: F.cross_entropy(x, y, reduction="none").square().sum())


@case
def cross_entropy_smoothing() -> Made:
    return _classifier(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1))


@case
def cross_entropy_weights() -> Made:
    weight = torch.rand(7) + 0.5

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m.head(x), y, weight=w) + F.cross_entropy(m.head(x), y, weight=w, label_smoothing=0.2)

    return Function(loss, head=nn.Linear(6, 7)), (torch.randn(10, 6), torch.randint(0, 7, (10,)), weight)


@case
def cross_entropy_probabilities() -> Made:
    model = Function(lambda m, x, y: F.cross_entropy(m.head(x), y.softmax(-1)), head=nn.Linear(6, 7))
    return model, (torch.randn(9, 6), torch.randn(9, 7))


@case
def cross_entropy_images() -> Made:
    model = Function(lambda m, x, y: F.cross_entropy(m.conv(x), y), conv=nn.Conv2d(3, 5, 1))
    return model, (torch.randn(4, 3, 4, 4), torch.randint(0, 5, (4, 4, 4)))


@case
def cross_entropy_odd_vocabulary() -> Made:
    return _classifier(F.cross_entropy, classes=509, tokens=5)


@case
def other_losses() -> Made:
    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = m.head(x)
        probability = out.sigmoid()
        return (
            F.mse_loss(out, y)
            + F.mse_loss(out, y, reduction="sum")
            + F.l1_loss(out, y)
            + F.smooth_l1_loss(out, y)
            + F.huber_loss(out, y, delta=0.7)
            + F.binary_cross_entropy(probability, y.sigmoid())
            + F.binary_cross_entropy_with_logits(out, y.sigmoid())
            + F.soft_margin_loss(out, y.sign())
            + F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="batchmean")
            + F.cosine_similarity(out, y).mean()
        )

    return Function(loss, head=nn.Linear(6, 5)), (torch.randn(7, 6), torch.randn(7, 5))


# --- what partial sums must not pass through


@case
def nonlinear_after_sums() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.down(m.up(x).relu())
        return (
            (y.sum() + 10).square() + y.norm() + y.amax() + y.clamp(-0.1, 0.1).sum() + y.mean(0).abs().sum() + y.std()
        )

    return Function(loss, up=nn.Linear(6, 8), down=nn.Linear(8, 6)), (torch.randn(5, 6),)


@case
def reductions() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.head(x)
        kept = y.logsumexp(-1).sum() + y.var(0).sum() + y.cumsum(0).square().mean() + y.sort(-1).values[:, :2].sum()
        return (
            kept + y.topk(2, -1).values.sum() + y.prod(-1).sum() + y.softmax(0).square().sum() + y.max(0).values.sum()
        )

    return Function(loss, head=nn.Linear(6, 6)), (torch.randn(8, 6),)


# --- views, writes and indexing


@case
def views_of_cut_dims() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.head(x).view(4, 3, 2, 6).transpose(1, 2).reshape(8, 18)
        return (y.unflatten(0, (2, 4)).flatten(1) * y.reshape(4, 36).roll(1, 0).view(2, 72)).sum()

    return Function(loss, head=nn.Linear(6, 12)), (torch.randn(12, 6),)


@case
def writes_through_views() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.head(x).clone()
        y[:, :2] = 0
        y[1:3] += x[1:3, :6]
        y.select(0, 0).mul_(2)
        y.t()[3] = y[:, 4]
        y[x[:, :6] > 0.5] = -1
        return y.square().sum()

    return Function(loss, head=nn.Linear(6, 6)), (torch.randn(8, 6),)


@case
def indexing() -> Made:
    def loss(m: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = m.head(x)
        z = torch.zeros_like(y).index_add(0, i, y).scatter_add(1, i[:, None].expand(8, 6) % 6, y)
        picked = (
            y[i].sum() + y[:, [0, 2]].square().sum() + y.gather(1, i[:, None] % 6).sum() + y.index_select(0, i).sum()
        )
        return (
            picked + z.square().sum() + torch.where(y > 0, y, 0).sum() + y.masked_fill(y < 0, 2).sum() + y.take(i).sum()
        )

    return Function(loss, head=nn.Linear(6, 6)), (torch.randn(8, 6), torch.randint(0, 8, (8,)))


@case
def embedding_with_padding() -> Made:
    def loss(m: Any, i: torch.Tensor) -> torch.Tensor:
        return m.table(i).square().mean() + F.embedding_bag(i, m.table.weight, mode="mean").sum()

    return Function(loss, table=nn.Embedding(11, 6, padding_idx=3)), (torch.randint(0, 11, (5, 7)),)


@case
def products() -> Made:
    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.einsum("bij,bkj->bik", m.head(x), y) + torch.baddbmm(y[:, :, :3], x, y.transpose(1, 2))
        return torch.einsum("bik,bik->", z, z) + torch.addmv(x[0, :, 0], x[0], y[0, 0]).sum()

    return Function(loss, head=nn.Linear(6, 6)), (torch.randn(4, 3, 6), torch.randn(4, 3, 6))


@case
def rope_by_complex_numbers() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(6, dtype=x.dtype), 0.1 ** torch.arange(3, dtype=x.dtype))
        q = torch.view_as_complex(m.head(x).unflatten(-1, (2, 3, 2)))
        q = torch.view_as_real(q * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-3)
        return (q @ q.transpose(1, 2)).softmax(-1).square().sum()

    return Function(loss, head=nn.Linear(8, 12)), (torch.randn(4, 6, 8),)


# --- parameters


@case
def ties_frozen_unused_and_twice() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.table.weight
            self.frozen, self.unused, self.shared = nn.Linear(6, 6), nn.Linear(3, 3), nn.Linear(6, 6)
            self.frozen.requires_grad_(False)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            x = self.shared(self.frozen(self.shared(self.table(i))).tanh())
            return F.cross_entropy(self.head(x * x).flatten(0, 1), i.flatten())

    return Model(), (torch.randint(0, 9, (5, 4)),)


@case
def grouped_heads_that_do_not_divide() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.q(x).view(4, 7, 10, 4).transpose(1, 2)
        k, v = (layer(x).view(4, 7, 5, 4).transpose(1, 2) for layer in (m.k, m.v))
        one = m.one(x).view(4, 7, 1, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y + F.scaled_dot_product_attention(q, one, one, enable_gqa=True)
        return m.out(y.transpose(1, 2).flatten(2)).square().mean()

    layers = {"q": nn.Linear(8, 40), "k": nn.Linear(8, 20), "v": nn.Linear(8, 20), "one": nn.Linear(8, 4)}
    return Function(loss, **layers, out=nn.Linear(40, 8)), (torch.randn(4, 7, 8),)


@case
def batch_smaller_than_the_mesh() -> Made:
    model = Function(lambda m, x: m.b(m.a(x).relu()).square().mean(), a=nn.Linear(3, 2), b=nn.Linear(2, 1))
    return model, (torch.randn(1, 3),)


# --- norms and buffers


@case
def batch_norm_of_five() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.norm(m.conv(x)).relu().square().mean()

    return Function(loss, conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4)), (torch.randn(5, 2, 6, 6),)


@case
def other_norms() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.instance(m.conv(x)) + m.group(m.conv(x))
        return (
            F.rms_norm(y, (4,)).square().mean()
            + F.normalize(y.flatten(1), dim=-1).sum()
            + F.local_response_norm(y, 2).sum()
        )

    layers = {"conv": nn.Conv1d(3, 6, 3, padding=1), "group": nn.GroupNorm(3, 6), "instance": nn.InstanceNorm1d(6)}
    return Function(loss, **layers), (torch.randn(4, 3, 4),)


@case
def buffers_read_and_written() -> Made:
    class Model(nn.Module):
        steps: torch.Tensor
        average: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 6)
            self.register_buffer("steps", torch.tensor(3))
            self.register_buffer("average", torch.rand(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(x) - self.average
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.steps += 1
            return y.square().mean() / self.steps

    return Model(), (torch.randn(5, 6),)


@case
def images() -> Made:
    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(m.conv(x).relu(), 2)
        y = m.up(F.avg_pool2d(m.grouped(y), 2, ceil_mode=True))
        return F.interpolate(y, scale_factor=2, mode="bilinear").square().mean() + F.pixel_shuffle(y, 2).sum()

    layers = {"conv": nn.Conv2d(3, 8, 3, padding=1), "grouped": nn.Conv2d(8, 8, 3, padding=1, groups=4)}
    return Function(loss, **layers, up=nn.ConvTranspose2d(8, 4, 2, stride=2)), (torch.randn(4, 3, 8, 8),)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("plan", range(len(PLANS)))
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES])
def test_equal_to_one_device(name: str, plan: int) -> None:
    torch.manual_seed(0)
    mesh, template = PLANS[plan]
    model, args = CASES[name]()
    model, args = model.double(), tuple(_double(arg) for arg in args)
    with traced_once(("exactness", name)):
        compiled = st.compile_model(model, args, mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER)
    single = copy.deepcopy(model)
    loss = single(*args)
    loss.backward()
    result = compiled.run_in_process(*args)
    assert result.loss is not None
    _close("loss", result.loss, loss.detach(), 0.0)
    largest = max(float(p.grad.abs().max()) for p in single.parameters() if p.grad is not None)
    for param_name, param in single.named_parameters(remove_duplicate=False):
        found = result.grads[param_name]
        assert (found is None) == (param.grad is None), param_name
        if found is not None and param.grad is not None:
            _close(param_name, found, param.grad, largest)
    for buffer_name, buffer in single.named_buffers():
        if buffer_name in result.buffers:
            _close(buffer_name, result.buffers[buffer_name], buffer, 0.0)


def _close(name: str, found: torch.Tensor, expected: torch.Tensor, largest: float) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    size = max(float(expected.double().norm()), 1e-4 * largest)
    error = float((found.double() - expected.double()).norm())
    assert error <= 1e-9 * size, name


def test_outputs_of_all_kinds() -> None:
    """Nested, integer, boolean and scalar outputs, inputs passed through, and constants."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> dict[str, Any]:
            y = self.head(x)
            pair = (y.argmax(-1), y > 0)
            return {
                "y": y,
                "pair": pair,
                "same": [x, i],
                "sum": y.sum(),
                "none": None,
                "n": 3,
                "view": y.t(),
                "i": i + 1,
            }

    torch.manual_seed(0)
    model, x, i = Model().double(), torch.randn(5, 6).double(), torch.arange(5)
    for mesh, template in PLANS:
        compiled = st.compile_model(
            model, (x, i), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER, training=False
        )
        found, expected = tree_leaves(compiled.run_in_process(x, i).outputs), tree_leaves(model(x, i))
        for got, want in zip(found, expected, strict=True):
            if isinstance(want, torch.Tensor):
                torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
            else:
                assert got == want


def test_inference_in_eval_mode() -> None:
    """Running statistics are used and stay, dropout does nothing."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 5)).double().eval()
    )
    norm = model[2]
    assert isinstance(norm, nn.BatchNorm1d) and isinstance(norm.running_mean, torch.Tensor)
    norm.running_mean.uniform_(-1, 1)
    x = torch.randn(7, 6).double()
    for mesh, template in PLANS:
        compiled = st.compile_model(
            model, (x,), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER, training=False
        )
        result = compiled.run_in_process(x)
        torch.testing.assert_close(result.outputs, model(x).detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(result.buffers["2.running_mean"], norm.running_mean)
        assert not result.grads


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_autocast(dtype: torch.dtype, tolerance: float) -> None:
    """Parameters rest in float32 and are cast before they are sent; gradients have the dtypes of eager's."""

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            y = m.down(F.gelu(m.norm(m.up(x))))
            q = y.view(4, 6, 2, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).float().square().mean()

    torch.manual_seed(0)
    model = Function(loss, up=nn.Linear(16, 32), norm=nn.LayerNorm(32), down=nn.Linear(32, 16))
    x = torch.randn(4, 6, 16)
    model(x).backward()
    for mesh, template in [(2, "zero3"), ((2, 2), None)]:
        compiled = st.compile_model(model, (x,), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER)
        result = compiled.run_in_process(x)
        for name, param in model.named_parameters():
            found = result.grads[name]
            assert found is not None and param.grad is not None
            assert found.dtype == param.grad.dtype == torch.float32
            assert (found - param.grad).norm() <= tolerance * param.grad.norm(), name
        sent = {
            (value.dtype, value.shape)
            for artifact in compiled.artifacts
            for instr in artifact.forward.body
            if instr.kind == "collective"
            for value in instr.inputs()
        }
        if template == "zero3":
            weights = {d for d, shape in sent if len(shape) == 2}
            assert weights == {dtype}, sent


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_regions(dropout: float) -> None:
    """Regions that the user recomputes in backward, with the same masks."""

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 6))

    torch.manual_seed(0)
    model = Function(loss, layers=nn.ModuleList([layer() for _ in range(2)])).double()
    x = torch.randn(4, 6).double()
    torch.manual_seed(1)
    expected = model(x)
    expected.backward()
    for mesh, template in PLANS:
        compiled = st.compile_model(model, (x,), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER)
        torch.manual_seed(1)
        result = compiled.run_in_process(x)
        assert result.loss is not None
        _close("loss", result.loss, expected.detach(), 0.0)
        for name, param in model.named_parameters():
            found = result.grads[name]
            assert found is not None and param.grad is not None
            _close(name, found, param.grad, 0.0)
