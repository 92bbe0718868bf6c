"""Measurements that all ranks make together: products, attention, memory-bound ops, transfers, and what overlap costs.

All ranks measure at once, so cores and links that they share count as shared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count, cycle

import torch
import torch.distributed as dist

from stpart_compiler.cost_models.cluster import Hidden
from stpart_compiler.cost_models.fit import P2P, Transfer, rounded
from stpart_compiler.runtime.engine import Engine

SIZES = {"cpu": (32, 64, 128, 256, 512, 768), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
"""Square products that are measured."""

SHAPES = ((1.0, 1.0, 1.0), (2.0, 0.25, 2.0), (0.5, 4.0, 0.5), (0.5, 0.25, 8.0), (8.0, 0.5, 0.25))
"""Rows, inner dim and columns of products as parts of the square's size: the square, and what is wide, deep or tall."""

STREAM_BYTES = {"cpu": tuple(2**n for n in range(16, 29, 2)), "cuda": tuple(2**n for n in range(18, 31, 2))}
"""What memory-bound ops read and write in all."""

ATTENTION_ROWS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
POOL_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Operands and results come from so much memory in turn, as in a step: caches do not hold them."""

MESSAGE_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)

STARTS = 100
"""Transfers of either kind of which it is measured how long they take to start."""

BESIDE_BYTES = (2**16, 2**20, 2**22)
"""Messages beside which products run: what small ones cost a rank, their bytes do not show."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SAMPLES = 5
SAMPLE_S = 0.1
"""A time is the least of so many samples, as other work on the machine only adds; each is of as many calls as take so
long: ranks that share cores take turns."""

LONGEST_S = 0.1
"""Larger products than one that takes so long are not measured."""


