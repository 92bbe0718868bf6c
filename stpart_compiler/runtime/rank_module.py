"""One rank's model: local parameters under the model's own names, and a differentiable forward over its two programs.

The parameters are plain local `nn.Parameter`s, so every elementwise torch optimizer works on them. `forward` takes the
global inputs, the same on every rank (the program cuts its own part), and returns global outputs. All communication
happens inside of the programs, through the engine that the module was attached to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule
from torch.utils._pytree import tree_unflatten

from stpart_compiler.ir.artifact import Interface, Port, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import local_shape
from stpart_compiler.ir.program import Instr, Origin, RankProgram
from stpart_compiler.passes.emit_fx import raised_in
from stpart_compiler.runtime import ops as _ops  # noqa: F401  (defines the ops that the programs call)
from stpart_compiler.runtime.agree import agree_on_sizes
from stpart_compiler.runtime.calls import call_leaves, call_sizes, checked_leaf, compiled_sizes, differs_in_sizes_only
from stpart_compiler.runtime.engine import CommTimeoutError, Engine, Label, Peer
from stpart_compiler.runtime.modes import check_modes, submodule, take_modes
from stpart_compiler.runtime.optimizers import watch_optimizers
from stpart_compiler.runtime.owners import own
from stpart_compiler.runtime.random_ops import drawn, share_state

OtherSizes = Callable[[list[Any]], tuple[RankArtifact, GraphModule, GraphModule | None]]
"""Leaves of a call -> what a rank runs for calls of these sizes. All ranks ask together."""


class RankModule(nn.Module):
    """The model of one rank.

    `local_params` and `local_buffers`: this rank's block of every slot, by the slot's name; the module takes them over
    (an nn.Parameter stays the same object).
    Parameters, buffers and the state dict go by the model's own names, tied ones by all of theirs. Buffers that the
    step changes are written in place after each forward. Each module of the model has a counterpart of its name, which
    is in train or eval mode as it was compiled, and must be when the module is called.

    `other_sizes`: compiles for calls with inputs of other sizes, once for each. Without it they are refused.

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
    ) -> None:
        super().__init__()
        watch_optimizers()
        interface = artifact.interface
        _check_blocks("parameter", interface.params, local_params, artifact)
        _check_blocks("buffer", interface.buffers, local_buffers, artifact)
        homes: dict[str, _Home] = {}
        for slot in interface.params:
            block = local_params[slot.name]
            param = block if isinstance(block, nn.Parameter) else nn.Parameter(block.detach(), slot.requires_grad)
            homes[slot.name] = _register(self, slot, param, "_parameters")
            own(self, slot, param)
        for slot in interface.buffers:
            homes[slot.name] = _register(self, slot, local_buffers[slot.name].detach(), "_buffers")
        self._stpart = _Programs(artifact, forward_gm, backward_gm, homes)
        self._modes = take_modes(self, interface.modes)
        self._other_sizes = other_sizes
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
                module was put in another mode (train or eval).
            RuntimeError: the module has no engine and needs one, or the ranks are called with inputs of several sizes.
            CommTimeoutError: a message did not arrive.
            Exception: what an op of the programs raises, with a note of the op and its place in the model; no rank can
                go on then.
        """
        check_modes(self, self._modes, self.interface.modes.get("", True))
        leaves = call_leaves(self.interface, args, kwargs)
        programs = self._programs_for(leaves)
        interface = programs.interface
        leaves = [checked_leaf(slot, leaf) for slot, leaf in zip(interface.inputs, leaves, strict=True)]
        programs.begin_step()
        if programs.backward_gm is not None and torch.is_grad_enabled():
            apply: Any = _Step.apply
            flat = apply(programs, leaves, *(programs.homes[slot.name].tensor for slot in interface.params))
        else:
            flat = programs.run_forward(leaves, keep=False)[0]
        tensors = iter(flat)
        outputs = [next(tensors) if slot.is_tensor else slot.constant for slot in interface.outputs]
        return tree_unflatten(outputs, interface.out_spec)

    def _programs_for(self, leaves: list[Any]) -> _Programs:
        """Those for the sizes of a call, compiled now where these are new and the call may run under the same plan."""
        sizes, engine = call_sizes(leaves), self.engine
        if sizes not in self._by_sizes:
            if self._other_sizes is None or not differs_in_sizes_only(self.interface, leaves):
                return self._stpart
            if engine is not None:
                agree_on_sizes(engine, self.interface, sizes, self._stpart.device)
            self._by_sizes[sizes] = _Programs(*self._other_sizes(leaves), self._stpart.homes)
        programs = self._by_sizes[sizes]
        if engine is not None:
            programs.attach(engine)
        return programs


class _Home(NamedTuple):
    """Where a tensor is registered. Read at each call: `.to()` and `load_state_dict(assign=True)` replace tensors."""

    table: dict[str, Tensor]
    key: str

    @property
    def tensor(self) -> Tensor:
        return self.table[self.key]


class _Kept:
    """What a backward program needs, in the order of its inputs; the gaps are for the tangents."""

    __slots__ = ("owners", "values", "versions")

    def __init__(self, values: list[Tensor | None], owners: list[Port | None]) -> None:
        self.values = values
        self.owners = owners  # whose memory the value is, where it was there before the step
        self.versions = [0 if value is None else value._version for value in values]

    def check_unchanged(self, rank: int) -> None:
        for value, owner, version in zip(self.values, self.owners, self.versions, strict=True):
            if value is not None and owner is not None and value._version != version:
                raise RuntimeError(
                    f"rank {rank}: {owner[0]} {owner[1]!r} is needed for the gradients, but was modified by an inplace "
                    f"operation after forward; call backward before optimizer.step()"
                )


class _Programs:
    """The two programs of a rank and what their inputs and outputs are bound to. No nn.Module: it owns no tensors."""

    def __init__(
        self,
        artifact: RankArtifact,
        forward_gm: GraphModule,
        backward_gm: GraphModule | None,
        homes: dict[str, _Home],
    ) -> None:
        self.artifact = artifact
        self.interface = artifact.interface
        self.forward_gm = forward_gm
        self.backward_gm = backward_gm
        self.homes = homes
        self.engine: Engine | None = None
        self.device = next((home.tensor.device for home in homes.values()), torch.device("cpu"))
        self.constants = {name: x.to(self.device) for name, x in artifact.constants.items()}
        programs = [program for program in (artifact.forward, artifact.backward) if program is not None]
        self.draws = any(instr.target is drawn for program in programs for instr in program.body)
        self.labels = program_labels(artifact.forward, artifact.backward)
        _check_arity(forward_gm, self.interface.forward_inputs)
        if backward_gm is not None:
            _check_arity(backward_gm, self.interface.backward_inputs)

    def attach(self, engine: Engine) -> None:
        if self.engine is not engine:
            # clip_grad_norm_ needs the group of all ranks.
            engine.prepare(self.interface.channels, (*self.interface.groups, tuple(range(engine.world_size))))
            self.engine = engine

    def begin_step(self) -> None:
        if self.engine is not None:
            self.engine.begin_step()
            if self.draws:
                share_state(self.engine, self.device)
        elif self.interface.mesh.world_size > 1:
            raise RuntimeError(
                f"rank module {self.artifact.rank} of {self.interface.mesh.world_size} has no engine: call "
                f"attach(engine) on every rank, or run all ranks with run_in_process"
            )

    def run_forward(self, leaves: list[Any], *, keep: bool) -> tuple[list[Tensor], _Kept]:
        """The output tensors, and with `keep` what backward needs. Clears `leaves`; writes the new buffers."""
        interface = self.interface
        values = [self._fetch(port, leaves) for port in interface.forward_inputs]
        early = {i: self._fetch(p, leaves) for i, p in enumerate(interface.backward_inputs) if keep and _is_early(p)}
        leaves.clear()
        memory = {_storage(value): port for value, port in zip(values, interface.forward_inputs, strict=True)}
        given = {id(value) for value in values}
        found = dict(zip(interface.forward_outputs, self._run(self.forward_gm, values), strict=True))
        if not keep:
            found = {port: value for port, value in found.items() if port[0] != "saved"}
        self._write_buffers(found, early)
        # A tensor that autograd returns gets a history: it must be neither the caller's nor one that is kept here.
        for index, slot in enumerate(interface.outputs):
            if slot.is_tensor:
                found["output", index] = _apart(found["output", index], given)
        outputs = [found["output", index] for index, slot in enumerate(interface.outputs) if slot.is_tensor]
        for port, value in found.items():
            if port[0] == "saved" and id(value) in given:
                found[port] = value.detach()
        ports = interface.backward_inputs if keep else ()
        kept = [early[i] if i in early else found.get(port) for i, port in enumerate(ports)]
        return outputs, _Kept(kept, [None if value is None else memory.get(_storage(value)) for value in kept])

    def run_backward(
        self, kept: _Kept, tangents: Mapping[int, Tensor | None], device: torch.device
    ) -> dict[str, Tensor]:
        """Gradients by parameter name. Each kept value is freed at its last use."""
        kept.check_unchanged(self.artifact.rank)
        values = kept.values
        for position, (kind, key) in enumerate(self.interface.backward_inputs):
            if kind == "tangent":
                assert isinstance(key, int)
                values[position] = self._tangent(key, tangents.get(key), device)
        taken = {_storage(value) for value in values if value is not None}
        assert self.backward_gm is not None
        grads = self._run(self.backward_gm, values)
        return _unshared_grads(self.interface.backward_outputs, grads, taken)

    def _tangent(self, index: int, given: Tensor | None, device: torch.device) -> Tensor:
        slot = self.interface.outputs[index]
        if given is None:
            return torch.zeros(slot.shape, dtype=slot.dtype, device=device)
        return given.contiguous()

    def _fetch(self, port: Port, leaves: list[Any]) -> Tensor:
        kind, key = port
        if kind == "input":
            assert isinstance(key, int)
            leaf = leaves[key]
            assert isinstance(leaf, Tensor)
            return leaf
        assert isinstance(key, str)
        return self.constants[key] if kind == "constant" else self.homes[key].tensor.contiguous()

    def _write_buffers(self, found: dict[Port, Tensor], early: dict[int, Tensor]) -> None:
        """Write the new values of buffers in place; what still needs the old ones gets a copy first."""
        new = {key: found.pop((kind, key)) for kind, key in list(found) if kind == "buffer"}
        if not new:
            return
        homes = {key: self.homes[str(key)].tensor for key in new}
        changing = {_storage(home) for home in homes.values()}
        tables: tuple[dict[Any, Tensor], ...] = (found, early, new)
        for table in tables:
            table.update({key: value.clone() for key, value in table.items() if _storage(value) in changing})
        with torch.no_grad():
            for key, home in homes.items():
                home.copy_(new[key])

    def _run(self, gm: GraphModule, values: list[Any]) -> list[Any]:
        """The outputs of a program. What an op of it raises gets a note of where it stands, and peers are stopped."""
        try:
            with self._running():
                outputs: list[Any] = gm(values)
        except CommTimeoutError:
            raise  # says where by itself
        except Exception as error:
            error.add_note(f"raised on rank {self.artifact.rank} {_place(raised_in(gm, error))}")
            if self.engine is not None:
                self.engine.abort(f"rank {self.artifact.rank} raised {type(error).__name__}: {error}")
            raise
        return outputs

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Programs were traced with autograd and autocast already applied."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C._DisableAutocast())
            if self.engine is not None:
                stack.enter_context(self.engine.activate())
                self.engine.labels = self.labels
            yield


class _Step(torch.autograd.Function):
    """Forward program, then backward program. The tensor inputs are all parameters, in the order of the slots."""

    @staticmethod
    def forward(ctx: Any, programs: _Programs, leaves: list[Any], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, ctx.kept = programs.run_forward(leaves, keep=True)
        ctx.programs = programs
        slots = [slot for slot in programs.interface.outputs if slot.is_tensor]
        fixed = [value for slot, value in zip(slots, outputs, strict=True) if not slot.differentiable]
        ctx.mark_non_differentiable(*fixed)
        ctx.device = params[0].device if params else torch.device("cpu")
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        programs, kept = ctx.programs, ctx.kept
        if kept is None:
            raise RuntimeError(
                f"rank {programs.artifact.rank}: trying to backward through the same step a second time; what it saved "
                f"was freed by the first backward: call forward again"
            )
        ctx.kept = None
        indices = [index for index, slot in enumerate(programs.interface.outputs) if slot.is_tensor]
        grads = programs.run_backward(kept, dict(zip(indices, tangents, strict=True)), ctx.device)
        return (None, None, *(grads.get(slot.name) for slot in programs.interface.params))


def program_labels(*programs: RankProgram | None) -> dict[tuple[int, int], Label]:
    """(channel, tag) -> where the message comes from, for the engine's error messages."""
    labels: dict[tuple[int, int], Label] = {}
    for program in programs:
        for instr in program.body if program is not None else ():
            for tag, peer in _peers(instr).items():
                where = instr.origin
                labels[instr.channel, tag] = Label(where.node, where.module_path, peer, where.step)
    return labels


