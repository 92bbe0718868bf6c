"""Ranks decide alike: one rank solves, the others take its plan, and all compare digests before they run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stpart_compiler.ir.artifact import Interface, RankArtifact, messages_digest
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.ir.program import RankProgram
from stpart_compiler.runtime.calls import Sizes
from stpart_compiler.runtime.engine import FORMING, Engine, Label, online_engine

T = TypeVar("T")

_AGREE_TAG = 0
_SAME_STEP = "every rank must compile the same model, inputs and options"


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


def agree_on_plan(
    graph_digest: str, solve: Callable[[], tuple[Plan, T]], rebuild: Callable[[Plan], tuple[Plan, T]]
) -> tuple[Plan, T]:
    """Rank 0 solves and sends its plan, or its error, to all; without a process group it just solves.

    Raises:
        RuntimeError: the ranks have captured different graphs.
    """
    if not is_online():
        return solve()
    _check_same("graph", _everyones(graph_digest), _SAME_STEP)
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
    check_same_programs(interface, [program for artifact in artifacts for program in artifact.programs])
    return online_engine(timeout_s)


def check_same_programs(interface: Interface, programs: Sequence[RankProgram]) -> None:
    """Compare all ranks' programs, as this process made them, with what the other processes made.

    Raises:
        RuntimeError: a rank of the process group holds another plan or other programs.
    """
    digests = _everyones((interface.plan_digest, messages_digest(programs)))
    _check_same("plan", [plan for plan, _ in digests], f"{_SAME_STEP}, or load the same plan")
    _check_same(
        "program",
        [programs for _, programs in digests],
        "the same plan gave other programs: all ranks need the same versions of torch, this package and custom ops",
    )


def agree_on_sizes(engine: Engine, interface: Interface, sizes: Sizes, device: torch.device) -> None:
    """All ranks are about to compile for inputs of these sizes.

    Raises:
        RuntimeError: another rank is called with inputs of other sizes that are new too.
        CommTimeoutError: another rank is called with sizes that it has programs for, or not at all.
    """
    shown = ", ".join(f"{slot.path} {size}" for slot, size in zip(interface.inputs, sizes, strict=True) if size)
    other = _disagreeing(engine, interface, repr(sizes), f"(compiling for inputs of other sizes: {shown})", device)
    if other:
        raise RuntimeError(
            f"rank {engine.rank}: called with inputs of the sizes {shown}, but ranks {other} with others; inputs are"
            " global tensors: give all ranks the same"
        )


def agree_on_no_sync(engine: Engine, interface: Interface, device: torch.device) -> None:
    """All ranks are about to compile programs for `no_sync`.

    Raises:
        RuntimeError: another rank is called with inputs of new sizes instead.
        CommTimeoutError: another rank runs a step without `no_sync`, or nothing.
    """
    other = _disagreeing(engine, interface, "no_sync", "(compiling for no_sync)", device)
    if other:
        raise RuntimeError(f"rank {engine.rank}: enters no_sync, but ranks {other} do not; all ranks do so together")


def _disagreeing(engine: Engine, interface: Interface, text: str, label: str, device: torch.device) -> list[int]:
    """Ranks that are about to do something else than `text` says; `label` is for error messages."""
    mine = torch.tensor([int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])], device=device)
    peers = [rank for rank in range(engine.world_size) if rank != engine.rank]
    theirs = [torch.empty_like(mine) for _ in peers]
    # A channel of its own: ranks that run a program meanwhile must not take this for one of its messages.
    channel, tags = interface.channels, [_AGREE_TAG] * len(peers)
    where = Label(label, "(the model)", tuple(peers))
    engine.labels = {FORMING: where, (channel, _AGREE_TAG): where}
    engine.prepare(channel + 1)
    engine.exchange([mine] * len(peers), peers, tags, theirs, peers, tags, channel)
    if peers:
        engine.wait(tags[:1], channel)
    return [peer for peer, their in zip(peers, theirs, strict=True) if not torch.equal(their, mine)]


def _everyones(mine: T) -> list[T]:
    """What each rank gives, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _check_same(what: str, digests: list[str], advice: str) -> None:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        shown = ", ".join(f"rank {rank}: {digests[rank][:12]}" for rank in (0, *different))
        raise RuntimeError(f"{what} digests differ ({shown}); {advice}")
