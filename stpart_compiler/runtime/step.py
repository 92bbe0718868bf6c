"""The programs of a rank and one step through them, differentiable: forward's, then backward's.

Under `RankModule.no_sync` backward leaves sums unreduced (`runtime/sums.py`); the first backward outside reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from stpart_compiler.ir.artifact import Deferred, Port, RankArtifact
from stpart_compiler.ir.program import COLLECTIVE_CHANNEL, Instr, Origin, RankProgram
from stpart_compiler.passes.emit_fx import raised_in
from stpart_compiler.runtime.agree import agree_on_no_sync
from stpart_compiler.runtime.engine import CommTimeoutError, Engine, Label, Peer
from stpart_compiler.runtime.owners import Home
from stpart_compiler.runtime.random_ops import drawn, share_state
from stpart_compiler.runtime.sums import GradientSums, added


class Backward(NamedTuple):
    """Backward in two programs: up to the sums of gradients, and their reduction."""

    deferred: Deferred
    accumulate_gm: GraphModule
    reduce_gm: GraphModule


Split = Callable[[], Backward]
"""Makes the two programs. All ranks ask together."""


class Sized(NamedTuple):
    """What a rank runs for calls of some sizes."""

    artifact: RankArtifact
    forward_gm: GraphModule
    backward_gm: GraphModule | None
    split: Split | None


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


class Programs:
    """The two programs of a rank and what their inputs and outputs are bound to. No nn.Module: it owns no tensors."""

    def __init__(
        self,
        sized: Sized,
        homes: dict[str, Home],
        sums: GradientSums,
    ) -> None:
        self.artifact, self.forward_gm, self.backward_gm, self._split = sized
        self.interface = self.artifact.interface
        self.homes = homes
        self.sums = sums
        self.engine: Engine | None = None
        self._backward: Backward | None = None
        self.device = next((home.tensor.device for home in homes.values()), torch.device("cpu"))
        self.constants = {name: x.to(self.device) for name, x in self.artifact.constants.items()}
        self.draws = any(instr.target is drawn for program in self.artifact.programs for instr in program.body)
        self.labels = program_labels(*self.artifact.programs)
        _check_arity(self.forward_gm, self.interface.forward_inputs)
        if self.backward_gm is not None:
            _check_arity(self.backward_gm, self.interface.backward_inputs)

    def attach(self, engine: Engine) -> None:
        if self.engine is not engine:
            # clip_grad_norm_ needs the group of all ranks.
            everyone = (COLLECTIVE_CHANNEL, tuple(range(engine.world_size)))
            engine.prepare(self.interface.channels, (*self.interface.groups, everyone))
            self.engine = engine
            self._prepare_sums()

    def split_backward(self) -> Backward:
        """Backward in two programs, made at the first call; all ranks ask together.

        Raises:
            RuntimeError: they were not compiled and cannot be, or other ranks do not ask for them.
        """
        if self._backward is None:
            if self._split is None:
                raise RuntimeError(
                    f"no_sync: rank module {self.artifact.rank} came without programs for it and cannot compile them:"
                    f" make it with rank_module() or local_module()"
                )
            if self.engine is not None:
                agree_on_no_sync(self.engine, self.interface, self.device)
            self._backward = self._split()
            deferred = self._backward.deferred
            self.labels |= program_labels(deferred.accumulate, deferred.reduce)
            self._prepare_sums()
        return self._backward

    def _prepare_sums(self) -> None:
        if self.engine is not None and self._backward is not None:
            self.engine.prepare(self.interface.channels, self._backward.deferred.groups)

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
        assert self.backward_gm is not None
        grads = self._run_over(kept, tangents, device, self.backward_gm)
        return {
            str(port[1]): grad
            for port, grad in zip(self.interface.backward_outputs, grads, strict=True)
            if grad is not None
        }

    def run_to_sums(
        self, kept: _Kept, tangents: Mapping[int, Tensor | None], device: torch.device, needed: Collection[str]
    ) -> dict[str, Tensor]:
        """Like `run_backward`, but what would have to be reduced is left with what waits already.

        `needed`: the parameters that get gradients. Outside of `no_sync` all that waits is reduced.
        """
        deferred, accumulate, _ = self.split_backward()
        made = self._run_over(kept, tangents, device, accumulate)
        count = len(deferred.grads)
        grads = {name: grad for name, grad in zip(deferred.grads, made[:count], strict=True) if grad is not None}
        sums = made[count:]
        del made
        self.sums.add(deferred.sums, sums, needed, self._reduce)
        del sums
        return grads if self.sums.open else added(grads, self.sums.reduced())

    def _reduce(self, sums: list[Tensor | None]) -> dict[str, Tensor]:
        """Gradients by parameter name; a sum that is None is zero."""
        deferred, _, reduce = self.split_backward()
        inputs = deferred.reduce.inputs
        given = [
            x if x is not None else torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            for x, value in zip(sums, inputs, strict=True)
        ]
        sums.clear()
        taken: set[int] = set()
        return dict(zip(deferred.reduced, _unshared(self._run(reduce, given), taken), strict=True))

    def _run_over(
        self, kept: _Kept, tangents: Mapping[int, Tensor | None], device: torch.device, gm: GraphModule
    ) -> list[Any]:
        """Outputs of a program that takes backward's inputs, each with memory of its own."""
        kept.check_unchanged(self.artifact.rank)
        values = kept.values
        for position, (kind, key) in enumerate(self.interface.backward_inputs):
            if kind == "tangent":
                assert isinstance(key, int)
                values[position] = self._tangent(key, tangents.get(key), device)
        taken = {_storage(value) for value in values if value is not None}
        return _unshared(self._run(gm, values), taken)

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


class Step(torch.autograd.Function):
    """Forward program, then backward program. The tensor inputs are all parameters, in the order of the slots."""

    @staticmethod
    def forward(ctx: Any, programs: Programs, leaves: list[Any], *params: Tensor) -> tuple[Tensor, ...]:
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
        given = dict(zip(indices, tangents, strict=True))
        params = programs.interface.params
        if programs.sums.open or programs.sums.waiting:
            needed = [slot.name for slot, need in zip(params, ctx.needs_input_grad[2:], strict=True) if need]
            _check_accumulates(ctx.next_functions, programs.artifact.rank)
            grads = programs.run_to_sums(kept, given, ctx.device, needed)
        else:
            grads = programs.run_backward(kept, given, ctx.device)
        return (None, None, *(grads.get(slot.name) for slot in params))


def _check_accumulates(nodes: Sequence[tuple[Any, int]], rank: int) -> None:
    """Raises:
    RuntimeError: this is no backward that adds to the gradient of every parameter: what waits would be lost.
    """
    try:
        runs = all(torch._C._will_engine_execute_node(node) for node, _ in nodes if node is not None)
    except RuntimeError:  # torch.autograd.grad
        runs = False
    if not runs:
        raise RuntimeError(
            f"rank {rank}: with no_sync, gradients are for .grad alone: call loss.backward() without inputs=, not"
            " torch.autograd.grad"
        )


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


def _check_arity(gm: GraphModule, ports: tuple[Port, ...]) -> None:
    taken = sum(1 for node in gm.graph.nodes if node.op == "placeholder")
    assert taken == len(ports), f"program takes {taken} inputs, its interface names {len(ports)}"


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


def _unshared(made: list[Any], taken: set[int]) -> list[Any]:
    """Each with memory of its own, which is not among `taken`: gradients are accumulated in place."""
    for position, value in enumerate(made):
        if value is not None:
            made[position] = value.clone() if _storage(value) in taken else value
            taken.add(_storage(value))
    return made
