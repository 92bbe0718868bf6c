"""Discrete-event simulation of all ranks' programs on a cluster.

Each rank runs its instructions one after another. Compute takes the time of the cost model on the shapes of that rank.
A transfer starts once both of its ends, or all members of its collective, have come to it; it does not hold up its
ranks until they wait for it, but for what it takes from the compute beside it (`Hidden`), once for all that are under
way: if that is all, an accelerator has one queue for compute and transfers, and runs them in order. A collective goes
by the algorithm that is cheapest for its group alone, phase by phase; in each, a member sends to the next one of a
ring, in an all-to-all to all others. What it does not reach of a link's bandwidth is sent as so many more bytes. A
rank's collectives in one group of one channel follow one another, two at a time on CPUs; on accelerators, whose library
keeps one queue per group of ranks, its exchanges of one channel too. Backward starts on a rank when its forward is
done.

The same programs on the same cluster always give the same times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

from stpart_compiler.cost_models.cluster import GLOO_THREADS, Cluster
from stpart_compiler.cost_models.collectives import Group, members, ring
from stpart_compiler.cost_models.communication import Route, route_seconds, routes, unit_of
from stpart_compiler.cost_models.compute import copy_seconds
from stpart_compiler.cost_models.instructions import InstructionCost
from stpart_compiler.cost_models.network import Clock, Flow, Network
from stpart_compiler.cost_models.resting import StepPhase
from stpart_compiler.cost_models.timeline import (
    COLLECTIVE,
    COMPUTE,
    RECV,
    SEND,
    WAIT,
    Interval,
    RankTimeline,
    Simulation,
)
from stpart_compiler.ir.program import SMALL_CHANNEL, Instr, collective_kind, sums_in_place


class DeadlockError(ValueError):
    """Ranks wait for transfers that will never start."""


def simulate(steps: Sequence[Sequence[StepPhase]], cluster: Cluster) -> Simulation:
    """One step of all ranks. `steps[rank]`: the programs that the rank runs one after another.

    Raises:
        DeadlockError: ranks wait for each other, or for a transfer that its other end never comes to.
        ValueError: the cluster joins fewer ranks, or the two ends of a message differ in size.
    """
    if cluster.max_ranks is not None and len(steps) > cluster.max_ranks:
        raise ValueError(
            f"simulate: cluster {cluster.name!r} joins {cluster.max_ranks} ranks, the step has {len(steps)}"
        )
    return _Simulation(steps, cluster).run()


@dataclass(eq=False)
class _End:
    """One rank's end of a message, or its part in a collective, between start and wait.

    `finish_seconds`: what the rank still computes once it has waited. `began`, `done_at`: when it was under way.
    """

    rank: _Rank
    instr: Instr
    nbytes: float
    finish_seconds: float = 0.0
    began: float = 0.0
    done_at: float | None = None


@dataclass(eq=False)
class _Operation:
    """An exchange or collective on one rank. `left`: ends that are not done."""

    rank: _Rank
    instr: Instr
    ends: list[_End]
    left: int


@dataclass(eq=False)
class _Rank:
    """Where a rank is: instruction `at` of phase `phase`, at `clock` seconds."""

    number: int
    phases: tuple[StepPhase, ...]
    prices: list[list[float]]
    phase: int = 0
    at: int = 0
    clock: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    starts: list[list[float]] = field(default_factory=list)
    open: dict[tuple[int, int], list[_End]] = field(default_factory=dict)
    awaited: int = 0  # ends that the instruction it stands at waits for and that are not done
    has_started: bool = False  # the transfer it stands at
    computed: list[tuple[float, float]] = field(default_factory=list)  # when no transfer took anything from it so far

    def current(self) -> Instr | None:
        """The next instruction, in the next phase where this one is done; None at the end of the step."""
        while self.phase < len(self.phases) and self.at >= len(self.phases[self.phase].program.body):
            self.phase, self.at = self.phase + 1, 0
        return self.phases[self.phase].program.body[self.at] if self.phase < len(self.phases) else None

    def compute(self, instr: Instr, seconds: float) -> None:
        if seconds > 0:
            self.intervals.append(Interval(self.clock, self.clock + seconds, COMPUTE, instr))
            self.computed.append((self.clock, self.clock + seconds))
            self.clock += seconds

    def disturbed(self, end: _End, hidden: float) -> float:
        """Seconds that compute beside a transfer lost to it; of several transfers at once the first one takes them."""
        if hidden == 1.0 or end.done_at is None:
            return 0.0
        beside, left = 0.0, []
        while self.computed and self.computed[-1][1] > end.began:
            low, high = self.computed.pop()
            start, stop = max(low, end.began), min(high, end.done_at)
            beside += max(0.0, stop - start)
            parts = ((stop, high), (low, start)) if start < stop else ((low, high),)
            left += [part for part in parts if part[0] < part[1]]
        self.computed += reversed(left)
        return (1 - hidden) * beside

    def wait(self, until: float, started: Instr) -> None:
        """Do nothing up to a moment, because of a transfer."""
        self.intervals.append(Interval(self.clock, until, WAIT, started))
        self.clock = until

    def ends_of(self, instr: Instr) -> list[_End]:
        """What a wait is for, or what a transfer has started."""
        return [end for tag in _tags(instr) for end in self.open.get((instr.channel, tag), ())]

    def where(self) -> str:
        phase = self.phases[self.phase].program.phase
        instr = self.current()
        return f"rank {self.number}, {phase}, instruction {self.at}" + (f" ({instr.origin})" if instr else "")


class _Joined(NamedTuple):
    """The members of a collective that have come to it so far."""

    ends: dict[int, _End]
    operations: list[_Operation]


class _Collective:
    """A collective under way: its phases that are `left`, and what one rank sends in all of them (`share`)."""

    def __init__(self, began: float, group: Group, nbytes: float, route: Route, joined: _Joined) -> None:
        self.began = began
        self.group = group
        self.nbytes = nbytes
        self.left = deque(route)
        self.share = sum(phase.share for phase, _ in route)
        self.joined = joined


class _Simulation:
    def __init__(self, steps: Sequence[Sequence[StepPhase]], cluster: Cluster) -> None:
        self.cluster = cluster
        self.cost = InstructionCost(cluster)
        self.clock = Clock()
        self.network = Network(cluster, self.clock)
        self.in_streams = cluster.device.type != "cpu"
        self.at_once = 1 if self.in_streams else GLOO_THREADS
        self.ranks = [
            _Rank(number, tuple(phases), [self.cost.of(phase.program) for phase in phases], starts=[[] for _ in phases])
            for number, phases in enumerate(steps)
        ]
        self.offered: dict[tuple[int, int, int, int], tuple[_Operation, _End]] = {}
        self.joined: dict[tuple[tuple[int, ...], int, int], _Joined] = {}
        self.queues: dict[tuple[object, ...], deque[_Operation]] = {}
        self.routes: dict[tuple[str, Group], tuple[Route, ...]] = {}

    def run(self) -> Simulation:
        for rank in self.ranks:
            self.clock.at(0.0, self._advance, rank)
        self.clock.run(self.network.settle)
        self._check_done()
        return Simulation(
            self.cluster.name,
            tuple(
                RankTimeline(r.number, tuple(r.intervals), tuple(map(tuple, r.starts)), r.clock, r.phases)
                for r in self.ranks
            ),
        )

    def _advance(self, now: float, rank: _Rank) -> None:
        """Run a rank up to the next wait for something that is not there yet."""
        while (instr := rank.current()) is not None:
            starts = rank.starts[rank.phase]
            if len(starts) == rank.at:
                starts.append(rank.clock)
            if instr.kind == "wait":
                if not self._waited(rank, instr):
                    return
            elif instr.kind in ("exchange", "collective"):
                if not self._started(rank, instr):
                    return
            else:
                rank.compute(instr, rank.prices[rank.phase][rank.at])
            rank.at += 1

    def _started(self, rank: _Rank, instr: Instr) -> bool:
        """Whether a rank may go on once it has started a transfer: in the queue of compute it waits for the end."""
        if not rank.has_started:
            ends = self._message_ends(rank, instr) if instr.kind == "exchange" else self._collective_end(rank, instr)
            rank.compute(instr, self.cluster.device.transfer_overhead if ends else 0.0)
            self._post(rank, instr, ends)
        in_queue = self.in_streams and not self._hidden(instr)
        rank.has_started = in_queue and not self._arrived(rank, rank.ends_of(instr))
        return not rank.has_started

    def _waited(self, rank: _Rank, instr: Instr) -> bool:
        ends = rank.ends_of(instr)
        if not self._arrived(rank, ends):
            return False
        lost = sum(rank.disturbed(end, self._hidden(end.instr)) for end in ends)
        if lost:
            rank.wait(rank.clock + lost, ends[0].instr)
        for end in ends:
            rank.compute(end.instr, end.finish_seconds)
        for tag in instr.tags:
            rank.open.pop((instr.channel, tag), None)
        return True

    def _arrived(self, rank: _Rank, ends: list[_End]) -> bool:
        """Whether these ends are done; the rank's clock is then not before the last of them."""
        rank.awaited = sum(1 for end in ends if end.done_at is None)
        if rank.awaited:
            return False
        done = max((end.done_at for end in ends if end.done_at is not None), default=rank.clock)
        if done > rank.clock:
            rank.wait(done, next(end.instr for end in ends if end.done_at == done))
        return True

    def _hidden(self, instr: Instr) -> float:
        """The part of a transfer's time beside compute that costs nothing."""
        hidden = self.cluster.hidden
        if instr.channel == SMALL_CHANNEL:
            return self.cluster.hidden_small
        of_a_loop = instr.kind == "exchange" and instr.origin.step is not None
        return hidden.exchanges if of_a_loop else hidden.collectives

    def _message_ends(self, rank: _Rank, instr: Instr) -> list[tuple[int, _End]]:
        """Per message that moves bytes, its tag and this rank's end of it: the sends first."""
        messages = (*instr.sends, *instr.recvs)
        return [(message.tag, _End(rank, instr, value.nbytes)) for value, message in messages if value.nbytes]

    def _collective_end(self, rank: _Rank, instr: Instr) -> list[tuple[int, _End]]:
        x = instr.inputs()[0]
        if len(instr.group) == 1 or not x.nbytes:
            return []
        kind = collective_kind(instr)
        if kind == "all_reduce" and not sums_in_place(instr):  # sums in a copy
            rank.compute(instr, copy_seconds(x.nbytes, self.cluster))
        whole = x.nbytes * (len(instr.group) if kind == "all_gather" else 1)
        end = _End(rank, instr, whole)
        if kind == "reduce_scatter" and self.cluster.device.type == "cpu":  # moves blocks there, and sums them after
            end.finish_seconds = copy_seconds(x.nbytes * (1 + 1 / len(instr.group)) / 2, self.cluster)
        return [(instr.tag, end)]

    def _post(self, rank: _Rank, instr: Instr, ends: list[tuple[int, _End]]) -> None:
        for tag, end in ends:
            rank.open.setdefault((instr.channel, tag), []).append(end)
        if ends:
            operation = _Operation(rank, instr, [end for _, end in ends], len(ends))
            self.clock.at(rank.clock, self._enqueue, operation)

    def _enqueue(self, now: float, operation: _Operation) -> None:
        if not self._queued(operation):
            self._begin(now, operation)
            return
        queue = self.queues.setdefault(_queue_of(operation), deque())
        queue.append(operation)
        if len(queue) <= self.at_once:
            self._begin(now, operation)

    def _queued(self, operation: _Operation) -> bool:
        """Whether it waits for the one before it: in NCCL's streams, and collectives for threads of a gloo group."""
        return self.in_streams or operation.instr.kind == "collective"

    def _begin(self, now: float, operation: _Operation) -> None:
        if operation.instr.kind == "collective":
            self._join(now, operation)
            return
        number, instr, ends = operation.rank.number, operation.instr, iter(operation.ends)
        for value, message in instr.sends:
            if value.nbytes:
                self._offer(now, (number, message.peer, instr.channel, message.tag), operation, next(ends))
        for value, message in instr.recvs:
            if value.nbytes:
                self._offer(now, (message.peer, number, instr.channel, message.tag), operation, next(ends))

    def _offer(self, now: float, key: tuple[int, int, int, int], operation: _Operation, end: _End) -> None:
        """One end of message `key` (sender, receiver, channel, tag) is there; with the other one it goes."""
        if key not in self.offered:
            self.offered[key] = (operation, end)
            return
        both = (self.offered.pop(key), (operation, end))
        sizes = {each.nbytes for _, each in both}
        if len(sizes) > 1:
            raise ValueError(f"simulate: {end.instr.origin}: message {key} has {sizes} bytes at its two ends")

        def done(then: float, flow: Flow) -> None:
            for owner, each in both:
                kind, peer = (SEND, key[1]) if each.rank.number == key[0] else (RECV, key[0])
                each.began = now
                each.rank.intervals.append(Interval(now, then, kind, each.instr, (peer,), each.nbytes))
                self._finish(then, owner, each)

        self.network.send(now, Flow(key[0], key[1], end.nbytes, done))

    def _join(self, now: float, operation: _Operation) -> None:
        """A member has come to its collective; the last one starts it."""
        end, instr = operation.ends[0], operation.instr
        group = tuple(sorted(instr.group))
        joined = self.joined.setdefault((group, instr.channel, instr.tag), _Joined({}, []))
        joined.ends[operation.rank.number] = end
        joined.operations.append(operation)
        if len(joined.ends) < len(group):
            return
        del self.joined[group, instr.channel, instr.tag]
        ways = self._routes(collective_kind(instr), group)
        route = min(ways, key=lambda way: route_seconds(way, end.nbytes))
        self._send_phase(now, _Collective(now, group, end.nbytes, route, joined))

    def _send_phase(self, now: float, collective: _Collective) -> None:
        """The next phase of a collective, after the last message of the one before."""
        if not collective.left:
            self._collected(now, collective)
            return
        phase, link = collective.left.popleft()
        groups = members(collective.group, phase.among, unit_of(self.cluster, collective.group))
        all_pairs = phase.kind == "all_to_all"
        pairs = [pair for each in groups for pair in (permutations(each, 2) if all_pairs else ring(each))]
        moved = phase.share * collective.nbytes * len(collective.group) / len(pairs)
        under_way = len(pairs)

        def done(then: float, flow: Flow) -> None:
            nonlocal under_way
            under_way -= 1
            if not under_way:
                self._send_phase(then, collective)

        nbytes = moved / link.reached(phase.kind, phase.share * collective.nbytes)
        for one, two in pairs:
            self.network.send_at(now + phase.messages * link.latency_of(phase.kind), Flow(one, two, nbytes, done))

    def _collected(self, now: float, collective: _Collective) -> None:
        for operation in collective.joined.operations:
            end, number = operation.ends[0], operation.rank.number
            peers = tuple(rank for rank in collective.joined.ends if rank != number)
            moved = collective.share * end.nbytes
            end.began = collective.began
            operation.rank.intervals.append(Interval(end.began, now, COLLECTIVE, end.instr, peers, moved))
            self._finish(now, operation, end)

    def _routes(self, kind: str, group: Group) -> tuple[Route, ...]:
        if (kind, group) not in self.routes:
            self.routes[kind, group] = routes(self.cluster, kind, group)
        return self.routes[kind, group]

    def _finish(self, now: float, operation: _Operation, end: _End) -> None:
        """An end is done: its rank may go on, and the next operation of its queue may begin."""
        end.done_at = now
        operation.left -= 1
        if not operation.left and self._queued(operation):
            queue = self.queues[_queue_of(operation)]
            queue.remove(operation)
            if len(queue) >= self.at_once:
                self._begin(now, queue[self.at_once - 1])
        rank = operation.rank
        instr = rank.current()
        if rank.awaited and instr is not None and end in rank.ends_of(instr):
            rank.awaited -= 1
            if not rank.awaited:
                self._advance(now, rank)

    def _check_done(self) -> None:
        stuck = [rank for rank in self.ranks if rank.current() is not None]
        if stuck:
            raise DeadlockError("simulate: deadlock: " + "; ".join(map(_waits_for, stuck[:4])))


def _tags(instr: Instr) -> list[int]:
    """Those that an instruction waits for, or of the messages or the collective that it starts."""
    if instr.kind == "exchange":
        return list(dict.fromkeys(message.tag for _, message in (*instr.sends, *instr.recvs)))
    return [instr.tag] if instr.kind == "collective" else list(instr.tags)


def _queue_of(operation: _Operation) -> tuple[object, ...]:
    instr = operation.instr
    return (operation.rank.number, instr.channel, *sorted(instr.group))


def _waits_for(rank: _Rank) -> str:
    instr = rank.current()
    assert instr is not None
    missing = next(end for end in rank.ends_of(instr) if end.done_at is None)
    others = sorted(
        {message.peer for _, message in (*missing.instr.sends, *missing.instr.recvs)} | set(missing.instr.group)
    )
    others = [other for other in others if other != rank.number]
    return f"{rank.where()} waits for tags {_tags(instr)} with ranks {others}, which do not all come to it"
