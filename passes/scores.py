"""Find attention written out: the ops between its two products, as a region whose loop is one over keys.

Its scores then exist for a block of keys at a time, in a ring of keys and values or in time alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from stpart_compiler.ir.rule import TensorMap
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.regions import KINDS, FindRegions, Found, Middle
from stpart_compiler.passes.strategies import is_contraction

Spot = tuple[int, int]  # dim of a value, atom of the dim


class FindScores(FindRegions):
    """Regions of attention, forward and backward. `softmaxes`: names of those written by `WriteOnline`."""

    def __init__(self, graph: Annotated, softmaxes: frozenset[str]) -> None:
        super().__init__(graph, frozenset(KINDS))
        self.softmaxes = softmaxes
        self.products: set[str] = set()  # ops that products are among those that made what they read
        for op in graph.ops:
            if is_contraction(op.rule) or any(name in self.products for name, _ in op.operands):
                self.products.add(op.name)

    def run(self) -> Iterator[tuple[Found, ...]]:
        for op in self.graph.ops:
            if op.name in self.softmaxes:
                middle = self._scores(op)
                found = self._pair(middle, middle.ops)
                if found:
                    yield found

    def _results(self, inside: set[str], names: set[str], kept: set[ValueKey]) -> list[ValueKey]:
        """The output, which is made last, first: before the logsumexp."""
        found = super()._results(inside, names, kept)
        return found[::-1] if not inside & self.graph.backward else found

    def _scores(self, op: OpNode) -> Middle:
        """What has both keys and queries and is made of products; a mask that has both is read from outside."""
        result = op.rule.outputs[0]
        places = self._places(op, _wide(op, result[-1])[-1], _wide(op, result[-2])[-1])
        return Middle({(name, keys) for name, (keys, _) in places.items()}, self._both)

    def _places(self, op: OpNode, keys: int, queries: int) -> dict[str, tuple[int, int]]:
        """Ops that have both dims, with their factors, followed through values that have both."""
        found: dict[str, tuple[int, int]] = {}
        self._both: set[ValueKey] = set()
        todo = [(op, keys, queries)]
        while todo:
            at, k, q = todo.pop()
            if at.name in found:
                continue
            found[at.name] = k, q
            for key, tensor in self.links.tensors(at):
                one, two = self._spot(at, key, tensor, k), self._spot(at, key, tensor, q)
                if one is not None and two is not None and key[0] in self.products:
                    self._both.add(key)
                    todo += self._met(key, one, two)
        return found

    def _spot(self, op: OpNode, key: ValueKey, tensor: TensorMap, f: int) -> Spot | None:
        for d, factors in enumerate(tensor):
            wide = _wide(op, factors)
            if f in wide and len(wide) == len(self.graph.values[key].atoms[d]):
                return d, wide.index(f)
        return None

    def _met(self, key: ValueKey, keys: Spot, queries: Spot) -> Iterator[tuple[OpNode, int, int]]:
        """Ops that make or read a value, with the factors that two of its atoms are there."""
        atoms = self.graph.values[key].atoms
        for op, tensor in self.links.ports(key):
            dims = [_wide(op, tensor[d]) for d, _ in (keys, queries)]
            if all(len(wide) == len(atoms[d]) for wide, (d, _) in zip(dims, (keys, queries), strict=True)):
                yield op, dims[0][keys[1]], dims[1][queries[1]]


def _wide(op: OpNode, factors: tuple[int, ...]) -> list[int]:
    return [f for f in factors if op.rule.factors[f].size > 1]
