"""Time of local ops: FLOPs against torch's own counter, bytes, views, and order."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stpart_compiler.cost_models.cluster import Cluster, Device, Link
from stpart_compiler.cost_models.compute import flops, is_view, moved_bytes, op_seconds
from stpart_compiler.passes.rules.registry import OpCall, Operand

aten = torch.ops.aten
DEVICE = Device("d", "cpu", (("float32", 1e12), ("bfloat16", 4e12)), 2**30, 1e11, launch_overhead=1e-6)
CLUSTER = Cluster("c", DEVICE, ((None, Link(0, 1e9)),))


def call(op, ins, outs, dtype=torch.float32, rest=()):
    operands = tuple(Operand(i, tuple(shape), dtype) for i, shape in enumerate(ins))
    results = tuple(Operand(i, tuple(shape), dtype) for i, shape in enumerate(outs))
    return OpCall(op, (*operands, *rest), {}, operands, results)


@pytest.mark.parametrize(
    ("op", "ins"),
    [
        (aten.mm.default, [(3, 5), (5, 7)]),
        (aten.addmm.default, [(7,), (3, 5), (5, 7)]),
        (aten.bmm.default, [(2, 3, 5), (2, 5, 7)]),
        (aten.baddbmm.default, [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
    ],
)
def test_matmul_flops_agree_with_torch(op, ins):
    tensors = [torch.zeros(shape) for shape in ins]
    out = op(*tensors)
    expected = flop_registry[op.overloadpacket](*tensors, out_val=out)
    assert flops(call(op, ins, [out.shape]), ins, [out.shape]) == expected


def test_other_products_by_hand():
    assert flops(call(aten.mv.default, [(3, 5), (5,)], [(3,)]), [(3, 5), (5,)], [(3,)]) == 30
    assert flops(call(aten.dot.default, [(5,), (5,)], [()]), [(5,), (5,)], [()]) == 10
    ins, outs = [(2, 3, 5), (7, 5), (7,)], [(2, 3, 7)]
    assert flops(call(aten.linear.default, ins, outs), ins, outs) == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize("is_transposed", [False, True])
def test_convolution_flops_by_hand(is_transposed):
    """Each place of the result, or of the image of a transposed one, meets the kernel for each channel of its group."""
    ins = [(2, 4, 9, 9), (4, 3, 3, 3) if is_transposed else (6, 2, 3, 3)]
    x, w = (torch.zeros(shape) for shape in ins)
    args = (None, [2, 2], [1, 1], [1, 1], is_transposed, [0, 0], 2)
    out = aten.convolution.default(x, w, *args)
    by_hand = 2 * (x.numel() * 3 if is_transposed else out.numel() * 2) * 9
    assert flops(call(aten.convolution.default, ins, [out.shape], rest=args), ins, [out.shape]) == by_hand


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", 4),
        ("_scaled_dot_product_flash_attention", 4),
        ("_scaled_dot_product_efficient_attention", 4),
        ("_scaled_dot_product_cudnn_attention", 4),
        ("_scaled_dot_product_flash_attention_for_cpu", 2),
    ],
)
def test_attention_flops_agree_with_torch(name, kv_heads):
    query, key, value = (2, 4, 6, 8), (2, kv_heads, 10, 8), (2, kv_heads, 10, 5)
    whole_key, whole_value = (2, 4, *key[2:]), (2, 4, *value[2:])  # grouped heads cost what repeated ones do
    out = (*query[:3], 5)
    forward = call(getattr(aten, name).default, [query, key, value], [out])
    assert flops(forward, [query, key, value], [out]) == sdpa_flop_count(query, whole_key, whole_value)
    ins, outs = [out, query, key, value, out, query[:3]], [query, key, value]
    backward = call(getattr(aten, name + "_backward").default, ins, outs)
    assert flops(backward, ins, outs) == sdpa_backward_flop_count(out, query, whole_key, whole_value)


def test_matmul_is_bound_by_arithmetic_or_by_memory():
    big = [(1000, 1000), (1000, 1000)]
    seconds = op_seconds(call(aten.mm.default, big, big[:1]), big, big[:1], CLUSTER)
    assert seconds == pytest.approx(2e9 / 1e12 + 1e-6)
    thin, out = [(1, 1000), (1000, 1000)], [(1, 1000)]
    seconds = op_seconds(call(aten.mm.default, thin, out), thin, out, CLUSTER)
    assert seconds == pytest.approx(4 * (1000 + 10**6 + 1000) / 1e11 + 1e-6)


def test_rate_follows_the_dtype_of_the_first_operand():
    big = [(1000, 1000), (1000, 1000)]
    seconds = op_seconds(call(aten.mm.default, big, big[:1], torch.bfloat16), big, big[:1], CLUSTER)
    assert seconds == pytest.approx(2e9 / 4e12 + 1e-6)


def test_pointwise_moves_bytes_and_views_are_free():
    shape = (100, 1000)
    add = call(aten.add.Tensor, [shape, shape], [shape])
    assert op_seconds(add, [shape, shape], [shape], CLUSTER) == pytest.approx(3 * 4e5 / 1e11 + 1e-6)
    for op in (aten.view.default, aten.permute.default, aten.expand.default, aten._unsafe_view.default):
        assert is_view(op)
        assert op_seconds(call(op, [shape], [shape]), [shape], [shape], CLUSTER) == 0
    clone = call(aten.clone.default, [shape], [shape])
    assert op_seconds(clone, [shape], [shape], CLUSTER) > 0


def test_a_lookup_reads_only_the_rows_it_needs():
    table, ids, out = (10**6, 64), (3,), (3, 64)
    lookup = call(aten.embedding.default, [table, ids], [out])
    assert moved_bytes(lookup, [table, ids], [out]) == 4 * (2 * 3 * 64 + 3)


def test_what_a_tensor_is_made_like_is_not_read():
    like, out = (100, 1000), (10, 1000)
    assert moved_bytes(call(aten.new_zeros.default, [like], [out]), [like], [out]) == 4 * 10 * 1000
    assert moved_bytes(call(aten.new_empty.default, [like], [out]), [like], [out]) == 0


def test_results_that_are_no_tensors_and_empty_blocks():
    shape = (0, 8)
    op = replace(call(aten.mm.default, [shape, (8, 8)], [shape]), results=(None, Operand(0, shape, torch.float32)))
    outs = [(), shape]
    assert flops(op, [shape, (8, 8)], outs) == 0
    assert op_seconds(op, [shape, (8, 8)], outs, CLUSTER) == pytest.approx(4 * 64 / 1e11 + 1e-6)


def test_exp_takes_as_long_as_its_elements_where_memory_is_faster():
    shape = (1000, 1000)
    device = replace(DEVICE, transcendental_rate=1e6)
    one = CLUSTER.device.launch_overhead
    for op in (aten.exp.default, aten.exp_.default, aten.logsumexp.default):
        of_op = call(op, [shape], [shape])
        assert op_seconds(of_op, [shape], [shape], replace(CLUSTER, device=device)) == pytest.approx(1.0 + one)
        assert op_seconds(of_op, [shape], [shape], CLUSTER) == pytest.approx(8e6 / 1e11 + one)
    plain = call(aten.neg.default, [shape], [shape])
    assert op_seconds(plain, [shape], [shape], replace(CLUSTER, device=device)) == pytest.approx(8e6 / 1e11 + one)


sizes = st.lists(st.integers(1, 4096), min_size=3, max_size=3)


@given(sizes, sizes)
def test_a_larger_matmul_is_never_cheaper(one, other):
    curve = ((1e4, 0.01), (1e7, 0.5), (1e10, 0.9))
    cluster = replace(CLUSTER, device=replace(DEVICE, matmul_efficiency=curve))
    low, high = (
        [min(a, b) for a, b in zip(one, other, strict=True)],
        [max(a, b) for a, b in zip(one, other, strict=True)],
    )

    def seconds(m, k, n):
        ins, outs = [(m, k), (k, n)], [(m, n)]
        return op_seconds(call(aten.mm.default, ins, outs), ins, outs, cluster)

    assert seconds(*low) <= seconds(*high) * (1 + 1e-12)
    assert math.isfinite(seconds(*high))
