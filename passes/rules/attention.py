"""Fused scaled dot-product attention.

q (b (k g) q d), k and v (b k s d): grouped-query attention has `g` query heads per head of k and v. In backward, what
a result lacks adds up in it: dk and dv over the queries and over `g`, dq over the keys; that is exact for blocks since
the global output and logsumexp are operands. Causal attention on a block of the sequence takes an explicit mask.
"""

from __future__ import annotations

from typing import Any

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, aligned, maps_of_results
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, Operand, localized, rule
from stpart_compiler.runtime import local_ops

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
    q, k, v, out, scores = _maps(factors, call.operands[:3], summed=PARALLEL, keys=WHOLE)
    masks = [aligned(scores, mask.shape) for mask in call.operands[3:]]
    return factors.rule((q, k, v, *masks), (out, scores[:3]))


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(call: OpCall) -> OpRule | None:
    """(grad_out, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask, scale) -> (dq, dk, dv)."""
    if call.arg(6, "dropout_p", 0.0):
        return None
    factors = Factors()
    q, k, v, out, scores = _maps(factors, call.operands[1:4], summed=SUM, keys=SUM)
    masks = [aligned(scores, mask.shape) for mask in call.operands[6:]]
    outputs = maps_of_results(call, (q, k, v))
    return factors.rule((out, q, k, v, out, scores[:3], *masks), outputs, ((0,),))


@localized(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention_block(call: OpCall, block: Block) -> LocalCall:
    if not _needs_help(call, block, 0, 4):
        return call.target, call.args, call.kwargs
    q, k, v = call.operands[:3]
    return local_ops.attention_block, (q, k, v, *_context(call, block, 0, 4)), {}


@localized(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward_block(call: OpCall, block: Block) -> LocalCall:
    if not _needs_help(call, block, 1, 7):
        return call.target, call.args, call.kwargs
    return local_ops.attention_backward_block, (*call.operands[:6], *_context(call, block, 1, 7)), {}


def _needs_help(call: OpCall, block: Block, q: int, causal_at: int) -> bool:
    """The kernel's causal mask begins at the first query and key it gets."""
    maps = block.rule.inputs
    sequence_cut = block.is_cut(maps[q][2]) or block.is_cut(maps[q + 1][2])
    return bool(call.arg(causal_at, "is_causal", False)) and sequence_cut


def _context(call: OpCall, block: Block, q: int, causal_at: int) -> tuple[Any, ...]:
    """Mask, scale, and where a causal mask is wanted the spans of queries and keys."""
    scale, mask = call.kwargs.get("scale"), call.kwargs.get("attn_mask")
    if not call.arg(causal_at, "is_causal", False):
        return mask, scale, None, None
    maps = block.rule.inputs
    return mask, scale, block.digits(maps[q][2]), block.digits(maps[q + 1][2])
