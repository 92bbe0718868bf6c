"""Peak memory of a piece of code: at tensor level (`PeakBytes`), and as the allocator sees it (`allocator_peak`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")


class PeakBytes(TorchDispatchMode):
    """Bytes of live tensor storages, and their peak, while the mode is active on the calling thread.

    The same for real and fake tensors; backward is included. Counted are the storages of `existing` (parameters,
    optimizer state: what is alive before) and of every op's outputs until they are freed. A storage that is alive
    before and not named in `existing` is never counted. Temporaries inside of kernels are not seen.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in existing:
            self._count(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in _tensors(outputs):
            storage = output.untyped_storage()
            if self._known(storage) or not self._shared(storage, args, kwargs):
                self._count(storage)
        return outputs

    def _known(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._live

    def _shared(self, storage: torch.UntypedStorage, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether the op only passes on a storage that it was given: a view, or a result written in place."""
        return any(tensor.untyped_storage() is storage for tensor in _tensors((args, kwargs)))

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Take a new storage in, or the new size of a resized one."""
        key, nbytes = id(storage), storage.nbytes()
        reference, counted = self._live.get(key, (None, 0))
        if reference is not None and counted == nbytes:
            return
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._free(key))
        self._live[key] = (reference, nbytes)
        self.current += nbytes - counted
        self.peak = max(self.peak, self.current)

    def _free(self, key: int) -> None:
        _, nbytes = self._live.pop(key)
        self.current -= nbytes


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def allocator_peak(fn: Callable[[], Result]) -> tuple[Result, int]:
    """Result of `fn()`, and the peak bytes its CPU allocations add to what was allocated before.

    Counts what the allocator gives out on all threads, kernel temporaries included. Runs under the profiler.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = fn()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None, "the profiler has finished and has results"
    changes = [event for event in results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, peak
