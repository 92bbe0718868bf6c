"""A lower bound and a good assignment by message passing, before CP-SAT starts.

The problem without memory is a pairwise graphical model (`passes/messages.py`). Its LP relaxation (the one of the flows
of `passes/sat_model.py`) is bounded from below by sequential reparametrisation, in milliseconds a sweep where simplex
takes minutes. The memory bound enters with Lagrange multipliers, one per point that can be the peak: any that are not
negative give a bound. They share one scale, which is bisected; their parts move to the points that are over the limit.
Choices that cannot be part of any assignment better than the best known one are ruled out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stpart_compiler.passes.costs import Array
from stpart_compiler.passes.messages import Model, State
from stpart_compiler.passes.problem import Problem, evaluate, memory_bytes
from stpart_compiler.passes.uses import Assignment

POLISH_ROUNDS = 3
OFFER_EVERY = 4
"""Sweeps between two assignments that are tried."""

WINDOW = 24
WINDOW_GAIN = 1e-3
"""The search stops where so many sweeps raise the bound by less than that share of it."""

WARM_SWEEPS = 10
"""Sweeps after a change of the memory multiplier, from where the last ones led."""

MULTIPLIER_STEPS = 7
"""Values of the memory multiplier that are tried."""

SCAN_FACTOR, SCAN_STEPS = 8.0, 12
"""By how much multipliers fall from one to the next where none gives what fits, and how often at most."""

LEAN_ROUNDS = 60
LEAN_STEP = 1.0
LEAN_TRIED = 5
"""Rounds and step of the search for the least memory, and how many of what it finds are looked at."""

POINT_STEP = 0.3
"""Part of the multipliers that moves to a point over the limit."""

POINT_ROUNDS = 4
"""Points that are tried where the multiplier of one is not enough."""


@dataclass
class Bound:
    """`lower`: seconds no assignment can beat. `choice`: best assignment found (None: none fits). `alive`: choices per
    root that may still be part of a better one. `free`: seconds no assignment can beat, whatever memory it needs.
    `nearest`: `choice`, or where there is none the last one tried. `least`: bytes that no assignment needs less than, 0
    where that was not asked for."""

    lower: float
    choice: Assignment | None
    alive: dict[int, list[int]]
    free: float
    nearest: Assignment
    least: int


@dataclass(frozen=True)
class FindBound:
    """priced problem -> bound. `sweeps`: passes at most per memory multiplier; `gap`: near enough to stop at once;
    `enough`: near enough to look for no better multiplier.
    """

    memory_limit: int | None = None
    sweeps: int = 200
    gap: float = 0.002
    enough: float = 0.0

    def apply(self, problem: Problem, hint: Assignment | None = None) -> Bound:
        model = Model.of(problem)
        best = _Best(problem, self.memory_limit)
        if hint is not None:
            best.offer(hint)
        state = model.state()
        lower = self._run(model, problem, best, state, self.sweeps)
        free = lower
        least = 0
        if self.memory_limit is not None and not best.fits(model.decoded):
            least = find_least(problem)[0]
            if least <= self.memory_limit:
                lower = max(lower, self._multiply(model, problem, best, state))
        if best.choice is not None:
            best.offer(_polished(problem, best.choice, None, self.memory_limit))
        nearest = best.choice or model.decoded
        alive = _alive(state, best.seconds)
        return Bound(lower / 1e9, best.choice, alive, free / 1e9, nearest, least)

    def _run(self, model: Model, problem: Problem, best: _Best, state: State, sweeps: int) -> float:
        """Sweeps at the state's multiplier: bound in ns."""
        lowers = [-np.inf]
        for sweep in range(sweeps):
            model.decoded = state.sweep()
            lowers.append(max(lowers[-1], state.bound()))
            if sweep % OFFER_EVERY == 0:
                best.offer(model.decoded)
            near = lowers[-1] >= (1 - self.gap) * best.seconds * 1e9
            if near or (sweep > WINDOW and lowers[-1] - lowers[-WINDOW] < WINDOW_GAIN * abs(lowers[-1])):
                break
            model.split_anew(state, model.decoded, 1 / (2 + sweep / 4))
        if sweeps > WARM_SWEEPS:
            best.offer(_polished(problem, model.decoded, state.multipliers))
        return lowers[-1]

    def _multiply(self, model: Model, problem: Problem, best: _Best, state: State) -> float:
        """Bisect the multipliers (ns per byte) to where assignments begin to fit; the best bound found on the way."""
        assert self.memory_limit is not None
        memory = problem.memory
        state.limit(memory.lower(), self.memory_limit - memory.constant, memory.lower_pairs())
        parts = _one(memory.worst(model.decoded), memory.points)
        high = model.scale(state.held, parts)
        for _ in range(POINT_ROUNDS):
            decoded = _decoded_at(model, state, high * parts)
            if best.fits(decoded):
                break
            parts = _towards(parts, memory.worst(decoded))
        else:
            return self._scan(model, problem, best, state, high * parts)
        best.offer(decoded)
        low = 0.0
        found: list[tuple[float, float, Array]] = []
        for _ in range(MULTIPLIER_STEPS):
            scale = (low * high) ** 0.5 if low else high / 30
            state.weigh(scale * parts)
            found.append((self._run(model, problem, best, state, WARM_SWEEPS), scale, parts))
            if not best.fits(model.decoded):
                low = scale
                parts = _towards(parts, memory.worst(model.decoded))
                continue
            high = scale
            if max(item[0] for item in found) >= (1 - self.enough) * best.seconds * 1e9:
                break
        lower, scale, parts = max(found, key=lambda item: item[0])
        state.weigh(scale * parts)
        return max(lower, self._run(model, problem, best, state, self.sweeps // 4))

    def _scan(self, model: Model, problem: Problem, best: _Best, state: State, most: Array) -> float:
        """The best bound under ever smaller multipliers, where not even the largest give what fits."""
        found: list[tuple[float, float]] = []
        for step in range(SCAN_STEPS):
            scale = SCAN_FACTOR**-step
            state.weigh(scale * most)
            found.append((self._run(model, problem, best, state, WARM_SWEEPS), scale))
            if found[-1][0] < max(found)[0]:
                break
        state.weigh(max(found)[1] * most)
        return max(max(found)[0], self._run(model, problem, best, state, self.sweeps // 4))


def _one(point: int, points: int) -> Array:
    parts = np.zeros(points)
    parts[point] = 1.0
    return parts


def _towards(parts: Array, point: int) -> Array:
    """Move some of the multipliers to one point."""
    return (1 - POINT_STEP) * parts + POINT_STEP * _one(point, len(parts))


def _decoded_at(model: Model, like: State, multipliers: Array) -> Assignment:
    """What a few sweeps give at other multipliers; leaves the model as it is."""
    state = model.state()
    state.limit(like.held, like.room, like.saved)
    state.weigh(multipliers)
    for _ in range(WARM_SWEEPS):
        decoded = state.sweep()
    return decoded


@dataclass
class _Best:
    """Cheapest assignment seen that fits in memory."""

    problem: Problem
    limit: int | None
    choice: Assignment | None = None
    seconds: float = float("inf")

    def fits(self, choice: Assignment) -> bool:
        return self.limit is None or memory_bytes(self.problem, choice) <= self.limit

    def offer(self, choice: Assignment) -> None:
        seconds = evaluate(self.problem, choice)
        if seconds < self.seconds and self.fits(choice):
            self.choice, self.seconds = dict(choice), seconds


def _polished(problem: Problem, choice: Assignment, multipliers: Array | None, limit: int | None = None) -> Assignment:
    """Change one root at a time while that pays (and fits in `limit`), with the true cost of shared re-layouts."""
    choice = dict(choice)
    for _ in range(POLISH_ROUNDS):
        changed = [_improve(problem, choice, root, multipliers, limit) for root in problem.roots]
        if not any(changed):
            break
    return choice


def _improve(problem: Problem, choice: Assignment, root: int, multipliers: Array | None, limit: int | None) -> bool:
    """Move one root to its cheapest choice; whether it moved."""
    now = choice[root]
    prices = np.array(problem.local(root).prices(choice), dtype=np.float64)
    if multipliers is not None:
        prices += problem.memory.tables[root] @ multipliers
    if prices[now] <= prices.min():
        return False
    if limit is not None:
        prices[problem.memory.peaks(choice, root) > limit] = np.inf
    best = int(np.argmin(prices))
    if prices[best] >= prices[now]:
        return False
    choice[root] = best
    return True


def find_least(problem: Problem) -> tuple[int, list[Assignment]]:
    """Bytes that no assignment needs less than, and assignments that need little.

    Each root decides for itself under weights of the points; those grow where the peak is (multiplicative weights, as
    for the value of a matrix game).
    """
    memory = problem.memory
    tables = {root: table.astype(np.float64) for root, table in memory.lower().items()}
    weights = np.ones(memory.points)
    least = 0.0
    found: list[tuple[float, Assignment]] = []
    for _ in range(LEAN_ROUNDS):
        parts = weights / weights.sum()
        priced = {root: table @ parts for root, table in tables.items()}
        choice = {root: int(np.argmin(prices)) for root, prices in priced.items()}
        least = max(least, sum(float(prices.min()) for prices in priced.values()) + float(memory.constant @ parts))
        held = memory.constant + sum(table[choice[root]] for root, table in tables.items())
        found.append((float(held.max()), choice))
        weights = np.maximum(weights * (1 + LEAN_STEP) ** (held / held.max()), 1e-9)
    found.sort(key=lambda pair: pair[0])
    return int(least), [choice for _, choice in found[:LEAN_TRIED]]


def find_leanest(problem: Problem) -> Assignment:
    """An assignment that needs little memory: roots are changed one after another while that helps."""
    best: Assignment = min(find_least(problem)[1], key=lambda choice: memory_bytes(problem, choice))
    for _ in range(POLISH_ROUNDS):
        before = memory_bytes(problem, best)
        for root in problem.roots:
            peaks = problem.memory.peaks(best, root)
            if peaks.min() < peaks[best[root]]:
                best[root] = int(np.argmin(peaks))
        if memory_bytes(problem, best) == before:
            break
    return best


def _alive(state: State, best_seconds: float) -> dict[int, list[int]]:
    """Choices whose own lower bound does not exceed the best known cost."""
    slack = best_seconds * 1e9 - state.bound()
    return {root: [i for i, more in enumerate(extra) if more <= slack + 1.0] for root, extra in state.extra().items()}
