"""Measures the ranks it runs on: products, memory-bound ops, transfers, and what overlapping them costs.

All ranks measure at once, so cores and links that they share count as shared. `python -m
stpart_compiler.runtime.calibrate FILE` is what a rank runs; rank 0 writes the cluster as TOML and prints residuals.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from stpart_compiler.cost_models.cluster import Cluster, Device, Hidden, Link
from stpart_compiler.cost_models.cluster_text import to_toml
from stpart_compiler.cost_models.fit import (
    P2P,
    Transfer,
    fit_curve,
    fit_efficiency,
    fit_link,
    residuals,
    rounded,
    rounded_curve,
)
from stpart_compiler.ir.program import COLLECTIVE_CHANNEL
from stpart_compiler.progress import progress_lines
from stpart_compiler.runtime.engine import Engine, online_engine

DTYPES = ("float32", "bfloat16", "float16", "float64")
SIZES = {"cpu": (32, 64, 128, 256, 512, 768), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
"""Square products that are measured."""

STREAM_BYTES = {"cpu": 2**25, "cuda": 2**28}
MESSAGE_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
REPEATS, SECONDS = 3, 0.1
"""A time is the median of at least so many runs, over at least so many seconds."""

STEADY_S = 0.03
"""What all ranks compute at once is repeated for so long: ranks that share cores take turns of some milliseconds."""

LONGEST_S = 0.1
"""Larger products than one that takes so long are not measured."""

Say = Callable[[str], None]


@dataclass
class Bench:
    """Measurements on this process's rank, which all ranks make together; times are means over ranks."""

    device: torch.device
    engine: Engine | None
    _tags: Iterator[int] = field(default_factory=count)

    @property
    def ranks(self) -> int:
        return self.engine.world_size if self.engine else 1

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call of `run`."""
        self._once(run)
        times: list[float] = []
        while not self._enough(times):
            times.append(self._once(run))
        return self._mean(statistics.median(times))

    def steady_seconds(self, run: Callable[[], object]) -> float:
        """Of one call of `run` while all ranks run it, as often as it takes to share cores evenly."""
        times = max(1, math.ceil(STEADY_S / self.seconds(run)))
        return self.seconds(lambda: [run() for _ in range(times)]) / times

    def _once(self, run: Callable[[], object]) -> float:
        if self.engine is not None:
            dist.barrier()
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _enough(self, times: list[float]) -> bool:
        """Whether all ranks have runs enough: they must agree."""
        return len(times) >= REPEATS and self._mean(sum(times)) >= SECONDS

    def _mean(self, value: float) -> float:
        if self.engine is None:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.ranks

    def products(self, dtype: torch.dtype) -> list[tuple[float, float]]:
        """(FLOPs, seconds) of square products."""
        found = []
        for size in SIZES[self.device.type]:
            a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            found.append((2.0 * size**3, self.steady_seconds(partial(torch.mm, a, b))))
            if found[-1][1] > LONGEST_S:
                break
        return found

    def stream(self) -> tuple[float, float]:
        """Bytes/s of an addition of large tensors, and seconds of one of tiny ones."""
        x = torch.zeros(STREAM_BYTES[self.device.type] // 4, device=self.device)
        y, tiny = torch.zeros_like(x), torch.zeros(8, device=self.device)
        launch = self.steady_seconds(lambda: torch.add(tiny, 1.0))
        return 2 * x.nbytes / (self.steady_seconds(lambda: torch.add(x, 1.0, out=y)) - launch), launch

    def attention(self) -> tuple[float, float]:
        """(FLOPs, seconds) of attention on [1, 4, rows, 64]."""
        rows = 512 if self.device.type == "cpu" else 4096
        q = torch.randn(1, 4, rows, 64, device=self.device)
        attend = torch.nn.functional.scaled_dot_product_attention
        return 4.0 * 4 * rows * rows * 64, self.steady_seconds(lambda: attend(q, q, q))

    def transfers(self, distance: int) -> list[Transfer]:
        """Messages between ranks that are `distance` apart, one way and in a ring."""
        assert self.engine is not None
        found = []
        for nbytes in MESSAGE_BYTES:
            x = torch.zeros(nbytes // 4, device=self.device)
            found.append(Transfer(P2P, nbytes, 2, self.seconds(partial(self._one_way, x, distance))))
            found.append(Transfer("exchange", nbytes, self.ranks, self.seconds(partial(self._ring, x, distance))))
        return found

    def collectives(self) -> list[Transfer]:
        """Every collective over all ranks."""
        engine, n = self.engine, self.ranks
        assert engine is not None
        found = []
        for kind in COLLECTIVES:
            for nbytes in MESSAGE_BYTES[1:]:
                shape = (n, nbytes // 4 // n) if kind != "all_reduce" else (nbytes // 4,)
                x = torch.zeros(shape, device=self.device)
                x = x[0] if kind == "all_gather" else x
                found.append(Transfer(kind, nbytes, n, self.seconds(partial(self._collective, kind, x))))
        return found

    def overlap(self, run: Callable[..., object]) -> float:
        """How much of the shorter is hidden when a product runs beside a transfer: 1 all, 0 nothing.

        `run`: takes what is sent, and what to do meanwhile.
        """
        size = SIZES[self.device.type][-2]
        a, x = torch.randn(size, size, device=self.device), torch.zeros(2**18, device=self.device)
        product = self.steady_seconds(lambda: a @ a)
        transfer = self.seconds(lambda: run(x))
        times = max(1, round(transfer / product))
        both = self.seconds(lambda: run(x, lambda: [a @ a for _ in range(times)]))
        alone = product * times
        return min(1.0, max(0.0, (alone + transfer - both) / min(alone, transfer)))

    def _one_way(self, x: torch.Tensor, distance: int) -> None:
        """Even blocks of ranks send to odd ones."""
        engine, tag = self.engine, next(self._tags)
        assert engine is not None
        block = engine.rank // distance
        peer = engine.rank + (distance if block % 2 == 0 else -distance)
        if peer >= self.ranks:
            return
        if block % 2 == 0:
            engine.isend(x, peer, tag, 0)
        else:
            engine.irecv(x.shape, x.dtype, x.device, peer, tag, 0)
        engine.wait((tag,), 0)
        engine.begin_step()

    def hidden(self) -> Hidden:
        """Of what runs beside compute, the parts that cost nothing."""
        ring = self.overlap(lambda x, *meanwhile: self._ring(x, 1, *meanwhile))
        reduction = self.overlap(partial(self._collective, "all_reduce"))
        return Hidden(rounded(ring), rounded(reduction))

    def _ring(self, x: torch.Tensor, distance: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        engine, tag = self.engine, next(self._tags)
        assert engine is not None
        after, before = ((engine.rank + sign * distance) % self.ranks for sign in (1, -1))
        engine.exchange((x,), (after,), (tag,), (torch.empty_like(x),), (before,), (tag,), 0)
        meanwhile()
        engine.wait((tag,), 0)
        engine.begin_step()

    def _collective(self, kind: str, x: torch.Tensor, meanwhile: Callable[[], object] = lambda: None) -> None:
        engine, tag = self.engine, next(self._tags)
        assert engine is not None
        getattr(engine, kind)(x, range(self.ranks), tag, 1)
        meanwhile()
        engine.wait((tag,), 1)
        engine.begin_step()


def calibrate(bench: Bench, name: str, say: Say) -> tuple[Cluster, list[str]]:
    """The cluster that the measurements fit, and lines of residuals."""
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    device = _device(bench, note)
    levels = _levels(bench, note) if bench.ranks > 1 else ((None, Link(0.0, device.memory_bandwidth)),)
    hidden = _hidden(bench, note) if bench.ranks > 1 else Hidden()
    how = f"fitted to measurements, {bench.ranks} ranks at once"
    fitted = ("peak_flops", "memory_bandwidth", "launch_overhead", "matmul_efficiency", "links", "hidden")
    sources = (("memory", "of the machine"), *((key, how) for key in fitted))
    return Cluster(name, device, levels, sources, hidden), notes


def _device(bench: Bench, note: Say) -> Device:
    """The efficiency curve is that of the first dtype; it is taken for the others too."""
    products = {}
    for dtype in DTYPES:
        products[dtype] = bench.products(getattr(torch, dtype))
        note(f"products of {dtype}: peak {fit_curve(products[dtype])[0] / 1e9:.1f} GFLOP/s")
    bandwidth, launch = bench.stream()
    note(f"memory-bound ops: {bandwidth / 1e9:.1f} GB/s, launch {launch * 1e6:.1f} us")
    is_cpu = bench.device.type == "cpu"
    device = Device(
        platform.processor() or platform.machine() if is_cpu else torch.cuda.get_device_name(),
        bench.device.type,
        tuple((dtype, rounded(fit_curve(found)[0])) for dtype, found in products.items()),
        _memory(bench),
        rounded(bandwidth),
        rounded(launch),
        rounded_curve(fit_curve(products[DTYPES[0]])[1]),
    )
    for dtype, found in products.items():
        note(f"residual of products of {dtype}: {_off(_residual(device, getattr(torch, dtype), found))}")
    note(f"residual of attention: {_off(_residual(device, torch.float32, [bench.attention()]))}")
    return device


def _residual(device: Device, dtype: torch.dtype, products: Sequence[tuple[float, float]]) -> float:
    """Median relative error of the device's times."""
    return statistics.median(abs(device.matmul_seconds(flops, dtype) / seconds - 1) for flops, seconds in products)


