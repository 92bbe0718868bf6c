"""Loss scaling for float16: all ranks see an overflow of any of them."""

from __future__ import annotations

import torch
from torch import Tensor

from stpart_compiler.runtime.clip import largest_over_ranks
from stpart_compiler.runtime.owners import allow_change, owner_of
from stpart_compiler.runtime.rank_module import RankModule


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for rank modules, whose ranks leave out the same steps.

    With torch's own each would look at its own blocks of the gradients alone.

    All ranks call `unscale_` and `step` together.

    Raises:
        ValueError: an optimizer's parameters belong to no rank module.
        RuntimeError: sums of gradients wait for their reduction (`RankModule.no_sync`).
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        module = _module_of(optimizer)
        module.check_reduced("GradScaler")
        per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            allow_change(param)
        mine = torch.stack([found.cpu() for found in per_device.values()] or [torch.zeros(1)]).amax()
        everywhere = largest_over_ranks(module, mine.to(inv_scale.device), "GradScaler").reshape(1)
        return {device: everywhere.to(device) for device in per_device or {inv_scale.device: mine}}


def _module_of(optimizer: torch.optim.Optimizer) -> RankModule:
    for group in optimizer.param_groups:
        for param in group["params"]:
            owner = owner_of(param)
            if owner is not None:
                return owner[0]
    raise ValueError(
        "GradScaler: the optimizer's parameters belong to no rank module; pass those of rank_module() or local_module()"
    )
