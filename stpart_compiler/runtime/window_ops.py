"""What a block of the places of an image computes where the aten op itself would not do.

An op pads both sides of a dim alike, a block has padding at the outer borders of the image alone. `margins`: as torch's
padding takes them, the last dim first, (before, after) each; negative widths cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def padded_convolution(margins: Sequence[int], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Convolution of an image with zeros around it."""
    out: torch.Tensor = aten.convolution(aten.constant_pad_nd(x, margins), *args)
    return out


def cropped_convolution(margins: Sequence[int], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Transposed convolution, with the margins cut off the result."""
    out: torch.Tensor = aten.constant_pad_nd(aten.convolution(x, *args), margins)
    return out


def padded_weight_gradient(
    margins: Sequence[int], grad: torch.Tensor, x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """Backward of a convolution of an image with zeros around it."""
    found: tuple[torch.Tensor | None, ...] = aten.convolution_backward(grad, aten.constant_pad_nd(x, margins), *args)
    return found
