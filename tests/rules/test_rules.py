"""Factor rules: the op on blocks, combined, is the op on the whole; and sums pass where a rule says so."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from blocks import (
    Example,
    as_list,
    check,
    check_cuts,
    check_maps,
    check_sums,
    example,
    flags,
    graph_inputs,
    in_double,
    ints,
    rand,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations import moe as _moe  # noqa: F401  (registers its ops)

from stpart_compiler.capture import Captured, capture
from stpart_compiler.ir.rule import OpRule
from stpart_compiler.passes.decompose import Decompose
from stpart_compiler.passes.rules import OpCall, Operand, op_call, rule_of
from stpart_compiler.passes.rules.registry import bind

aten = torch.ops.aten
fused = torch.ops.stpart_fused


# --- calls as they occur in graphs, of any sizes


PLACES: list[Any] = [[2, 1], [1, 0], [1, 2], False, [0, 0], 1]  # stride, padding, dilation, transposed, ..., groups


def convolution_backward(n: int, i: int, o: int, mask: list[bool]) -> Example:
    x, weight = rand(n, i, 7, 5), rand(o, i, 3, 2)
    out = aten.convolution.default(x, weight, None, *PLACES)
    grad = rand(*out.shape)
    return example(aten.convolution_backward.default, grad, x, weight, None, *PLACES, mask)


def max_pool_backward(n: int, c: int) -> Example:
    x = rand(n, c, 6, 6)
    window: list[Any] = [[3, 3], [2, 2], [1, 1], [1, 1], False]
    out, indices = aten.max_pool2d_with_indices.default(x, *window)
    return example(aten.max_pool2d_with_indices_backward.default, rand(*out.shape), x, *window, indices)


grouped = torch.ops.transformers.grouped_mm_fallback
grouped_backward = torch.ops.transformers.grouped_mm_fallback_backward


def ends(tokens: int, experts: int) -> torch.Tensor:
    """Where the tokens of each expert end, some experts having none."""
    return torch.cat([torch.randint(0, tokens + 1, (experts - 1,)).sort().values, torch.tensor([tokens])])


def place_of(dim: int, keepdim: bool, largest: bool, *sizes: int) -> Example:
    """Equal values, of which the first counts, and a NaN."""
    x = ints(3, *sizes).double()
    x[-1, 0] = torch.nan
    value = (x.amax if largest else x.amin)(dim, keepdim=True)
    return example(fused.place_of.default, x, value, dim, keepdim, largest)


CASES: dict[str, Callable[..., Example]] = {
    "mm": lambda m, n, k: example(aten.mm.default, rand(m, n), rand(n, k)),
    "bmm": lambda b, m, n, k: example(aten.bmm.default, rand(b, m, n), rand(b, n, k)),
    "addmm": lambda m, n, k: example(aten.addmm.default, rand(k), rand(m, n), rand(n, k), beta=2, alpha=3),
    "baddbmm": lambda b, m, n: example(aten.baddbmm.default, rand(b, m, n), rand(b, m, 2), rand(b, 2, n)),
    "convolution": lambda n, i, o: example(aten.convolution.default, rand(n, i, 7, 5), rand(o, i, 3, 2), None, *PLACES),
    "convolution grouped": lambda n, g, o: example(
        aten.convolution.default, rand(n, 2 * g, 6), rand(g * o, 2, 3), None, [1], [1], [1], False, [0], g
    ),
    "convolution transposed": lambda n, i, o: example(
        aten.convolution.default, rand(n, i, 4), rand(i, o, 3), None, [2], [1], [1], True, [0], 1
    ),
    "convolution_backward x": lambda n, i, o: convolution_backward(n, i, o, [True, False, False]),
    "convolution_backward weight": lambda n, i, o: convolution_backward(n, i, o, [False, True, False]),
    "max_pool": lambda n, c: example(aten.max_pool2d_with_indices.default, rand(n, c, 6, 6), [3, 3], [2, 2], [1, 1]),
    "max_pool_backward": lambda n, c: max_pool_backward(n, c),
    "avg_pool": lambda n, c: example(aten.avg_pool2d.default, rand(n, c, 6, 6), [2, 2]),
    "adaptive_avg_pool": lambda n, c: example(aten._adaptive_avg_pool2d.default, rand(n, c, 6, 6), [2, 3]),
    "upsample": lambda n, c: example(aten.upsample_nearest2d.vec, rand(n, c, 3, 4), None, [2.0, 2.0]),
    "reflection_pad": lambda n, c: example(aten.reflection_pad1d.default, rand(n, c, 5), [1, 2]),
    "histc": lambda a, b: example(aten.histc.default, rand(a, b), 5, -1, 1),
    "grouped_mm": lambda e, k, n: example(grouped.default, rand(9, k), rand(e, k, n), ends(9, e)),
    "grouped_mm_backward": lambda e, k, n: example(
        grouped_backward.default, rand(9, k), rand(e, k, n), ends(9, e), rand(9, n)
    ),
    "mv": lambda m, n: example(aten.mv.default, rand(m, n), rand(n)),
    "dot": lambda n: example(aten.dot.default, rand(n), rand(n)),
    "add": lambda a, b: example(aten.add.Tensor, rand(a, 1, b), rand(3, b), alpha=2),
    "add scalar": lambda a, b: example(aten.add.Tensor, rand(a, b), 1.5),
    "add int": lambda a, b: example(aten.add.Tensor, ints(9, a, b), ints(9, b)),
    "sub": lambda a, b: example(aten.sub.Tensor, rand(a, b), rand(a, 1)),
    "rsub": lambda a, b: example(aten.rsub.Scalar, rand(a, b), 1.0),
    "mul": lambda a, b: example(aten.mul.Tensor, rand(2, a, b), rand(a, 1)),
    "mul scalar": lambda a, b: example(aten.mul.Tensor, rand(a, b), 0.5),
    "mul Scalar": lambda a, b: example(aten.mul.Scalar, rand(a, b), 0.5),
    "div": lambda a, b: example(aten.div.Tensor, rand(a, b), rand(b)),
    "div Scalar": lambda a, b: example(aten.div.Scalar, rand(a, b), 3),
    "div floor": lambda a, b: example(aten.div.Tensor_mode, ints(90, a, b), 7, rounding_mode="floor"),
    "neg": lambda a, b: example(aten.neg.default, rand(a, b)),
    "pow": lambda a, b: example(aten.pow.Tensor_Scalar, rand(a, b), 2),
    "rsqrt": lambda a, b: example(aten.rsqrt.default, rand(a, b).abs()),
    "cos": lambda a, b: example(aten.cos.default, rand(a, b)),
    "tanh": lambda a, b: example(aten.tanh.default, rand(a, b)),
    "tanh_backward": lambda a, b: example(aten.tanh_backward.default, rand(a, b), rand(a, b)),
    "relu": lambda a, b: example(aten.relu.default, rand(a, b)),
    "threshold_backward": lambda a, b: example(aten.threshold_backward.default, rand(a, b), rand(a, b), 0),
    "gelu": lambda a, b: example(aten.gelu.default, rand(a, b)),
    "gelu_backward": lambda a, b: example(aten.gelu_backward.default, rand(a, b), rand(a, b), approximate="tanh"),
    "silu": lambda a, b: example(aten.silu.default, rand(a, b)),
    "silu_backward": lambda a, b: example(aten.silu_backward.default, rand(a, b), rand(a, b)),
    "sigmoid_backward": lambda a, b: example(aten.sigmoid_backward.default, rand(a, b), rand(a, b)),
    "le": lambda a, b: example(aten.le.Tensor, ints(9, 1, b), ints(9, a, 1)),
    "ne": lambda a, b: example(aten.ne.Scalar, ints(3, a, b), 1),
    "logical_and": lambda a, b: example(aten.logical_and.default, flags(a, b), flags(b)),
    "where": lambda a, b: example(aten.where.self, flags(a, b), rand(b), rand(a, 1)),
    "where zero": lambda a, b: example(aten.where.ScalarOther, flags(a, b), rand(a, b), 0),
    "where one": lambda a, b: example(aten.where.ScalarOther, flags(a, b), rand(a, b), 1),
    "masked_fill zero": lambda a, b: example(aten.masked_fill.Scalar, rand(a, b), flags(b), 0),
    "masked_fill": lambda a, b: example(aten.masked_fill.Scalar, rand(a, b), flags(b), -1e9),
    "masked_fill tensor": lambda a, b: example(aten.masked_fill.Tensor, rand(a, b), flags(b), rand()),
    "clone": lambda a, b: example(aten.clone.default, rand(a, b), memory_format=torch.contiguous_format),
    "clone cols": lambda a, b: example(aten.clone.default, rand(b, a).t()),
    "alias": lambda a, b: example(aten.alias.default, rand(a, b)),
    "copy": lambda a, b: example(aten.copy.default, rand(a, b), rand(b)),
    "to wider": lambda a, b: example(aten._to_copy.default, ints(9, a, b), dtype=torch.float64),
    "to narrower": lambda a, b: example(aten._to_copy.default, rand(a, b), dtype=torch.float32),
    "zeros_like": lambda a, b: example(aten.zeros_like.default, rand(a, b)),
    "full_like": lambda a, b: example(aten.full_like.default, rand(a, b), 2),
    "view merge": lambda a, b, c: example(aten.view.default, rand(a, b, c), [a * b, c]),
    "view split": lambda a, b, c: example(aten.view.default, rand(a, b * c), [a, 1, b, c]),
    "view both": lambda a, b, c: example(aten.view.default, rand(a, b * 2, 3, c), [a * b, 2 * 3, c]),
    "view infer": lambda a, b: example(aten.view.default, rand(a, b), [-1, b]),
    "view mixed": lambda a, b: example(aten.reshape.default, rand(a, 6, 4, b), [a, 4, 6, b]),
    "view transposed": lambda a, b, c: example(aten.reshape.default, rand(a, b, c).transpose(0, 1), [b * a, c]),
    "unsafe_view": lambda a, b, c: example(aten._unsafe_view.default, rand(a * b, c), [a, b, c]),
    "squeeze dim": lambda a, b: example(aten.squeeze.dim, rand(a, 1, b), 1),
    "squeeze no": lambda a, b: example(aten.squeeze.dim, rand(a, 2, b), 1),
    "squeeze": lambda a, b: example(aten.squeeze.default, rand(1, a, 1, b)),
    "squeeze dims": lambda a, b: example(aten.squeeze.dims, rand(1, a, 1, b), [0, -2]),
    "unsqueeze": lambda a, b: example(aten.unsqueeze.default, rand(a, b), -1),
    "t": lambda a, b: example(aten.t.default, rand(a, b)),
    "t vector": lambda a: example(aten.t.default, rand(a)),
    "transpose": lambda a, b, c: example(aten.transpose.int, rand(a, b, c), 1, -1),
    "permute": lambda a, b, c: example(aten.permute.default, rand(a, b, c), [2, 0, -2]),
    "expand": lambda a, b: example(aten.expand.default, rand(a, 1, b), [3, -1, 5, b]),
    "sum": lambda a, b, c: example(aten.sum.dim_IntList, rand(a, b, c), [0, -1]),
    "sum keepdim": lambda a, b, c: example(aten.sum.dim_IntList, rand(a, b, c), [0, 1], True),
    "sum empty list": lambda a, b: example(aten.sum.dim_IntList, rand(a, b), []),
    "sum all": lambda a, b: example(aten.sum.default, rand(a, b)),
    "sum scalar": lambda: example(aten.sum.default, rand()),
    "sum flags": lambda a, b: example(aten.sum.dim_IntList, flags(a, b), [0]),
    "mean": lambda a, b: example(aten.mean.dim, rand(a, b), [-1], True),
    "mean all": lambda a, b: example(aten.mean.default, rand(a, b)),
    "mean dtype": lambda a, b: example(aten.mean.dim, ints(9, a, b), [0], dtype=torch.float64),
    "amax": lambda a, b: example(aten.amax.default, rand(a, b), [-1], True),
    "max dim": lambda a, b: example(aten.max.dim, rand(a, b), 0),
    "argmax": lambda a, b: example(aten.argmax.default, rand(a, b), -1),
    "place of largest": lambda a, b: place_of(-1, False, True, a, b),
    "place of smallest": lambda a, b: place_of(0, True, False, a, b),
    "any": lambda a, b: example(aten.any.dim, flags(a, b), 1),
    "all": lambda a, b: example(aten.all.default, flags(a, b)),
    "var_mean": lambda a, b: example(aten.var_mean.correction, rand(a, b), [1], correction=0, keepdim=True),
    "logsumexp": lambda a, b: example(aten.logsumexp.default, rand(a, b), [1]),
    "logsumexp all": lambda a, b: example(aten.logsumexp.default, 1e4 * rand(a, b), [0, 1], True),
    "max": lambda a, b: example(aten.max.default, rand(a, b)),
    "max int": lambda a, b: example(aten.amax.default, ints(9, a, b), [0]),
    "amin": lambda a, b: example(aten.amin.default, rand(a, b), [0]),
    "addcmul": lambda a, b: example(aten.addcmul.default, rand(a, b), rand(a, b), rand(a, 1), value=-2),
    "exp_minus": lambda a, b: example(fused.exp_minus.default, rand(a, b), rand(a, 1)),
    "minus_softmax": lambda a, b: example(fused.minus_softmax.default, rand(a, b), rand(a, b), rand(a, 1), rand(a, 1)),
    "vector_norm": lambda a, b: example(aten.linalg_vector_norm.default, rand(a, b), 2, [1]),
    "cumsum": lambda a, b: example(aten.cumsum.default, rand(a, b), -1),
    "flip": lambda a, b: example(aten.flip.default, rand(a, b), [0]),
    "roll": lambda a, b: example(aten.roll.default, rand(a, b), [1], [0]),
    "roll flat": lambda a, b: example(aten.roll.default, rand(a, b), [1]),
    "tril": lambda a, b: example(aten.tril.default, rand(a, b, b)),
    "topk": lambda a, b: example(aten.topk.default, rand(a, b + 2), 2),
    "sort": lambda a, b: example(aten.sort.default, rand(a, b)),
    "slice": lambda a, b: example(aten.slice.Tensor, rand(a, b + 2), -1, 1, 3),
    "slice full": lambda a, b: example(aten.slice.Tensor, rand(a, b), 0, 0, 9223372036854775807),
    "slice_backward": lambda a, b: example(aten.slice_backward.default, rand(a, b), [a, b + 4], 1, 1, b + 1, 1),
    "slice_backward full": lambda a, b: example(aten.slice_backward.default, rand(a, b), [a, b], 0, 0, 1 << 62, 1),
    "select": lambda a, b: example(aten.select.int, rand(a, b, 3), 1, b - 1),
    "select_backward": lambda a, b: example(aten.select_backward.default, rand(a, 3), [a, b, 3], 1, -1),
    "slice_scatter": lambda a, b: example(aten.slice_scatter.default, rand(a, b + 2), rand(a, 2), 1, 0, 2),
    "select_scatter": lambda a, b: example(aten.select_scatter.default, rand(a, b), rand(a), 1, 0),
    "cat equal": lambda a, b: example(aten.cat.default, [rand(a, b), rand(a, b), rand(a, b)], -1),
    "cat": lambda a, b: example(aten.cat.default, [rand(a, b), rand(a, 1), rand(a, 2)], 1),
    "cat rows": lambda a, b: example(aten.cat.default, [rand(a, b), rand(a + 1, b)]),
    "stack": lambda a, b: example(aten.stack.default, [rand(a, b), rand(a, b)], 1),
    "unbind": lambda a, b: example(aten.unbind.int, rand(a, 3, b), 1),
    "split equal": lambda a, b: example(aten.split.Tensor, rand(a, 3 * b), b, 1),
    "split": lambda a, b: example(aten.split.Tensor, rand(a, 2 * b + 1), b, 1),
    "split sizes": lambda a, b: example(aten.split_with_sizes.default, rand(a, b + 3), [b, 1, 2], -1),
    "pad": lambda a, b: example(aten.constant_pad_nd.default, rand(a, b), [0, 1], 7.0),
    "pad zero": lambda a, b: example(aten.constant_pad_nd.default, rand(a, b, 2), [1, 0, 0, 0, 2, 1]),
    "repeat": lambda a, b: example(aten.repeat.default, rand(a, b), [2, 1, 3]),
    "softmax": lambda a, b, c: example(aten._softmax.default, rand(a, b, c), -1, False),
    "softmax_backward": lambda a, b: example(
        aten._softmax_backward_data.default, rand(a, b), rand(a, b), -1, torch.float64
    ),
    "log_softmax": lambda a, b: example(aten._log_softmax.default, rand(a, b), 1, False),
    "log_softmax_backward": lambda a, b: example(
        aten._log_softmax_backward_data.default, rand(a, b), rand(a, b), 1, torch.float64
    ),
    "layer_norm": lambda a, b, h: example(aten.native_layer_norm.default, rand(a, b, h), [h], rand(h), rand(h), 1e-5),
    "layer_norm plain": lambda a, b, h: example(
        aten.native_layer_norm.default, rand(a, b, h), [b, h], None, None, 1e-5
    ),
    "layer_norm_backward": lambda a, b, h: layer_norm_backward(a, b, h, [True, True, True]),
    "layer_norm_backward dx": lambda a, b, h: layer_norm_backward(a, b, h, [True, False, False]),
    "rms_norm": lambda a, b, h: example(aten._fused_rms_norm.default, rand(a, b, h), [h], rand(h), 1e-5),
    "embedding": lambda v, h, a, b: example(aten.embedding.default, rand(v, h), ints(v, a, b)),
    "embedding padding": lambda v, h, a: example(aten.embedding.default, rand(v, h), ints(v, a), v - 1),
    "embedding_backward": lambda v, h, a, b: example(
        aten.embedding_dense_backward.default, rand(a, b, h), ints(v, a, b), v, -1, False
    ),
    "embedding_backward padding": lambda v, h, a: example(
        aten.embedding_dense_backward.default, rand(a, h), ints(v, a), v, v - 1, False
    ),
    "embedding_backward frequency": lambda v, h, a: example(
        aten.embedding_dense_backward.default, rand(a, h), ints(v, a), v, -1, True
    ),
    "gather": lambda a, b: example(aten.gather.default, rand(a, b), 1, ints(b, a, 1)),
    "gather many": lambda a, b, c: example(aten.gather.default, rand(a, b, 3), 1, ints(b, a, c, 2)),
    "scatter": lambda a, b: example(aten.scatter.src, rand(a, b), 1, ints(b, a, 1), rand(a, 1)),
    "scatter value": lambda a, b: example(aten.scatter.value, rand(a, b), 1, ints(b, a, 2), 0),
    "scatter_add": lambda a, b: example(aten.scatter_add.default, rand(a, b), 1, ints(b, a, 3), rand(a, 3)),
    "index_select": lambda a, b, c: example(aten.index_select.default, rand(a, b), 1, ints(b, c)),
    "index": lambda a, b, c: example(aten.index.Tensor, rand(2, a, b, 2), [None, ints(a, c, 1), ints(b, 3)]),
    "index apart": lambda a, b, c: example(aten.index.Tensor, rand(a, 3, b), [ints(a, c), None, ints(b, c)]),
    "index_put": lambda a, b, c: example(
        aten.index_put.default, rand(a, b), [None, torch.randperm(b)[:1]], rand(a, 1), False
    ),
    "index_put add": lambda a, b, c: example(aten.index_put.default, rand(a, b), [ints(a, c)], rand(c, b), True),
    "mse_loss": lambda a, b: example(aten.mse_loss.default, rand(a, b), rand(a, b)),
    "mse_loss sum": lambda a, b: example(aten.mse_loss.default, rand(a, b), rand(a, b), 2),
    "mse_loss none": lambda a, b: example(aten.mse_loss.default, rand(a, b), rand(a, b), 0),
    "mse_loss_backward": lambda a, b: example(aten.mse_loss_backward.default, rand(), rand(a, b), rand(a, b), 1),
    "mse_loss_backward sum": lambda a, b: example(aten.mse_loss_backward.default, rand(), rand(a, b), rand(a, b), 2),
    "mse_loss_backward none": lambda a, b: example(
        aten.mse_loss_backward.default, rand(a, b), rand(a, b), rand(a, b), 0
    ),
    "nll_loss": lambda n, c: example(aten.nll_loss_forward.default, rand(n, c), ints(c, n), None, 1, 0),
    "nll_loss_backward": lambda n, c: example(
        aten.nll_loss_backward.default, rand(), rand(n, c), ints(c, n), None, 1, 0, rand()
    ),
    "nll_loss_backward weights": lambda n, c: example(
        aten.nll_loss_backward.default, rand(n), rand(n, c), ints(c, n), rand(c), 0, -100, rand()
    ),
    "nll_loss_backward one row": lambda c: example(
        aten.nll_loss_backward.default, rand(), rand(c), ints(c), None, 2, -100, rand()
    ),
    "nll_loss2d_backward": lambda n, c: example(
        aten.nll_loss2d_backward.default, rand(), rand(n, c, 2, 3), ints(c, n, 2, 3), rand(c), 1, 1, rand()
    ),
    "full": lambda a, b: example(aten.full.default, [a, b], 2.5),
    "zeros": lambda a, b: example(aten.zeros.default, [a, b], dtype=torch.float64),
    "new_zeros": lambda a, b: example(aten.new_zeros.default, rand(a, b), [b, a]),
    "new_full": lambda a, b: example(aten.new_full.default, rand(a, b), [a, b], 3),
    "scalar_tensor": lambda: example(aten.scalar_tensor.default, 2.0, dtype=torch.float64),
    "arange": lambda a: example(aten.arange.default, a),
    "arange start": lambda a: example(aten.arange.start, 3, 3 + a, dtype=torch.int32),
    "arange step": lambda a: example(aten.arange.start_step, 0.5, 0.5 + 0.25 * a, 0.25, dtype=torch.float64),
    "attention": lambda b, h, s, d: attention(b, h, h, s, s, d, causal=False),
    "attention grouped": lambda b, h, s, d: attention(b, 2 * h, h, s, s + 1, d, causal=False),
    "attention causal": lambda b, h, s, d: attention(b, 2 * h, h, s, s, d, causal=True),
    "attention masked": lambda b, h, s, d: attention(b, h, h, s, s, d, causal=False, mask=rand(b, 1, s, s)),
    "attention mask per head": lambda b, h, s, d: attention(
        b, 2 * h, h, s, s, d, causal=False, mask=rand(1, 2 * h, s, s)
    ),
    "attention_backward": lambda b, h, s, d: attention_backward(b, h, h, s, d, causal=False),
    "attention_backward grouped": lambda b, h, s, d: attention_backward(b, 3 * h, h, s, d, causal=True),
    "attention_backward masked": lambda b, h, s, d: attention_backward(
        b, 2 * h, h, s, d, causal=False, mask=rand(b, 1, s, s)
    ),
}


def layer_norm_backward(a: int, b: int, h: int, wanted: list[bool]) -> Example:
    x, weight, bias = rand(a, b, h), rand(h), rand(h)
    _, mean, rstd = aten.native_layer_norm.default(x, [h], weight, bias, 1e-5)
    return example(aten.native_layer_norm_backward.default, rand(a, b, h), x, [h], mean, rstd, weight, bias, wanted)


def attention(
    b: int, heads: int, kv: int, queries: int, keys: int, d: int, causal: bool, mask: torch.Tensor | None = None
) -> Example:
    options = {"scale": 0.5} if mask is None else {"attn_mask": mask, "scale": 0.5}
    q, k, v = rand(b, heads, queries, d), rand(b, kv, keys, d), rand(b, kv, keys, d)
    return example(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal, **options)


def attention_backward(
    b: int, heads: int, kv: int, s: int, d: int, causal: bool, mask: torch.Tensor | None = None
) -> Example:
    forward = attention(b, heads, kv, s, s, d, causal, mask)
    out, logsumexp = forward.run(forward.tensors)
    q, k, v = forward.tensors[:3]
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return example(
        op, torch.randn_like(q), q, k, v, out, logsumexp, 0.0, causal, **bind(forward.call.kwargs, forward.tensors)
    )


def sizes_of(builder: Callable[..., Example]) -> st.SearchStrategy[list[int]]:
    count = builder.__code__.co_argcount
    return st.lists(st.integers(1, 7), min_size=count, max_size=count)


@pytest.mark.parametrize("name", CASES)
def test_blocks_and_sums_of_every_rule(name: str) -> None:
    builder = CASES[name]

    @settings(max_examples=8)
    @given(sizes_of(builder))
    def run(sizes: list[int]) -> None:
        torch.manual_seed(sum(sizes))
        check(builder(*sizes))

    run()


# --- what a rule must not say


def linear(target: Any, *args: Any, **kwargs: Any) -> set[frozenset[int]]:
    return set(example(target, *args, **kwargs).rule.linear)


def test_sums_do_not_pass_where_the_op_is_not_linear() -> None:
    x, y, chosen = rand(4, 4), rand(4, 4), flags(4, 4)
    assert linear(aten.add.Tensor, x, 10.0) == set()
    assert linear(aten.add.Tensor, x, y) == {frozenset({0, 1})}
    assert linear(aten.mul.Tensor, x, y) == {frozenset({0}), frozenset({1})}
    assert linear(aten.div.Tensor, x, y) == {frozenset({0})}
    assert linear(aten.where.ScalarOther, chosen, x, 1) == set()
    assert linear(aten.masked_fill.Scalar, x, chosen, -1.0) == set()
    assert linear(aten.constant_pad_nd.default, x, [1, 0], 1.0) == set()
    assert linear(aten.gelu.default, x) == set()
    assert linear(aten._to_copy.default, x, dtype=torch.float32) == set()
    assert linear(aten._to_copy.default, x.float(), dtype=torch.float64) == {frozenset({0})}
    assert linear(aten.add.Tensor, x.float(), rand()) == set()
    assert linear(aten.clone.default, chosen) == set()


def test_factors_of_the_ops_that_carry_a_transformer() -> None:
    assert str(CASES["mm"](2, 3, 4).rule) == "(m n, n k) -> (m k); sum n"
    assert str(CASES["addmm"](2, 3, 4).rule) == "(k, m n, n k) -> (m k); whole n"
    assert str(CASES["view split"](2, 3, 4).rule) == "(a (b c)) -> (a 1 b c)"
    assert str(CASES["split equal"](2, 3).rule) == "(a (p b)) -> (a b, a b, a b); whole p"
    assert str(CASES["embedding"](5, 4, 2, 3).rule) == "(v h, a b) -> (a b h); sum v"
    assert str(CASES["embedding_backward"](5, 4, 2, 3).rule) == "(a b h, a b) -> (v h); sum a; sum b"
    assert str(CASES["layer_norm_backward"](2, 3, 4).rule).endswith("-> (a b c, c, c); sum a; sum b; whole c")
    grouped = CASES["attention_backward grouped"](2, 2, 3, 4).rule
    assert str(grouped).endswith("-> (b (h g) q d, b h s d, b h s e); sum g; sum q; sum s; whole d; whole e")


def test_ops_that_draw_random_numbers_or_need_data_have_no_rule() -> None:
    def rule_for(target: Any, *args: Any) -> OpRule | None:
        graph = fx.Graph()
        node = graph.call_function(target, args)
        node.meta["val"] = rand(4, 4)
        for operand in node.all_input_nodes:
            operand.meta["val"] = rand(4, 4)
        return rule_of(op_call(node))

    assert rule_for(aten.rand.default, [4, 4]) is None
    assert rule_for(aten.as_strided.default, fx.Graph().placeholder("x"), [4, 4], [4, 1]) is None


# --- the ops of whole models: every one has a rule, and every distinct call of theirs holds in blocks


def mlp() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    layers = [nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 8, bias=False), nn.ReLU(), nn.Linear(8, 8), nn.SiLU()]
    return nn.Sequential(*layers, nn.LayerNorm(8), nn.Linear(8, 5)).double(), (rand(4, 3, 6),), {}


def llama(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).double(), (), token_inputs(20)


def gpt2(attention: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config).double(), (), token_inputs(20)


def token_inputs(vocabulary: int) -> dict[str, Any]:
    labels = ints(vocabulary, 2, 6)
    labels[0, :2] = -100
    return {"input_ids": ints(vocabulary, 2, 6), "labels": labels}


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "mlp": mlp,
    "llama eager": lambda: llama("eager"),
    "llama sdpa": lambda: llama("sdpa"),
    "gpt2 eager": lambda: gpt2("eager"),
    "gpt2 sdpa": lambda: gpt2("sdpa"),
}


def mse(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, torch.ones_like(output))


def op_calls(graph: fx.Graph) -> Iterator[OpCall]:
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            yield op_call(node)


def index_bound(call: OpCall, operand: Operand) -> int:
    """Integers below this are valid in the operand's place."""
    if call.target is aten.embedding_dense_backward.default:
        return int(call.args[2])
    if call.target is aten.nll_loss_backward.default:
        return call.operands[1].shape[1]
    if call.target in (aten.embedding.default, aten.gather.default):
        return call.operands[0].shape[0 if call.target is aten.embedding.default else call.args[1]]
    return 9


