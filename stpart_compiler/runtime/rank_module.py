"""One rank's model: local parameters under the model's own names, and a differentiable forward over its two programs.

The parameters are plain local `nn.Parameter`s, so every elementwise torch optimizer works on them. `forward` takes the
global inputs, the same on every rank (the program cuts its own part), and returns global outputs. All communication
happens inside of the programs, through the engine that the module was attached to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_unflatten

from stpart_compiler.ir.artifact import Interface, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import local_shape
from stpart_compiler.runtime import ops as _ops  # noqa: F401  (defines the ops that the programs call)
from stpart_compiler.runtime.agree import agree_on_sizes
from stpart_compiler.runtime.buckets import Padding
from stpart_compiler.runtime.calls import call_leaves, call_sizes, checked_leaf, compiled_sizes, differs_in_sizes_only
from stpart_compiler.runtime.engine import Engine
from stpart_compiler.runtime.modes import check_modes, submodule, take_modes
from stpart_compiler.runtime.optimizers import watch_optimizers
from stpart_compiler.runtime.owners import Home, own
from stpart_compiler.runtime.step import Programs, Sized, Split, Step
from stpart_compiler.runtime.sums import GradientSums

OtherSizes = Callable[[list[Any]], Sized]
"""Leaves of a call -> what a rank runs for calls of these sizes. All ranks ask together."""


class RankModule(nn.Module):
    """The model of one rank.

    `local_params` and `local_buffers`: this rank's block of every slot, by the slot's name; the module takes them over
    (an nn.Parameter stays the same object).
    Parameters, buffers and the state dict go by the model's own names, tied ones by all of theirs. Buffers that the
    step changes are written in place after each forward. Each module of the model has a counterpart of its name, which
    is in train or eval mode as it was compiled, and must be when the module is called.

    `other_sizes`: compiles for calls with inputs of other sizes, once for each. Without it they are refused. `split`:
    makes the programs of `no_sync`, which is refused without. `padding`: pads calls of sizes that are not compiled.

    Raises:
        ValueError: a block is missing, unknown, or of another shape or dtype than the slot's layout says.
    """

    def __init__(
        self,
        artifact: RankArtifact,
        forward_gm: GraphModule,
        backward_gm: GraphModule | None,
        local_params: Mapping[str, Tensor],
        local_buffers: Mapping[str, Tensor],
        engine: Engine | None = None,
        other_sizes: OtherSizes | None = None,
        split: Split | None = None,
        padding: Padding | None = None,
    ) -> None:
        super().__init__()
        watch_optimizers()
        interface = artifact.interface
        _check_blocks("parameter", interface.params, local_params, artifact)
        _check_blocks("buffer", interface.buffers, local_buffers, artifact)
        homes: dict[str, Home] = {}
        for slot in interface.params:
            block = local_params[slot.name]
            param = block if isinstance(block, nn.Parameter) else nn.Parameter(block.detach(), slot.requires_grad)
            homes[slot.name] = _register(self, slot, param, "_parameters")
            own(self, slot, param)
        for slot in interface.buffers:
            homes[slot.name] = _register(self, slot, local_buffers[slot.name].detach(), "_buffers")
        self._sums = GradientSums(artifact.rank, homes)
        self._stpart = Programs(Sized(artifact, forward_gm, backward_gm, split), homes, self._sums)
        self._modes = take_modes(self, interface.modes)
        self._other_sizes = other_sizes
        self._padding = padding
        self._by_sizes = {compiled_sizes(interface): self._stpart}
        if engine is not None:
            self.attach(engine)

    @property
    def artifact(self) -> RankArtifact:
        return self._stpart.artifact

    @property
    def interface(self) -> Interface:
        return self._stpart.interface

    @property
    def rank(self) -> int:
        return self._stpart.artifact.rank

    @property
    def engine(self) -> Engine | None:
        return self._stpart.engine

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that were traced into the programs."""
        return self._stpart.constants

    def attach(self, engine: Engine) -> None:
        """Communicate through `engine`. All ranks attach in the same order, since groups are formed here.

        Raises:
            ValueError: the engine is of another rank or of a world of another size.
        """
        world_size = self.interface.mesh.world_size
        if (engine.rank, engine.world_size) != (self.rank, world_size):
            raise ValueError(
                f"rank module {self.rank} of {world_size}: the engine is that of rank {engine.rank} of "
                f"{engine.world_size}; start as many ranks as the mesh {self.interface.mesh} has"
            )
        self._stpart.attach(engine)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward adds up gradients on each rank; the first backward outside reduces the sums, once for all.

        As with torch's DistributedDataParallel, for gradient accumulation:

            for micro_batch in micro_batches[:-1]:
                with module.no_sync():
                    module(**micro_batch).loss.backward()
            module(**micro_batches[-1]).loss.backward()
            optimizer.step()

        Until then such a sum is not in `.grad` (which shows zeros), since it may have another shape than the parameter
        on this rank. It takes memory of its own, up to the size of the whole parameter, that no memory limit of the
        plan counts. Gradients that need no communication go to `.grad` as ever. `zero_grad()` drops what waits, and
        checkpoints hold no gradients, waiting or not. All ranks enter and leave together; the first time they compile.

        Raises:
            RuntimeError: the module cannot compile what it needs; or a rank enters while others do something else.
                While sums wait: in `optimizer.step()`, `clip_grad_norm_` and `GradScaler`, and in a backward where
                `.grad` or `requires_grad` was changed by hand.
        """
        if self._stpart.backward_gm is not None:
            self._stpart.split_backward()
        self._sums.open += 1
        try:
            yield
        finally:
            self._sums.open -= 1

    def check_reduced(self, caller: str) -> None:
        """Raises:
        RuntimeError: sums of gradients wait for their reduction (`no_sync`); the message names `caller`.
        """
        self._sums.check_reduced(caller)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any module's; what waits under `no_sync` is dropped."""
        self._sums.drop()
        super().zero_grad(set_to_none)

    def param_slots(self) -> Iterator[tuple[TensorSlot, nn.Parameter]]:
        """Every parameter once, with what it is."""
        for slot in self.interface.params:
            param = self._stpart.homes[slot.name].tensor
            assert isinstance(param, nn.Parameter), slot.name
            yield slot, param

    def buffer_slots(self) -> Iterator[tuple[TensorSlot, Tensor]]:
        """Every buffer once, with what it is."""
        for slot in self.interface.buffers:
            yield slot, self._stpart.homes[slot.name].tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output (global tensors) on the global inputs.

        Raises:
            ValueError: the call differs from the one that was compiled in structure, shape, dtype or a constant, or a
                module was put in another mode (train or eval); with `dynamic`, padding changes what the model computes.
            RuntimeError: the module has no engine and needs one, or the ranks are called with inputs of several sizes.
            CommTimeoutError: a message did not arrive.
            Exception: what an op of the programs raises, with a note of the op and its place in the model; no rank can
                go on then.
        """
        check_modes(self, self._modes, self.interface.modes.get("", True))
        leaves = call_leaves(self.interface, args, kwargs)
        if self._padding is None or call_sizes(leaves) in self._by_sizes:
            tensors = iter(self._step(leaves))
        else:
            tensors = iter(self._padded_step(self._padding, leaves))
        outputs = [next(tensors) if slot.is_tensor else slot.constant for slot in self.interface.outputs]
        return tree_unflatten(outputs, self.interface.out_spec)

    def _step(self, leaves: list[Any]) -> Sequence[Tensor]:
        """The output tensors of a call of these sizes."""
        programs, leaves = self._checked(leaves)
        trains = programs.backward_gm is not None and torch.is_grad_enabled()
        if trains and (self._sums.open or self._sums.waiting):
            programs.split_backward()  # compiles where sizes are new: now, not in the midst of backward
        programs.begin_step()
        if not trains:
            return programs.run_forward(leaves, keep=False)[0]
        apply: Any = Step.apply
        # inputs of the torch.compile backend stand here too, which are no nn.Parameters
        params = (programs.homes[slot.name].tensor for slot in programs.interface.params)
        flat: tuple[Tensor, ...] = apply(programs, leaves, *params)
        return flat

    def _checked(self, leaves: list[Any]) -> tuple[Programs, list[Any]]:
        programs = self._programs_for(leaves)
        slots = programs.interface.inputs
        return programs, [checked_leaf(slot, leaf) for slot, leaf in zip(slots, leaves, strict=True)]

    def _padded_step(self, padding: Padding, leaves: list[Any]) -> Sequence[Tensor]:
        """The output tensors of a call, run in the sizes of buckets."""
        padded, grown = padding.padded(leaves)
        if grown and not padding.is_tried(grown):
            names = [f"output {index}" for index, slot in enumerate(self.interface.outputs) if slot.is_tensor]
            names += [f"buffer {slot.name!r}" for slot in self.interface.buffers]
            padding.try_out(grown, (leaves, padded), (self._dry_run(leaves), self._dry_run(padded)), names)
        found = self._step(padded)
        return padding.cut(grown, leaves, found) if grown else found

    def _dry_run(self, leaves: list[Any]) -> list[Tensor]:
        """The output tensors, then the new values of all buffers, which stay as they were.

        Raises:
            ValueError: the step draws random numbers, which are others for other sizes.
        """
        programs, leaves = self._checked(leaves)
        if programs.draws:
            raise ValueError(
                "dynamic: the step draws random numbers (dropout), which are others for padded inputs: set dropout to 0"
                " in the model, or compile without dynamic="
            )
        buffers = [buffer for _, buffer in self.buffer_slots()]
        before = [buffer.clone() for buffer in buffers]
        programs.begin_step()
        with torch.no_grad():
            outputs = programs.run_forward(leaves, keep=False)[0]
            after = [buffer.clone() for buffer in buffers]
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        return [*outputs, *after]

    def _programs_for(self, leaves: list[Any]) -> Programs:
        """Those for the sizes of a call, compiled now where these are new and the call may run under the same plan."""
        sizes, engine = call_sizes(leaves), self.engine
        if sizes not in self._by_sizes:
            if self._other_sizes is None or not differs_in_sizes_only(self.interface, leaves):
                return self._stpart
            if engine is not None:
                agree_on_sizes(engine, self.interface, sizes, self._stpart.device)
            self._by_sizes[sizes] = Programs(self._other_sizes(leaves), self._stpart.homes, self._sums)
        programs = self._by_sizes[sizes]
        if engine is not None:
            programs.attach(engine)
        return programs


def _check_blocks(
    kind: str, slots: tuple[TensorSlot, ...], blocks: Mapping[str, Tensor], artifact: RankArtifact
) -> None:
    names = {slot.name for slot in slots}
    if names != blocks.keys():
        raise ValueError(
            f"rank module {artifact.rank}: missing {kind}s {sorted(names - blocks.keys())}, "
            f"unknown {kind}s {sorted(blocks.keys() - names)}"
        )
    for slot in slots:
        expected = local_shape(slot.layout, artifact.interface.mesh, artifact.rank)
        block = blocks[slot.name]
        if tuple(block.shape) != expected or block.dtype != slot.dtype:
            raise ValueError(
                f"rank module {artifact.rank}: {kind} {slot.name!r} must be this rank's block, {slot.dtype} of shape "
                f"{expected} (layout {slot.layout}), got {block.dtype} of shape {tuple(block.shape)}"
            )


def _register(root: nn.Module, slot: TensorSlot, tensor: Tensor, table: str) -> Home:
    """Register under all names of the slot; the first is its home.

    Straight into the tables: the checks of register_parameter refuse names that are attributes of RankModule itself.
    """
    homes = []
    for name in (slot.name, *slot.aliases):
        path, _, key = name.rpartition(".")
        module = submodule(root, path)
        tensors = getattr(module, table)
        tensors[key] = tensor
        if not slot.persistent:
            module._non_persistent_buffers_set.add(key)
        homes.append(Home(tensors, key))
    return homes[0]
