"""Fused scaled dot-product attention.

q (b (k g) q d), k and v (b k s d): grouped-query attention has `g` query heads per head of k and v. In backward, what
a result lacks adds up in it: dk and dv over the queries and over `g`, dq over the keys; that is exact for blocks since
the global output and logsumexp are operands. In forward the keys may come block after block: their outputs are merged
by logsumexp (ring attention; Liu et al. 2023, METP section on attention).

Causal attention on a block of the sequence skips keys that come after all its queries. Where ranks have stripes of the
sequence (every n-th token; Brandon et al. 2023, Striped Attention), the kernel's own mask does for all blocks, moved by
one row for keys behind their queries: every rank computes half of every block. Else it takes an explicit mask where
queries and keys are not the same span.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stpart_compiler.cost_models.compute import ALL, Computed, causal_share, is_causal
from stpart_compiler.ir.rule import ONLINE, PARALLEL, SUM, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, aligned, maps_of_results
from stpart_compiler.passes.rules.registry import (
    MERGES,
    WORK,
    Block,
    LocalCall,
    Merge,
    OpCall,
    Operand,
    Span,
    Work,
    localized,
    rule,
)
from stpart_compiler.runtime import local_ops
from stpart_compiler.runtime.local_ops import span_length

aten = torch.ops.aten


def _maps(
    factors: Factors, operands: tuple[Operand, ...], summed: str, keys: str
) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap, TensorMap]:
    """Maps of q, k, v, of the output and of the scores (b, heads, queries, keys)."""
    q, k, v = operands
    heads, kv_heads = q.shape[1], k.shape[1]
    assert heads % kv_heads == 0, f"attention: {heads} query heads over {kv_heads} heads of keys"
    b = factors.dim(q.shape[0], PARALLEL, "b")
    h = factors.dim(kv_heads, PARALLEL, "h")
    g = factors.dim(heads // kv_heads, summed, "g")
    queries = factors.dim(q.shape[2], summed, "q")
    s = factors.dim(k.shape[2], keys, "s")
    d = factors.dim(q.shape[3], WHOLE, "d")
    e = factors.dim(v.shape[3], WHOLE, "e")
    all_heads = (*h, *g)
    scores = (b, all_heads, queries, s)
    return (b, all_heads, queries, d), (b, h, s, d), (b, h, s, e), (b, all_heads, queries, e), scores


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(call: OpCall) -> OpRule | None:
    """(q, k, v, dropout_p, is_causal, attn_mask, scale) -> (out, logsumexp)."""
    if call.arg(3, "dropout_p", 0.0):
        return None  # the mask of dropout depends on the place in the whole tensor
    factors = Factors()
    q, k, v, out, scores = _maps(factors, call.operands[:3], summed=PARALLEL, keys=ONLINE)
    masks = [aligned(scores, mask.shape) for mask in call.operands[3:]]
    return factors.rule((q, k, v, *masks), (out, scores[:3]), loops=scores[3])


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(call: OpCall) -> OpRule | None:
    """(grad_out, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask, scale) -> (dq, dk, dv)."""
    if call.arg(6, "dropout_p", 0.0):
        return None
    factors = Factors()
    q, k, v, out, scores = _maps(factors, call.operands[1:4], summed=SUM, keys=SUM)
    masks = [aligned(scores, mask.shape) for mask in call.operands[6:]]
    outputs = maps_of_results(call, (q, k, v))
    inputs = (out, q, k, v, out, scores[:3], *masks)
    return factors.rule(inputs, outputs, ((0,),), loops=(*scores[2], *scores[3]))


@localized(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention_block(call: OpCall, block: Block) -> LocalCall:
    q, k, v = call.operands[:3]
    mask, scale = call.kwargs.get("attn_mask"), call.kwargs.get("scale")
    if _needs_help(call, block, 0):
        found = _striped(*_spans(block, 0))
        if found is not None:
            return local_ops.striped_attention_block, (q, k, v, scale, *found), {}
        return local_ops.attention_block, (q, k, v, None, scale, *_causal(block, 0)), {}
    if mask is not None and block.is_cut(block.rule.inputs[1][2]):
        return local_ops.attention_block, (q, k, v, mask, scale, False, None, None), {}
    return call.target, call.args, call.kwargs


@localized(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward_block(call: OpCall, block: Block) -> LocalCall:
    if not _needs_help(call, block, 1):
        return call.target, call.args, call.kwargs
    found, given = _striped(*_spans(block, 1)), (*call.operands[:6], call.kwargs.get("scale"))
    if found is not None:
        return local_ops.striped_attention_backward_block, (*given, *found), {}
    return local_ops.attention_backward_block, (*given, *_causal(block, 1)), {}


def causal_dims(query: int) -> Callable[[OpCall, OpRule], tuple[DimMap, ...]]:
    """Of an attention kernel whose queries are operand `query`: those of queries and keys, where it masks causally."""

    def dims(call: OpCall, rule: OpRule) -> tuple[DimMap, ...]:
        return (rule.inputs[query][2], rule.inputs[query + 1][2]) if is_causal(call) else ()

    return dims


def computed_part(queries: Span, keys: Span) -> Computed:
    """What is computed of a block of causal attention."""
    if _is_masked(queries, keys):
        return Computed(0.0)
    found = _striped(queries, keys)
    if found is not None:
        return Computed(causal_share(span_length(queries) // found[0]), found[1])
    return Computed(causal_share(span_length(queries))) if queries == keys else ALL


WORK[aten._scaled_dot_product_flash_attention_for_cpu.default] = Work(causal_dims(0), computed_part)
WORK[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = Work(causal_dims(1), computed_part)
MERGES[aten._scaled_dot_product_flash_attention_for_cpu.default] = Merge(
    local_ops.merge_attention, local_ops.merged_attention, lambda dtypes: (dtypes[1], dtypes[1])
)


def _needs_help(call: OpCall, block: Block, q: int) -> bool:
    """The kernel's causal mask begins at the first query and key it gets."""
    maps = block.rule.inputs
    return is_causal(call) and (block.is_cut(maps[q][2]) or block.is_cut(maps[q + 1][2]))


def _spans(block: Block, q: int) -> tuple[Span, Span]:
    """Queries and keys of a block."""
    maps = block.rule.inputs
    return block.digits(maps[q][2]), block.digits(maps[q + 1][2])


def _bounds(span: Span) -> tuple[int, int]:
    """First and last position of a span."""
    return sum(stride * low for stride, _, low, _ in span), sum(stride * (high - 1) for stride, _, _, high in span)


def _is_masked(queries: Span, keys: Span) -> bool:
    """Whether every key comes after every query."""
    return _bounds(keys)[0] > _bounds(queries)[1]


def _striped(queries: Span, keys: Span) -> tuple[int, int, bool] | None:
    """Of queries and keys in other stripes of the same rows: how many each, and whether keys are behind in each row."""
    (*rows, own), (*others, other) = queries, keys
    if rows != others or span_length(rows) < 2 or (other[3] > own[2] and own[3] > other[2]):
        return None
    return own[3] - own[2], other[3] - other[2], other[2] >= own[3]


def _causal(block: Block, q: int) -> tuple[bool, Span | None, Span | None]:
    """How a block is masked: whether as the kernel does it, else the spans of an explicit mask if one is needed."""
    queries, keys = _spans(block, q)
    if queries == keys:
        return True, None, None
    if _bounds(keys)[1] <= _bounds(queries)[0]:
        return False, None, None
    return False, queries, keys
