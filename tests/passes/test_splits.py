"""Templates as yardsticks, each on the split of the ranks on which it is fastest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import Device, Link
from stpart_compiler.graphs import annotate
from stpart_compiler.ir.mesh import Mesh, parse_mesh
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import MakePlan
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.splits import PriceSplits, splits
from stpart_compiler.passes.templates import TEMPLATES

SOLVER = st.SolverOptions(time_limit_s=5, patience_s=0.5)
CLUSTER = st.Cluster("even", Device("even", "cpu", (("float32", 1e11),), 2**34, 1e12), ((None, Link(1e-6, 1e10)),))
LIMIT = 10**12


EXPECTED = {name for name, template in TEMPLATES.items() if template.yardstick} - {"primepar", "metp"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 640 - size, bias=False) for size in (128, 512, 128, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def alone(graph: Annotated, name: str, mesh: Mesh) -> float:
    return MakePlan(Costs(CLUSTER, mesh), SOLVER, LIMIT, name).apply(graph).seconds


def test_each_template_is_priced_where_it_is_fastest() -> None:
    with torch.device("meta"):
        graph = annotate(capture(Net(), (torch.zeros(2, 64, 128),)), stripes=8)
    plan = MakePlan(Costs(CLUSTER, parse_mesh((4, 2))), SOLVER, LIMIT).apply(graph)
    found = PriceSplits(CLUSTER, SOLVER, LIMIT).apply([graph], plan)
    assert [mesh.sizes for mesh in splits(8)] == [(8,), (2, 4), (4, 2)]
    assert {label.split(" ")[0] for label in found} == EXPECTED, "no square, no regions"
    assert any("(" in label for label in found) and any("(" not in label for label in found)
    for label, seconds in found.items():
        name, _, split = label.rstrip(")").partition(" (")
        meshes = [mesh for mesh in splits(8) if TEMPLATES[name].applies(mesh) is None]
        assert seconds == pytest.approx(min(alone(graph, name, mesh) for mesh in meshes))
        assert seconds == pytest.approx(alone(graph, name, parse_mesh(tuple(map(int, (split or "4x2").split("x"))))))
