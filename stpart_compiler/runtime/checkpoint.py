"""Saving and loading with torch.distributed.checkpoint, under the model's own names.

Each rank offers its blocks as rectangles with global offsets, through the protocol that the checkpoint planner asks
for. So what was saved loads onto any other mesh or plan, into plain tensors (a whole model's state dict,
`dcp_to_torch_save`), and the other way round. DTensor is not used: on meshes with permuted ranks it is silently wrong.

Names: parameters and persistent buffers by the model's own, tied ones under all of theirs; optimizer state as
`optimizer.<parameter>.<state>`. Hyperparameters of the optimizer are not saved: they are arguments of its constructor.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict, save

from stpart_compiler.ir.artifact import TensorSlot
from stpart_compiler.ir.layout import Atom, Layout, Range, block
from stpart_compiler.runtime.rank_module import RankModule

OPTIMIZER_PREFIX = "optimizer"
Path = str | os.PathLike[str]


class Piece(NamedTuple):
    """A rectangle of a global tensor: where it starts, and its data (a view of a rank's local tensor)."""

    offsets: tuple[int, ...]
    data: Tensor


class BlockTensor(Tensor):
    """A global tensor of which this process holds some rectangles; only torch.distributed.checkpoint reads it.

    Its shape is the global one. Ranks that hold the same block offer the same pieces, and the planner has each written
    by one of them.
    """

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor, pieces: Sequence[Piece]) -> BlockTensor:
        # Without type: the constructor of wrapper subclasses has no annotation.
        make: Any = Tensor._make_wrapper_subclass
        self: BlockTensor = make(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
        self.pieces = list(pieces)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockTensor(shape={tuple(self.shape)}, pieces at {[piece.offsets for piece in self.pieces]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: a BlockTensor is only for torch.distributed.checkpoint; use the module's parameters")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [self._write_item(fqn, piece) for piece in self.pieces]

    def _write_item(self, fqn: str, piece: Piece) -> WriteItem:
        offsets = torch.Size(piece.offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, piece.data.shape),
            properties=TensorProperties.create_from_tensor(piece.data),
            size=self.shape,
        )
        return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.shape) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for piece in self.pieces:
            if index.offset is None or torch.Size(piece.offsets) == index.offset:
                return piece.data
        raise ValueError(f"{index.fqn}: this rank has no block at {index.offset}")


def local_pieces(local: Tensor, layout: Layout, ranges: Sequence[Range]) -> list[Piece]:
    """The rectangles of the global tensor that make up a local block.

    `ranges`: index range of each atom (`layout.block`). A dim of one atom is one run; of several, a run for each index
    of its major atoms, one after the other in the local tensor. An empty block has none, unless all of the tensor is
    empty.
    """
    if local.numel() == 0 and math.prod(layout.shape) > 0:
        return []
    left = iter(ranges)
    runs = [_runs(atoms, [next(left) for _ in atoms]) for atoms in layout.dims]
    return [_piece(local, choice) for choice in itertools.product(*(enumerate(starts) for starts in runs))]


class _Run(NamedTuple):
    start: int
    length: int


def _runs(atoms: tuple[Atom, ...], ranges: list[Range]) -> list[_Run]:
    """Contiguous global index runs of one dim's block, all of one length, ascending."""
    sizes = [atom.size for atom in atoms]
    cut = [i for i, (size, (low, high)) in enumerate(zip(sizes, ranges, strict=True)) if high - low < size]
    last = cut[-1] if cut else 0
    stride = math.prod(sizes[last + 1 :])
    low, high = ranges[last]
    starts = [0]
    for size, (first, stop) in zip(sizes[:last], ranges[:last], strict=True):
        starts = [start * size + index for start in starts for index in range(first, stop)]
    return [_Run((start * sizes[last] + low) * stride, (high - low) * stride) for start in starts]


def _piece(local: Tensor, choice: tuple[tuple[int, _Run], ...]) -> Piece:
    data = local
    for dim, (position, run) in enumerate(choice):
        data = data.narrow(dim, position * run.length, run.length)
    return Piece(tuple(run.start for _, run in choice), data)


def state_for_checkpoint(module: RankModule, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """This rank's state for `torch.distributed.checkpoint.save` and `.load`, which writes into it in place.

    Optimizer state is there for parameters that have made a step. Non-persistent buffers are left out.

    Raises:
        ValueError: the optimizer holds a state tensor that is neither a scalar nor shaped like its parameter.
    """
    state: dict[str, Any] = {}
    for slot, tensor in (*module.param_slots(), *module.buffer_slots()):
        if slot.persistent:
            holder = _holder(module, slot, tensor)
            state.update(dict.fromkeys((slot.name, *slot.aliases), holder))
    for slot, key, value in _optimizer_entries(module, optimizer):
        state[f"{OPTIMIZER_PREFIX}.{slot.name}.{key}"] = _state_holder(module, slot, key, value)
    return state


def save_checkpoint(
    module: RankModule,
    path: Path,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save to the directory `path`, which all ranks share; every rank calls this.

    Raises:
        ValueError: there are other ranks, but no process group is initialised (then use `save_all`).
    """
    world_size = module.interface.mesh.world_size
    if not dist.is_initialized():
        if world_size > 1:
            raise ValueError(
                f"save_checkpoint: the mesh has {world_size} ranks, but no process group is initialised; run under "
                f"torchrun, or save the modules of all ranks from one process with save_all"
            )
        save_all([module], path, None if optimizer is None else [optimizer])
        return
    save(state_for_checkpoint(module, optimizer), checkpoint_id=path, process_group=process_group)


def save_all(
    modules: Sequence[RankModule], path: Path, optimizers: Sequence[torch.optim.Optimizer] | None = None
) -> None:
    """Save the modules of all ranks (in rank order) from this one process, without a process group.

    Raises:
        ValueError: not exactly one module of each rank, or not one optimizer for each module.
    """
    ranks = [module.rank for module in modules]
    if not modules or ranks != list(range(modules[0].interface.mesh.world_size)):
        raise ValueError(f"save_all: needs the modules of all ranks of the mesh in rank order, got ranks {ranks}")
    if optimizers is not None and len(optimizers) != len(modules):
        raise ValueError(f"save_all: {len(modules)} modules need as many optimizers, got {len(optimizers)}")
    paired = itertools.zip_longest(modules, optimizers or ())
    states = [state_for_checkpoint(module, optimizer) for module, optimizer in paired]
    merged = {name: _merged([state[name] for state in states if name in state]) for name in _names(states)}
    _save_state_dict(merged, FileSystemWriter(path), no_dist=True)


def load_checkpoint(module: RankModule, path: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load this rank's blocks from the directory `path`, saved on any mesh or plan or from whole tensors.

    Each rank reads by itself. The optimizer's state is replaced by what was saved for its parameters; its
    hyperparameters stay.

    Raises:
        ValueError: there is no checkpoint, or a parameter or persistent buffer is missing in it or has another shape.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        raise ValueError(
            f"load_checkpoint: {os.fspath(path)} holds no checkpoint; give a directory that save_checkpoint wrote"
        ) from error
    state = {name: value for name, value in state_for_checkpoint(module).items() if _is_needed(module, name, metadata)}
    _check_saved(state, metadata, path)
    states = {} if optimizer is None else _blank_optimizer_state(module, metadata)
    for name, entries in states.items():
        slot = next(slot for slot in module.interface.params if slot.name == name)
        for key, value in entries.items():
            state[f"{OPTIMIZER_PREFIX}.{name}.{key}"] = _state_holder(module, slot, key, value)
    _load_state_dict(state, FileSystemReader(path), no_dist=True)
    if optimizer is not None:
        for name, entries in states.items():
            for key, value in entries.items():
                if not isinstance(value, Tensor):
                    entries[key] = state[f"{OPTIMIZER_PREFIX}.{name}.{key}"]
        _set_optimizer_state(module, optimizer, states)


def _holder(module: RankModule, slot: TensorSlot, tensor: Tensor) -> BlockTensor:
    local = tensor.detach()
    ranges = block(slot.layout, module.interface.mesh, module.rank)
    return BlockTensor(slot.shape, local, local_pieces(local, slot.layout, ranges))


def _state_holder(module: RankModule, slot: TensorSlot, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == module._stpart.homes[slot.name].tensor.shape:
        return _holder(module, slot, value)
    if value.dim() == 0:
        return value
    raise ValueError(
        f"checkpoint: optimizer state {key!r} of {slot.name!r} has shape {tuple(value.shape)}, which is neither a "
        f"scalar nor the shape of the local parameter; such state cannot be cut anew for another mesh"
    )


def _optimizer_entries(
    module: RankModule, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[TensorSlot, str, Any]]:
    if optimizer is None:
        return
    for slot, param in module.param_slots():
        for key, value in optimizer.state.get(param, {}).items():
            if value is not None:
                yield slot, key, value


def _names(states: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for state in states for name in state))


def _merged(values: list[Any]) -> Any:
    """One process's view of what all ranks hold: every piece once."""
    first = values[0]
    if not isinstance(first, BlockTensor):
        return first
    pieces = {piece.offsets: piece for value in values for piece in value.pieces}
    return BlockTensor(first.shape, first, list(pieces.values()))


def _is_needed(module: RankModule, name: str, metadata: Metadata) -> bool:
    """Tied names have one tensor: it is read under those that were saved, at least one of which must be there."""
    if name in metadata.state_dict_metadata:
        return True
    for slot in (*module.interface.params, *module.interface.buffers):
        names = (slot.name, *slot.aliases)
        if name in names:
            return not any(other in metadata.state_dict_metadata for other in names)
    return True


def _check_saved(state: Mapping[str, Any], metadata: Metadata, path: Path) -> None:
    saved = metadata.state_dict_metadata
    missing = sorted(name for name in state if name not in saved)
    if missing:
        raise ValueError(f"checkpoint {os.fspath(path)}: has no {', '.join(missing)}; it is of another model")
    for name, holder in state.items():
        entry = saved[name]
        size = None if isinstance(entry, BytesStorageMetadata) else tuple(entry.size)
        if size != tuple(holder.shape):
            raise ValueError(
                f"checkpoint {os.fspath(path)}: {name} has shape {size}, the model expects {tuple(holder.shape)}"
            )


def _blank_optimizer_state(module: RankModule, metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Parameter -> state key -> an empty local tensor for what was saved (None where it is no tensor)."""
    blank: dict[str, dict[str, Any]] = {}
    for slot, param in module.param_slots():
        prefix = f"{OPTIMIZER_PREFIX}.{slot.name}."
        for name, entry in metadata.state_dict_metadata.items():
            key = name.removeprefix(prefix)
            # "optimizer.w.b.exp_avg" is state "exp_avg" of parameter "w.b", not state "b.exp_avg" of "w".
            if name.startswith(prefix) and "." not in key:
                blank.setdefault(slot.name, {})[key] = _blank(slot, param, entry)
    return blank


def _blank(slot: TensorSlot, param: Tensor, entry: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    if isinstance(entry, BytesStorageMetadata):
        return None
    if tuple(entry.size) == slot.shape and slot.shape:
        return torch.zeros_like(param, dtype=entry.properties.dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _set_optimizer_state(
    module: RankModule, optimizer: torch.optim.Optimizer, states: Mapping[str, dict[str, Any]]
) -> None:
    """Through `load_state_dict`, which knows where each optimizer wants its step counters."""
    names = {id(param): slot.name for slot, param in module.param_slots()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_index = {index: states[names[id(param)]] for index, param in enumerate(params) if names.get(id(param)) in states}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
