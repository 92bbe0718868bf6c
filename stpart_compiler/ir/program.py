"""Rank programs: straight-line instructions of one rank, before they become torch.fx graphs.

Instructions are cheap to make, move and check; `passes/emit_fx.py` turns a list of them into a GraphModule. All ranks
build their instructions from the same sequence of global events, so that `Builder.reserve` hands out equal tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stpart_compiler.ir.redistribute import Step


class Value:
    """A local tensor of one rank's program."""

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Origin:
    """Where an instruction comes from: graph node, module path, and what it does there (with the time step, if any).

    `line`: file and line of the user's model, where known.
    """

    node: str = ""
    module_path: str = ""
    note: str = ""
    step: int | None = None
    line: str = ""

    def __str__(self) -> str:
        where = f"{self.module_path}: {self.node}" if self.module_path else self.node
        step = f", step {self.step}" if self.step is not None else ""
        return f"{where} ({self.note}{step})" if self.note or step else where


@dataclass(frozen=True)
class Message:
    """One point-to-point transfer of an exchange as this rank sees it."""

    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Instr:
    """`outs = target(*args, **kwargs)`; args hold `Value`s (also in lists). Comm facts are for the verifier.

    kind: "compute", "view" (result aliases its first argument), "exchange", "collective", "wait".
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value | None, ...]
    origin: Origin
    kind: str = "compute"
    multi: bool = False  # the target returns a tuple or list: outs are its items
    sends: tuple[tuple[Value, Message], ...] = ()
    recvs: tuple[tuple[Value, Message], ...] = ()
    group: tuple[int, ...] = ()
    tag: int = -1
    channel: int = 0
    tags: tuple[int, ...] = ()
    partial_ok: bool = False  # may read pending sums: linear in them, or part of their reduction
    scratch: int = 0  # most bytes of tensors that the target makes and drops meanwhile (passes/scratch.py)
    _inputs: tuple[Value, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Operators cannot be pickled; they go by name."""
        named = {"target": _named(self.target), "args": tuple(map(_named, self.args))}
        return {key: value for key, value in self.__dict__.items() if key != "_inputs"} | named

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.target = _found(self.target)
        self.args = tuple(map(_found, self.args))

    def inputs(self) -> tuple[Value, ...]:
        """Tensors among the arguments, in order, repeats kept. Found once: an instruction does not change."""
        if self._inputs is None:
            self._inputs = tuple(values_in((*self.args, *self.kwargs.values())))
        return self._inputs


def collective_kind(instr: Instr) -> str:
    """ "all_reduce", in place or not, "all_gather", "reduce_scatter" or "all_to_all"."""
    return str(instr.target).split(".")[1].removesuffix("_")


def sums_in_place(instr: Instr) -> bool:
    """Whether a collective's result takes the place of what it is given."""
    return instr.kind == "collective" and str(instr.target).split(".")[1].endswith("_")


class _OpName(str):
    """Name of an operator overload, such as aten.add.Tensor."""

    __slots__ = ()


def _named(item: Any) -> Any:
    return _OpName(str(item)) if isinstance(item, torch._ops.OpOverload) else item


def _found(item: Any) -> Any:
    return _find_op(item) if isinstance(item, _OpName) else item


def _find_op(name: _OpName) -> Any:
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise ValueError(f"operator {name} is not defined: import the module that registers it, then load") from error


def substituted(item: Any, leaf: Callable[[Any], Any]) -> Any:
    """An argument of an instruction or call with each part of its lists, tuples and dicts replaced by `leaf(part)`."""
    if isinstance(item, (list, tuple)):
        return type(item)([substituted(x, leaf) if isinstance(x, _NESTED) else leaf(x) for x in item])
    if isinstance(item, dict):
        return {key: substituted(part, leaf) for key, part in item.items()}
    return leaf(item)


_NESTED = (list, tuple, dict)


def values_in(item: Any) -> list[Value]:
    """Tensors in an argument, in order."""
    if isinstance(item, Value):
        return [item]
    found: list[Value] = []
    if isinstance(item, (list, tuple)):
        for part in item:
            if isinstance(part, Value):
                found.append(part)
            elif isinstance(part, (list, tuple)):
                found += values_in(part)
    return found


P2P_CHANNEL = 0
COLLECTIVE_CHANNEL = 1
SMALL_CHANNEL = 2
"""Of collectives of small tensors, which have groups of their own: in one group they would queue behind large ones."""

SMALL = 1 << 18
"""Bytes of a tensor, as a whole, up to which its collectives are those of small tensors."""


@dataclass
class RankProgram:
    """Instructions of one phase (such as "forward") on one rank. `gives_sums`: outputs may be pending sums."""

    rank: int
    phase: str
    inputs: list[Value]
    outputs: list[Value | None]
    body: list[Instr]
    partial: dict[str, tuple[str, ...]] = field(default_factory=dict)  # value name -> pending digits (verifier)
    constants: list[Value] = field(default_factory=list)  # tensors that are attributes of the module, not inputs
    gives_sums: bool = False


Group = tuple[int, tuple[int, ...]]
"""Channel and ranks of collectives that have one group."""


def groups_of(programs: Iterable[RankProgram]) -> tuple[Group, ...]:
    """Those of all collectives."""
    return tuple(sorted({(i.channel, i.group) for program in programs for i in program.body if i.kind == "collective"}))


