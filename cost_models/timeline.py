"""What a simulation found: when each rank computes, waits, sends and receives, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stpart_compiler.cost_models.liveness import alive_bytes
from stpart_compiler.cost_models.resting import StepPhase
from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.cost_models.trace import write_trace
from stpart_compiler.ir.program import Instr

COMPUTE, WAIT, SEND, RECV, COLLECTIVE = KINDS = ("compute", "wait", "send", "recv", "collective")

LISTED = 5
"""Number of module paths that a summary lists."""


class Interval(NamedTuple):
    """From `start` to `end` (seconds since the step began) a rank did `kind`, for `instr`.

    `peers`: the other ranks of a transfer; `nbytes`: what this rank sends or receives in it.
    """

    start: float
    end: float
    kind: str
    instr: Instr
    peers: tuple[int, ...] = ()
    nbytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def op(self) -> str:
        """Name of the operator, or of the transfer."""
        target = self.instr.target
        name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
        return name.removeprefix("aten.").removeprefix("stpart.").removesuffix(".default")

    @property
    def module_path(self) -> str:
        return self.instr.origin.module_path


@dataclass(frozen=True)
class RankTimeline:
    """One rank's step. `starts`: per phase, when each instruction began; `end`: when the last one had ended."""

    rank: int
    intervals: tuple[Interval, ...]
    starts: tuple[tuple[float, ...], ...]
    end: float
    phases: tuple[StepPhase, ...]

    @cached_property
    def compute_seconds(self) -> float:
        return sum(x.seconds for x in self.intervals if x.kind == COMPUTE)

    @cached_property
    def exposed_seconds(self) -> float:
        """Seconds in which the rank waits for transfers, or for ranks that come late to them."""
        return sum(x.seconds for x in self.intervals if x.kind == WAIT)

    @cached_property
    def waits(self) -> tuple[tuple[Interval, float], ...]:
        """Transfers with the seconds that the rank waits for them: at each moment for that under way which ends last.

        While none is under way, because other ranks come late to it, the interval is that of the wait. A transfer that
        several waits are for stands there as often.
        """
        flows = sorted((x for x in self.intervals if x.kind in (SEND, RECV, COLLECTIVE)), key=lambda x: x.start)
        found: list[tuple[Interval, float]] = []
        under_way: list[Interval] = []
        at = 0
        for wait in (x for x in self.intervals if x.kind == WAIT):
            while at < len(flows) and flows[at].start < wait.end:
                under_way.append(flows[at])
                at += 1
            under_way = [x for x in under_way if x.end > wait.start]
            found += _shared_out(wait, under_way)
        return tuple(found)

    @cached_property
    def sent_bytes(self) -> float:
        return sum(x.nbytes for x in self.intervals if x.kind in (SEND, COLLECTIVE))

    @cached_property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes of tensors alive from then on), wherever that changes; without optimizer state."""
        points: list[tuple[float, int]] = []
        for phase, starts in zip(self.phases, self.starts, strict=True):
            alive = alive_bytes(phase.program, phase.kept)
            begin = starts[0] if starts else self.end
            for time, nbytes in zip((begin, *starts), alive, strict=True):
                total = nbytes + phase.beside
                if not points or points[-1][1] != total:
                    points.append((time, total))
        return tuple(points)

    @cached_property
    def peak_bytes(self) -> int:
        return max(nbytes for _, nbytes in self.memory)


def _shared_out(wait: Interval, under_way: Sequence[Interval]) -> list[tuple[Interval, float]]:
    """A wait as seconds of transfers, from its end backwards, and what is left."""
    found: list[tuple[Interval, float]] = []
    covered_from = wait.end
    for x in sorted(under_way, key=lambda x: x.end, reverse=True):
        start = max(x.start, wait.start)
        seconds = min(x.end, covered_from) - start
        if seconds > 0:
            found.append((x, seconds))
            covered_from = start
    late = wait.seconds - sum(seconds for _, seconds in found)
    return [*found, (wait, late)] if late > 0 else found


@dataclass(frozen=True)
class Simulation:
    """One simulated step of all ranks on a cluster. Times in seconds, without the optimizer's step."""

    cluster: str
    timeline: tuple[RankTimeline, ...]

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(rank.end for rank in self.timeline)

    @property
    def compute_seconds(self) -> float:
        """Of the rank that computes longest."""
        return max(rank.compute_seconds for rank in self.timeline)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of waiting for transfers and for other ranks, on the rank that waits longest."""
        return max(rank.exposed_seconds for rank in self.timeline)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank: parameters, buffers, inputs, activations, gradients; no optimizer state."""
        return max(rank.peak_bytes for rank in self.timeline)

    def summary(self) -> str:
        """A few lines: times, the modules that communication is exposed in, memory."""
        ranks = self.timeline
        slowest = max(ranks, key=lambda rank: rank.end)
        lines = [
            f"simulated step on {self.cluster}, {len(ranks)} ranks: {self.seconds * 1e3:.3f} ms",
            f"  compute {_span([rank.compute_seconds for rank in ranks])},"
            f" exposed communication {_span([rank.exposed_seconds for rank in ranks])}",
            f"  sent per rank at most {format_bytes(max(rank.sent_bytes for rank in ranks))},"
            f" peak memory {format_bytes(self.peak_bytes)}",
        ]
        for seconds, where in _exposed(slowest)[:LISTED]:
            lines.append(f"  rank {slowest.rank} waits {seconds * 1e3:.3f} ms for {where}")
        return "\n".join(lines)

    def trace(self, path: str | Path) -> None:
        """Write the step for Perfetto (ui.perfetto.dev) or chrome://tracing, as JSON. Raises OSError."""
        write_trace(self, Path(path))


def _span(seconds: Sequence[float]) -> str:
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    return f"{high:.3f} ms" if high - low < 1e-3 else f"{low:.3f} to {high:.3f} ms"


def _exposed(rank: RankTimeline) -> list[tuple[float, str]]:
    """Seconds of waiting per place, the longest first."""
    found: dict[str, float] = {}
    for x, seconds in rank.waits:
        where = f"{x.instr.origin.node} of {x.module_path}" if x.module_path else x.instr.origin.node
        found[where] = found.get(where, 0.0) + seconds
    return sorted(((seconds, where) for where, seconds in found.items()), key=lambda item: (-item[0], item[1]))
