"""A rank's blocks of the parameters and buffers: from a model, a state dict, or an initialiser.

However large the model, never more than one whole tensor (with the modules' own initialisation: the tensors of one
module) exists at a time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stpart_compiler.ir.artifact import Interface, TensorSlot
from stpart_compiler.ir.layout import Layout, take
from stpart_compiler.ir.mesh import Mesh

Initializer = Callable[[str, Tensor], object]
"""`initializer(name, tensor)` fills the whole tensor in place, alike on every rank."""

# Initialisation draws from torch's global generator, which rank threads of one process share.
_GENERATOR_LOCK = threading.Lock()


def local_block(tensor: Tensor, layout: Layout, mesh: Mesh, rank: int, device: torch.device | None = None) -> Tensor:
    """The block of a whole tensor that `rank` holds, in memory of its own (on `device`, if given)."""
    block = take(tensor.detach(), layout, mesh, rank)
    moved = block if device is None else block.to(device)
    shared = moved.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return moved.clone() if shared else moved


def materialize(
    interface: Interface,
    rank: int,
    *,
    model: nn.Module | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    initializer: Initializer | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's blocks of all parameters and of all buffers, by slot name, in the slots' dtypes.

    Each tensor comes from the first of: `state_dict` (whole tensors under any of the names; must have all that are
    persistent); the `model`'s own tensor, if it is not on meta; `initializer`; the initialisation that the model's
    modules bring along (`reset_parameters`, and `_init_weights` of transformers models), run with `seed`, so that all
    ranks get the same values.

    Raises:
        ValueError: a tensor has no source, or one of another shape (all of them are named), or its module cannot
            initialise it.
    """
    device = torch.device(device)
    slots = (*interface.params, *interface.buffers)
    known = _known_tensors(slots, model, state_dict)
    unknown = [slot for slot in slots if slot.name not in known]
    _check_sources(slots, known, unknown, model, initializer)
    wholes: Iterator[tuple[TensorSlot, Tensor]]
    if initializer is not None:
        wholes = _filled(unknown, initializer, device)
    else:
        wholes = _initialised(unknown, model, device, seed) if model is not None else iter(())
    blocks: dict[str, Tensor] = {}
    for slot, whole in _chained(slots, known, wholes):
        blocks[slot.name] = local_block(whole, slot.layout, interface.mesh, rank, device).to(slot.dtype)
        del whole
    params = {slot.name: blocks.pop(slot.name) for slot in interface.params}
    return params, blocks


