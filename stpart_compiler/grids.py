"""Meshes for a plain number of ranks: its axes follow the levels of the cluster."""

from __future__ import annotations

import math

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.ir.mesh import Mesh, parse_mesh


def over_hierarchy(ranks: int, cluster: Cluster) -> list[Mesh]:
    """Meshes of two axes whose inner one stays inside a group of ranks that a level joins, the largest that fits.

    None where all ranks are joined by the innermost level.
    """
    joined = [level for level, _ in cluster.levels if level is not None and level < ranks]
    inner = dict.fromkeys(math.gcd(ranks, level) for level in joined)
    return [parse_mesh((ranks // size, size)) for size in inner if size > 1]
