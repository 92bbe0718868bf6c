"""Messages under way on the links of a cluster: at any moment the messages on one link share it equally.

A message runs at the rate of the slower of its two ends (`ports.py`); when one starts or ends, the rates of those it
met change. Latencies of messages that a rank sends over one link follow one another.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.cost_models.ports import PortKey, ports_between

Action = Callable[[float, Any], None]
"""What happens at a moment: called with the time in seconds and its argument."""


class Clock:
    """Moments in order of time; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, int, Action, Any]] = []
        self._number = count()

    def at(self, time: float, action: Action, argument: Any = None) -> None:
        heapq.heappush(self._moments, (time, next(self._number), action, argument))

    def run(self, settle: Callable[[float], None]) -> None:
        """Until nothing is left; `settle` is called after all that happens at one time."""
        moments = self._moments
        while moments:
            now = moments[0][0]
            while moments and moments[0][0] == now:
                _, _, action, argument = heapq.heappop(moments)
                action(now, argument)
            settle(now)


@dataclass(eq=False)
class Port:
    """One end of a link: bytes/s that the messages on it share."""

    bandwidth: float
    flows: dict[Flow, None] = field(default_factory=dict)


@dataclass(eq=False)
class Flow:
    """One message under way. `done` is called with the time at which its last byte has arrived, and the flow."""

    source: int
    target: int
    nbytes: float
    done: Action
    ports: tuple[Port, ...] = ()
    left: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


class Network:
    """The links of `cluster` with what is on them; `clock` is told when messages will have arrived."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._ports: dict[PortKey, Port] = {}
        self._changed: dict[Flow, None] = {}
        self._between: dict[tuple[int, int], tuple[Port, ...]] = {}
        self._free_at: dict[tuple[int, int], float] = {}  # when the latency of a rank's last message is over

    def send(self, now: float, flow: Flow) -> None:
        """Put a message on its way: its link's latency after those sent before it, and then the time of its bytes."""
        level = self._cluster.level_between(flow.source, flow.target)
        begin = max(now, self._free_at.get((level, flow.source), 0.0)) + self._cluster.levels[level][1].latency
        self._free_at[level, flow.source] = begin
        self.send_at(begin, flow)

    def send_at(self, begin: float, flow: Flow) -> None:
        """Put a message on its way whose first byte leaves at `begin`."""
        flow.ports = self._route(flow.source, flow.target)
        self._clock.at(begin, self._start, flow)

    def settle(self, now: float) -> None:
        """Give each message that met a change its new rate."""
        for flow in self._changed:
            rate = min(port.bandwidth / len(port.flows) for port in flow.ports)
            if rate == flow.rate:
                continue
            flow.left -= flow.rate * (now - flow.since)
            flow.rate, flow.since = rate, now
            flow.version += 1
            self._clock.at(now + max(flow.left, 0.0) / rate, self._end, (flow, flow.version))
        self._changed.clear()

    def _start(self, now: float, flow: Flow) -> None:
        flow.since = now
        flow.left = flow.nbytes
        for port in flow.ports:
            port.flows[flow] = None
            self._changed.update(port.flows)

    def _end(self, now: float, ends: tuple[Flow, int]) -> None:
        flow, version = ends
        if version != flow.version:
            return
        for port in flow.ports:
            port.flows.pop(flow, None)
            self._changed.update(port.flows)
        self._changed.pop(flow, None)
        flow.done(now, flow)

    def _route(self, source: int, target: int) -> tuple[Port, ...]:
        if (source, target) not in self._between:
            keys = ports_between(self._cluster, source, target)
            self._between[source, target] = tuple(map(self._port, keys))
        return self._between[source, target]

    def _port(self, key: PortKey) -> Port:
        if key not in self._ports:
            self._ports[key] = Port(self._cluster.levels[key[1]][1].bandwidth)
        return self._ports[key]
