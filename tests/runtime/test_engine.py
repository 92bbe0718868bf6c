"""Engine and ops over real gloo groups: one thread per rank, and two processes for a rank that is killed."""

from __future__ import annotations

import importlib
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import run_code, run_processes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from stpart_compiler.ir.program import COLLECTIVE_CHANNEL, SMALL_CHANNEL
from stpart_compiler.runtime import ops
from stpart_compiler.runtime.engine import CommTimeoutError, Engine, Label, current_engine, online_engine
from stpart_compiler.runtime.threads import run_ranks

CPU = torch.device("cpu")
stpart = torch.ops.stpart


def ring_graph(rank: int, world: int, shape: tuple[int, ...]) -> Graph:
    """A double-buffered ring of sums: the exchange for the next step is started before the compute of this one."""
    graph = Graph()
    total = moving = graph.placeholder("x")
    for step in range(1, world):
        tags = (step * world + rank, step * world + (rank - 1) % world)
        args = ([moving], [(rank + 1) % world], [tags[0]], shape, [len(shape)], [(rank - 1) % world], [tags[1]])
        received = graph.call_function(stpart.exchange.default, (*args, torch.float64, CPU, step % 2))
        total = graph.call_function(torch.ops.aten.mul.Tensor, (total, 2.0))
        graph.call_function(stpart.wait.default, (list(tags), step % 2))
        moving = graph.call_function(operator.getitem, (received, 0))
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, moving))
    graph.output(total)
    return graph


