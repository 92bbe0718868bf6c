"""The cost model's terms as sympy expressions, and the overlap conditions solved from them.

Symbols: b batch, s sequence, h hidden, f MLP width, p ranks on one axis, q side of a q x q grid, n ranks of a group, X
bytes of a tensor, e bytes of an element, F FLOP/s of a rank, B bytes/s of its link each way; M, N, K loop dims of a
matmul O[M,K] = I[M,N] W[N,K] (M includes the batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import sympy as sp

from stpart_compiler.ir.overlap import B, Expr, F, hidden

b, s, h, f, p, q, n, e, X, M, N, K = sp.symbols("b s h f p q n e X M N K", positive=True)
SYMBOLS: dict[str, Expr] = {symbol.name: symbol for symbol in (b, s, h, f, p, q, n, e, X, F, B, M, N, K)}

INPUT, WEIGHT, OUTPUT = ("M", "N"), ("N", "K"), ("M", "K")
_OPERANDS = {"I": INPUT, "W": WEIGHT, "O": OUTPUT}


def matmul_flops(rows: Expr, inner: Expr, columns: Expr) -> Expr:
    """FLOPs of a matrix product: a multiplication and an addition for each triple."""
    return 2 * rows * inner * columns


@dataclass(frozen=True)
class TemporalMap:
    """A matmul whose loop dims are cut in `parts[dim]` blocks and whose tensors `moving` (of I, W, O) go round."""

    parts: Mapping[str, Expr]
    moving: tuple[str, ...]
    steps: Expr

    def extent(self, dim: str) -> Expr:
        return SYMBOLS[dim] / self.parts.get(dim, 1)

    def step_flops(self) -> Expr:
        """FLOPs of one rank in one step."""
        return matmul_flops(self.extent("M"), self.extent("N"), self.extent("K"))

    def block_bytes(self, tensor: str) -> Expr:
        """Bytes of the block of I, W or O that takes part in one step."""
        rows, columns = _OPERANDS[tensor]
        return e * self.extent(rows) * self.extent(columns)

    def step_bytes(self) -> Expr:
        """Bytes that a rank sends (and receives) between two steps."""
        return sum((self.block_bytes(tensor) for tensor in self.moving), sp.Integer(0))

    def total_bytes(self) -> Expr:
        """Bytes that a rank sends in all: the last step is followed by no move."""
        return (self.steps - 1) * self.step_bytes()

    def buffer_bytes(self) -> Expr:
        """Bytes of the double buffers: two blocks of each moving tensor."""
        return 2 * self.step_bytes()


def temporal_1d(space: str, time: str) -> TemporalMap:
    """One axis of p ranks: dim `space` is cut as d and dim `time` as d+t, in p blocks each.

    A tensor with the time dim alone moves; one with both is sliced where it rests, or filled block by block.
    """
    moving = [name for name, dims in _OPERANDS.items() if time in dims and space not in dims]
    return TemporalMap({space: p, time: p}, tuple(moving), p)


def temporal_2d(time: str) -> TemporalMap:
    """A q x q grid, all three dims cut in q by pairwise independent forms: the tensors with the time dim move."""
    moving = tuple(name for name, dims in _OPERANDS.items() if time in dims)
    return TemporalMap({"M": q, "N": q, "K": q}, moving, q)


def collective_bytes(kind: str) -> Expr:
    """Bytes that each of n ranks sends in a ring collective of a tensor of X bytes (gathered, or before scattering).

    Raises:
        ValueError: the kind is unknown.
    """
    piece, rounds = X / n, n - 1
    phases = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    if kind not in phases:
        raise ValueError(f"collective {kind!r} has no formula; use one of {', '.join(phases)}")
    return phases[kind] * rounds * piece


def _total(costs: Iterable[tuple[Expr, Expr]]) -> tuple[Expr, Expr]:
    flops, nbytes = zip(*costs, strict=True)
    return sum(flops), sum(nbytes)


def _mlp(products: int, weight_copies: int) -> tuple[Expr, Expr]:
    """METP's MLP: a step meets the pair of weight blocks of one owner, h x f/p and f/p x h."""
    flops = products * matmul_flops(b * s / p, h, f / p)
    return flops, weight_copies * 2 * e * h * f / p