def random_operand(call: OpCall, operand: Operand) -> torch.Tensor:
    if operand.dtype == torch.bool:
        return flags(*operand.shape)
    if operand.dtype.is_floating_point:
        return rand(*operand.shape)
    return ints(index_bound(call, operand), *operand.shape)


@dataclass
class Step:
    """A model's step after `Decompose`, with what it computed and returned by name before."""

    captured: Captured
    inputs: list[torch.Tensor]
    results: list[Any]
    names: list[str]


@functools.cache
def decomposed(name: str, training: bool) -> Step:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    captured = capture(model, args, kwargs, loss_fn=mse if name == "mlp" else None, training=training)
    inputs = graph_inputs(captured, model, [*args, *kwargs.values()])
    before = Step(captured, inputs, list(captured.gm(*inputs)), output_names(captured))
    Decompose().apply(captured.gm)
    return before


def output_names(captured: Captured) -> list[str]:
    return [str(x) for x in captured.gm.graph.output_node().args[0]]


STEPS = list(itertools.product(MODELS, (True, False)))


@pytest.mark.parametrize(("name", "training"), STEPS)
def test_every_call_of_the_models_has_a_rule_that_holds_in_blocks(name: str, training: bool) -> None:
    torch.manual_seed(0)
    calls: dict[str, OpCall] = {}
    for call in op_calls(decomposed(name, training).captured.gm.graph):
        call = OpCall(*(in_double(getattr(call, field.name)) for field in fields(OpCall)))
        calls.setdefault(f"{call.target}{call.args}{call.kwargs}", call)
    without_rule = {str(call.target) for call in calls.values() if rule_of(call) is None}
    assert without_rule == set()
    for call in calls.values():
        rule = rule_of(call)
        assert rule is not None
        ex = Example(call, [random_operand(call, operand) for operand in call.operands], rule)
        check_maps(ex)
        check_cuts(ex, parts=(2, 3))
        check_sums(ex)