def blocks(world: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_with_double_buffers(world: int) -> None:
    data = blocks(world, 5, 3)

    def program(rank: int, engine: Engine) -> Tensor:
        engine.prepare(2)
        module = GraphModule(torch.nn.Module(), ring_graph(rank, world, (5, 3)))
        with torch.no_grad():
            result = module(data[rank])
        assert engine.outstanding == []
        assert engine.message_totals() == {kind: (world - 1, (world - 1) * 120) for kind in ("send", "recv")}
        engine.begin_step()
        assert engine.messages == []
        return result

    for rank, result in enumerate(run_ranks(world, program, timeout_s=20)):
        expected = data[rank]
        for step in range(1, world):
            expected = expected * 2.0 + data[(rank - step) % world]
        assert torch.equal(result, expected)


GROUPS = [(2, [1, 0]), (3, [2, 0, 1]), (3, [1, 2, 0]), (4, [3, 1]), (4, [2, 0, 3, 1]), (4, [0, 1, 2, 3]), (4, [2])]


@pytest.mark.parametrize(("world", "ranks"), GROUPS)
def test_collectives_in_any_rank_order(world: int, ranks: list[int]) -> None:
    n = len(ranks)
    single, rows = blocks(world, 3, 2), blocks(world, n, 3, 2)

    def program(rank: int, engine: Engine) -> list[Tensor] | None:
        engine.prepare(0, [(COLLECTIVE_CHANNEL, tuple(ranks))])
        if rank not in ranks:
            return None
        results = [
            stpart.all_reduce(single[rank].t(), ranks, 1, 0),
            stpart.all_gather(single[rank].t(), ranks, 2, 0),
            stpart.reduce_scatter(rows[rank], ranks, 3, 0),
            stpart.all_to_all(rows[rank], ranks, 4, 1),
        ]
        stpart.wait([2, 3, 1], 0)
        stpart.wait([4], 1)
        return results

    results = run_ranks(world, program, timeout_s=20)
    for place, rank in enumerate(ranks):
        reduced, gathered, scattered, swapped = results[rank]
        expected = torch.stack([single[member] for member in ranks]).sum(0).t()
        torch.testing.assert_close(reduced, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(reduced, results[ranks[0]][0])
        assert torch.equal(gathered, torch.stack([single[member].t() for member in ranks]))
        summed = torch.stack([rows[member][place] for member in ranks]).sum(0)
        torch.testing.assert_close(scattered, summed, rtol=1e-14, atol=1e-14)
        assert torch.equal(swapped, torch.stack([rows[member][place] for member in ranks]))


@pytest.mark.parametrize("seen", [torch.clone, torch.t])
def test_all_reduce_in_place(seen: Callable[[Tensor], Tensor]) -> None:
    """The sum is where the summand was, also where that is transposed."""
    data = blocks(3, 3, 2)

    def program(rank: int, engine: Engine) -> tuple[Tensor, Tensor, bool]:
        engine.prepare(0, [(COLLECTIVE_CHANNEL, (0, 1, 2))])
        own = seen(data[rank].clone())
        result = stpart.all_reduce_(own, [2, 0, 1], 1, COLLECTIVE_CHANNEL)
        stpart.wait([1], COLLECTIVE_CHANNEL)
        return result, own, result.data_ptr() == own.data_ptr()

    for result, own, shared in run_ranks(3, program, timeout_s=20):
        torch.testing.assert_close(result, seen(torch.stack(list(data)).sum(0)), rtol=1e-14, atol=1e-14)
        assert shared and torch.equal(result, own)


def test_small_tensors_do_not_queue_behind_large_ones() -> None:
    """Rank 0 starts the large sum first, rank 1 only when the small one is there."""

    def program(rank: int, engine: Engine) -> list[Tensor]:
        ranks = (0, 1)
        engine.prepare(0, [(COLLECTIVE_CHANNEL, ranks), (SMALL_CHANNEL, ranks)])
        large, small = torch.full((1 << 16,), float(rank)), torch.ones(2)
        if rank == 0:
            whole = stpart.all_reduce(large, ranks, 1, COLLECTIVE_CHANNEL)
        count = stpart.all_reduce(small, ranks, 2, SMALL_CHANNEL)
        stpart.wait([2], SMALL_CHANNEL)
        if rank == 1:
            whole = stpart.all_reduce(large, ranks, 1, COLLECTIVE_CHANNEL)
        stpart.wait([1], COLLECTIVE_CHANNEL)
        return [whole, count]

    for whole, count in run_ranks(2, program, timeout_s=5):
        assert whole.unique().tolist() == [1.0] and count.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("size", [1, 7, 1023])
def test_all_reduce_has_the_same_bits_everywhere(dtype: torch.dtype, size: int) -> None:
    data = [block.to(dtype) * 10.0**rank for rank, block in enumerate(blocks(4, size))]

    def program(rank: int, engine: Engine) -> Tensor:
        result = stpart.all_reduce(data[rank], [2, 0, 3, 1], 1, 0)
        stpart.wait([1], 0)
        return result

    results = run_ranks(4, program, timeout_s=20)
    assert all(torch.equal(result, results[0]) for result in results)
    exact = torch.stack([block.to(torch.complex128) for block in data]).sum(0)
    torch.testing.assert_close(
        results[0].to(torch.complex128), exact, rtol=2e-2, atol=20 if dtype.itemsize == 2 else 1e-3
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.int16, torch.complex64]
)
def test_dtypes_move(dtype: torch.dtype) -> None:
    data = [(torch.arange(12) * (rank + 1) % 5 - 2).to(dtype) for rank in range(2)]

    def program(rank: int, engine: Engine) -> tuple[Tensor, Tensor]:
        received = stpart.irecv([12], dtype, CPU, 1 - rank, 10 + rank, 0)
        stpart.isend(data[rank], 1 - rank, 11 - rank, 0)
        gathered = stpart.all_gather(data[rank], [1, 0], 5, 0)
        stpart.wait([10, 11, 5], 0)
        return received, gathered

    for rank, (received, gathered) in enumerate(run_ranks(2, program, timeout_s=20)):
        assert torch.equal(received, data[1 - rank])
        assert torch.equal(gathered, torch.stack([data[1], data[0]]))


def test_empty_tensors_move_nothing() -> None:
    def program(rank: int, engine: Engine) -> list[torch.Size]:
        empty = torch.empty(0, 4)
        received = stpart.exchange(
            [empty], [1 - rank], [rank], [0, 4], [2], [1 - rank], [1 - rank], empty.dtype, CPU, 0
        )
        gathered = stpart.all_gather(empty, [1, 0], 5, 0)
        reduced = stpart.all_reduce(empty, [1, 0], 6, 0)
        block = stpart.reduce_scatter(torch.empty(2, 0, 3), [1, 0], 7, 0)
        stpart.wait([0, 1, 5, 6, 7], 0)
        assert engine.messages == [] and engine.outstanding == []
        return [x.shape for x in (received[0], gathered, reduced, block)]

    assert run_ranks(2, program, timeout_s=20) == [[(0, 4), (2, 0, 4), (0, 4), (0, 3)]] * 2


def test_many_exchanges_under_way_waited_in_any_order() -> None:
    number = 200

    def program(rank: int, engine: Engine) -> bool:
        engine.prepare(2)
        peer, received = 1 - rank, {}
        for i in range(number):
            tags = [2 * i + rank, 2 * i + peer]
            x = torch.full((i % 17 + 1,), 1000.0 * rank + i)
            args = ([x], [peer], tags[:1], [i % 17 + 1], [1], [peer], tags[1:], x.dtype, CPU, i % 2)
            received[i] = stpart.exchange(*args)[0]
        for i in reversed(range(number)):
            stpart.wait([2 * i, 2 * i + 1], i % 2)
        return all(bool((x == 1000.0 * peer + i).all()) for i, x in received.items())

    assert run_ranks(2, program, timeout_s=20) == [True, True]


def test_results_of_several_shapes_in_one_exchange() -> None:
    def program(rank: int, engine: Engine) -> list[Tensor]:
        others = [other for other in range(3) if other != rank]
        sends = [torch.full((rank + 1, other + 1), float(10 * rank + other)) for other in others]
        dims = [size for other in others for size in (other + 1, rank + 1)]
        tags = ([3 * rank + o for o in others], [3 * o + rank for o in others])
        result = stpart.exchange(sends, others, tags[0], dims, [2, 2], others, tags[1], torch.float32, CPU, 0)
        stpart.wait([*tags[0], *tags[1]], 0)
        return result

    for rank, received in enumerate(run_ranks(3, program, timeout_s=20)):
        others = [other for other in range(3) if other != rank]
        for other, x in zip(others, received, strict=True):
            assert torch.equal(x, torch.full((other + 1, rank + 1), float(10 * other + rank)))


def test_timeout_names_the_message() -> None:
    def program(rank: int, engine: Engine) -> None:
        engine.prepare(1)
        if rank == 1:
            time.sleep(1.5)
            return
        engine.labels = {(0, 17): Label("recv_w", "layers.0.mlp.up", 1, 2)}
        stpart.irecv([4], torch.float32, CPU, 1, 17, 0)
        stpart.wait([17], 0)

    with pytest.raises(CommTimeoutError) as caught:
        run_ranks(2, program, timeout_s=1.0)
    text = str(caught.value)
    for part in (
        "rank 0",
        "recv_w",
        "layers.0.mlp.up",
        "peer 1",
        "step 2",
        "tag 17",
        "timeout of 1 s",
        "failed after 1.",
    ):
        assert part in text, text
    assert caught.value.__notes__ == ["raised on rank 0 of 2"]


@pytest.mark.parametrize("kind", ["recv", "all_reduce", "busy"])
def test_a_rank_that_raises_stops_the_others(kind: str) -> None:
    stopped: dict[int, str] = {}

    def wait_for_rank_2(rank: int) -> None:
        if kind == "busy":
            time.sleep(0.5)
        if kind == "all_reduce":
            stpart.all_reduce(torch.ones(4), [0, 1, 2], 1, 0)
        else:
            stpart.irecv([4], torch.float32, CPU, (rank + 1) % 3, 1, 0)
        stpart.wait([1], 0)

    def program(rank: int, engine: Engine) -> None:
        engine.prepare(1, [(COLLECTIVE_CHANNEL, (0, 1, 2))])
        if rank == 2:
            time.sleep(0.1)
            raise ValueError("bad block")
        try:
            wait_for_rank_2(rank)
        except CommTimeoutError as error:
            stopped[rank] = str(error)
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="bad block") as caught:
        run_ranks(3, program, timeout_s=30)
    assert time.monotonic() - start < 5
    assert caught.value.__notes__ == ["raised on rank 2 of 3"]
    assert sorted(stopped) == [0, 1]
    assert all("rank 2 raised ValueError: bad block" in text for text in stopped.values()), stopped