def _known_tensors(
    slots: Iterable[TensorSlot], model: nn.Module | None, state_dict: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Slot name -> the whole tensor, where one exists."""
    own: dict[str, Tensor] = {}
    if model is not None:
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        own = {name: tensor for name, tensor in named if not tensor.is_meta}
    found: dict[str, Tensor] = {}
    missing = []
    for slot in slots:
        names = (slot.name, *slot.aliases)
        given = [state_dict[name] for name in names if state_dict is not None and name in state_dict]
        mine = [own[name] for name in names if name in own]
        if given:
            found[slot.name] = given[0]
        elif state_dict is not None and slot.persistent:
            missing.append(slot.name)
        elif mine:
            found[slot.name] = mine[0]
    if missing:
        raise ValueError(f"materialize: the state dict has no {', '.join(missing)}; it must hold the whole model")
    return found


def _check_sources(
    slots: Iterable[TensorSlot],
    known: Mapping[str, Tensor],
    unknown: list[TensorSlot],
    model: nn.Module | None,
    initializer: Initializer | None,
) -> None:
    wrong = [
        f"{slot.name}: expected shape {slot.shape}, got {tuple(known[slot.name].shape)}"
        for slot in slots
        if slot.name in known and tuple(known[slot.name].shape) != slot.shape
    ]
    if wrong:
        raise ValueError(f"materialize: tensors of another model: {'; '.join(wrong)}")
    if initializer is None:
        modules = dict(model.named_modules()) if model is not None else {}
        lost = [slot.name for slot in unknown if slot.name.rpartition(".")[0] not in modules]
        if lost:
            raise ValueError(
                f"materialize: nothing gives {', '.join(lost)}; pass the model, a state dict, or an initializer"
            )


def _chained(
    slots: Iterable[TensorSlot], known: Mapping[str, Tensor], made: Iterator[tuple[TensorSlot, Tensor]]
) -> Iterator[tuple[TensorSlot, Tensor]]:
    for slot in slots:
        if slot.name in known:
            yield slot, known[slot.name]
    yield from made


def _filled(
    slots: Iterable[TensorSlot], initializer: Initializer, device: torch.device
) -> Iterator[tuple[TensorSlot, Tensor]]:
    for slot in slots:
        whole = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        with torch.no_grad():
            initializer(slot.name, whole)
        yield slot, whole
        del whole


def _initialised(
    slots: Iterable[TensorSlot], model: nn.Module, device: torch.device, seed: int
) -> Iterator[tuple[TensorSlot, Tensor]]:
    """Whole tensors as the modules themselves initialise them; `model` stays on meta."""
    owned: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        owned.setdefault(slot.name.rpartition(".")[0], []).append(slot)
    devices = [device] if device.type == "cuda" else []
    with _GENERATOR_LOCK, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for path, mine in owned.items():
            chain = _shadow(model, path, device)
            before = {name: (tensor, tensor._version) for name, tensor in _own(chain[-1])}
            _run_initialisation(chain)
            after = dict(_own(chain[-1]))
            _check_initialised(mine, before, after, type(chain[-1]).__name__)
            for slot in mine:
                yield slot, after[slot.name.rpartition(".")[2]]
            del chain, before, after


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that the module itself holds, by their last name."""
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _shadow(model: nn.Module, path: str, device: torch.device) -> list[nn.Module]:
    """Copies of the modules from the root to `path`; the last has real tensors of its own, all else stays on meta."""
    chain = [_copy(model)]
    for part in path.split(".") if path else ():
        child = chain[-1]._modules[part]
        assert child is not None
        chain.append(_copy(child))
        chain[-2]._modules[part] = chain[-1]
    real: dict[int, Tensor] = {}
    tables: tuple[dict[str, Any], ...] = (chain[-1]._parameters, chain[-1]._buffers)
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and tensor.is_meta:
                table[name] = real.setdefault(id(tensor), _blank(tensor, device))
    return chain


def _copy(module: nn.Module) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    tables = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
    twin.__dict__.update(module.__dict__, **tables)
    return twin


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """A real tensor in which one can see later whether it was initialised."""
    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.is_floating_point() or tensor.is_complex():
        blank.fill_(float("nan"))
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def _run_initialisation(chain: list[nn.Module]) -> None:
    """From the module up to the root, as constructors do: a parent may initialise its children's parameters anew."""
    with torch.no_grad():
        for module in reversed(chain):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                reset()
        for depth in reversed(range(len(chain))):
            models = [module for module in chain[: depth + 1] if _is_pretrained(module)]
            if models:
                init_weights: Any = models[-1]._init_weights
                init_weights(chain[depth])


def _is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of transformers, which is never imported here."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _check_initialised(
    slots: list[TensorSlot], before: dict[str, tuple[Tensor, int]], after: dict[str, Tensor], kind: str
) -> None:
    for slot in slots:
        key = slot.name.rpartition(".")[2]
        tensor = after[key]
        old, version = before[key]
        untouched = tensor is old and tensor._version == version
        floats = tensor.is_floating_point() or tensor.is_complex()
        if bool(tensor.isnan().any()) if floats else untouched:
            raise ValueError(
                f"materialize: module {kind} does not initialise {slot.name} (no reset_parameters or _init_weights "
                f"that fills it); pass initializer=, a state dict, or a model that is not on meta"
            )
