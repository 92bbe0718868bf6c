"""Inputs padded up to one of a few sizes, so that few programs serve calls of many.

Padding changes what a model computes, unless the model leaves padded places out. Nothing here can know that, so it is
tried: the first call that is padded along some dims also runs without padding (compiled for its own sizes), and what
the two give must agree. From their shapes follows which dims of the outputs are cut back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stpart_compiler.ir.artifact import InputSlot

Place = tuple[int, int]
"""(leaf of the call or tensor output, dim)."""


@dataclass(frozen=True)
class Buckets:
    """Sizes of one dim of an input that programs are made for: a smaller one is filled up with `pad` at its end.

    `pad` must be what the model leaves out: -100 for labels of a cross entropy, 0 or False for an attention mask; any
    valid value for what these hide.
    """

    dim: int
    sizes: tuple[int, ...]
    pad: float | int | bool

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes)
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"Buckets: sizes must be positive and ascending, got {sizes}")
        object.__setattr__(self, "sizes", sizes)

    def of(self, size: int, path: str) -> int:
        """The smallest size that is at least `size`."""
        found = next((bucket for bucket in self.sizes if bucket >= size), None)
        if found is None:
            raise ValueError(
                f"input {path!r}: dim {self.dim} has size {size}, more than the largest bucket {self.sizes[-1]}; add a"
                " bucket in dynamic="
            )
        return found


Dynamic = Mapping[str, Buckets | Sequence[Buckets]]
"""Path of an input, as error messages name it ("input_ids", "args[0]") -> the dims of it that are padded."""


def by_leaf(dynamic: Dynamic, slots: Sequence[InputSlot]) -> dict[Place, Buckets]:
    """Buckets by leaf of the call and dim.

    Raises:
        ValueError: no input has that path, or it has no such dim.
    """
    found: dict[Place, Buckets] = {}
    leaves = {slot.path: index for index, slot in enumerate(slots) if slot.shape is not None}
    for path, given in dynamic.items():
        if path not in leaves:
            raise ValueError(f"dynamic: {path!r} is no tensor input; those are {sorted(leaves)}")
        index = leaves[path]
        shape, dtype = slots[index].shape, slots[index].dtype
        assert shape is not None and dtype is not None
        for buckets in (given,) if isinstance(given, Buckets) else given:
            dim = buckets.dim + len(shape) if buckets.dim < 0 else buckets.dim
            if not 0 <= dim < len(shape):
                raise ValueError(f"dynamic: input {path!r} of shape {shape} has no dim {buckets.dim}")
            if torch.tensor(buckets.pad).to(dtype).item() != buckets.pad:
                raise ValueError(f"dynamic: input {path!r} is {dtype}, which cannot hold the pad value {buckets.pad}")
            if (index, dim) in found:
                raise ValueError(f"dynamic: input {path!r}: dim {dim} is given twice")
            found[index, dim] = buckets
    return found


class Padding:
    """Pads calls of one rank module, and cuts back what comes out."""

    def __init__(self, buckets: Mapping[Place, Buckets], slots: Sequence[InputSlot]) -> None:
        self._buckets = buckets
        self._slots = slots
        self._cuts: dict[frozenset[Place], dict[Place, list[Place]]] = {}

    def padded(self, leaves: Sequence[Any]) -> tuple[list[Any], frozenset[Place]]:
        """The leaves in the sizes of buckets, and which dims grew.

        Raises:
            ValueError: a dim is larger than its largest bucket.
        """
        leaves, grown = list(leaves), []
        for (index, dim), buckets in self._buckets.items():
            leaf = leaves[index]
            if not isinstance(leaf, Tensor) or leaf.dim() <= dim:
                continue  # refused later, in terms of what was compiled
            size = leaf.shape[dim]
            bucket = buckets.of(size, self._slots[index].path)
            if bucket > size:
                missing = leaf.new_full((*leaf.shape[:dim], bucket - size, *leaf.shape[dim + 1 :]), buckets.pad)
                leaves[index] = torch.cat((leaf, missing), dim)
                grown.append((index, dim))
        return leaves, frozenset(grown)

    def is_tried(self, grown: frozenset[Place]) -> bool:
        return grown in self._cuts

    def try_out(
        self,
        grown: frozenset[Place],
        calls: tuple[Sequence[Any], Sequence[Any]],
        results: tuple[Sequence[Tensor], Sequence[Tensor]],
        names: Sequence[str],
    ) -> None:
        """Compare what a call gives as it is and padded along `grown`, and learn where it is cut back.

        Raises:
            ValueError: they differ, or a result has a dim that grows otherwise than those of the inputs.
        """
        sizes = {place: tuple(call[place[0]].shape[place[1]] for call in calls) for place in grown}
        cuts: dict[Place, list[Place]] = {}
        for index, (exact, padded) in enumerate(zip(*results, strict=True)):
            for dim, pair in enumerate(zip(exact.shape, padded.shape, strict=True)):
                if pair[0] != pair[1]:
                    cuts[index, dim] = [place for place in sorted(grown) if sizes[place] == pair]
                    self._check_known(cuts[index, dim], f"dim {dim} of {names[index]}", pair)
        self._cuts[grown] = cuts
        back = self.cut(grown, calls[0], results[1])
        wrong = [
            name for name, pair in zip(names, zip(results[0], back, strict=True), strict=True) if not _agree(*pair)
        ]
        if wrong:
            del self._cuts[grown]
            raise ValueError(
                f"dynamic: with the inputs padded along {self._named(grown)}, {', '.join(wrong)} differs from"
                " what it is without: the model does not leave padded places out. Give a mask, labels of -100, or other"
                " pad values; or compile without dynamic="
            )

    def cut(self, grown: frozenset[Place], leaves: Sequence[Any], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of a padded call in the sizes of the call as it is, `leaves`.

        Raises:
            ValueError: it cannot be told by which input an output is cut.
        """
        found = list(outputs)
        for (index, dim), places in self._cuts[grown].items():
            sizes = {leaves[leaf].shape[d] for leaf, d in places}
            if len(sizes) > 1:
                raise ValueError(
                    f"dynamic: dim {dim} of output {index} has the size of {self._named(places)}, which differ in this"
                    f" call ({sorted(sizes)}); it cannot be told which: compile without dynamic= for one of them"
                )
            found[index] = found[index].narrow(dim, 0, sizes.pop())
        return found

    def _check_known(self, places: list[Place], where: str, pair: tuple[int, int]) -> None:
        if not places:
            raise ValueError(
                f"dynamic: {where} grows from {pair[0]} to {pair[1]} by padding, as no padded dim of"
                " an input does: return only outputs that can be cut back, or compile without dynamic="
            )

    def _named(self, places: Sequence[Place] | frozenset[Place]) -> str:
        return ", ".join(f"dim {dim} of {self._slots[leaf].path!r}" for leaf, dim in sorted(places))


def _agree(exact: Tensor, padded: Tensor) -> bool:
    """Within what another order of summation may change."""
    try:
        torch.testing.assert_close(padded, exact, equal_nan=True)
    except AssertionError:
        return False
    return True