@pytest.mark.parametrize(("name", "training"), STEPS)
def test_decompose_computes_the_same_under_the_same_names(name: str, training: bool) -> None:
    step = decomposed(name, training)
    assert output_names(step.captured) == step.names
    values = [value for node in step.captured.gm.graph.nodes for value in as_list(node.meta.get("val"))]
    in_single = any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in values)
    tolerance = 1e-6 if in_single else 1e-12  # transformers computes its losses in float32
    for got, want in zip(step.captured.gm(*step.inputs), step.results, strict=True):
        assert isinstance(got, torch.Tensor) == isinstance(want, torch.Tensor)
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    targets = {node.target for node in step.captured.gm.graph.nodes}
    assert not targets & {aten.addmm.default, aten.nll_loss_forward.default}


def test_decompose_keeps_the_meta_and_knows_the_values() -> None:
    graph = decomposed("gpt2 sdpa", True).captured.gm.graph
    made = [node for node in graph.nodes if node.target in (aten.mm.default, aten.gather.default)]
    assert any("c_attn" in node.meta["module_path"] for node in made)
    for node in graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["is_backward"], bool)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            with torch.no_grad():
                values = as_list(node.target(*args, **kwargs))
            for value, known in zip(values, as_list(node.meta["val"]), strict=True):
                assert value is None or (value.shape, value.dtype) == (known.shape, known.dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_decomposed_nll_loss_ignores_targets(reduction: str) -> None:
    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(logits, target, ignore_index=2, reduction=reduction)

    logits, target = rand(7, 5), torch.tensor([0, 2, 4, 2, 1, 3, 2])
    captured = capture(Loss(), (logits, target), training=False)
    Decompose().apply(captured.gm)
    assert all(node.target is not aten.nll_loss_forward.default for node in captured.gm.graph.nodes)
    (got,) = captured.gm(logits, target)
    want = nn.functional.cross_entropy(logits, target, ignore_index=2, reduction=reduction)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
