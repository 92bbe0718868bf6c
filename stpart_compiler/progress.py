"""Progress of the passes on a terminal: a live line for what runs now; plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console


@contextmanager
def progress_lines(stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a line of text with the seconds since the start. `stream` None: standard error."""
    stream = stream or sys.stderr
    start = time.perf_counter()

    def stamped(text: str) -> str:
        return f"[{time.perf_counter() - start:6.1f} s] {text}"

    if not stream.isatty():
        yield lambda text: print(stamped(text), file=stream, flush=True)
        return
    console = Console(file=stream, highlight=False, markup=False)
    with console.status("start") as status:

        def show(text: str) -> None:
            console.print(stamped(text))
            status.update(text)

        yield show
