"""Models of many families: the solved plan on every mesh, and every template, against one device.

Of some models three ranks run as a thread and a gloo group each; all else runs in lockstep.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import lru_cache
from typing import Any

import torch
from lockstep_step import lockstep_step
from once import traced_before
from slow_ranks import CLUSTER, SOLVER
from traced_zoo import by_model, by_other_model, traced
from zoo import KERNEL_FLOAT32, ZOO, Step, make

import stpart_compiler as st

MESHES = (2, 3, (4,), (8,), (2, 2))  # of a plain 4 or 8 the solver would choose the axes
THREADS = 3
IN_THREADS = ("opt", "t5", "mixtral", "conformer")
SQUARES = ((4,), (2, 2))
# meshes of templates that do not apply to others
ONLY_ON = {"primepar": SQUARES, "primepar_space": SQUARES, "summa": ((4,), (2, 3))}


class Case:
    """A step with the loss, gradients and buffers of one device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.step, self.captured, self.graph = traced(name)
        self.single = dataclasses.replace(self.step, model=copy.deepcopy(self.step.model))
        self.loss = self.single.loss()
        self.loss.backward()

    def compile(self, mesh: Any, template: str | None) -> st.CompiledModel:
        with traced_before(self.captured, lambda stripes: self.graph):
            return st.compile_model(
                self.step.model,
                self.step.args,
                dict(self.step.kwargs),
                loss_fn=self.step.loss_fn,
                mesh=mesh,
                template=template,
                cluster=CLUSTER,
                solver=SOLVER,
            )

    def check(self, compiled: st.CompiledModel) -> None:
        args, kwargs = self.step.args, dict(self.step.kwargs)
        threads = compiled.world_size == THREADS and self.name in IN_THREADS
        result = compiled.run_in_process(*args, **kwargs) if threads else lockstep_step(compiled, args, kwargs)
        assert result.loss is not None
        self._close("loss", result.loss, self.loss.detach())
        largest = max(float(p.grad.abs().max()) for p in self.single.model.parameters() if p.grad is not None)
        for name, param in self.single.model.named_parameters(remove_duplicate=False):
            found = result.grads[name]
            assert (found is None) == (param.grad is None), name
            if found is not None and param.grad is not None:
                self._close(name, found, param.grad, floor=1e-6 * largest)
        for name, buffer in self.single.model.named_buffers():
            if name in result.buffers:
                self._close(name, result.buffers[name], buffer)

    def _close(self, name: str, found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> None:
        """Relative to the norm; gradients that vanish but for rounding, relative to `floor`."""
        size = max(float(expected.double().norm()), floor * expected.numel() ** 0.5)
        error = float((found.double() - expected.double()).norm())
        assert error <= self.step.tolerance * size, f"{name}: error {error:.2e} of {size:.2e}"


@lru_cache(maxsize=1)
def _case(name: str) -> Case:
    return Case(name)


@by_other_model
def test_solved(name: str) -> None:
    case = _case(name)
    for mesh in MESHES:
        compiled = case.compile(mesh, None)
        work = [op.name for op in case.graph.ops if op.call.target in _PRODUCTS]
        assert any(any(compiled.plan.strategies[op].digits) for op in work), mesh
        case.check(compiled)


@by_other_model
def test_templates(name: str) -> None:
    """Three templates of five on one mesh each, other templates and other meshes for each model."""
    case = _case(name)
    for turn, template in enumerate(st.templates(), start=list(ZOO).index(name)):
        if turn % 5 in (0, 2):
            continue
        meshes = ONLY_ON.get(template, MESHES)
        mesh = meshes[turn // 2 % len(meshes)]
        case.check(case.compile(mesh, template))


@by_model
def test_every_op_has_a_rule(name: str) -> None:
    graph = _case(name).graph
    assert {str(op.call.target) for op in graph.ops if not op.has_rule} == set()


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default}


def test_float32_is_used_only_where_kernels_demand_it() -> None:
    kept = [name for name in ZOO if make(name).tolerance == KERNEL_FLOAT32]
    assert kept == ["mixtral"]
    assert isinstance(make("dit"), Step)
