"""Ranks decide alike: one rank solves, the others take its plan, and all compare digests before they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from stpart_compiler.ir.artifact import RankArtifact, messages_digest
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.runtime.engine import Engine, online_engine

T = TypeVar("T")


def is_online() -> bool:
    return dist.is_available() and dist.is_initialized()


def check_world(mesh: Mesh) -> None:
    """Raises:
    ValueError: the mesh does not have one rank per process of the running process group.
    """
    if not is_online():
        return
    world = dist.get_world_size()
    if mesh.world_size != world:
        relation = "larger" if mesh.world_size > world else "smaller"
        raise ValueError(
            f"mesh: {mesh} has {mesh.world_size} ranks, {relation} than the process group's {world};"
            " give a mesh with one rank per process"
        )


def agree_on_plan(solve: Callable[[], tuple[Plan, T]], rebuild: Callable[[Plan], tuple[Plan, T]]) -> tuple[Plan, T]:
    """Rank 0 solves and sends its plan, or its error, to all; without a process group it just solves."""
    if not is_online():
        return solve()
    message: list[Any] = [None]
    made: tuple[Plan, T] | None = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            made = solve()
            message = [("plan", made[0].to_json())]
        except Exception as failure:
            error = failure
            message = [("error", f"{type(failure).__name__}: {failure}")]
    dist.broadcast_object_list(message, src=0)
    if error is not None:
        raise error
    kind, text = message[0]
    if kind == "error":
        raise ValueError(f"rank 0 could not make a plan: {text}")
    return made if made is not None else rebuild(Plan.from_json(text))


def local_engine(artifacts: Sequence[RankArtifact], timeout_s: float) -> Engine:
    """Engine of this process for a compiled model, after all ranks have shown the same plan and programs.

    Raises:
        RuntimeError: there is no process group, or a rank holds another plan or other programs.
        ValueError: the world size differs from the mesh.
    """
    if not is_online():
        raise RuntimeError(
            "local_module: no process group; start under torchrun and call torch.distributed.init_process_group first,"
            " or use run_in_process"
        )
    interface = artifacts[0].interface
    check_world(interface.mesh)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, (interface.plan_digest, messages_digest(artifacts)))
    _check_same(
        "plan",
        [plan for plan, _ in digests],
        "every rank must compile the same model, inputs and options, or load the same plan",
    )
    _check_same(
        "program",
        [programs for _, programs in digests],
        "the same plan gave other programs: all ranks need the same versions of torch, this package and custom ops",
    )
    return online_engine(timeout_s)


def _check_same(what: str, digests: list[str], advice: str) -> None:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        shown = ", ".join(f"rank {rank}: {digests[rank][:12]}" for rank in (0, *different))
        raise RuntimeError(f"{what} digests differ ({shown}); {advice}")
