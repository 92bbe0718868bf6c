"""Meshes as the solver sees them: the same ranks, axes that follow the levels of the cluster, wide axes joined.

A plain number of ranks leaves the axes to the solver; any other mesh is kept as it was asked for, but for joined axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.templates import template as named_template

MOST_BESIDE_PAIRS = 4
"""Wide axes that a template of 2-D maps is planned on at most: its space grows with their number as powers do."""


def over_hierarchy(ranks: int, cluster: Cluster) -> list[Mesh]:
    """Meshes of two axes whose inner one stays inside a group of ranks that a level joins, the largest that fits.

    None where all ranks are joined by the innermost level.
    """
    joined = [level for level, _ in cluster.levels if level is not None and level < ranks]
    inner = dict.fromkeys(math.gcd(ranks, level) for level in joined)
    return [parse_mesh((ranks // size, size)) for size in inner if size > 1]


def within_host(ranks: int, cluster: Cluster) -> list[Mesh]:
    """Meshes of two axes over ranks that the innermost level joins, the inner axis not the shorter one.

    All links are equal there, so that the axes the other way round would give the same plans but for which of two cuts
    is the major one. None where ranks are in several hosts.
    """
    level = cluster.levels[0][0]
    if level is not None and ranks > level:
        return []
    return [parse_mesh((size, ranks // size)) for size in range(2, math.isqrt(ranks) + 1) if ranks % size == 0]


def _planned(mesh: Mesh, name: str | None, plan: Plan | None) -> Mesh:
    """The mesh as the solver sees it: the same ranks, two wide axes at most.

    A template of 2-D maps keeps a pair of equal axes beside one or two others; without a pair, an axis of square size
    is written as two. Else the inner ones of three and more axes are taken as one.
    """
    if plan is not None:
        return plan.mesh
    if name is not None and named_template(name).pairs and len(_wide(mesh)) > 2:
        few = mesh if len(_wide(mesh)) <= MOST_BESIDE_PAIRS else _three_axes(mesh)
        if named_template(name).applies(few) is None:
            return few
    mesh = _two_axes(mesh)
    return mesh if name is None or named_template(name).applies(mesh) is None else _as_pair(mesh)


def _as_pair(mesh: Mesh) -> Mesh:
    """The innermost axis of square size written as two; the same mesh if there is none."""
    for axis, size in reversed(mesh.size.items()):
        root = math.isqrt(size)
        if root > 1 and root * root == size:
            return mesh.factored(axis, (root, root))
    return mesh


def grids_to_try(spec: Any, mesh: Mesh, cluster: Cluster, name: str | None, plan: Plan | None) -> list[Mesh]:
    """The meshes that are tried, the one asked for first. Of a plain number of ranks also those whose axes follow the
    cluster's levels, for a template of 2-D maps with the inner one as a pair too, and, but for a template, two axes
    inside of a host. Of three and more axes over several hosts, but for a template, all two axes that they or the
    levels can be taken as: a plan on these is what is refined."""
    grids = [_planned(mesh, name, plan)]
    if plan is None and name is None and len(_wide(mesh)) > 2:
        along = over_hierarchy(mesh.world_size, cluster)
        grids += [*_joined_otherwise(mesh), *along] if along else []
    if isinstance(spec, int) and plan is None:
        along = over_hierarchy(spec, cluster)
        grids += [_planned(other, name, None) for other in along]
        grids += map(_as_pair, along) if name is not None and named_template(name).pairs else []
        grids += within_host(spec, cluster) if name is None else []
    if name is not None:
        grids = [grid for grid in grids if named_template(name).applies(grid) is None] or grids[:1]
    distinct: dict[tuple[int, ...], Mesh] = {}
    for grid in grids:
        distinct.setdefault(grid.sizes, grid)
    return list(distinct.values())


def coarse_and_fine(mesh: Mesh) -> tuple[Mesh, Mesh | None]:
    """The mesh on which a plan is made first, and the finer one on which it is refined, where there are three wide
    axes."""
    return _two_axes(mesh), _three_axes(mesh) if len(_wide(mesh)) > 2 else None


def _two_axes(mesh: Mesh) -> Mesh:
    """Of three and more wide axes the inner ones as one."""
    wide = _wide(mesh)
    return mesh if len(wide) <= 2 else _mesh(wide[0], _joined(wide[1:]))


def _joined_otherwise(mesh: Mesh) -> list[Mesh]:
    """Of three and more wide axes the outer ones as one, and the inner ones as one, in all other ways."""
    wide = _wide(mesh)
    return [_mesh(_joined(wide[:n]), _joined(wide[n:])) for n in range(2, len(wide))]


def _three_axes(mesh: Mesh) -> Mesh:
    """Of four and more wide axes those in the middle as one."""
    wide = _wide(mesh)
    return _mesh(wide[0], _joined(wide[1:-1]), wide[-1])


def _mesh(*axes: tuple[str, int]) -> Mesh:
    return Mesh(tuple(axis for axis, _ in axes), tuple(size for _, size in axes))


def _wide(mesh: Mesh) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in mesh.size.items() if size > 1]


def _joined(axes: Sequence[tuple[str, int]]) -> tuple[str, int]:
    return "_".join(axis for axis, _ in axes), math.prod(size for _, size in axes)