def _levels(bench: Bench, note: Say) -> tuple[tuple[int | None, Link], ...]:
    """The link inside of a host and, where the job has several, the one between hosts."""
    inside = int(os.environ.get("LOCAL_WORLD_SIZE", bench.ranks))
    one_host = inside == bench.ranks
    within = bench.transfers(1) if inside > 1 else []
    levels: list[tuple[int | None, Link]] = []
    if within:
        together = bench.collectives() if one_host else []  # a group of all ranks tells of the outermost level alone
        levels.append((None if one_host else inside, _link("links in a host", within, together, note)))
    if not one_host:
        levels.append((None, _link("links between hosts", bench.transfers(inside), [], note)))
    return tuple(levels)


def _hidden(bench: Bench, note: Say) -> Hidden:
    hidden = bench.hidden()
    note(f"a ring beside a product: {hidden.exchanges:.0%} of the shorter is hidden; sums: {hidden.collectives:.0%}")
    return hidden


def _link(what: str, messages: Sequence[Transfer], collectives: Sequence[Transfer], note: Say) -> Link:
    """A link with latency and bandwidth of messages, and the parts of it that collectives reach."""
    fitted = fit_link(messages)
    link = Link(rounded(fitted.latency), rounded(fitted.bandwidth), fitted.full_duplex)
    link = replace(link, efficiency=fit_efficiency(collectives, link))
    duplex = "full" if link.full_duplex else "half"
    off = ", ".join(f"{kind} {_off(error)}" for kind, error in residuals([*messages, *collectives], link).items())
    note(f"{what}: {link.latency * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s, {duplex} duplex; {off}")
    return link


def _off(error: float) -> str:
    return f"off by {error:.0%}"


def _memory(bench: Bench) -> int:
    if bench.device.type == "cuda":
        return torch.cuda.get_device_properties(bench.device).total_memory
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // int(os.environ.get("LOCAL_WORLD_SIZE", bench.ranks))


def calibrate_here(path: Path, name: str = "calibrated") -> None:
    """Calibrate the ranks of this process group, or this process alone; rank 0 writes `path`."""
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
    engine = online_engine() if dist.is_initialized() and dist.get_world_size() > 1 else None
    if engine is not None:
        engine.prepare(2, [(COLLECTIVE_CHANNEL, tuple(range(engine.world_size)))])
    first = engine is None or engine.rank == 0
    with progress_lines() as say:
        bench = Bench(torch.device("cuda" if cuda else "cpu"), engine)
        cluster, notes = calibrate(bench, name, say if first else lambda text: None)
    if first:
        path.write_text(to_toml(cluster, notes))
    if dist.is_initialized():
        dist.barrier()  # no rank closes its connections while another still uses them
        dist.destroy_process_group()


if __name__ == "__main__":
    calibrate_here(Path(sys.argv[1]))
