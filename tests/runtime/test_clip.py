"""The global gradient norm over ranks against torch's own on the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stpart_compiler.ir.artifact import Interface, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import Layout, form, gather, replicated, shard, take
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import RankProgram
from stpart_compiler.passes.emit_fx import emit_fx
from stpart_compiler.runtime.clip import clip_grad_norm_
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.rank_module import RankModule
from stpart_compiler.runtime.threads import run_ranks

GRID = Mesh(("r", "c"), (2, 2))
LINE = Mesh(("d",), (3,))
LAYOUTS: dict[str, tuple[Mesh, dict[str, Layout]]] = {
    "grid": (
        GRID,
        {
            "skewed": shard((5, 6), {0: (form(2, r=1),), 1: (form(2, r=1, c=1),)}),
            "over_r": shard((7,), {0: (form(2, r=1),)}),
            "whole": replicated((3, 2)),
            "scalar": replicated(()),
            "unused": replicated((4,)),
        },
    ),
    "line": (LINE, {"uneven": shard((7, 2), {0: (form(3, d=1),)}), "empty": shard((2, 3), {0: (form(3, d=1),)})}),
    "single": (Mesh(("d",), (1,)), {"whole": replicated((3, 2))}),
}


def rank_module(mesh: Mesh, layouts: dict[str, Layout], rank: int, engine: Engine | None, dtype: Any) -> RankModule:
    slots = tuple(TensorSlot(n, (), layout.shape, dtype, layout, True, True) for n, layout in layouts.items())
    spec = tree_flatten(((), {}))[1]
    none: Any = ()
    interface = Interface(
        mesh, slots, none, none, none, spec, spec, None, none, none, none, none, groups=(), channels=0, plan_digest="",
        training=True,
    )  # fmt: skip
    artifact = RankArtifact(rank, interface, RankProgram(rank, "forward", [], [], []), None)
    whole = {s.name: torch.zeros(s.shape, dtype=dtype) for s in slots}
    params = {s.name: take(whole[s.name], s.layout, mesh, rank).clone() for s in slots}
    return RankModule(artifact, emit_fx(artifact.forward), None, params, {}, engine)


def global_grads(layouts: dict[str, Layout], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(layout.shape, dtype=torch.float64, generator=generator).to(dtype)
        for name, layout in layouts.items()
        if name != "unused"
    }


def with_grads(module: RankModule, grads: dict[str, Tensor]) -> RankModule:
    mesh = module.interface.mesh
    for slot, param in module.param_slots():
        if slot.name in grads:
            param.grad = take(grads[slot.name], slot.layout, mesh, module.rank).clone()
    return module


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("case", list(LAYOUTS))
def test_equals_torch_on_the_whole_model(case: str, max_norm: float, norm_type: float) -> None:
    mesh, layouts = LAYOUTS[case]
    grads = global_grads(layouts, torch.float64)
    whole = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    for name, param in whole.items():
        param.grad = grads[name].clone()
    expected = nn.utils.clip_grad_norm_(whole.values(), max_norm, norm_type)

    def rank(index: int, engine: Engine) -> tuple[Tensor, list[Tensor | None]]:
        module = with_grads(rank_module(mesh, layouts, index, engine, torch.float64), grads)
        norm = clip_grad_norm_(module if index % 2 else module.parameters(), max_norm, norm_type, foreach=True)
        assert engine.outstanding == []
        return norm, [param.grad for _, param in module.param_slots()]

    results = run_ranks(mesh.world_size, rank, timeout_s=20)
    for norm, _ in results:
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        assert torch.equal(norm, results[0][0])
    for index, (name, layout) in enumerate(layouts.items()):
        blocks = [local[index] for _, local in results]
        if name == "unused":
            assert blocks == [None] * mesh.world_size
            continue
        found = gather([block for block in blocks if block is not None], layout, mesh)
        torch.testing.assert_close(found, whole[name].grad, rtol=1e-12, atol=1e-14)


def test_low_precision_is_summed_in_higher() -> None:
    mesh, layouts = LAYOUTS["grid"]
    grads = global_grads(layouts, torch.bfloat16)
    exact = torch.cat([grad.double().reshape(-1) for grad in grads.values()]).norm()

    def rank(index: int, engine: Engine) -> Tensor:
        module = with_grads(rank_module(mesh, layouts, index, engine, torch.bfloat16), grads)
        return clip_grad_norm_(module, 1.0)

    for norm in run_ranks(4, rank, timeout_s=20):
        assert norm.dtype == torch.bfloat16
        assert norm == exact.to(torch.bfloat16)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nan_on_one_rank_is_seen_by_all(norm_type: float) -> None:
    mesh, layouts = LAYOUTS["line"]
    grads = global_grads(layouts, torch.float64)
    grads["uneven"][6, 0] = math.nan  # held by the last rank alone

    def rank(index: int, engine: Engine) -> Tensor:
        module = with_grads(rank_module(mesh, layouts, index, engine, torch.float64), grads)
        with pytest.raises(RuntimeError, match="over all ranks is not finite: nan"):
            clip_grad_norm_(module, 1.0, norm_type, error_if_nonfinite=True)
        return clip_grad_norm_(module, 1.0, norm_type)

    assert all(norm.isnan() for norm in run_ranks(3, rank, timeout_s=20))


def test_bad_arguments() -> None:
    mesh, layouts = LAYOUTS["grid"]
    first, second = (rank_module(mesh, layouts, 0, None, torch.float64) for _ in range(2))
    stranger = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"parameter 5 of shape \(2, 3\) belongs to no rank module"):
        clip_grad_norm_([*first.parameters(), stranger], 1.0)
    with pytest.raises(ValueError, match="belong to several rank modules; clip each by itself"):
        clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
    with pytest.raises(ValueError, match="norm_type must be positive or inf, got 0"):
        clip_grad_norm_(first, 1.0, 0)
    with pytest.raises(RuntimeError, match=r"has no engine; call attach\(engine\)"):
        clip_grad_norm_(first, 1.0)
    assert clip_grad_norm_([], 1.0) == 0
