"""When transfers will have ended, told while programs are made: the next one of a row starts there.

A forecast must be the same for all ranks, which start transfers in one order. So it knows the work of heavy ops shared
by all of them (`passes/ahead.py`) and the price of each transfer, not what single ranks do. Transfers in the same
groups of one channel follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.ir.redistribute import Step, redistribution_cost
from stpart_compiler.passes.emit_redistribute import channel_of


@dataclass
class Forecast:
    """Seconds since a phase began: `now`, and when each queue of transfers will be empty."""

    cost: LinkCost
    now: float = 0.0
    free: dict[object, float] = field(default_factory=dict)

    def started(self, step: Step, itemsize: int) -> float:
        """When a transfer that starts now ends. `itemsize`: bytes of an element."""
        queue = channel_of(step, itemsize), step.groups
        self.free[queue] = max(self.now, self.free.get(queue, 0.0)) + self.seconds(step, itemsize)
        return self.free[queue]

    def seconds(self, step: Step, itemsize: int) -> float:
        """What a transfer takes."""
        return redistribution_cost(step.source, step.target, self.cost.mesh, itemsize, self.cost)

    def computed(self, seconds: float) -> None:
        self.now += seconds

    def waited(self, until: float) -> None:
        self.now = max(self.now, until)
