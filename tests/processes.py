"""Processes of tests, forked off one that has imported torch and models once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["stpart_compiler", "transformers.models.llama.modeling_llama"])


def run_processes(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], limit_s: float
) -> list[tuple[int | None, str]]:
    """A process for each tuple of arguments; its exit status and what it printed. None is left running.

    `target`: a function of a module that can be imported by its name.
    """
    ends = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / str(number) for number in range(len(arguments))]
        made = [
            _CONTEXT.Process(target=_run, args=(log, target, given)) for log, given in zip(logs, arguments, strict=True)
        ]
        try:
            for process in made:
                process.start()
            for process in made:
                process.join(max(1.0, ends - time.monotonic()))
        finally:
            for process in made:
                process.kill()
                process.join()
        return [(process.exitcode, log.read_text()) for process, log in zip(made, logs, strict=True)]


def run_code(code: str, *argv: str) -> None:
    """A script given as text, as the target of a process."""
    sys.argv = ["-c", *argv]
    exec(code, {"__name__": "__main__"})


def _run(log: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    target(*arguments)
