"""What a block of the places of an image computes where the aten op itself would not do.

An op pads both sides of a dim alike, a block has padding at the outer borders of the image alone. `margins`: as torch's
padding takes them, the last dim first, (before, after) each; negative widths cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from stpart_compiler.ir.combine import neutral
from stpart_compiler.ir.rule import MAX

aten = torch.ops.aten


def padded_convolution(margins: Sequence[int], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Convolution of an image with zeros around it."""
    out: torch.Tensor = aten.convolution(_around(x, margins), *args)
    return out


def cropped_convolution(margins: Sequence[int], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Transposed convolution, with the margins cut off the result."""
    return _around(aten.convolution(x, *args), margins)


def padded_weight_gradient(
    margins: Sequence[int], grad: torch.Tensor, x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """Backward of a convolution of an image with zeros around it."""
    found: tuple[torch.Tensor | None, ...] = aten.convolution_backward(grad, _around(x, margins), *args)
    return found


def _around(x: torch.Tensor, margins: Sequence[int], value: float = 0.0) -> torch.Tensor:
    padded: torch.Tensor = aten.constant_pad_nd(x, margins, value) if any(margins) else x
    return padded


def max_pool_block(
    x: torch.Tensor,
    margins: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest values of a block x [..., places], and where they are in whole channels of `sizes`.

    `starts`: of the block's places in the whole. In a window in which all is -inf it is the first place of the image.
    """
    pool = aten.max_pool2d_with_indices if len(sizes) == 2 else aten.max_pool3d_with_indices
    padded = _around(x, margins, float(neutral(MAX, x.dtype)))
    values, rest = pool(padded, kernel, stride)
    indices = torch.zeros_like(rest)
    step = 1
    for dim in range(1, len(sizes) + 1):
        width = padded.shape[-dim]
        place = rest % width - margins[2 * dim - 2]
        indices = indices + step * (place.clamp(0, x.shape[-dim] - 1) + starts[-dim])
        rest = rest.div(width, rounding_mode="floor")
        step *= sizes[-dim]
    return values, indices


def max_pool_backward_block(
    grad: torch.Tensor, indices: torch.Tensor, made: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> torch.Tensor:
    """Gradient of the places `made` (a range per dim) of images of `sizes`, from the gradients of what reads them.

    grad and indices [..., places of the result] -> [..., places made].
    """
    local, inside = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    rest, step = indices, 1
    for (low, high), size in zip(reversed(made), reversed(sizes), strict=True):
        place = rest % size - low
        inside = inside & (place >= 0) & (place < high - low)
        local = local + step * place
        rest = rest.div(size, rounding_mode="floor")
        step *= high - low
    n = len(sizes)
    share, local = (torch.where(inside, x, 0).flatten(-n) for x in (grad, local))
    out = grad.new_zeros((*share.shape[:-1], step)).scatter_add_(-1, local, share)
    found: torch.Tensor = out.unflatten(-1, [high - low for low, high in made])
    return found


Counted = tuple[int, int, int, int, int, int]
"""Places low to high of an average in one dim, size of the dim that is read, kernel, stride, padding."""


def avg_pool_block(
    x: torch.Tensor,
    margins: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    counted: Sequence[Counted],
    with_padding: bool,
    divisor: int | None,
) -> torch.Tensor:
    """Averages over the windows of a block x [..., places]."""
    pool = aten.avg_pool2d if len(kernel) == 2 else aten.avg_pool3d
    out: torch.Tensor = pool(_around(x, margins), kernel, stride)
    return out * _ratio(out, counted, with_padding, divisor)


def avg_pool_backward_block(
    grad: torch.Tensor,
    margins: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    counted: Sequence[Counted],
    with_padding: bool,
    divisor: int | None,
) -> torch.Tensor:
    """Gradient of the image from grad [..., places of averages], with the margins cut off."""
    n = len(kernel)
    backward = aten.avg_pool2d_backward if n == 2 else aten.avg_pool3d_backward
    share = grad * _ratio(grad, counted, with_padding, divisor)
    sizes = [s * (count - 1) + k for count, s, k in zip(grad.shape[-n:], stride, kernel, strict=True)]
    image = grad.new_empty((*grad.shape[:-n], *sizes))
    return _around(backward(share, image, kernel, stride, [0] * n, False, True, None), margins)


def _ratio(
    like: torch.Tensor, counted: Sequence[Counted], with_padding: bool, divisor: int | None
) -> torch.Tensor | float:
    """Places of a kernel for each that an average is over: averages over whole kernels, which do not overflow where
    sums would, are made first. One dim of the result for each of `counted`.
    """
    whole = math.prod(kernel for *_, kernel, _, _ in counted)
    if divisor is not None:
        return whole / divisor
    total = like.new_ones(())
    for low, high, size, kernel, stride, padding in counted:
        start = torch.arange(low, high, device=like.device) * stride - padding
        stop = (start + kernel).clamp(max=size + padding)
        inside = stop - start if with_padding else stop.clamp(max=size) - start.clamp(min=0)
        total = total[..., None] * inside.to(like.dtype)
    return whole / total
