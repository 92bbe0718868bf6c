"""A cluster's parameters from measured times: a link from transfers, an efficiency curve from products.

Fits minimise squared relative errors, so small messages count as much as large ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stpart_compiler.cost_models.cluster import Link
from stpart_compiler.cost_models.collectives import traffic
from stpart_compiler.cost_models.curve import Curve, share_at

P2P = "p2p"


@dataclass(frozen=True)
class Transfer:
    """`seconds` that a transfer took. `kind`: "p2p" (one way), "exchange" (each rank sends and receives), a collective.

    `nbytes`: what `collective_seconds` takes; of "p2p" what is sent. `ranks`: of the group.
    """

    kind: str
    nbytes: float
    ranks: int
    seconds: float

    def terms(self, full_duplex: bool) -> tuple[float, float]:
        """Messages, and bytes that go over the link one after another."""
        if self.kind == P2P:
            return 1.0, float(self.nbytes)
        share, messages = traffic(self.kind, self.ranks)
        return float(messages), share * self.nbytes * (1 if full_duplex else 2)

    def predicted(self, link: Link) -> float:
        """Seconds by the cost model, of a ring."""
        messages, nbytes = self.terms(link.full_duplex)
        return messages * link.latency_of(self.kind) + nbytes / (link.bandwidth * link.reached(self.kind, self.sent))

    @property
    def sent(self) -> float:
        """Bytes that one rank sends."""
        return self.nbytes * (1.0 if self.kind == P2P else traffic(self.kind, self.ranks)[0])


def fit_link(transfers: Sequence[Transfer]) -> Link:
    """The link that explains the times best, full duplex or not.

    Exchanges, which are most of what programs send, tell of its latency and bandwidth, where there are several; one-way
    messages, whose ends have nothing else to do, then tell only whether both directions share it.

    Raises:
        ValueError: fewer than two transfers.
    """
    if len(transfers) < 2:
        raise ValueError(f"fit_link: got {len(transfers)} transfers; a latency and a bandwidth need at least two")
    link = min((_fitted(transfers, duplex) for duplex in (True, False)), key=lambda link: error_of(transfers, link))
    exchanges = _by_kind(transfers).get("exchange", [])
    return _fitted(exchanges, link.full_duplex) if len(exchanges) > 1 else link


def fit_latencies(transfers: Sequence[Transfer], full_duplex: bool) -> tuple[tuple[str, float], ...]:
    """Per kind of these collectives, of which there are at least two each, seconds a message."""
    return tuple((kind, rounded(_fitted(some, full_duplex).latency)) for kind, some in _by_kind(transfers).items())


def fit_efficiency(transfers: Sequence[Transfer], link: Link) -> tuple[tuple[str, Curve], ...]:
    """Per kind of these collectives, the part of the link's bandwidth that it reached, by bytes that one rank sends.

    Sizes at which latency is most of the time say nothing of that and are left out. Where more bytes took less time
    than fewer, they count as having taken as long; what was faster than the link has its bandwidth.
    """
    found: list[tuple[str, Curve]] = []
    for kind, some in _by_kind(transfers).items():
        points: list[tuple[float, float]] = []
        taken = 0.0
        for x in sorted(some, key=lambda x: x.sent):
            messages, nbytes = x.terms(link.full_duplex)
            moving = x.seconds - messages * link.latency_of(kind)
            if moving > x.seconds / 2:
                taken = max(taken, moving, nbytes / link.bandwidth)
                points.append((x.sent, nbytes / link.bandwidth / taken))
        if points:
            found.append((kind, rounded_curve(tuple(points))))
    return tuple(found)


def error_of(transfers: Sequence[Transfer], link: Link) -> float:
    """Mean squared relative error of the predicted times."""
    return statistics.fmean((x.predicted(link) / x.seconds - 1) ** 2 for x in transfers)


def residuals(transfers: Sequence[Transfer], link: Link) -> dict[str, float]:
    """Median relative error of the predicted times by kind of transfer."""
    return {
        kind: statistics.median(abs(x.predicted(link) / x.seconds - 1) for x in some)
        for kind, some in _by_kind(transfers).items()
    }


def _by_kind(transfers: Sequence[Transfer]) -> dict[str, list[Transfer]]:
    """Transfers of each kind, kinds as they are met."""
    return {kind: [x for x in transfers if x.kind == kind] for kind in dict.fromkeys(x.kind for x in transfers)}


def _fitted(transfers: Sequence[Transfer], full_duplex: bool) -> Link:
    rows = [x.terms(full_duplex) for x in transfers]
    scaled = [[value / x.seconds for value in row] for row, x in zip(rows, transfers, strict=True)]
    a = torch.tensor(scaled, dtype=torch.float64)
    width = a.abs().amax(0).clamp(min=1e-300)
    best = torch.linalg.lstsq(a / width, torch.ones(len(a), 1, dtype=torch.float64)).solution[:, 0] / width
    latency, per_byte = best.tolist()
    if latency < 0:  # then bytes alone
        latency, per_byte = 0.0, _alone(a[:, 1])
    if per_byte <= 0:  # transfers too small to tell: messages alone, and a bandwidth at which bytes take no time
        latency, per_byte = _alone(a[:, 0]), 1e-15
    return Link(latency, 1 / per_byte, full_duplex)


def _alone(column: torch.Tensor) -> float:
    """Factor with which one column comes nearest to ones."""
    return float(column.sum() / (column * column).sum())


def fit_curve(ops: Sequence[tuple[float, float]]) -> tuple[float, Curve]:
    """Peak rate and efficiency curve from (FLOPs or bytes, seconds) of ops: the best rate seen, and shares of it.

    Where a larger op took less time than a smaller one, it counts as having taken as long.

    Raises:
        ValueError: there is no op.
    """
    if not ops:
        raise ValueError("fit_curve: got no ops; expected (FLOPs or bytes, seconds) of at least one")
    peak = max(size / seconds for size, seconds in _rising(ops))
    return peak, fit_shares(ops, peak)


def fit_shares(ops: Sequence[tuple[float, float]], peak: float) -> Curve:
    """Efficiency curve of ops against a peak rate that is known; a rate above it counts as the peak."""
    return tuple((size, size / max(seconds, size / peak) / peak) for size, seconds in _rising(ops))


def fit_peak(ops: Sequence[tuple[float, float]], curve: Curve) -> float:
    """The peak rate with which an efficiency curve explains the times of ops best: half of them take longer."""
    return statistics.median(size / seconds / share_at(curve, size) for size, seconds in ops)


def _rising(ops: Sequence[tuple[float, float]]) -> Curve:
    """Sizes and seconds of ops by size, the seconds never falling."""
    grown: list[tuple[float, float]] = []
    for size, seconds in sorted(ops):
        grown.append((size, max(seconds, grown[-1][1] if grown else 0.0)))
    return tuple(grown)


def rounded_curve(curve: Curve) -> Curve:
    """The curve to four significant digits, rounded down where a larger product would else take less time."""
    found: list[tuple[float, float]] = []
    for size, share in curve:
        most = found[-1][1] * size / found[-1][0] if found else 1.0
        found.append((size, rounded(share) if rounded(share) <= most else _rounded_down(most)))
    return tuple(found)


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits."""
    return round(value, _places(value, digits)) if value else 0.0


def _rounded_down(value: float, digits: int = 4) -> float:
    near = rounded(value, digits)
    return near if near <= value else round(near - 10.0 ** -_places(value, digits), _places(value, digits))


def _places(value: float, digits: int) -> int:
    """Decimal places that hold so many significant digits."""
    return digits - 1 - math.floor(math.log10(abs(value)))
