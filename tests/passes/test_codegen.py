"""Where the instructions of transfers stand in a rank's program."""

from __future__ import annotations

import itertools

import torch
from forced import Step, is_exact, programs, run
from torch import nn

from stpart_compiler.ir.mesh import parse_mesh
from stpart_compiler.passes.strategies import enumerate_strategies


def test_each_transfer_of_a_gradient_runs_beside_a_product() -> None:
    """A gradient that is summed along one axis and gathered along the other: two transfers, each beside a product."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).double()
    step = Step(model, (torch.randn(8, 256, dtype=torch.float64),), lambda y: y.square().sum())
    mesh = parse_mesh((2, 2))
    name = step.captured.grads["3.weight"]
    assert name is not None
    op = step.graph.by_name[name]
    named = {s.describe(op.rule): s for s in enumerate_strategies(op.rule, mesh, op.movable)}
    forced = {name: named["n=r, k=c"]}
    assert is_exact(step, *run(step, mesh, forced))
    for _, backward in programs(step, mesh, forced)[1]:
        kinds = []
        for instr in backward.body:
            if instr.target is torch.ops.aten.mm.default:
                kinds.append("product" if instr.origin.node != name else "gradient")
            elif instr.origin.node == name and instr.kind in ("collective", "exchange", "wait"):
                kinds.append("wait" if instr.kind == "wait" else "start")
        began = [kind for kind, _ in itertools.groupby(kinds[kinds.index("gradient") :])]
        assert began[:7] == ["gradient", "start", "product", "wait", "start", "product", "wait"]
