"""Fits a cluster to what the ranks measure that it runs on. `python -m stpart_compiler.runtime.calibrate FILE` is what
a rank runs; rank 0 writes the cluster as TOML and prints residuals.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from stpart_compiler.cost_models.cluster import SOURCED, Cluster, Device, Hidden, Link
from stpart_compiler.cost_models.cluster_text import to_toml
from stpart_compiler.cost_models.fit import (
    Transfer,
    fit_curve,
    fit_efficiency,
    fit_latencies,
    fit_link,
    fit_peak,
    fit_shares,
    residuals,
    rounded,
    rounded_curve,
)
from stpart_compiler.ir.program import COLLECTIVE_CHANNEL
from stpart_compiler.progress import progress_lines
from stpart_compiler.runtime.bench import SHAPES, Bench
from stpart_compiler.runtime.engine import online_engine

DTYPES = ("float32", "bfloat16", "float16", "float64")

Say = Callable[[str], None]


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
    sources = (("memory", "of the machine"), *((key, how) for key in SOURCED if key != "memory"))
    return Cluster(name, device, levels, sources, hidden), notes


def _device(bench: Bench, note: Say) -> Device:
    """The curve of products is that of the first dtype; other dtypes have the peak with which it fits them best."""
    products = {dtype: bench.products(getattr(torch, dtype), SHAPES) for dtype in DTYPES[:1]}
    peak, matmuls = fit_curve(products[DTYPES[0]])
    for dtype in DTYPES[1:]:
        products[dtype] = bench.products(getattr(torch, dtype), SHAPES[:1])
    peaks = tuple((dtype, rounded(fit_peak(found, matmuls))) for dtype, found in products.items())
    for dtype, rate in peaks:
        note(f"products of {dtype}: peak {rate / 1e9:.1f} GFLOP/s")
    launch = bench.launch()
    bandwidth, streams = fit_curve(bench.streams(launch))
    note(f"memory-bound ops: up to {bandwidth / 1e9:.1f} GB/s, launch {launch * 1e6:.1f} us")
    attention = bench.attention()
    device = Device(
        platform.processor() or platform.machine() if bench.device.type == "cpu" else torch.cuda.get_device_name(),
        bench.device.type,
        peaks,
        _memory(bench),
        rounded(bandwidth),
        rounded(launch),
        rounded_curve(matmuls),
        rounded_curve(fit_shares(attention, peak)),
        rounded_curve(streams),
        rounded(bench.transcendentals()),
        rounded(bench.starting) if bench.ranks > 1 else 0.0,
    )
    note(f"a transfer takes {device.transfer_overhead * 1e6:.0f} us to start")
    for dtype, found in products.items():
        note(f"residual of products of {dtype}: {_off(_residual(device, getattr(torch, dtype), found))}")
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
    """A link with latency and bandwidth of messages, and the parts of it that collectives reach.

    A message in a collective has a latency of its own: ranks that share cores wait for their turn before each.
    """
    fitted = fit_link(messages)
    latencies = fit_latencies(collectives, fitted.full_duplex)
    link = Link(rounded(fitted.latency), rounded(fitted.bandwidth), fitted.full_duplex, latencies=latencies)
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
