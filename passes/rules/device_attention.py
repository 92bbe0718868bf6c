"""Fused scaled dot-product attention as torch emits it on accelerators: flash, efficient, cuDNN and overrideable.

Batch and heads may always be cut, as in `rules/attention.py`. The sequence may be for flash attention without a causal
mask; else it is whole: causal masks of these kernels begin at the block's first query, and the others' logsumexp is
padded to tiles or has no defined form. Dropout has no rule: its mask depends on the place in the whole tensor. Seeds,
offsets and lengths of sequences that are packed are whole: without dropout they say nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.passes.rules.attention import causal_dims, computed_part
from stpart_compiler.passes.rules.factors import Factors, aligned
from stpart_compiler.passes.rules.registry import WORK, Block, LocalCall, OpCall, Operand, Work, localized, rule

aten = torch.ops.aten

_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_FLASH = (aten._scaled_dot_product_flash_attention.default, _FLASH_BACKWARD)
_FORWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
_BACKWARD = (
    _FLASH_BACKWARD,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)


@rule(*_FORWARD)
def device_attention(call: OpCall) -> OpRule | None:
    """(q, k, v, bias, dropout_p, is_causal, ...) -> (out, logsumexp, lengths, seeds, ...)."""
    given = _arguments(call)
    if given["dropout_p"] or given.get("return_debug_mask"):
        return None
    maps = _Maps(call, given, summed=PARALLEL)
    outputs = [maps.of_result(i, r) for i, r in enumerate(call.results)]
    return maps.factors.rule(maps.of_operands(given), outputs)


@rule(*_BACKWARD)
def device_attention_backward(call: OpCall) -> OpRule | None:
    """(grad, q, k, v, bias, out, logsumexp, ...) -> (dq, dk, dv); no rule where the bias has a gradient."""
    given = _arguments(call)
    if given["dropout_p"] or given.get("grad_input_mask", (False,))[-1]:
        return None
    maps = _Maps(call, given, summed=SUM)
    tensors = [maps.query, maps.key, maps.value]
    unwanted = [aligned(maps.scores, r.shape) if r is not None else () for r in call.results[3:]]  # of a bias
    outputs = [m if r is not None else () for m, r in zip(tensors, call.results, strict=False)]
    return maps.factors.rule(maps.of_operands(given), [*outputs, *unwanted], ((0,),))


@localized(_FLASH_BACKWARD)
def flash_backward_block(call: OpCall, block: Block) -> LocalCall:
    """The longest sequences are those of the block."""
    lengths = {"max_q": block.extent(block.rule.inputs[1][2]), "max_k": block.extent(block.rule.inputs[2][2])}
    names = [argument.name for argument in call.target._schema.arguments]
    args = tuple(lengths.get(name, value) for name, value in zip(names, call.args, strict=False))
    return call.target, args, call.kwargs


for _op in (*_FORWARD, *_BACKWARD):
    WORK[_op] = Work(causal_dims(int(_op in _BACKWARD)), computed_part)


class _Maps:
    """Maps by the names that arguments have in all these ops. `summed`: kind of what adds up in backward."""

    def __init__(self, call: OpCall, given: dict[str, Any], summed: str) -> None:
        self.factors = factors = Factors()
        q, k, v = (given[name] for name in ("query", "key", "value"))
        heads, kv_heads, self.length = q.shape[1], k.shape[1], q.shape[2]
        assert heads % kv_heads == 0, f"attention: {heads} query heads over {kv_heads} heads of keys"
        cut = call.target in _FLASH and not given["is_causal"]
        b = factors.dim(q.shape[0], PARALLEL, "b")
        h = factors.dim(kv_heads, PARALLEL, "h")
        g = factors.dim(heads // kv_heads, summed, "g")
        self.queries = factors.dim(q.shape[2], summed if cut else WHOLE, "q")
        s = factors.dim(k.shape[2], SUM if cut and summed == SUM else WHOLE, "s")
        d, e = factors.dim(q.shape[3], WHOLE, "d"), factors.dim(v.shape[3], WHOLE, "e")
        self.rows: TensorMap = (b, (*h, *g), self.queries)
        self.query, self.key, self.value = (*self.rows, d), (b, h, s, d), (b, h, s, e)
        self.out: TensorMap = (*self.rows, e)
        self.scores: TensorMap = (*self.rows, s)

    def of_operands(self, given: dict[str, Any]) -> list[TensorMap]:
        operands = [(name, value) for name, value in given.items() if isinstance(value, Operand)]
        return [self._named(name, x) for name, x in sorted(operands, key=lambda pair: pair[1].index)]

    def of_result(self, index: int, result: Operand | None) -> TensorMap:
        return self._named(("out", "logsumexp")[index] if index < 2 else "", result) if result is not None else ()

    def _named(self, name: str, x: Operand) -> TensorMap:
        known = {"query": self.query, "key": self.key, "value": self.value, "out": self.out}
        if name.startswith("grad_out"):
            return self.out
        if name == "attn_bias":
            return aligned(self.scores, x.shape)
        if name in ("logsumexp", "log_sumexp"):
            return (*self.rows[:2], self._row(x.shape[2]), *self.factors.dims(x.shape[3:], WHOLE))
        return known.get(name) or self.factors.dims(x.shape, WHOLE)

    def _row(self, size: int) -> DimMap:
        """The queries' dim of a logsumexp, which may be padded."""
        return self.queries if size == self.length else self.factors.dim(size, WHOLE)


def _arguments(call: OpCall) -> dict[str, Any]:
    """All arguments by name, with their defaults."""
    arguments = call.target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {argument.name: value for argument, value in zip(arguments, call.args, strict=False)}
    return given | call.kwargs
