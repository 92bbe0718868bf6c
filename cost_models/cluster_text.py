"""A cluster as the TOML text that `load_cluster` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from stpart_compiler.cost_models.cluster import Cluster, Device, Hidden, Link
from stpart_compiler.cost_models.collectives import RING
from stpart_compiler.cost_models.curve import Curve


def to_toml(cluster: Cluster, comments: Sequence[str] = ()) -> str:
    """TOML text of a cluster, `comments` first."""
    device = cluster.device
    lines = [f"# {comment}" for comment in comments]
    lines += [f"name = {_quoted(cluster.name)}", "", "[device]", f"name = {_quoted(device.name)}"]
    lines += [f"type = {_quoted(device.type)}", f"memory = {device.memory}"]
    lines += [f"memory_bandwidth = {device.memory_bandwidth!r}", f"launch_overhead = {device.launch_overhead!r}"]
    lines += [f"matmul_efficiency = {_points(device.matmul_efficiency)}"]
    if device.attention_efficiency:
        lines.append(f"attention_efficiency = {_points(device.attention_efficiency)}")
    if device.memory_efficiency != Device.memory_efficiency:
        lines.append(f"memory_efficiency = {_points(device.memory_efficiency)}")
    if device.transcendental_rate:
        lines.append(f"transcendental_rate = {device.transcendental_rate!r}")
    if device.transfer_overhead:
        lines.append(f"transfer_overhead = {device.transfer_overhead!r}")
    lines += ["", "[device.peak_flops]"]
    lines += [f"{dtype} = {rate!r}" for dtype, rate in device.peak_flops]
    for ranks, link in cluster.levels:
        lines += ["", "[[links]]", *_link(ranks, link)]
    if cluster.hidden != Hidden():
        parts = (f"{field.name} = {getattr(cluster.hidden, field.name)!r}" for field in fields(Hidden))
        lines += ["", "[hidden]", *parts]
    if cluster.sources:
        lines += ["", "[sources]", *(f"{name} = {_quoted(source)}" for name, source in cluster.sources)]
    return "\n".join(lines) + "\n"


def _link(ranks: int | None, link: Link) -> list[str]:
    lines = [f"ranks = {ranks}"] if ranks is not None else []
    lines += [f"latency = {link.latency!r}", f"bandwidth = {link.bandwidth!r}"]
    lines.append(f"full_duplex = {str(link.full_duplex).lower()}")
    lines += [f"shared_by = {link.shared_by}"] if link.shared_by > 1 else []
    if link.algorithms != (RING,):
        lines.append(f"algorithms = [{', '.join(map(_quoted, link.algorithms))}]")
    if link.efficiency:
        lines += ["", "[links.efficiency]", *(f"{kind} = {_points(curve)}" for kind, curve in link.efficiency)]
    if link.latencies:
        lines += ["", "[links.latencies]", *(f"{kind} = {latency!r}" for kind, latency in link.latencies)]
    return lines


def _points(curve: Curve) -> str:
    return "[" + ", ".join(f"[{size!r}, {share!r}]" for size, share in curve) + "]"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
