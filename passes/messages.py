"""The pairwise model of a problem, for message passing: what assignments cost, and the same costs handed on.

Roots are nodes, their choices labels, re-layouts edges. A state holds the costs of all assignments in another way after
each sweep: what no assignment can avoid moves to where it is seen (TRW-S; Kolmogorov, "Convergent Tree-reweighted
Message Passing for Energy Minimization", 2006).

A re-layout shared by uses of different roots is charged to them in parts that sum to one, so never more than the true
cost; the parts move towards the uses that need it (a subgradient step on the bound).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stpart_compiler.passes.costs import Array
from stpart_compiler.passes.held import Saved
from stpart_compiler.passes.problem import Problem
from stpart_compiler.passes.uses import Assignment, Use

Edge = tuple[int, int]


@dataclass
class Model:
    """Unary and pairwise costs in ns."""

    unary: dict[int, Array]
    pairwise: dict[Edge, Array]
    order: list[int]
    shared: list[Shared]
    decoded: Assignment = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> Model:
        unary = {root: np.array(problem.own[root], dtype=np.float64) for root in problem.roots}
        pairwise: dict[Edge, Array] = {}
        # a use that may not be there counts nothing, in a lower bound
        groups = [[use for use in group if use.when is None] for group in problem.uses]
        shared = [Shared.of(problem, group) for group in groups if group]
        for group in shared:
            for joint in group.joints:
                _store(joint, joint.total(group.parts), unary, pairwise)
        # parameters first, then ops in graph order: chains of the graph are monotone in this order
        order = sorted(problem.roots, key=lambda root: (root >= 0, root))
        return Model(unary, pairwise, order, shared)

    def scale(self, held: dict[int, Array], parts: Array) -> float:
        """A multiplier (ns per byte) at which memory outweighs time."""
        time = sum(float(np.ptp(costs)) for costs in self.unary.values())
        time += sum(float(np.ptp(costs)) for costs in self.pairwise.values())
        spans = sum(float(np.ptp(table @ parts)) for table in held.values())
        return 10 * time / max(1.0, spans)

    def state(self) -> State:
        unary = {root: costs.copy() for root, costs in self.unary.items()}
        pairwise = {edge: costs.copy() for edge, costs in self.pairwise.items()}
        return State(unary, pairwise, self.order)

    def split_anew(self, state: State, choice: Assignment, step: float) -> None:
        """Move the parts of shared re-layouts towards the uses that need them in `choice`, here and in `state`."""
        for group in self.shared:
            for joint, change in group.shift(choice, step):
                _store(joint, change, self.unary, self.pairwise)
                _store(joint, change, state.unary, state.pairwise)


@dataclass
class Joint:
    """Uses of one value between the same two roots. `ids[u][i, j]`: the re-layout that use u needs, -1 for none."""

    source: int | None
    target: int | None
    ids: list[npt.NDArray[np.int64]]
    prices: list[Array]
    pairs: npt.NDArray[np.int64]  # all re-layouts that some choice needs, sorted
    uses: list[Use]
    indices: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]  # layouts of the choices on both sides

    def may_need(self, pair: int) -> bool:
        at = np.searchsorted(self.pairs, pair)
        return bool(at < len(self.pairs) and self.pairs[at] == pair)

    def priced(self, pair: int) -> Array:
        """Price of one re-layout, over the choices of both roots that need it."""
        each = [np.where(ids == pair, price, 0.0) for ids, price in zip(self.ids, self.prices, strict=True)]
        return functools.reduce(np.maximum, each)

    def total(self, parts: Callable[[npt.NDArray[np.int64]], Array]) -> Array:
        """Prices over the choices of both roots; equal re-layouts count once, shared ones by their part."""
        total = np.zeros_like(self.prices[0])
        scaled = [price / parts(ids) for ids, price in zip(self.ids, self.prices, strict=True)]
        for u, (ids, extra) in enumerate(zip(self.ids, scaled, strict=True)):
            for v in range(u):
                same = (ids == self.ids[v]) & (ids >= 0)
                extra = np.where(same, np.maximum(0.0, extra - scaled[v]), extra)
            total += extra
        return total

    def active(self, choice: Assignment) -> set[int]:
        """Re-layouts that an assignment needs here."""
        i = 0 if self.source is None else choice[self.source]
        j = 0 if self.target is None else choice[self.target]
        return {int(ids[i, j]) for ids in self.ids} - {-1}


@dataclass
class Shared:
    """The uses of one value in one phase, and how the price of a re-layout is split over them.

    Any split with parts that sum to one gives a lower bound. `users[i]` of the joints may need re-layout `pairs[i]`
    (sorted). `weights[pair][joint]` holds the parts that are not equal.
    """

    joints: list[Joint]
    pairs: npt.NDArray[np.int64]
    users: npt.NDArray[np.int64]
    weights: dict[int, dict[int, float]] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, group: list[Use]) -> Shared:
        found: dict[tuple[int | None, int | None], list[Use]] = {}
        for use in group:
            found.setdefault((use.from_root, use.to_root), []).append(use)
        joints = [_joint(problem, source, target, uses) for (source, target), uses in found.items()]
        pairs, users = np.unique(np.concatenate([joint.pairs for joint in joints]), return_counts=True)
        return Shared(joints, pairs, users)

    def parts(self, ids: npt.NDArray[np.int64]) -> Array:
        """Number of joints that each re-layout is split over at first."""
        users = np.append(self.users, 1)  # nothing costs anything where there are no pairs
        return np.where(ids >= 0, users[np.searchsorted(self.pairs, ids)], 1).astype(np.float64)

    def shift(self, choice: Assignment, step: float) -> Iterator[tuple[Joint, Array]]:
        """Move weight to the uses that an assignment has need a re-layout; yields what that adds to each joint."""
        if len(self.joints) == 1:
            return
        needs = [joint.active(choice) for joint in self.joints]
        for pair in set().union(*needs):
            weights = self._weights(pair)
            using = [number for number in weights if pair in needs[number]]
            for number, weight in weights.items():
                change = step * ((number in using) / len(using) - weight)
                if change:
                    weights[number] += change
                    yield self.joints[number], change * self.joints[number].priced(pair)

    def parts_of(self, pairs: list[int], number: int) -> list[float]:
        """Parts of the prices of re-layouts that one of the joints is charged."""
        if len(self.joints) == 1:
            return [1.0] * len(pairs)
        return [self._weights(pair)[number] for pair in pairs]

    def _weights(self, pair: int) -> dict[int, float]:
        if pair not in self.weights:
            who = [number for number, joint in enumerate(self.joints) if joint.may_need(pair)]
            self.weights[pair] = dict.fromkeys(who, 1 / len(who))
        return self.weights[pair]


def _joint(problem: Problem, source: int | None, target: int | None, uses: list[Use]) -> Joint:
    ids, prices, pairs, indices = [], [], [], []
    for use in uses:
        indices.append((_side_index(problem, source, use.from_members), _side_index(problem, target, use.to_members)))
        at = np.ix_(*indices[-1])
        price = np.array(use.price, dtype=np.float64) * use.edge.count
        pair = np.array(use.from_ids, dtype=np.int64)[:, None] * 2**20 + use.wanted_ids()
        pairs.append(pair[price > 0])
        ids.append(np.where(price > 0, pair, -1)[at])
        prices.append(price[at])
    return Joint(source, target, ids, prices, np.unique(np.concatenate(pairs)), uses, indices)


def _side_index(problem: Problem, root: int | None, members: list[list[int]]) -> npt.NDArray[np.int64]:
    """Layout index of every choice of a root."""
    if root is None:
        return np.zeros(1, dtype=np.int64)
    index = np.zeros(problem.roots[root], dtype=np.int64)
    for layout, ids in enumerate(members):
        index[ids] = layout
    return index


def _store(joint: Joint, costs: Array, unary: dict[int, Array], pairwise: dict[Edge, Array]) -> None:
    """Add costs over the choices of both roots to a model."""
    source, target = joint.source, joint.target
    if source is None and target is None:
        return
    if source is None or target is None:
        root = source if source is not None else target
        assert root is not None
        unary[root] = unary[root] + costs.reshape(-1)
    elif source == target:
        unary[source] = unary[source] + np.diagonal(costs)
    else:
        edge = (min(source, target), max(source, target))
        oriented = costs if edge == (source, target) else costs.T
        pairwise[edge] = pairwise[edge] + oriented if edge in pairwise else oriented.copy()


class State:
    """A reparametrised model: the same cost of every assignment, a larger sum of local minima after every sweep.

    Once there is a `limit`, the costs hold `multipliers` (ns per byte, per point) times what a choice holds of the
    `room` bytes at each point.
    """

    def __init__(self, unary: dict[int, Array], pairwise: dict[Edge, Array], order: list[int]) -> None:
        self.unary = unary
        self.pairwise = pairwise
        self.order = order
        self.held: dict[int, Array] = {}
        self.saved: Sequence[Saved] = ()
        self.room: Array = np.zeros(0)
        self.multipliers: Array | None = None
        rank = {root: i for i, root in enumerate(order)}
        self.before: dict[int, list[Edge]] = {root: [] for root in order}
        self.after: dict[int, list[Edge]] = {root: [] for root in order}
        for edge in pairwise:
            first, second = sorted(edge, key=rank.__getitem__)
            self.after[first].append(edge)
            self.before[second].append(edge)

    def limit(
        self,
        held: Mapping[int, npt.NDArray[np.number[Any]]],
        room: npt.NDArray[np.number[Any]],
        saved: Sequence[Saved] = (),
    ) -> None:
        """Bytes per choice and point of what no assignment holds less than, and the room at each point."""
        self.held = {root: table.astype(np.float64) for root, table in held.items()}
        self.saved = [one for one in saved if (one.root, one.again) in self.pairwise]
        self.room = room.astype(np.float64)
        self.multipliers = np.zeros(len(room))

    def weigh(self, multipliers: Array) -> None:
        """Change the multipliers, keeping what the sweeps have learned."""
        assert self.multipliers is not None
        for root, held in self.held.items():
            self.unary[root] = self.unary[root] + held @ (multipliers - self.multipliers)
        for saved in self.saved:
            costs = np.zeros((len(saved.nbytes), 2))
            costs[:, 0] = saved.nbytes * float(saved.counts @ (multipliers - self.multipliers))
            self.pairwise[saved.root, saved.again] += costs
        self.multipliers = multipliers

    def sweep(self) -> Assignment:
        """Forward and backward; returns the assignment decoded on the way back."""
        for root in self.order:
            self._visit(root, self.after[root], self.before[root])
        decoded: Assignment = {}
        for root in reversed(self.order):
            self._pull(root)
            costs = self.unary[root].copy()
            for edge in self.after[root]:
                costs += self._row(edge, root, decoded[edge[0] if edge[1] == root else edge[1]])
            decoded[root] = int(np.argmin(costs))
            self._push(root, self.before[root], self.after[root])
        return decoded

    def _visit(self, root: int, forward: list[Edge], backward: list[Edge]) -> None:
        self._pull(root)
        self._push(root, forward, backward)

    def _pull(self, root: int) -> None:
        """Gather what every incident edge can guarantee per choice."""
        for edge in (*self.before[root], *self.after[root]):
            costs = self.pairwise[edge]
            if edge[0] == root:
                least = costs.min(axis=1)
                costs -= least[:, None]
            else:
                least = costs.min(axis=0)
                costs -= least[None, :]
            self.unary[root] += least

    def _push(self, root: int, towards: list[Edge], other: list[Edge]) -> None:
        """Hand the node's costs on to the edges ahead, in equal parts."""
        if not towards:
            return
        share = self.unary[root] / max(len(towards), len(other))
        for edge in towards:
            self.pairwise[edge] += share[:, None] if edge[0] == root else share[None, :]
        self.unary[root] -= share * len(towards)

    def _row(self, edge: Edge, root: int, other: int) -> Array:
        costs = self.pairwise[edge]
        return costs[:, other] if edge[0] == root else costs[other, :]

    def extra(self) -> dict[int, Array]:
        """ns per choice of a root by which an assignment that has it is over the bound, at least."""
        found = {}
        for root in self.order:
            extra = self.unary[root] - self.unary[root].min()
            for edge in (*self.before[root], *self.after[root]):
                costs = self.pairwise[edge]
                extra = extra + (costs.min(axis=1) if edge[0] == root else costs.min(axis=0)) - costs.min()
            found[root] = extra
        return found

    def bound(self) -> float:
        """ns that no assignment within the room can beat."""
        least = sum(float(c.min()) for c in self.unary.values()) + sum(float(c.min()) for c in self.pairwise.values())
        return least if self.multipliers is None else least - float(self.multipliers @ self.room)