def _attention(products: int, copies: int) -> tuple[Expr, Expr]:
    """METP's inner ring: a step meets the K and V blocks of one owner, over all heads (their number cancels)."""
    flops = products * b * matmul_flops(s / p, h, s / p)
    return flops, copies * 2 * e * b * s * h / p


def _outer_broadcast() -> tuple[Expr, Expr]:
    """METP's outer loop: while one head group's attention is computed, the next group's packed weights arrive."""
    projections = matmul_flops(b * s / p, h, 3 * h / p) + matmul_flops(b * s / p, h / p, h)
    ring = p * 2 * b * matmul_flops(s / p, h / p, s / p)
    return projections + ring, e * (h * 3 * h / p + h / p * h)


def _matmul_2d(tensors: str) -> tuple[Expr, Expr]:
    step = temporal_2d("N")
    return step.step_flops(), sum(step.block_bytes(tensor) for tensor in tensors)


def _matmul_1d(space: str, time: str) -> tuple[Expr, Expr]:
    step = temporal_1d(space, time)
    return step.step_flops(), step.step_bytes()


# Per kind: FLOPs of one step, and bytes that arrive meanwhile.
_STEPS: dict[str, Callable[[], tuple[Expr, Expr]]] = {
    "primepar_input": lambda: _matmul_2d("I"),
    "primepar_weight": lambda: _matmul_2d("W"),
    "primepar_shared_link": lambda: _matmul_2d("IW"),
    "ring_weight": lambda: _matmul_1d("M", "N"),
    "ring_input": lambda: _matmul_1d("K", "M"),
    # forward: two products; backward: one recomputed, four for the gradients, and the weights' gradients travel too
    "metp_mlp_forward": lambda: _mlp(2, 1),
    "metp_mlp_backward": lambda: _mlp(5, 2),
    # forward: QK^T and AV; backward: QK^T again, dV, the scores' gradient, dQ, dK, and dK, dV travel too
    "metp_ring_forward": lambda: _attention(2, 1),
    "metp_ring_backward": lambda: _attention(5, 2),
    "metp_outer_broadcast": _outer_broadcast,
}


def overlap_kinds() -> tuple[str, ...]:
    """Kinds that `overlap_condition` knows."""
    return tuple(_STEPS)


def _step(kind: str) -> tuple[Expr, Expr]:
    if kind not in _STEPS:
        raise ValueError(f"overlap condition {kind!r} is unknown; use one of {', '.join(_STEPS)}")
    return _STEPS[kind]()


def overlap_condition(kind: str, element_bytes: int | None = 2) -> Expr:
    """When one step's transfer hides behind its compute, as the relation `intensity >= F/B`.

    Solved from step FLOPs / F = step bytes / B. `element_bytes` None keeps the symbol e.

    Raises:
        ValueError: the kind is unknown.
    """
    flops, nbytes = _step(kind)
    return hidden(flops, nbytes if element_bytes is None else nbytes.subs(e, element_bytes))


def least(kind: str, symbol: str, element_bytes: int | None = 2) -> Expr:
    """Smallest value of `symbol` (such as "s") for which the transfer of `kind` is hidden, in the other symbols.

    Negative or infinite where the other symbols have values for which none is enough.

    Raises:
        ValueError: the kind is unknown, or its condition does not depend on the symbol.
    """
    condition = overlap_condition(kind, element_bytes)
    unknown = SYMBOLS.get(symbol)
    if unknown not in condition.lhs.free_symbols:
        names = ", ".join(sorted(x.name for x in condition.lhs.free_symbols))
        raise ValueError(f"overlap condition {kind!r} does not depend on {symbol!r}; it depends on {names}")
    roots = sp.solve(sp.Eq(condition.lhs, condition.rhs), unknown)
    assert len(roots) == 1, f"{kind}: expected one positive bound of {symbol}, got {roots}"
    return sp.simplify(roots[0])
