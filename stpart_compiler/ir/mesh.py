"""Device mesh: named axes over ranks numbered row-major."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MOST_RANKS = 1024
_DEFAULT_NAMES = {1: ("d",), 2: ("r", "c"), 3: ("x", "y", "z")}


@dataclass(frozen=True)
class Mesh:
    """Ranks 0..world_size-1 laid out row-major over named axes.

    Raises:
        ValueError: an axis is empty, unnamed or named twice.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.axes or len(self.axes) != len(self.sizes):
            raise ValueError(f"mesh: needs one name per axis and at least one axis, got {self.axes} and {self.sizes}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"mesh: axis names must differ, got {self.axes}")
        for name, size in zip(self.axes, self.sizes, strict=True):
            if not name.isidentifier() or name == "t":
                raise ValueError(f"mesh: axis name {name!r} must be an identifier other than 't' (t is the time step)")
            if size < 1:
                raise ValueError(f"mesh: axis {name!r} has size {size}; every axis needs at least one rank")

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def size(self) -> dict[str, int]:
        """Axis name -> number of ranks along it."""
        return dict(zip(self.axes, self.sizes, strict=True))

    @cached_property
    def coords(self) -> tuple[dict[str, int], ...]:
        """Per rank: axis name -> coordinate."""
        return tuple(dict(zip(self.axes, self._unravel(rank), strict=True)) for rank in range(self.world_size))

    def _unravel(self, rank: int) -> tuple[int, ...]:
        out = []
        for size in reversed(self.sizes):
            rank, here = divmod(rank, size)
            out.append(here)
        return tuple(reversed(out))

    def rank(self, coords: Mapping[str, int]) -> int:
        """Rank at the given coordinates (taken modulo each axis size)."""
        rank = 0
        for name, size in zip(self.axes, self.sizes, strict=True):
            rank = rank * size + coords[name] % size
        return rank

    def shifted(self, rank: int, shift: Mapping[str, int]) -> int:
        """Rank reached from `rank` by adding `shift` (cyclically) to its coordinates."""
        here = self.coords[rank]
        return self.rank({name: here[name] + shift.get(name, 0) for name in self.axes})

    def factored(self, axis: str, parts: Sequence[int]) -> Mesh:
        """The same ranks with `axis` written as several axes `axis0, axis1, ...` (major first).

        Raises:
            ValueError: the parts do not multiply to the axis size.
        """
        if math.prod(parts) != self.size[axis]:
            raise ValueError(f"mesh: axis {axis!r} of size {self.size[axis]} cannot be factored as {tuple(parts)}")
        axes: list[str] = []
        sizes: list[int] = []
        for name, size in zip(self.axes, self.sizes, strict=True):
            axes += [f"{name}{i}" for i in range(len(parts))] if name == axis else [name]
            sizes += list(parts) if name == axis else [size]
        return Mesh(tuple(axes), tuple(sizes))

    def to_dict(self) -> dict[str, int]:
        return dict(zip(self.axes, self.sizes, strict=True))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes, strict=True))


def parse_mesh(spec: Any) -> Mesh:
    """Mesh from `4`, `(2, 2)`, `{"r": 2, "c": 2}`, a torch DeviceMesh or a Mesh.

    Raises:
        ValueError: the spec is empty, has a size below one or too many ranks, or is a DeviceMesh whose ranks are not
            0..n-1 in order.
        TypeError: the spec is of another type.
    """
    mesh = _parsed(spec)
    if mesh.world_size > MOST_RANKS:
        raise ValueError(
            f"mesh: {mesh} has {mesh.world_size} ranks, expected at most {MOST_RANKS}: the programs of all ranks are"
            " made and checked in one process; use a smaller mesh"
        )
    return mesh


def _parsed(spec: Any) -> Mesh:
    if isinstance(spec, Mesh):
        return spec
    if isinstance(spec, bool):
        raise TypeError("mesh: expected an int, a tuple of ints, a dict, or a DeviceMesh, got a bool")
    if isinstance(spec, int):
        return Mesh(("d",), (spec,))
    if isinstance(spec, Mapping):
        return Mesh(tuple(str(name) for name in spec), tuple(map(_size, spec.values())))
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        names = _DEFAULT_NAMES.get(len(spec), tuple(f"a{i}" for i in range(len(spec))))
        return Mesh(names, tuple(map(_size, spec)))
    if hasattr(spec, "mesh_dim_names") and hasattr(spec, "mesh"):
        return _from_device_mesh(spec)
    raise TypeError(f"mesh: expected an int, a tuple of ints, a dict, or a DeviceMesh, got {type(spec).__name__}")


def _size(size: Any) -> int:
    try:
        return operator.index(size)
    except TypeError:
        raise TypeError(f"mesh: expected sizes that are ints, got {size!r}") from None


def _from_device_mesh(device_mesh: Any) -> Mesh:
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise ValueError(f"mesh: the DeviceMesh must hold ranks 0..{len(ranks) - 1} in row-major order, got {ranks}")
    sizes = tuple(int(size) for size in device_mesh.mesh.shape)
    names = device_mesh.mesh_dim_names or _DEFAULT_NAMES.get(len(sizes), tuple(f"a{i}" for i in range(len(sizes))))
    return Mesh(tuple(names), sizes)
