"""Clusters as data: one kind of device, and the links between ranks by level of the hierarchy.

Ranks are numbered row-major over the mesh, so the innermost mesh axes lie inside a host. A cluster is written in TOML:
see `presets/`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import torch

from stpart_compiler.cost_models.collectives import ALGORITHMS, HIERARCHICAL, KINDS, RING, Group
from stpart_compiler.cost_models.curve import Curve, check_curve, share_at
from stpart_compiler.cost_models.toml_table import Table, read_toml
from stpart_compiler.ir.mesh import Mesh

_GENERIC = {"cpu": "cpu-gloo", "cuda": "gpu-generic"}
CURVES = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
"""A device's curves: attention takes that of products where it has none."""

SOURCED = (
    "memory",
    "peak_flops",
    "memory_bandwidth",
    "launch_overhead",
    *CURVES,
    "transcendental_rate",
    "transfer_overhead",
    "links",
    "hidden",
)
"""What a cluster file may name the source of: vendor's figure, measured, fitted (and to what), or assumed."""

COLLECTIVES = tuple(kind for kind in KINDS if kind != "exchange")
"""Those of which a link may have an efficiency of its own."""

GLOO_THREADS = 2
"""Collectives of one gloo group that run at once, as torch sets it up."""

_FALLBACK_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Device:
    """One rank's device.

    `peak_flops`: FLOP/s by dtype name ("float32"). `memory`: bytes. `memory_bandwidth`: bytes/s, read plus written.
    `launch_overhead`: seconds per op. `matmul_efficiency`: points (FLOPs of one call, share of the peak), ascending;
    `attention_efficiency`: those of attention's kernels, empty: as of products. `memory_efficiency`: points (bytes that
    one op reads and writes, share of the memory's bandwidth). `transcendental_rate`: elements/s of exp and the like,
    0: never slower than memory. `transfer_overhead`: seconds in which a rank does nothing else to start a transfer.

    Raises:
        ValueError: a quantity is not positive, or a point of a curve makes more FLOPs or bytes cheaper than fewer.
    """

    name: str
    type: str
    peak_flops: tuple[tuple[str, float], ...]
    memory: int
    memory_bandwidth: float
    launch_overhead: float = 0.0
    matmul_efficiency: Curve = ((1.0, 1.0),)
    attention_efficiency: Curve = ()
    memory_efficiency: Curve = ((1.0, 1.0),)
    transcendental_rate: float = 0.0
    transfer_overhead: float = 0.0

    def __post_init__(self) -> None:
        if self.type not in _GENERIC:
            raise ValueError(f"device {self.name!r}: type {self.type!r} is unknown; use one of {', '.join(_GENERIC)}")
        if not self.peak_flops:
            raise ValueError(f"device {self.name!r}: peak_flops is empty; give FLOP/s for at least one dtype")
        for dtype, rate in self.peak_flops:
            _check_dtype(self.name, dtype)
            _check_positive(f"device {self.name!r}: peak_flops.{dtype}", rate)
        _check_positive(f"device {self.name!r}: memory", self.memory)
        _check_positive(f"device {self.name!r}: memory_bandwidth", self.memory_bandwidth)
        units = {"launch_overhead": "seconds", "transcendental_rate": "elements/s", "transfer_overhead": "seconds"}
        for name, unit in units.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"device {self.name!r}: {name} is {value}; expected {unit} >= 0")
        check_curve(f"device {self.name!r}: matmul_efficiency", self.matmul_efficiency, "FLOPs")
        if self.attention_efficiency:
            check_curve(f"device {self.name!r}: attention_efficiency", self.attention_efficiency, "FLOPs")
        check_curve(f"device {self.name!r}: memory_efficiency", self.memory_efficiency, "bytes")

    @cached_property
    def _peaks(self) -> dict[torch.dtype, float]:
        return {getattr(torch, name): rate for name, rate in self.peak_flops}

    @cached_property
    def _fallback_peak(self) -> float:
        rates = dict(self.peak_flops)
        return next((rates[name] for name in _FALLBACK_DTYPES if name in rates), min(rates.values()))

    def peak(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s in `dtype`; a dtype that is not listed runs at the rate of float32 or of the next best listed."""
        return self._peaks.get(dtype, self._fallback_peak)

    def efficiency(self, flops: float, attention: bool = False) -> float:
        """Share of the peak that a product (or a kernel of attention) of `flops` reaches.

        Log-log interpolation, constant beyond the ends.
        """
        return share_at((attention and self.attention_efficiency) or self.matmul_efficiency, flops)

    def streaming(self, nbytes: float) -> float:
        """Share of the memory's bandwidth that an op reaches which reads and writes so many bytes in all."""
        return share_at(self.memory_efficiency, nbytes)

    def matmul_seconds(self, flops: float, dtype: torch.dtype, attention: bool = False) -> float:
        """Seconds that `flops` of one matmul-like call take, without launch and memory traffic."""
        return flops / (self.peak(dtype) * self.efficiency(flops, attention)) if flops > 0 else 0.0

    def memory_seconds(self, nbytes: float) -> float:
        """Seconds that one op takes to read and write so many bytes in all, without its launch."""
        return nbytes / (self.memory_bandwidth * self.streaming(nbytes)) if nbytes > 0 else 0.0


@dataclass(frozen=True)
class Link:
    """What a rank has towards others: `latency` in seconds a message, `bandwidth` in bytes/s each direction.

    Not `full_duplex`: both directions share the bandwidth. `shared_by`: so many ranks (0..n-1, n..2n-1, ...) send and
    receive over one such link together, like those of a host over its network card; its bandwidth is theirs together.
    `algorithms`: those of which a collective that this link limits takes the cheapest; a ring where none of them can do
    it. `efficiency`: per kind of collective points (bytes that one rank sends, share of the bandwidth), ascending.
    `latencies`: seconds a message in collectives of a kind, where they are not `latency`.

    Raises:
        ValueError: the bandwidth is not positive, a latency negative, or no rank has the link; an algorithm or kind
            of collective is unknown, or a point of a curve makes more bytes cheaper than fewer.
    """

    latency: float
    bandwidth: float
    full_duplex: bool = True
    shared_by: int = 1
    algorithms: tuple[str, ...] = (RING,)
    efficiency: tuple[tuple[str, Curve], ...] = ()
    latencies: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        _check_positive("link: bandwidth", self.bandwidth)
        _check_latency("latency", self.latency)
        if self.shared_by < 1:
            raise ValueError(f"link: shared_by is {self.shared_by}; expected the number of ranks on one link, >= 1")
        if not self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise ValueError(
                f"link: algorithms is {list(self.algorithms)}; expected one or more of {', '.join(ALGORITHMS)}"
            )
        for kind, curve in self.efficiency:
            _check_collective(f"efficiency.{kind}", kind)
            check_curve(f"link: efficiency.{kind}", curve, "bytes")
        for kind, latency in self.latencies:
            _check_collective(f"latencies.{kind}", kind)
            _check_latency(f"latencies.{kind}", latency)

    def reached(self, kind: str, nbytes: float) -> float:
        """Share of the bandwidth that a collective reaches in which one rank sends `nbytes`; of all else the whole."""
        return next((share_at(curve, float(nbytes)) for name, curve in self.efficiency if name == kind), 1.0)

    def latency_of(self, kind: str) -> float:
        """Seconds a message in a collective of a kind, or of what is none."""
        return next((latency for name, latency in self.latencies if name == kind), self.latency)


@dataclass(frozen=True)
class Hidden:
    """Parts, 0 to 1, of the time that transfers run beside compute which cost a rank nothing.

    The rest is what the two take from each other: cores, memory bandwidth, the bus. `exchanges`: of the messages of
    temporal loops; `collectives`: of collectives and all else that a re-layout sends, but for collectives of small
    tensors on accelerators, which take time but next to nothing else. 0: as if one waited for the other.

    Raises:
        ValueError: a part is not between 0 and 1.
    """

    exchanges: float = 1.0
    collectives: float = 1.0

    def __post_init__(self) -> None:
        for name in ("exchanges", "collectives"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"hidden: {name} is {getattr(self, name)}; expected a part between 0 and 1")


@dataclass(frozen=True)
class Cluster:
    """Equal devices and their links: `levels` from innermost outwards, each (ranks joined, link).

    Ranks i and j are joined by the first level with i // ranks == j // ranks. `ranks` None: any number (outermost).
    `sources`: where figures come from, by their names in `SOURCED`. `hidden`: what transfers beside compute cost.

    Raises:
        ValueError: there is no level, or a level does not hold a whole number of groups of the level inside it.
    """

    name: str
    device: Device
    levels: tuple[tuple[int | None, Link], ...]
    sources: tuple[tuple[str, str], ...] = ()
    hidden: Hidden = Hidden()

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError(f"cluster {self.name!r}: no links; give at least one level")
        for ranks, _ in self.levels[:-1]:
            if ranks is None:
                raise ValueError(f"cluster {self.name!r}: only the outermost level may join any number of ranks")
        sizes = [ranks for ranks, _ in self.levels if ranks is not None]
        if any(size < 1 for size in sizes) or any(outer % inner for inner, outer in pairwise(sizes)):
            raise ValueError(f"cluster {self.name!r}: levels join {sizes} ranks; each must be a multiple of the last")
        for name, _ in self.sources:
            if name not in SOURCED:
                raise ValueError(f"cluster {self.name!r}: sources.{name} is unknown; known: {', '.join(SOURCED)}")
        for number, (ranks, link) in enumerate(self.levels):
            if ranks is not None and ranks % link.shared_by:
                raise ValueError(
                    f"cluster {self.name!r}: links[{number}] joins {ranks} ranks, {link.shared_by} of which share one"
                    " link (shared_by); expected a divisor of the ranks joined"
                )
        if HIERARCHICAL in self.levels[0][1].algorithms:
            raise ValueError(
                f"cluster {self.name!r}: links[0] has the algorithm {HIERARCHICAL!r}, but no level of links is inside"
                " of it; use it on an outer level"
            )

    @property
    def hidden_small(self) -> float:
        """The part of the time of small collectives beside compute that costs nothing: on accelerators all, if any is.

        They are latency, which takes nothing from compute but on CPUs, whose cores they run on.
        """
        return self.hidden.collectives if self.device.type == "cpu" else float(self.hidden.collectives > 0)

    @cached_property
    def in_rows(self) -> Cluster:
        """As collectives see it of which one follows the other: on CPUs as many wait at once as gloo has threads."""
        if self.device.type != "cpu":
            return self
        levels = [
            (n, replace(link, latencies=tuple((kind, link.latency_of(kind) / GLOO_THREADS) for kind in COLLECTIVES)))
            for n, link in self.levels
        ]
        return replace(self, levels=tuple(levels))

    @property
    def max_ranks(self) -> int | None:
        """Ranks that the outermost level joins; None: any number."""
        return self.levels[-1][0]

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises:
        ValueError: the mesh has more ranks than the cluster.
        """
        if self.max_ranks is not None and mesh.world_size > self.max_ranks:
            raise ValueError(
                f"cluster {self.name!r} joins {self.max_ranks} ranks, but mesh {mesh} has {mesh.world_size}; "
                "use a smaller mesh, or a cluster file with a further level of links"
            )

    def link_for(self, axes: Iterable[str], mesh: Mesh, *, each: bool = False, alone: bool = False) -> Link:
        """Slowest link between ranks that differ in `axes` alone; without axes the innermost one.

        Its bandwidth is what one group of such ranks gets while all of them communicate: on a link that ranks of
        several groups share, an equal part of it. A group is a ring, which crosses a link once. `each`: every rank
        sends for itself instead, and all that share a link get an equal part of it. `alone`: one rank has the link.

        Raises:
            ValueError: an axis is not in the mesh, or the mesh has more ranks than the cluster.
        """
        return _link_for(self, frozenset(axes), mesh, each, alone)

    def crossed(self, groups: Sequence[Group]) -> int:
        """Index of the innermost level that joins the ranks of each of these groups."""
        return max(self.level_between(min(group), max(group)) for group in groups)

    def level_between(self, one: int, two: int) -> int:
        """Index of the innermost level that joins two ranks.

        Raises:
            ValueError: no level joins them.
        """
        for number, (ranks, _) in enumerate(self.levels):
            if ranks is None or one // ranks == two // ranks:
                return number
        raise ValueError(f"cluster {self.name!r} joins {self.max_ranks} ranks; no link between ranks {one} and {two}")


@lru_cache(maxsize=4096)
def _link_for(cluster: Cluster, axes: frozenset[str], mesh: Mesh, each: bool, alone: bool) -> Link:
    cluster.check_mesh(mesh)
    unknown = sorted(axes - set(mesh.axes))
    if unknown:
        raise ValueError(f"link: no axis {unknown[0]!r} in mesh {mesh}; its axes are {', '.join(mesh.axes)}")
    groups = groups_along(axes, mesh)
    crossed = cluster.crossed(groups)
    together = groups_along((), mesh) if each else groups
    return _slowest([link if alone else _share_of(link, together) for _, link in cluster.levels[: crossed + 1]])


def groups_along(axes: Iterable[str], mesh: Mesh) -> tuple[Group, ...]:
    """The groups of ranks that differ in `axes` alone; without axes each rank is one."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coords in enumerate(mesh.coords):
        groups.setdefault(tuple(at for axis, at in coords.items() if axis not in axes), []).append(rank)
    return tuple(map(tuple, groups.values()))


def _slowest(links: Iterable[Link]) -> Link:
    return min(links, key=lambda link: (link.bandwidth, -link.latency))


def _share_of(link: Link, groups: Iterable[Group]) -> Link:
    """The link as one of the groups sees it that have ranks on it."""
    if link.shared_by == 1:
        return link
    sharing = Counter(on for group in groups for on in {rank // link.shared_by for rank in group})
    return replace(link, bandwidth=link.bandwidth / max(sharing.values()), shared_by=1)


def presets() -> tuple[str, ...]:
    """Names of the clusters that come with the package, sorted."""
    files = resources.files("stpart_compiler.cost_models").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_cluster(spec: str | Path | Cluster | None, device_type: str = "cpu") -> Cluster:
    """Cluster from a preset's name, the path of a TOML file, or None: the generic preset of `device_type`.

    Raises:
        TypeError: `spec` is of another type.
        ValueError: unknown preset or device type; a file that is missing or malformed (names file, key, expected type).
    """
    if isinstance(spec, Cluster):
        return spec
    if spec is None:
        if device_type not in _GENERIC:
            known = ", ".join(_GENERIC)
            raise ValueError(f"cluster: no generic preset for device type {device_type!r}, only {known}; name one")
        spec = _GENERIC[device_type]
    if not isinstance(spec, (str, Path)):
        raise TypeError(f"cluster: expected the name of a preset, a path or a Cluster, got {type(spec).__name__}")
    if isinstance(spec, Path) or spec.endswith(".toml") or "/" in spec:
        return _load_file(Path(spec))
    return _load_preset(spec)


@lru_cache(maxsize=64)
def _load_preset(name: str) -> Cluster:
    if name not in presets():
        raise ValueError(
            f"cluster: no preset {name!r}; presets are {', '.join(presets())}; "
            "for your own cluster give the path of a .toml file"
        )
    file = resources.files("stpart_compiler.cost_models").joinpath("presets", f"{name}.toml")
    return parse_cluster(file.read_text(encoding="utf-8"), f"preset {name}")


def _load_file(path: Path) -> Cluster:
    if not path.is_file():
        known = ", ".join(presets())
        raise ValueError(f"cluster: no file {str(path)!r}; give an existing .toml file, or a preset: {known}")
    return parse_cluster(path.read_text(encoding="utf-8"), str(path))


def parse_cluster(text: str, source: str) -> Cluster:
    """Cluster from TOML text; `source` names it in messages.

    Raises:
        ValueError: no valid TOML, or a key is missing, unknown, or of another type than expected.
    """
    root = read_toml(text, source)
    device = root.table("device")
    levels = tuple((level.optional_integer("ranks"), _link(level)) for level in root.tables("links"))
    sources = root.optional_table("sources").strings()
    hidden = root.optional_table("hidden").numbers()
    try:
        cluster = Cluster(root.string("name"), _device(device), levels, sources, _hidden(dict(hidden), source))
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None
    root.check_no_more()
    return cluster


def _hidden(parts: dict[str, float], source: str) -> Hidden:
    known = [field.name for field in fields(Hidden)]
    for name in parts:
        if name not in known:
            raise ValueError(f"{source}: key 'hidden.{name}' is unknown; known: {', '.join(known)}")
    return Hidden(**parts)


def _device(table: Table) -> Device:
    device = Device(
        name=table.string("name"),
        type=table.string("type"),
        peak_flops=table.table("peak_flops").numbers(),
        memory=table.nbytes("memory"),
        memory_bandwidth=table.number("memory_bandwidth"),
        launch_overhead=table.number("launch_overhead"),
        matmul_efficiency=table.points("matmul_efficiency"),
        attention_efficiency=table.optional_points("attention_efficiency") or Device.attention_efficiency,
        memory_efficiency=table.optional_points("memory_efficiency") or Device.memory_efficiency,
        transcendental_rate=table.optional_number("transcendental_rate") or Device.transcendental_rate,
        transfer_overhead=table.optional_number("transfer_overhead") or Device.transfer_overhead,
    )
    table.check_no_more()
    return device


def _link(table: Table) -> Link:
    values = table.number("latency"), table.number("bandwidth"), table.boolean("full_duplex")
    shared_by = table.optional_integer("shared_by") or 1
    algorithms = table.optional_strings("algorithms")
    efficiency = table.optional_table("efficiency").curves()
    latencies = table.optional_table("latencies").numbers()
    table.check_no_more()
    try:
        return Link(*values, shared_by, (RING,) if algorithms is None else algorithms, efficiency, latencies)
    except ValueError as error:
        raise ValueError(f"{table.where()}: {error}") from None


def _check_latency(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"link: {what} is {value}; expected seconds >= 0")


def _check_collective(what: str, kind: str) -> None:
    if kind not in COLLECTIVES:
        raise ValueError(f"link: {what} is no collective; use one of {', '.join(COLLECTIVES)}")


def _check_positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} is {value}; expected a positive number")


def _check_dtype(device: str, dtype: str) -> None:
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"device {device!r}: peak_flops.{dtype} is no torch dtype; write it like 'bfloat16'")
