"""A simulated step as the JSON that Perfetto and chrome://tracing read: a process per rank, a track per kind of work.

Transfers that overlap on a rank stand on tracks of their own, since the slices of one track must not cross.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stpart_compiler.cost_models.timeline import Interval, RankTimeline, Simulation

_TRACKS = ("compute", "send", "recv", "collective")
_TRACK_OF = {"compute": "compute", "wait": "compute", "send": "send", "recv": "recv", "collective": "collective"}
_LANES = 1000
"""Track numbers that are kept for one kind."""


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write the trace of a simulation. Raises OSError."""
    events = [event for rank in simulation.timeline for event in _events(rank)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    yield _name(rank.rank, None, "process_name", f"rank {rank.rank}")
    lanes: dict[str, list[float]] = {track: [] for track in _TRACKS}
    for x in sorted(rank.intervals, key=lambda x: (x.start, x.end)):
        track = _TRACK_OF[x.kind]
        ends = lanes[track]
        lane = next((i for i, end in enumerate(ends) if end <= x.start), len(ends))
        thread = _TRACKS.index(track) * _LANES + lane
        if lane == len(ends):
            ends.append(0.0)
            yield _name(rank.rank, thread, "thread_name", track if not lane else f"{track} {lane + 1}")
        ends[lane] = x.end
        yield _slice(rank.rank, thread, x)
    for time, nbytes in rank.memory:
        yield {"ph": "C", "name": "memory", "pid": rank.rank, "ts": time * 1e6, "args": {"bytes": nbytes}}


def _name(rank: int, thread: int | None, what: str, name: str) -> dict[str, Any]:
    where = {"pid": rank} if thread is None else {"pid": rank, "tid": thread}
    return {"ph": "M", "name": what, **where, "args": {"name": name}}


def _slice(rank: int, thread: int, x: Interval) -> dict[str, Any]:
    origin = x.instr.origin
    place = f" {origin.module_path}" if origin.module_path else ""
    named = f"{x.op}{place}" if x.kind in ("compute", "collective") else f"{x.kind} {origin.node}{place}"
    facts: dict[str, Any] = {"from": str(origin)}
    if origin.line:
        facts["line"] = origin.line
    if x.peers:
        facts |= {"peers": list(x.peers), "bytes": x.nbytes}
    slice_ = {"ph": "X", "name": named, "cat": x.kind, "pid": rank, "tid": thread}
    return slice_ | {"ts": x.start * 1e6, "dur": x.seconds * 1e6, "args": facts}