class Pending:
    """A value on its way. `step` waits for the transfer under way and gives the value, or what starts next.

    `left`: transfers that have not ended. `steps`: the steps of a re-layout that these are, where they are known.
    """

    __slots__ = ("_step", "_value", "left", "steps")

    def __init__(self, step: Callable[[], Value | Pending], left: int = 1, steps: tuple[Step, ...] = ()) -> None:
        self._step = step
        self._value: Value | None = None
        self.left = left
        self.steps = steps

    def advance(self) -> None:
        """End the transfer under way, and start the next one if there is one."""
        made = self._step()
        if isinstance(made, Pending):
            self._step, self.left, self.steps = made._step, made.left, made.steps
        else:
            self._value, self.left = made, 0

    def finish(self) -> Value:
        """End all transfers; the same value each time."""
        while self._value is None:
            self.advance()
        return self._value


class Builder:
    """Appends instructions to one rank's program. `reserve` must be called alike on every rank."""

    def __init__(self, rank: int, phase: str, device: torch.device, first_tag: int = 0) -> None:
        self.rank = rank
        self.phase = phase
        self.device = device
        self.body: list[Instr] = []
        self.origin = Origin()
        self._tag = first_tag
        self._names: dict[str, int] = {}

    @property
    def next_tag(self) -> int:
        return self._tag

    def reserve(self, count: int = 1) -> int:
        """First of `count` tags; advances alike on every rank, used or not."""
        tag = self._tag
        self._tag += count
        return tag

    def name(self, stem: str) -> str:
        """A fresh value name."""
        seen = self._names.get(stem)
        self._names[stem] = 0 if seen is None else seen + 1
        return stem if seen is None else self.name(f"{stem}_{seen + 1}")

    def value(self, stem: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
        return Value(self.name(stem), tuple(shape), dtype)

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        stem: str = "v",
        kind: str = "compute",
        partial_ok: bool = False,
    ) -> Value:
        """Append a call with one tensor result of the given local shape."""
        out = self.value(stem, shape, dtype)
        self.body.append(Instr(target, args, kwargs or {}, (out,), self.origin, kind, partial_ok=partial_ok))
        return out

    def call_multi(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: Sequence[tuple[str, Sequence[int], torch.dtype] | None],
        kind: str = "compute",
        partial_ok: bool = False,
    ) -> tuple[Value | None, ...]:
        """Append a call with several results; None where a result is no tensor or not used."""
        values = tuple(None if out is None else self.value(*out) for out in outs)
        instr = Instr(target, args, kwargs, values, self.origin, kind, multi=True, partial_ok=partial_ok)
        self.body.append(instr)
        return values

    def exchange(
        self,
        sends: Sequence[tuple[Value, int, int]],
        recvs: Sequence[tuple[Sequence[int], torch.dtype, int, int]],
        stem: str = "recv",
        channel: int = P2P_CHANNEL,
        partial_ok: bool = False,
    ) -> tuple[list[Value], tuple[int, ...]]:
        """Start a grouped exchange: sends (value, peer, tag), receives (shape, dtype, peer, tag).

        Returns the receive buffers and the tags to wait for. All messages have one dtype. Nothing is emitted when both
        lists are empty.
        """
        if not sends and not recvs:
            return [], ()
        out_msgs = tuple((x, Message(peer, tag, x.shape, x.dtype)) for x, peer, tag in sends)
        in_msgs = tuple(
            (self.value(stem, shape, dtype), Message(peer, tag, tuple(shape), dtype))
            for shape, dtype, peer, tag in recvs
        )
        dtype = sends[0][0].dtype if sends else recvs[0][1]
        args = (
            [x for x, _, _ in sends],
            [peer for _, peer, _ in sends],
            [tag for _, _, tag in sends],
            [size for shape, _, _, _ in recvs for size in shape],
            [len(shape) for shape, _, _, _ in recvs],
            [peer for _, _, peer, _ in recvs],
            [tag for _, _, _, tag in recvs],
            dtype,
            self.device,
            channel,
        )
        buffers = tuple(value for value, _ in in_msgs)
        instr = Instr(torch.ops.stpart.exchange.default, args, {}, buffers, self.origin, "exchange", multi=True)
        instr.sends, instr.recvs, instr.channel, instr.partial_ok = out_msgs, in_msgs, channel, partial_ok
        self.body.append(instr)
        return list(buffers), tuple(sorted({m.tag for _, m in (*out_msgs, *in_msgs)}))

    def collective(
        self,
        kind: str,
        x: Value,
        group: Sequence[int],
        tag: int,
        shape: Sequence[int],
        channel: int = COLLECTIVE_CHANNEL,
        partial_ok: bool = False,
    ) -> Value:
        """Start `kind` ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") over `group`, in its order."""
        target = getattr(torch.ops.stpart, kind).default
        out = self.value(kind, shape, x.dtype)
        instr = Instr(target, (x, list(group), tag, channel), {}, (out,), self.origin, "collective")
        instr.group, instr.tag, instr.channel, instr.partial_ok = tuple(group), tag, channel, partial_ok
        self.body.append(instr)
        return out

    def wait(self, tags: Sequence[int], channel: int) -> None:
        """Wait for all transfers with these tags."""
        if not tags:
            return
        instr = Instr(torch.ops.stpart.wait.default, (list(tags), channel), {}, (), self.origin, "wait")
        instr.tags, instr.channel = tuple(tags), channel
        self.body.append(instr)