@dataclass
class Bench:
    """Measurements on this process's rank, which all ranks make together; times are those of the slowest."""

    device: torch.device
    engine: Engine | None
    _tags: Iterator[int] = field(default_factory=count)

    @property
    def ranks(self) -> int:
        return self.engine.world_size if self.engine else 1

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call of `run` while all ranks call it, as often as it takes to share cores evenly."""
        self._sample(run, 1)
        times = max(1, math.ceil(SAMPLE_S / self._sample(run, 1)))
        taken = min(self._sample(run, times) for _ in range(SAMPLES))
        return max(taken - self._together, 0.1 * taken) / times

    def between(self, run: Callable[[], object]) -> float:
        """Of one call of `run` between two products, as in a step: threads sleep, and caches hold other things."""
        compute, alone = self._compute
        taken = self.seconds(lambda: (compute(), run()))
        return max(taken - alone, 0.1 * taken)

    @cached_property
    def _compute(self) -> tuple[Callable[[], object], float]:
        """A product of medium size, and the seconds it takes."""
        size = SIZES[self.device.type][len(SIZES[self.device.type]) // 2]
        product = self._product(torch.float32, size, size, size)
        return product, self.seconds(product)

    @cached_property
    def _together(self) -> float:
        """Seconds of a sample in which nothing is done: all wait for one another."""
        return min(self._sample(lambda: None, 0) for _ in range(20))

    def _sample(self, run: Callable[[], object], times: int) -> float:
        """From when the first rank may start until the last has ended."""
        self._meet()
        start = time.perf_counter()
        for _ in range(times):
            run()
        self._meet()
        return self._most(time.perf_counter() - start)

    def _meet(self) -> None:
        """All ranks have done what they started; NCCL's barrier is itself something that a device has yet to do."""
        self._wait()
        if self.engine is not None:
            dist.barrier()
            self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _most(self, value: float) -> float:
        """Of all ranks', which must agree on what follows."""
        if self.engine is None:
            return value
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found.item())

    def products(self, dtype: torch.dtype, shapes: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
        """(FLOPs, seconds) of products by size, the median over shapes."""
        found: list[tuple[float, float]] = []
        for size in SIZES[self.device.type]:
            sizes = ([round(part * size) for part in shape] for shape in shapes)
            seconds = statistics.median(
                self.seconds(self._product(dtype, *rows_to_columns)) for rows_to_columns in sizes
            )
            found.append((2.0 * size**3, seconds))
            if seconds > LONGEST_S:
                break
        return found

    def _product(self, dtype: torch.dtype, rows: int, inner: int, columns: int) -> Callable[[], object]:
        pairs = self._pool(dtype, (rows, inner), (inner, columns))
        return lambda: torch.mm(*next(pairs))

    def _pool(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[list[torch.Tensor]]:
        """Tensors of these shapes again and again, each time others."""
        nbytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        turns = range(self._turns(nbytes))
        return cycle([[torch.randn(x, device=self.device).to(dtype) for x in shapes] for _ in turns])

    def _turns(self, nbytes: int) -> int:
        """How many things of so many bytes are used in turn."""
        return max(2, min(64, POOL_BYTES[self.device.type] // nbytes))

    def streams(self, launch: float) -> list[tuple[float, float]]:
        """(bytes read and written, seconds without the launch) of additions, each of the last one's result.

        Sizes at which the launch is most of the time say nothing and are left out.
        """
        found: list[tuple[float, float]] = []
        for nbytes in STREAM_BYTES[self.device.type]:
            seconds = self._adding(torch.ones(nbytes // 12, device=self.device))
            if seconds > 2 * launch or nbytes == STREAM_BYTES[self.device.type][-1]:
                found.append((float(nbytes), max(seconds - launch, seconds / 2)))
        return found

    def _adding(self, x: torch.Tensor) -> float:
        """Seconds of adding x to a sum, of which the last ones are kept."""
        turns = self._turns(x.nbytes)
        kept = deque([x], turns)

        def add() -> None:
            kept.append(torch.add(kept[-1], x))

        for _ in range(2 * turns):  # from now on memory is used again
            add()
        return self.seconds(add)

    def launch(self) -> float:
        """Seconds of an op on next to nothing, of some after a product."""
        tiny = torch.zeros(8, device=self.device)
        return self.between(lambda: [torch.add(tiny, 1.0) for _ in range(20)]) / 20

    def transcendentals(self) -> float:
        """Elements/s of exp."""
        elements = STREAM_BYTES[self.device.type][-2] // 8
        pool = self._pool(torch.float32, (elements,))
        return float(elements / self.seconds(lambda: torch.exp(*next(pool))))

    def attention(self) -> list[tuple[float, float]]:
        """(FLOPs, seconds) of attention on [1, 4, rows, 64]."""
        rows = ATTENTION_ROWS[self.device.type]
        return [(4.0 * 4 * n * n * 64, self.seconds(self._attending(n))) for n in rows]

    def _attending(self, rows: int) -> Callable[[], object]:
        qkv = self._pool(torch.float32, *[(1, 4, rows, 64)] * 3)

        def attend() -> torch.Tensor:
            q, k, v = next(qkv)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return attend

    @cached_property
    def starting(self) -> float:
        """Seconds in which a rank does nothing else to start a transfer, while others compute: the median of many.

        None on accelerators, which go on with what was started before.
        """
        if self.device.type == "cuda":
            return 0.0
        product, _ = self._compute
        x = torch.zeros(BESIDE_BYTES[0] // 4, device=self.device)
        starts: list[float] = []

        def timed(run: Callable[..., object]) -> None:
            product()
            begin = time.perf_counter()

            def meanwhile() -> None:
                starts.append(time.perf_counter() - begin)
                product()

            run(x, meanwhile)

        for _ in range(STARTS):
            timed(partial(self._ring, distance=1))
            timed(partial(self._collective, "all_gather"))
        return self._most(statistics.median(starts))

    def _moving(self, run: Callable[[], object]) -> float:
        """Seconds of a transfer once it has been started."""
        whole = self.between(run)
        return max(whole - self.starting, 0.1 * whole)

    def transfers(self, distance: int) -> list[Transfer]:
        """Messages between ranks that are `distance` apart, one way and in a ring."""
        assert self.engine is not None
        found = []
        for nbytes in MESSAGE_BYTES:
            x = torch.zeros(nbytes // 4, device=self.device)
            found.append(Transfer(P2P, nbytes, 2, self._moving(partial(self._one_way, x, distance))))
            ring = partial(self._ring, x, distance=distance)
            found.append(Transfer("exchange", nbytes, self.ranks, self._moving(ring)))
        return found

    def collectives(self) -> list[Transfer]:
        """Every collective over all ranks."""
        engine, n = self.engine, self.ranks
        assert engine is not None
        found = []
        for kind in COLLECTIVES:
            for nbytes in MESSAGE_BYTES[1:]:
                shape = (n, nbytes // 4 // n) if kind != "all_reduce" else (nbytes // 4,)
                x = torch.zeros(shape, device=self.device)
                x = x[0] if kind == "all_gather" else x
                found.append(Transfer(kind, nbytes, n, self._moving(partial(self._collective, kind, x))))
        return found

    def overlap(self, run: Callable[..., object]) -> float:
        """How much of the shorter is hidden when products run beside transfers: 1 all, 0 nothing.

        Of transfers of several sizes together. `run`: takes what is sent, and what to do meanwhile.
        """
        pairs = [self._beside(run, nbytes) for nbytes in BESIDE_BYTES]
        return min(1.0, max(0.0, sum(saved for saved, _ in pairs) / sum(shorter for _, shorter in pairs)))

    def _beside(self, run: Callable[..., object], nbytes: int) -> tuple[float, float]:
        """Seconds saved when products run beside one transfer that takes as long, and seconds of the shorter."""
        product, seconds = self._compute
        x = torch.zeros(nbytes // 4, device=self.device)
        transfer = self._moving(lambda: run(x))
        times = max(1, round(transfer / seconds))
        both = self.seconds(lambda: run(x, lambda: [product() for _ in range(times)])) - self.starting
        return seconds * times + transfer - both, min(seconds * times, transfer)

    def _one_way(self, x: torch.Tensor, distance: int) -> None:
        """Even blocks of ranks send to odd ones."""
        engine, tag = self.engine, next(self._tags)
        assert engine is not None
        block = engine.rank // distance
        peer = engine.rank + (distance if block % 2 == 0 else -distance)
        if peer >= self.ranks:
            return
        if block % 2 == 0:
            engine.isend(x, peer, tag, 0)
        else:
            engine.irecv(x.shape, x.dtype, x.device, peer, tag, 0)
        engine.wait((tag,), 0)
        engine.begin_step()

    def hidden(self) -> Hidden:
        """Of what runs beside compute, the parts that cost nothing."""
        ring = self.overlap(partial(self._ring, distance=1))
        reduction = self.overlap(partial(self._collective, "all_reduce"))
        return Hidden(rounded(ring), rounded(reduction))

    def _ring(self, x: torch.Tensor, meanwhile: Callable[[], object] = lambda: None, *, distance: int) -> None:
        engine, tag = self.engine, next(self._tags)
        assert engine is not None
        after, before = ((engine.rank + sign * distance) % self.ranks for sign in (1, -1))
        engine.exchange((x,), (after,), (tag,), (torch.empty_like(x),), (before,), (tag,), 0)
        meanwhile()
        engine.wait((tag,), 0)
        engine.begin_step()

    def _collective(self, kind: str, x: torch.Tensor, meanwhile: Callable[[], object] = lambda: None) -> None:
        engine, tag = self.engine, next(self._tags)
        assert engine is not None
        getattr(engine, kind)(x, range(self.ranks), tag, 1)
        meanwhile()
        engine.wait((tag,), 1)
        engine.begin_step()
