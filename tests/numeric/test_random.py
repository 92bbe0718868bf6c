"""Random ops: the numbers of one device, on every mesh and for every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from once import traced_once
from slow_ranks import CLUSTER, SOLVER
from torch import nn
from torch.nn import functional as F

import stpart_compiler as st


class Noisy(nn.Module):
    """Dropout, attention with dropout, noise that is added, and a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp, self.out = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2).flatten(2)
        x = x + 0.1 * torch.randn_like(x) + torch.rand(8, dtype=x.dtype)
        x = self.out(self.drop(F.gelu(self.mlp(x))))
        return (x * torch.bernoulli(torch.full_like(x, 0.5))).square().mean()


@pytest.mark.parametrize("template", [None, "data", "megatron"])
@pytest.mark.parametrize("mesh", [2, 3, (2, 2)], ids=str)
def test_equal_to_one_device(mesh: Any, template: str | None) -> None:
    torch.manual_seed(0)
    model, x = Noisy().double(), torch.randn(4, 6, 8).double()
    with traced_once("noisy"):
        compiled = st.compile_model(model, (x,), mesh=mesh, template=template, cluster=CLUSTER, solver=SOLVER)
    losses = []
    torch.manual_seed(5)
    for _ in range(2):
        loss = model(x)
        losses.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    after = torch.rand(3)
    torch.manual_seed(5)
    for loss, grads in losses:
        found = compiled.run_in_process(x)
        assert found.loss is not None
        torch.testing.assert_close(found.loss, loss, rtol=1e-9, atol=0)
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            torch.testing.assert_close(found.grads[name], grad, rtol=1e-9, atol=1e-12)
    assert losses[0][0] != losses[1][0]
    assert torch.equal(torch.rand(3), after)  # the generator went on as on one device


@pytest.mark.parametrize("mesh", [1, 2, (2, 2)], ids=str)
def test_masks_in_the_order_of_memory(mesh: Any) -> None:
    """Dropout of tensors that are transposed or channels last: eager draws in the order of memory."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.conv = nn.Linear(6, 6), nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            y = F.dropout(self.layer(x).transpose(0, 1), 0.3)
            return y.square().sum() + F.dropout(self.conv(image), 0.4).square().sum()

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 5, 6).double()
    image = torch.randn(4, 3, 4, 5).double().to(memory_format=torch.channels_last)
    compiled = st.compile_model(model, (x, image), mesh=mesh, cluster=CLUSTER, solver=SOLVER)
    torch.manual_seed(5)
    loss = model(x, image)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    torch.manual_seed(5)
    found = compiled.run_in_process(x, image)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-9, atol=0)
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-9, atol=1e-12)


def test_only_the_drawing_is_repeated() -> None:
    """The tensors that a mask is applied to stay cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)).double()
    x = torch.randn(8, 16).double()
    compiled = st.compile_model(
        model, (x,), mesh=2, template="data", cluster=CLUSTER, solver=SOLVER, loss_fn=lambda y: y.square().mean()
    )
    products = [row for row in compiled.plan.rows if row.op.startswith(("mul", "mm"))]
    assert products
    assert all(row.strategy != "replicated" for row in products)
    assert compiled.run_in_process(x).messages["all_gather"][0] == 2  # the state of the generator alone
