"""Stand the model's tensors in by fakes while it is traced: no memory is used, and meta tensors get a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

# On a build without CUDA, autograd on a fake "cuda" tensor aborts the process. So meta tensors stand for the device
# that the other tensors are on, and for the CPU when there is no other.
_DEFAULT_DEVICE = torch.device("cpu")


class Faker:
    """Makes fakes of the same shape, strides and dtype."""

    def __init__(self, model: nn.Module, leaves: list[Any]) -> None:
        # A model may hold real tensors that are neither parameters nor buffers: constants of the graph.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers(), *(x for x in leaves if isinstance(x, torch.Tensor))]
        self._device = next((t.device for t in tensors if not t.is_meta), _DEFAULT_DEVICE)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of its own: two calls never give the same tensor, so that equal inputs stay two inputs."""
        device = self._device if tensor.is_meta else tensor.device
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    @contextlib.contextmanager
    def replace_state(self, root: nn.Module) -> Iterator[None]:
        """Within: the parameters and buffers of all submodules are fakes; tied ones stay tied. After: as before."""
        memo: dict[int, torch.Tensor] = {}
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in root.modules():
            saved.extend((owner, dict(owner)) for owner in (module._parameters, module._buffers))
        try:
            for owner, originals in saved:
                owner.update({key: self._stand_in(value, memo) for key, value in originals.items()})
            yield
        finally:
            for owner, originals in saved:
                owner.clear()
                owner.update(originals)

    def _stand_in(self, tensor: torch.Tensor | None, memo: dict[int, torch.Tensor]) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in memo:
            fake = self.fake(tensor)
            is_param = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_param else fake
        return memo[id(tensor)]
