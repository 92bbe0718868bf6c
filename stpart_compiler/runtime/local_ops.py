"""What a block of an op computes where the aten op itself would not do on a block.

Generated programs call these functions. Each takes local tensors and says what its share of the whole result is. A
*span* describes a dim that is cut: one `(stride, size, low, high)` per factor of the dim, major to minor; the block
holds the positions whose digit `(position // stride) % size` is in `low..high` (exclusive) for every factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from stpart_compiler.runtime.fused_ops import cross_entropy_grad

aten = torch.ops.aten

Span = Sequence[tuple[int, int, int, int]]

MEAN = 1  # torch's code of a loss's `reduction`


def block_mean(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Share of a block in a mean over `dims`: its sum over the `count` elements of the whole. Shares add up."""
    return torch.sum(x, list(dims), keepdim=keepdim, dtype=dtype) / count


def zero_beside(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Result of a block without elements, on the device of x."""
    return x.new_zeros(tuple(shape), dtype=dtype)


def full_beside(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, value: float | int | bool) -> torch.Tensor:
    """Result of a block without elements where results combine otherwise than by addition."""
    return x.new_full(tuple(shape), value, dtype=dtype)


def zeros_beside(
    x: torch.Tensor, made: Sequence[tuple[Sequence[int], torch.dtype] | None]
) -> tuple[torch.Tensor | None, ...]:
    """Results of a block without elements, on the device of x."""
    return tuple(zero_beside(x, *one) if one is not None else None for one in made)


def span_length(span: Span) -> int:
    """Number of positions in the block."""
    return math.prod(high - low for _, _, low, high in span)


def positions_in_block(positions: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each global position: its index inside the block (0 for those outside), and whether it is inside."""
    index = torch.zeros_like(positions)
    inside = positions >= 0
    for stride, size, low, high in span:
        digit = positions.div(stride, rounding_mode="floor").remainder(size)
        inside = inside & (digit >= low) & (digit < high)
        index = index * (high - low) + digit - low
    return torch.where(inside, index, 0), inside


def block_positions(span: Span, device: torch.device | None = None) -> torch.Tensor:
    """Global positions of the block, in order, int64 [span_length]."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for stride, _, low, high in span:
        here = torch.arange(low, high, dtype=torch.int64, device=device) * stride
        found = (found[:, None] + here).reshape(-1)
    return found


def arange_block(
    start: float, step: float, span: Span, dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """Block of `arange(start, ..., step)`."""
    positions = block_positions(span, device)
    if not (isinstance(start, int) and isinstance(step, int)):
        positions = positions.double()
    return (positions * step + start).to(dtype)


def check_indices(indices: torch.Tensor, span: Span) -> None:
    """What the whole op checks, and a block cannot: an index that lies in no block would give zeros.

    Raises:
        IndexError: an index is out of range (RuntimeError on a GPU, and later).
    """
    low, high = 0, math.prod(size for _, size, _, _ in span)
    wrong = (indices < low) | (indices >= high)
    if indices.device.type != "cpu":
        torch._assert_async(~wrong.any())
    elif bool(wrong.any()):
        raise IndexError(f"index out of range: got {int(indices[wrong][0])}, expected {low}..{high - 1}")


def embedding_block(weight: torch.Tensor, indices: torch.Tensor, span: Span) -> torch.Tensor:
    """Rows of a block of the embedding table; zeros for indices outside the block. Shares add up.

    weight [block, hidden], indices [...] -> [..., hidden].
    """
    check_indices(indices, span)
    index, inside = positions_in_block(indices, span)
    return torch.where(inside[..., None], torch.nn.functional.embedding(index, weight), 0)


def embedding_backward_block(grad: torch.Tensor, indices: torch.Tensor, span: Span, padding_idx: int) -> torch.Tensor:
    """Gradient of a block of the embedding table. grad [..., hidden], indices [...] -> [block, hidden]."""
    index, inside = positions_in_block(indices, span)
    inside = inside & (indices != padding_idx)
    kept = torch.where(inside[..., None], grad, 0)
    table: torch.Tensor = aten.embedding_dense_backward(kept, index, span_length(span), -1, False)
    return table


def gather_block(x: torch.Tensor, dim: int, indices: torch.Tensor, span: Span) -> torch.Tensor:
    """`gather` from a block of x along `dim`; zeros for indices outside the block. Shares add up."""
    check_indices(indices, span)
    index, inside = positions_in_block(indices, span)
    return torch.where(inside, torch.gather(x, dim, index), 0)


def mse_loss_block(x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    """Share of a block in the mean squared error over `count` elements. Shares add up."""
    return torch.sum((x - y) ** 2) / count


def mse_loss_backward_block(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    """Gradient of the mean squared error over `count` elements with respect to a block of x."""
    return grad * (2.0 / count) * (x - y)


def nll_loss_backward_block(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: torch.Tensor,
    along: int,
    classes: Span,
) -> torch.Tensor:
    """Gradient of a block of the log-probabilities: not zero at the targets that are classes of the block.

    grad and target [rows] (grad [] if reduced), logits [rows, block], or with more dims after dim `along`;
    weight [block].
    """
    index, inside = positions_in_block(target, classes)
    share = -grad if weight is None else -grad * weight[index]
    if reduction == MEAN:
        share = share / total_weight
    share = torch.where(inside & (target != ignored), share, 0)
    return logits.new_zeros(logits.shape).scatter_(along, index.unsqueeze(along), share.unsqueeze(along))


def cross_entropy_grad_block(
    rows: torch.Tensor, x: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, dim: int, classes: Span
) -> torch.Tensor:
    """`cross_entropy_grad` of a block of the classes."""
    local, inside = positions_in_block(index, classes)
    return cross_entropy_grad(rows, x, shift, torch.where(inside, local, -1), dim)


def place_of_block(x: torch.Tensor, value: torch.Tensor, dim: int, keepdim: bool, span: Span) -> torch.Tensor:
    """First position in the whole of `value` (size 1 along dim), or of a NaN, in a block; past all where it is none."""
    here = torch.eq(x, value).logical_or_(torch.ne(x, x)).to(torch.uint8)
    found, local = torch.max(here, dim, keepdim=keepdim)
    return torch.where(found > 0, block_positions(span, x.device)[local], torch.iinfo(torch.int64).max)


def causal_mask(queries: Span, keys: Span, like: torch.Tensor) -> torch.Tensor:
    """Additive mask of a block of causal attention [queries, keys]: -inf where the key is after the query."""
    rows, columns = block_positions(queries, like.device), block_positions(keys, like.device)
    mask = torch.zeros(len(rows), len(columns), dtype=like.dtype, device=like.device)
    return mask.masked_fill(rows[:, None] < columns, -math.inf)


def attention_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    queries: Span | None,
    keys: Span | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block. `causal`: query i sees the keys up to i; with spans: those up to its position.

    q [b, heads, queries, d], k and v [b, kv heads, keys, d] -> out like q, logsumexp [b, heads, queries]; -inf for
    queries that see none of the keys, where the kernel itself says 0.
    """
    if queries is not None and keys is not None:
        mask = causal_mask(queries, keys, q)
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:
        logsumexp = logsumexp.masked_fill(torch.isneginf(mask).all(-1), -math.inf)
    return out, logsumexp


def attention_backward_block(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
    causal: bool,
    queries: Span | None,
    keys: Span | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shares of a block in dq, dk and dv, given the whole rows' output and logsumexp. Shares add up."""
    mask = causal_mask(queries, keys, q) if queries is not None and keys is not None else None
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


def striped_attention_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, own: int, other: int, strict: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of `own` stripes of queries over `other` stripes of keys, all before those or all behind them.

    A dim of positions is (rows, stripes): a query of row r sees the keys of the rows up to r, if `strict` of those
    before. Stripes of queries count as heads, those of keys come one after another, so that the kernel's mask does.
    q [b, heads, rows * own, d], k and v [b, kv heads, rows * other, d] -> out like q, logsumexp [b, heads, rows * own];
    -inf for the first row if `strict`.
    """
    queries, first = _stripes_as_heads(q, own), int(strict)
    made: tuple[torch.Tensor, torch.Tensor] | None = None
    for key, value in zip(_stripes(k, other), _stripes(v, other), strict=True):
        rows = key.shape[2] - first
        part = aten._scaled_dot_product_flash_attention_for_cpu(
            queries[:, :, first:], key[:, :, :rows], value[:, :, :rows], 0.0, True, scale=scale
        )
        made = part if made is None else merge_attention(made[0].to(part[1].dtype), made[1], *part)
    assert made is not None, "attention over no keys"
    out, logsumexp = (
        _heads_as_stripes(x[..., None] if x.ndim == 3 else x, own, first, fill)
        for x, fill in zip(made, (0.0, -math.inf), strict=True)
    )
    return out.to(q.dtype), logsumexp[..., 0]


def striped_attention_backward_block(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
    own: int,
    other: int,
    strict: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shares of `striped_attention_block` in dq, dk and dv, given the whole rows' output and logsumexp."""
    first = int(strict)
    grad, queries, out, lse = (_stripes_as_heads(x, own)[:, :, first:] for x in (grad, q, out, logsumexp[..., None]))
    dq: torch.Tensor | None = None
    dks, dvs = [], []
    for key, value in zip(_stripes(k, other), _stripes(v, other), strict=True):
        rows = key.shape[2] - first
        part, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, queries, key[:, :, :rows], value[:, :, :rows], out, lse[..., 0], 0.0, True, scale=scale
        )
        dq = part if dq is None else dq + part
        dks.append(_with_rows_behind(dk, first))
        dvs.append(_with_rows_behind(dv, first))
        del dk, dv
    assert dq is not None, "attention over no keys"
    return _heads_as_stripes(dq, own, first, 0.0), _joined_stripes(dks), _joined_stripes(dvs)


def _stripes(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """[b, heads, rows * count, d] -> `count` times [b, heads, rows, d]."""
    return x.reshape(*x.shape[:2], -1, count, x.shape[-1]).unbind(3)


def _joined_stripes(parts: list[torch.Tensor]) -> torch.Tensor:
    """The reverse."""
    return torch.stack(parts, 3).flatten(2, 3) if len(parts) > 1 else parts[0]


def _with_rows_behind(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, count)) if count else x


def _stripes_as_heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[b, heads, rows * count, d] -> [b, heads * count, rows, d]."""
    b, heads, length, d = x.shape
    rows = length // count
    return x.reshape(b, heads, rows, count, d).transpose(2, 3).reshape(b, heads * count, rows, d)


def _heads_as_stripes(x: torch.Tensor, count: int, first: int, fill: float) -> torch.Tensor:
    """The reverse, with `first` rows of `fill` put before."""
    padded = torch.nn.functional.pad(x, (0, 0, first, 0), value=fill) if first else x
    b, heads, rows, d = padded.shape
    return padded.reshape(b, heads // count, count, rows, d).transpose(2, 3).reshape(b, heads // count, rows * count, d)


def merge_attention(
    out: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from the attention over each. out [b, heads, queries, d], lse without d.

    A row that sees none of the keys of a set has logsumexp -inf there. Made in the precision of the first two.
    """
    merged = torch.logaddexp(logsumexp, part_logsumexp)
    made = _weighted(out, logsumexp, merged)
    return made.add_(_weighted(part, part_logsumexp, merged)), merged


def merged_attention(
    out: torch.Tensor, logsumexp: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged attention as the kernel gives it: rows that saw no key at all have logsumexp 0."""
    return out.to(dtype), torch.where(torch.isneginf(logsumexp), 0, logsumexp)


def merge_written(
    out: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attention` of attention written out: out (rows..., d), lse of the same rows, with whatever dims."""
    rows = out.shape[:-1]
    merged = merge_attention(out, logsumexp.reshape(rows), part, part_logsumexp.reshape(rows))
    return merged[0], merged[1].reshape(logsumexp.shape)


def merged_written(out: torch.Tensor, logsumexp: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged attention as its ops give it: nan in rows that saw no key at all."""
    unseen = torch.isneginf(logsumexp).reshape(*out.shape[:-1], 1)
    return torch.where(unseen, torch.nan, out).to(dtype), logsumexp


def _weighted(out: torch.Tensor, logsumexp: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """What a set of keys adds to the merged output, a new tensor; it is written once."""
    weight = torch.exp(logsumexp - merged)[..., None]
    share = out * weight if out.dtype == weight.dtype else out.to(weight.dtype).mul_(weight)
    return share.masked_fill_(torch.isneginf(logsumexp)[..., None], 0)


def grouped_block(
    product: Callable[..., torch.Tensor], experts: Span, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Products of the tokens of a block of experts; zeros for those of other experts. Shares add up.

    x [tokens, k] sorted by expert, weight [block, k, n], ends [experts] (where each expert's tokens end)
    -> [tokens, n].
    """
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    rows, local = _rows_of(experts, ends)
    out[rows] = product(x[rows], weight, local)
    return out


def grouped_backward_block(
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    experts: Span,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `grouped_block`: of x, whose shares add up, and of the block of the weight."""
    dx = torch.zeros_like(x)
    rows, local = _rows_of(experts, ends)
    dx[rows], dweight = backward(x[rows], weight, local, grad[rows])
    return dx, dweight


def _rows_of(experts: Span, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the tokens of a block of experts, in order, and where each expert's tokens end among them."""
    mine = block_positions(experts, ends.device)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = (ends - starts)[mine]
    rows = torch.cat([torch.arange(int(starts[e]), int(ends[e]), device=ends.device) for e in mine])
    return rows, counts.cumsum(0).to(ends.dtype)


def contiguous_call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an op whose kernel takes its operands for contiguous: blocks that are cut out of larger tensors are not."""
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
    return op(*args, **kwargs)