def test_first_failure_is_the_one_reported() -> None:
    """Rank 0 times out; rank 1 waits for rank 0 and fails because of it."""

    def program(rank: int, engine: Engine) -> None:
        engine.prepare(1)
        if rank == 2:
            time.sleep(4.5)
            return
        time.sleep(1.5 * rank)
        stpart.irecv([4], torch.float32, CPU, 2 if rank == 0 else 0, 5, 0)
        stpart.wait([5], 0)

    with pytest.raises(CommTimeoutError, match="rank 0: recv .*timeout of 3 s"):
        run_ranks(3, program, timeout_s=3.0)


def bad_calls() -> list[tuple[str, Callable[[], object]]]:
    x = torch.ones(2, 3)
    return [
        ("names rank 0, expected another rank", lambda: stpart.isend(x, 0, 1, 0)),
        ("names rank 9, expected another rank", lambda: stpart.isend(x, 9, 1, 0)),
        ("make the tensor contiguous", lambda: stpart.isend(x.t(), 1, 1, 0)),
        ("nothing is under way", lambda: stpart.wait([44], 0)),
        ("without it", lambda: stpart.all_reduce(x, [1], 1, 0)),
        ("differ from each other", lambda: stpart.all_gather(x, [0, 1, 1], 1, 0)),
        ("one row for each", lambda: stpart.all_to_all(torch.ones(3, 2), [0, 1], 1, 0)),
        ("cannot sum torch.complex64, all_reduce can", lambda: stpart.all_reduce_(x + 0j, [0, 1], 1, 0)),
        ("cannot sum torch.bool", lambda: stpart.all_reduce(x > 0, [0, 1], 1, 0)),
    ]


