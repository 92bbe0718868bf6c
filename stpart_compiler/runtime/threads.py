"""All ranks in one process: a thread per rank, a real gloo group between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from stpart_compiler.runtime.engine import CommTimeoutError, Engine
from stpart_compiler.runtime.transport import GlooTransport

Result = TypeVar("Result")

GRACE_S = 2.0
"""How long a failure that follows from another rank's waits for that one to be reported, before all are stopped."""


class _Run(Generic[Result]):
    """The state that the rank threads of one run share."""

    def __init__(self, engines: list[Engine], fn: Callable[[int, Engine], Result]) -> None:
        self.engines = engines
        self.fn = fn
        self.results: dict[int, Result] = {}
        self.failure: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()
        self._cause = threading.Event()
        for engine in engines:
            engine.on_failure = self._recorder(engine.rank)

    def rank(self, rank: int) -> None:
        """What the thread of one rank does."""
        torch.set_num_threads(1)
        try:
            with self.engines[rank].activate() as engine:
                self.results[rank] = self.fn(rank, engine)
        except BaseException as error:
            self._record(rank, error)
            if _follows(error):
                self._cause.wait(GRACE_S)
            self.stop(f"rank {rank} raised {type(error).__name__}: {error}")

    def stop(self, reason: str) -> None:
        for engine in self.engines:
            engine.abort(reason)

    def _recorder(self, rank: int) -> Callable[[CommTimeoutError], None]:
        return lambda error: self._record(rank, error)

    def _record(self, rank: int, error: BaseException) -> None:
        # gloo closes connections on a timeout before it reports it: a peer's failure may come in ahead of its cause.
        with self._lock:
            if self.failure is None or (_follows(self.failure[1]) and not _follows(error)):
                self.failure = (rank, error)
        if not _follows(error):
            self._cause.set()


def _follows(error: BaseException) -> bool:
    return isinstance(error, CommTimeoutError) and error.follows


def run_ranks(world_size: int, fn: Callable[[int, Engine], Result], *, timeout_s: float = 60.0) -> list[Result]:
    """Run `fn(rank, engine)` for all ranks, each in a thread of its own with its engine active.

    Returns the results by rank. The first exception of any rank is raised again, with a note that names the rank,
    after the other ranks were stopped; `timeout_s` (seconds) bounds every wait. A rank that is busy without
    communicating cannot be stopped and is left behind after `timeout_s`.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    store = HashStore()
    engines = [
        Engine(rank, world_size, GlooTransport(store, rank, world_size, timeout_s), timeout_s)
        for rank in range(world_size)
    ]
    run = _Run(engines, fn)
    # Setting one thread per rank also sets MKL's count, which is global.
    intra_op = torch.get_num_threads()
    threads = [
        threading.Thread(target=run.rank, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        _join(threads, run, timeout_s)
    except BaseException:
        run.stop("the run was interrupted")
        raise
    finally:
        torch.set_num_threads(intra_op)
    if run.failure is not None:
        rank, error = run.failure
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    _end([group for engine in engines for group in engine.release()])
    return [run.results[rank] for rank in range(world_size)]


def _end(groups: list[Any]) -> None:
    """End gloo groups side by side: each takes its time to stop its own threads."""
    held = [[group] for group in groups]
    groups.clear()
    enders = [threading.Thread(target=one.clear) for one in held]
    for thread in enders:
        thread.start()
    for thread in enders:
        thread.join()


def _join(threads: list[threading.Thread], run: _Run[Result], timeout_s: float) -> None:
    """Wait for the threads; once one has failed, for `timeout_s` at most."""
    deadline: float | None = None
    for thread in threads:
        while thread.is_alive():
            thread.join(0.05)
            if run.failure is not None:
                deadline = deadline or time.monotonic() + timeout_s
            if deadline is not None and time.monotonic() > deadline:
                return
