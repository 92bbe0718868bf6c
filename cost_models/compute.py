"""Time of one op on one rank: the larger of arithmetic and memory traffic, plus the launch.

Fast enough for every op of every strategy: plain floats, no tensors, nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from stpart_compiler.cost_models.cluster import Cluster, Device

Shape = Sequence[int]
Count = Callable[[Sequence[Shape], Sequence[Shape]], float]  # operands' shapes, results' shapes -> FLOPs

CAUSAL_TILE = 256
"""Rows and columns of the tiles of scores that kernels of causal attention compute or leave out as a whole."""


class TensorInfo(Protocol):
    """What the model needs to know of an operand or result."""

    @property
    def dtype(self) -> torch.dtype: ...


class Call(Protocol):
    """An op call as the rules see it: target, tensor operands, and results (None: no tensor)."""

    @property
    def target(self) -> Any: ...
    @property
    def args(self) -> Sequence[Any]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def operands(self) -> Sequence[TensorInfo]: ...
    @property
    def results(self) -> Sequence[TensorInfo | None]: ...


def _product_flops(left: int, right: int) -> Count:
    """FLOPs of a matrix product of operands `left` and `right`: each pair of their elements that meets, twice."""

    def count(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
        columns = ins[right][-1] if len(ins[right]) > 1 else 1
        return 2.0 * math.prod(ins[left]) * columns

    return count


def _linear_flops(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    return 2.0 * math.prod(ins[0]) * math.prod(ins[1][:-1])


def _convolution_flops(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    return 2.0 * math.prod(outs[0]) * math.prod(ins[1][1:])


def _transposed_flops(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    return 2.0 * math.prod(ins[0]) * math.prod(ins[1][1:])


def _convolution_backward_flops(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """As much as forward, for the gradient of the input and for that of the weight."""
    made = sum(1 for out in outs[:2] if len(out) == len(ins[0]))
    return made * 2.0 * math.prod(ins[0]) * math.prod(ins[2][1:])


def _grouped_flops(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """(tokens k, experts k n) or (m tokens, tokens n): each token meets one expert."""
    return 2.0 * math.prod(ins[0]) * ins[1][-1]


def _grouped_backward_flops(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    return 2 * _grouped_flops(ins, outs)


def _attention_flops(query: int, qk_products: int, av_products: int) -> Count:
    """FLOPs of attention on [batch, heads, sequence, dim] operands, `query` being the position of Q, before K and V.

    Scores that a mask hides are counted: `computed` says what a causal kernel leaves out.
    """

    def count(ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
        *heads, rows, dim = ins[query]
        columns, value_dim = ins[query + 1][-2], ins[query + 2][-1]
        return 2.0 * math.prod(heads) * rows * columns * (qk_products * dim + av_products * value_dim)

    return count


_TRANSPOSED = "convolution, transposed"

_FLOPS: dict[str, Count] = {
    **{name: _product_flops(0, 1) for name in ("mm", "bmm", "mv", "dot")},
    **{name: _product_flops(1, 2) for name in ("addmm", "baddbmm", "addbmm", "addmv")},
    "linear": _linear_flops,
    "convolution": _convolution_flops,
    _TRANSPOSED: _transposed_flops,
    "convolution_backward": _convolution_backward_flops,
    "_grouped_mm": _grouped_flops,
    "grouped_mm_fallback": _grouped_flops,
    "grouped_mm_fallback_backward": _grouped_backward_flops,
    # what generated programs call on blocks
    "padded_convolution": _convolution_flops,
    "cropped_convolution": _transposed_flops,
    "padded_weight_gradient": _convolution_backward_flops,
    "grouped_block": _grouped_flops,
    "grouped_backward_block": _grouped_backward_flops,
    "attention_block": _attention_flops(0, 1, 1),
    "attention_backward_block": _attention_flops(1, 3, 2),
    "striped_attention_block": _attention_flops(0, 1, 1),
    "striped_attention_backward_block": _attention_flops(1, 3, 2),
}
# Backward recomputes QK^T, then makes dQ and dK from the scores, and dV and the scores' gradient from the values.
_KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
for _kind in (*_KINDS, "fused_attention_overrideable"):
    _FLOPS[f"_scaled_dot_product_{_kind}"] = _attention_flops(0, 1, 1)
    _FLOPS[f"_scaled_dot_product_{_kind}_backward"] = _attention_flops(1, 3, 2)
_FLOPS["scaled_dot_product_attention"] = _attention_flops(0, 1, 1)

_VIEWS = frozenset({"_unsafe_view", "reshape", "getitem", "lift_fresh", "lift_fresh_copy"})
# Of these ops' first operand (a table) only the rows that are looked up are read.
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "embedding_block", "gather_block"})
# Of these ops' first operand only the dtype or shape is looked at.
_LIKE = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
    | {"zero_beside", "zeros_beside", "full_beside"}
)
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})


# Ops that raise e to a power, or the like, for each element: of the larger of operands and results.
_TRANSCENDENTAL = frozenset(
    {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logsumexp", "logaddexp", "logcumsumexp", "_softmax"}
    | {"_log_softmax", "_log_softmax_backward_data", "sigmoid", "tanh", "sinh", "cosh", "erf", "erfc", "erfinv"}
    | {"gelu", "gelu_backward", "silu", "silu_backward", "mish", "mish_backward", "softplus", "softplus_backward"}
    | {"elu", "elu_backward", "log_sigmoid_forward", "log_sigmoid_backward", "sin", "cos", "tan", "atan", "atan2"}
    | {"cross_entropy_grad", "cross_entropy_grad_block"}
)


@lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


@lru_cache(maxsize=4096)
def is_view(target: Any) -> bool:
    """Whether the op only looks at its operand in another way: it moves no bytes and launches nothing."""
    return bool(getattr(target, "is_view", False)) or _name(target) in _VIEWS


def flops(call: Call, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> float:
    """FLOPs of a matmul-like op (matrix products, convolution, attention) on blocks; 0 for any other op.

    `in_shapes`: per tensor operand; `out_shapes`: per result.
    """
    name = _name(call.target)
    if name == "convolution" and call.args[6]:
        name = _TRANSPOSED
    count = _FLOPS.get(name)
    return count(in_shapes, out_shapes) if count else 0.0


def moved_bytes(call: Call, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> float:
    """Bytes that the op reads and writes, each operand and result once; 0 for views."""
    if is_view(call.target) or _name(call.target) in _EMPTY:
        return 0.0
    written = _written(call, out_shapes)
    read: list[float] = [
        math.prod(shape) * info.dtype.itemsize for info, shape in zip(call.operands, in_shapes, strict=True)
    ]
    if read and _name(call.target) in _LIKE:
        read[0] = 0
    if read and _name(call.target) in _LOOKUPS:
        read[0] = min(read[0], written)
    return 1.0 * (sum(read) + written)


# Of generated calls: the argument that says whether they mask causally, or into how many causal stripes.
_CAUSAL_AT = {
    "attention_block": 5,
    "attention_backward_block": 7,
    "striped_attention_block": 4,
    "striped_attention_backward_block": 7,
}


def is_causal(call: Call) -> bool:
    """Whether a call of an attention kernel masks the keys that come after each query."""
    if _name(call.target) in _CAUSAL_AT:
        return bool(call.args[_CAUSAL_AT[_name(call.target)]])
    schema = getattr(call.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(call.args[at] if at < len(call.args) else call.kwargs.get("is_causal", False))


class Computed(NamedTuple):
    """What of a block is computed: the part of its FLOPs (0: the op is not called), in how many calls of a kernel."""

    share: float = 1.0
    calls: int = 1


ALL = Computed()


def computed(call: Call, in_shapes: Sequence[Shape]) -> Computed:
    """What a call computes: less than all where it masks causally."""
    if not is_causal(call):
        return ALL
    name = _name(call.target)
    if name.startswith("striped"):
        own, other = call.args[_CAUSAL_AT[name] : _CAUSAL_AT[name] + 2]
        return Computed(causal_share(in_shapes["backward" in name][-2] // own), other)
    rows, columns = (in_shapes[query + ("backward" in name)][-2] for query in (0, 1))
    return Computed(causal_share(rows)) if rows == columns else ALL


def causal_share(length: int) -> float:
    """Part of the scores of `length` queries and as many keys that a causal kernel computes: 1/2 and half a tile more.

    Measured on one core of a CPU (torch 2.13, head size 64): 0.71 at a length of 1024, 0.64 at 2048, 0.54 at 4096.
    """
    return 0.5 + 0.5 * min(1.0, CAUSAL_TILE / length) if length else 0.0


def op_seconds(
    call: Call, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape], cluster: Cluster, done: Computed = ALL
) -> float:
    """Seconds of one op on blocks of `in_shapes` (per tensor operand) and `out_shapes` (per result).

    `done`: what is computed of a product. Results of several calls are merged or added up.
    """
    if not done.share:
        return 0.0
    if is_view(call.target) or _name(call.target) in _EMPTY:
        return 0.0
    device = cluster.device
    traffic = device.memory_seconds(moved_bytes(call, in_shapes, out_shapes))
    work = flops(call, in_shapes, out_shapes)
    if not work:
        return max(traffic, _transcendental_seconds(call, in_shapes, out_shapes, device)) + device.launch_overhead
    seconds = max(traffic, arithmetic_seconds(call, work * done.share, device)) + device.launch_overhead
    if done.calls > 1:
        seconds += (done.calls - 1) * (device.launch_overhead + combining_seconds(_written(call, out_shapes), cluster))
    return seconds


def _transcendental_seconds(
    call: Call, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape], device: Device
) -> float:
    if not device.transcendental_rate or _name(call.target).removesuffix("_") not in _TRANSCENDENTAL:
        return 0.0
    return max((math.prod(shape) for shape in (*in_shapes, *out_shapes)), default=0) / device.transcendental_rate


def arithmetic_seconds(call: Call, work: float, device: Device) -> float:
    """Seconds of `work` FLOPs of a matmul-like call, by its kind of kernel."""
    return device.matmul_seconds(work, call.operands[0].dtype, "attention" in _name(call.target))


def _written(call: Call, out_shapes: Sequence[Shape]) -> float:
    results = zip(call.results, out_shapes, strict=True)
    return sum(math.prod(shape) * result.dtype.itemsize for result, shape in results if result is not None)


def combining_seconds(nbytes: float, cluster: Cluster) -> float:
    """Seconds to add or merge two tensors of `nbytes`: both are read, one is written."""
    return copy_seconds(1.5 * nbytes, cluster)


def copy_seconds(nbytes: float, cluster: Cluster) -> float:
    """Seconds to copy a tensor of `nbytes`: it is read and written."""
    return cluster.device.memory_seconds(2 * nbytes) + cluster.device.launch_overhead
