"""One step of a compiled model in one thread: all ranks in lockstep, receive buffers poisoned until data arrives.

Many times faster than a thread and a gloo group per rank, so that tests can run every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import stpart_compiler as st
from stpart_compiler.ir.artifact import Port
from stpart_compiler.ir.layout import gather
from stpart_compiler.runtime.lockstep import run_lockstep


@dataclass
class Result:
    """Loss (of rank 0; equal on all), and global gradients and new buffer values by the model's names."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def lockstep_step(compiled: st.CompiledModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """The step on global inputs, as `compiled.run_in_process` runs it."""
    interface, artifacts = compiled.interface, compiled.artifacts
    leaves = pytree.tree_leaves((args, kwargs))
    known = [_known(compiled, rank, leaves) for rank in range(compiled.world_size)]
    given = [[values[port] for port in interface.forward_inputs] for values in known]
    with torch.no_grad():
        outputs = run_lockstep([artifact.forward for artifact in artifacts], given)
        for values, found in zip(known, outputs, strict=True):
            values.update(zip(interface.forward_outputs, found, strict=True))
            values.update({port: torch.ones_like(values["output", port[1]]) for port in _tangents(compiled)})
        given = [[values[port] for port in interface.backward_inputs] for values in known]
        gradients = run_lockstep([artifact.backward for artifact in artifacts if artifact.backward], given)
    losses = [values["output", interface.loss_index] for values in known if interface.loss_index is not None]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    ports: list[dict[Port, Any]] = [dict(zip(interface.backward_outputs, found, strict=True)) for found in gradients]
    return Result(losses[0], _global_grads(compiled, ports), _global_buffers(compiled, known))


def _known(compiled: st.CompiledModel, rank: int, leaves: list[Any]) -> dict[Port, torch.Tensor]:
    params, buffers = compiled.local_state(rank)
    found: dict[Port, torch.Tensor] = {("param", name): x for name, x in params.items()}
    found |= {("buffer", name): x for name, x in buffers.items()}
    found |= {("constant", name): x for name, x in compiled.artifacts[rank].constants.items()}
    return found | {("input", i): x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}


def _tangents(compiled: st.CompiledModel) -> list[Port]:
    return [port for port in compiled.interface.backward_inputs if port[0] == "tangent"]


def _global_grads(compiled: st.CompiledModel, ports: list[dict[Port, Any]]) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for slot in compiled.interface.params:
        blocks = [values.get(("grad", slot.name)) for values in ports]
        present = [block for block in blocks if block is not None]
        assert len(present) in (0, len(blocks)), slot.name
        whole = gather(present, slot.layout, compiled.interface.mesh) if present else None
        found.update(dict.fromkeys((slot.name, *slot.aliases), whole))
    return found


def _global_buffers(compiled: st.CompiledModel, known: list[dict[Port, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for slot in compiled.interface.buffers:
        blocks = [values["buffer", slot.name] for values in known]
        found.update(dict.fromkeys((slot.name, *slot.aliases), gather(blocks, slot.layout, compiled.interface.mesh)))
    return found
