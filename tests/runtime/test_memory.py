"""PeakBytes against hand counts, fake tensors and the allocator."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.memory import PeakBytes, allocator_peak
from stpart_compiler.runtime.threads import run_ranks

MIB = 1 << 20


def chain(x: Tensor) -> Tensor:
    a = x + 1
    b = a * 2
    del a
    c = b - 3
    del b
    return c.sum()


def test_chain_keeps_two_tensors() -> None:
    x = torch.ones(MIB // 4)
    with torch.no_grad(), PeakBytes() as untold:
        chain(x)
    with torch.no_grad(), PeakBytes([x]) as told:
        chain(x)
    assert untold.peak == 2 * MIB and untold.current == 0
    assert told.peak == 3 * MIB and told.current == MIB


def test_views_and_in_place_results_are_not_new() -> None:
    x, named = torch.ones(256, 256), torch.ones(8)
    with PeakBytes([named]) as mode:
        x.t().add_(1)
        named.mul_(2)
        torch.add(x, 1, out=x)
        y = x[:2].clone()
    assert mode.current == mode.peak == 32 + y.nbytes


def test_resized_storage_counts_its_new_size() -> None:
    with PeakBytes() as mode:
        x = torch.empty(10)
        x.resize_(100)
        assert mode.current == 400
        del x
    assert mode.current == 0 and mode.peak == 400


def train_step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def build() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.ones(32, 64)


def peak_of_training() -> int:
    model, x = build()
    with PeakBytes([*model.parameters(), x]) as mode:
        train_step(model, x)
    return mode.peak


def test_real_is_fake_and_close_to_the_allocator() -> None:
    real = peak_of_training()
    with FakeTensorMode():
        assert peak_of_training() == real
    model, x = build()
    told = sum(p.nbytes for p in model.parameters()) + x.nbytes
    _, added = allocator_peak(lambda: train_step(model, x))
    assert abs(told + added - real) <= 0.02 * real


def test_allocator_peak_sees_what_is_alive_at_once() -> None:
    def work() -> Tensor:
        a = torch.ones(MIB // 4)
        b = a + 1
        del a
        return b + 1

    result, peak = allocator_peak(work)
    assert result.shape == (MIB // 4,)
    assert 2 * MIB <= peak < 2 * MIB + 4096


def test_each_thread_counts_its_own() -> None:
    barrier = threading.Barrier(3)

    def program(rank: int, engine: Engine) -> int:
        with PeakBytes() as mode:
            x = torch.empty((rank + 1) * 1000, dtype=torch.uint8)
            barrier.wait()
            torch.ops.stpart.all_reduce(torch.ones(4), [0, 1, 2], 1, 0)
            torch.ops.stpart.wait([1], 0)
            del x
        return mode.peak

    assert run_ranks(3, program, timeout_s=20) == [1000 + 32, 2000 + 32, 3000 + 32]