def _peers(instr: Instr) -> dict[int, Peer]:
    """Tag -> the other side of a communication instruction."""
    if instr.kind == "collective":
        return {instr.tag: instr.group}
    peers: dict[int, list[int]] = {}
    for _, message in (*instr.recvs, *instr.sends):
        known = peers.setdefault(message.tag, [])
        if message.peer not in known:
            known.append(message.peer)
    return {tag: known[0] if len(known) == 1 else tuple(known) for tag, known in peers.items()}


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


def _check_arity(gm: GraphModule, ports: tuple[Port, ...]) -> None:
    taken = sum(1 for node in gm.graph.nodes if node.op == "placeholder")
    assert taken == len(ports), f"program takes {taken} inputs, its interface names {len(ports)}"


def _register(root: nn.Module, slot: TensorSlot, tensor: Tensor, table: str) -> _Home:
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
        homes.append(_Home(tensors, key))
    return homes[0]


def _place(origin: Origin | None) -> str:
    if origin is None:
        return "outside of any op of its program"
    line = f", at {origin.line}" if origin.line else ""
    return f"by op {origin.node}, module {origin.module_path or '(the model)'}{line}"


def _is_early(port: Port) -> bool:
    """Whether an input of the backward program is there before the step."""
    return port[0] not in ("saved", "tangent")


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's memory, the same for all views of it."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _apart(value: Tensor, seen: set[int]) -> Tensor:
    """`value` as a tensor object that was not seen before (same memory)."""
    fresh = value.detach() if id(value) in seen else value
    seen.add(id(fresh))
    return fresh


def _unshared_grads(ports: tuple[Port, ...], grads: list[Any], taken: set[int]) -> dict[str, Tensor]:
    """Gradients by name, each with memory of its own: autograd accumulates into them in place."""
    found: dict[str, Tensor] = {}
    for position, (_, name) in enumerate(ports):
        grad, grads[position] = grads[position], None
        if grad is None:
            continue
        found[str(name)] = grad.clone() if _storage(grad) in taken else grad
        taken.add(_storage(grad))
    return found