@pytest.mark.parametrize("index", range(9))
def test_bad_calls(index: int) -> None:
    message, call = bad_calls()[index]

    def program(rank: int, engine: Engine) -> None:
        if rank == 0:
            call()

    with pytest.raises(ValueError, match=message):
        run_ranks(2, program, timeout_s=5)


def test_a_run_that_is_over_holds_no_connection() -> None:
    def joined(rank: int, engine: Engine) -> Engine:
        engine.prepare(2, [(COLLECTIVE_CHANNEL, (0, 1))])
        return engine

    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    engine = run_ranks(2, joined)[0]
    assert set(threading.enumerate()) <= threads  # those of tests before may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= files
    with pytest.raises(RuntimeError, match="the run that this engine was made for is over; attach the module to"):
        engine.isend(torch.ones(1), 1, 0, 0)


def test_no_engine() -> None:
    with pytest.raises(RuntimeError, match=r"inside engine.activate\(\)"):
        current_engine()
    with pytest.raises(RuntimeError, match="no process group"):
        online_engine()
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(0, lambda rank, engine: None)


def comm_graph() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(stpart.isend.default, (x, 1, 1, 0))
    graph.call_function(stpart.irecv.default, ([7], torch.int64, CPU, 1, 2, 0))
    args = ([x], [1], [3], [2, 3, 5], [2, 1], [1, 1], [4, 5])
    exchanged = graph.call_function(stpart.exchange.default, (*args, torch.bfloat16, CPU, 0))
    results = [
        graph.call_function(getattr(stpart, name).default, (x, [3, 0, 2, 1], 10 + i, 0))
        for i, name in enumerate(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    ]
    graph.call_function(stpart.wait.default, ([1, 2, 3, 4, 5, 10, 11, 12, 13], 0))
    graph.output((exchanged, *results))
    return graph


def test_fake_run_gives_shapes() -> None:
    module = GraphModule(torch.nn.Module(), comm_graph())
    with FakeTensorMode() as mode:
        exchanged, *results = module(mode.from_tensor(torch.ones(4, 6)))
    assert [(tuple(x.shape), x.dtype) for x in exchanged] == [((2, 3), torch.bfloat16), ((5,), torch.bfloat16)]
    assert [tuple(x.shape) for x in results] == [(4, 6), (4, 4, 6), (6,), (4, 6)]


def test_dead_code_elimination_keeps_communication() -> None:
    graph = comm_graph()
    graph.call_function(torch.ops.aten.neg.default, (next(iter(graph.nodes)),))
    graph.eliminate_dead_code()
    assert "aten.neg" not in str(graph)
    assert sum(str(node.target).startswith("stpart.") for node in graph.nodes) == 8
    code = GraphModule(torch.nn.Module(), graph).code
    assert "torch.ops.stpart.irecv.default([7], torch.int64, device(type='cpu'), 1, 2, 0)" in code


def test_reload_keeps_the_ops() -> None:
    importlib.reload(ops)
    assert run_ranks(1, lambda rank, engine: float(stpart.all_reduce(torch.ones(1), [0], 1, 0)), timeout_s=5) == [1.0]
    script = "import sys, torch\nimport stpart_compiler.runtime.ops\ndel sys.modules['stpart_compiler.runtime.ops']\n"
    script += (
        "import gc; gc.collect()\nimport stpart_compiler.runtime.ops\nprint(torch.ops.stpart.wait.default._schema)\n"
    )
    ((status, text),) = run_processes(run_code, [(script,)], 30.0)
    assert (status, text.strip()) == (0, "stpart::wait(int[] tags, int channel) -> ()")


def test_overhead_is_measured(record_property: Callable[[str, object], None]) -> None:
    """Reported in the test's properties; the machine is shared, so no bound is asserted."""
    calls = 300

    def program(rank: int, engine: Engine) -> float:
        engine.prepare(1)
        x = torch.ones(4)
        start = time.perf_counter()
        for i in range(calls):
            args = ([x], [1 - rank], [2 * i + rank], [4], [1], [1 - rank], [2 * i + 1 - rank], x.dtype, CPU, 0)
            stpart.exchange.default(*args)
        issued = time.perf_counter() - start
        for i in range(calls):
            stpart.wait.default([2 * i, 2 * i + 1], 0)
        return issued / calls * 1e6

    micros = run_ranks(2, program, timeout_s=20)
    record_property("exchange_issue_us", micros)
    assert len(micros) == 2


CHILD = """
import os, signal, sys, time, torch
import torch.distributed as dist
from stpart_compiler.runtime import ops
from stpart_compiler.runtime.engine import Label, online_engine
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
engine = online_engine(timeout_s=20)
engine.prepare(2, [(1, (0, 1))])
engine.labels[(1, 4)] = Label("recv_k", "layers.1.attn", 1 - rank, 3)
with engine.activate():
    y = torch.ops.stpart.all_reduce(torch.ones(3), [1, 0], 1, 0)
    torch.ops.stpart.wait([1], 0)
    assert y.tolist() == [2.0] * 3
    print("step", flush=True)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    torch.ops.stpart.irecv([8], torch.float32, torch.device("cpu"), 1, 4, 1)
    start = time.monotonic()
    try:
        torch.ops.stpart.wait([4], 1)
    except RuntimeError as error:
        print(type(error).__name__, round(time.monotonic() - start, 1), error, flush=True)
os._exit(0)
"""


def test_killed_process_stops_its_peer(tmp_path: Path) -> None:
    arguments = [(CHILD, str(rank), str(tmp_path / "store")) for rank in range(2)]
    (status, text), (killed, _) = run_processes(run_code, arguments, 30.0)
    assert (status, killed) == (0, -signal.SIGKILL), text
    name, waited, message = text.splitlines()[1].split(" ", 2)
    assert name == "CommTimeoutError" and float(waited) < 5
    for part in ("rank 0", "recv_k", "layers.1.attn", "peer 1", "step 3", "tag 4", "a peer has stopped"):
        assert part in message, message


TORCH_CHILD = """
import os, sys, torch
import torch.distributed as dist
from stpart_compiler.runtime import ops
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.transport import TorchTransport
rank, cpu = int(sys.argv[1]), torch.device("cpu")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
engine = Engine(rank, 3, TorchTransport(cpu, 20.0), 20.0)
engine.prepare(1, [(1, (2, 0)), (1, (2, 1, 0))])
x = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 10 * rank
with engine.activate():
    right, left, o = (rank + 1) % 3, (rank - 1) % 3, torch.ops.stpart
    got = o.exchange([x], [right], [rank], [3, 2], [2], [left], [left], x.dtype, cpu, 0)
    g = o.all_gather(x, [2, 1, 0], 7, 0)
    s = o.reduce_scatter(x, [2, 1, 0], 8, 0)
    a = o.all_to_all(x, [2, 1, 0], 9, 0)
    o.wait([rank, left, 7, 8, 9], 0)
    base = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    assert torch.equal(got[0], base + 10 * left)
    assert torch.equal(g, torch.stack([base + 20, base + 10, base]))
    assert torch.equal(s, 3 * base[2 - rank] + 30)
    assert torch.equal(a, torch.stack([base[2 - rank] + 10 * r for r in (2, 1, 0)]))
    if rank != 1:
        r = o.all_reduce(x, [2, 0], 10, 0)
        o.wait([10], 0)
        assert torch.equal(r, 2 * base + 20)
    try:
        o.all_reduce(x, [rank, right], 11, 0)
        print("formed" if sorted((rank, right)) != [0, 2] else "declared")
    except ValueError as error:
        print(error)
dist.barrier()
dist.destroy_process_group()
"""


def test_groups_of_torch_distributed(tmp_path: Path) -> None:
    """TorchTransport with the gloo backend of torch.distributed: the code that NCCL runs goes through too."""
    arguments = [(TORCH_CHILD, str(rank), str(tmp_path / "store")) for rank in range(3)]
    ended = run_processes(run_code, arguments, 60.0)
    assert [status for status, _ in ended] == [0, 0, 0], ended
    assert "ranks0_1 is not declared" in ended[0][1] and "ranks1_2 is not declared" in ended[1][1]
