"""The annotated joint graph as text, one value a line, and as DOT.

    %mm: f32[64@M:r, 256@K:r+c] = mm(%x, %t)  # layers.0.mlp.up, moves %t along r, 2 steps

A dim reads `size@FACTOR:form` where it is cut (the loop dim of the op that makes it, and the linear form over the mesh
axes that tells a rank's block), `size` where it is whole. `sum(c)`: the blocks along c are summands of the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stpart_compiler.cost_models.sizes import format_bytes
from stpart_compiler.inspect.table import plan_table
from stpart_compiler.ir.layout import Digit, Layout
from stpart_compiler.ir.redistribute import redistribute, step_traffic
from stpart_compiler.ir.rule import DimMap, OpRule
from stpart_compiler.ir.spacetime import MOVE, SLICE, Derived, Port, Shift, Strategy
from stpart_compiler.passes.codegen import Placement
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.rules import Operand
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.schedule import MakeSchedule, Phase

__all__ = ["dump_annotated", "dump_rules", "plan_table", "to_dot"]

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_LONGEST_ARGUMENT = 60  # characters


def dump_rules(graph: Annotated) -> str:
    """The joint graph as `propagate` leaves it: a line per op with its factor rule and its class of identical ops."""
    lines = [_resting_line(graph, key, None) for key, info in graph.values.items() if info.kind != "op"]
    for op in graph.ops:
        rule = str(op.rule) if op.has_rule else "no rule: whole on every rank"
        path = f"{op.module_path}, " if op.module_path else ""
        results = ", ".join(f"{_dtype(r.dtype)}{list(r.shape)}" for r in op.call.results if r is not None)
        lines.append(f"%{op.name}: {results} = {_call_text(graph, op)}  # {path}{rule}, class {op.klass}")
        lines += _body_lines(graph, op)
    return "\n".join(lines) + "\n"


def dump_annotated(graph: Annotated, placement: Placement) -> str:
    """The joint graph with all placements, one value a line, re-layouts on lines of their own.

    First the parameters, buffers and inputs with the layouts in which they rest, then forward, then backward, each with
    what it returns.
    """
    schedule = MakeSchedule(placement.cost).apply(graph, placement.derived, placement.layout)
    lines = [f"mesh {placement.mesh}", "", "at rest:"]
    lines += [_resting_line(graph, key, placement) for key, info in graph.values.items() if info.kind != "op"]
    for phase in (schedule.forward, schedule.backward):
        if phase is not None:
            lines += ["", f"{phase.name}:", *_phase_lines(graph, placement, phase)]
    return "\n".join(lines) + "\n"


def _phase_lines(graph: Annotated, placement: Placement, phase: Phase) -> Iterator[str]:
    seen: set[tuple[ValueKey, Layout]] = set()  # each re-layout is made once in a phase and shared
    is_forward = phase.name == "forward"
    apart = {read for reads in phase.slices.values() for read in reads}
    for op in graph.ops:
        if (op.name in graph.backward) == is_forward:
            continue
        for i, (key, port) in enumerate(zip(op.operands, placement.derived(op).inputs, strict=True)):
            steps = placement.strategies[op.name].steps if (op.name, i) in apart else 1
            yield from _relayout_lines(graph, placement, phase, key, port.layout, seen, steps)
        yield from _op_lines(graph, placement, op)
    for key, layout in phase.outputs:
        steps = placement.strategies[key[0]].steps if key in phase.leaving else 1
        yield from _relayout_lines(graph, placement, phase, key, layout, seen, steps)
    for (key, layout), meaning in zip(phase.outputs, _meanings(graph, phase), strict=True):
        yield f"return {_name(graph, key)}: {layout}  # {meaning}"


def _meanings(graph: Annotated, phase: Phase) -> list[str]:
    """What each result of a phase is."""
    captured = graph.captured
    if phase.name == "backward":
        names = [name for name, grad in captured.grads.items() if grad is not None]
        return [f"gradient of {name}" for name in names]
    found = [f"output {info.index}" for info in captured.outputs if info.node]
    found += [f"new value of {name}" for name in captured.mutations]
    return found + ["saved for backward"] * (len(phase.outputs) - len(found))


def _relayout_lines(
    graph: Annotated,
    placement: Placement,
    phase: Phase,
    key: ValueKey,
    wanted: Layout,
    seen: set[tuple[ValueKey, Layout]],
    slices: int,
) -> Iterator[str]:
    source = phase.layout.get(key) or placement.layout(key)
    if source == wanted or (key, wanted) in seen:
        return
    seen.add((key, wanted))
    how = relayout_text(placement, source, wanted, graph.values[key].dtype.itemsize)
    if how:
        yield f"{_name(graph, key)} -> {wanted}  # {how}{f', in {slices} slices' if slices > 1 else ''}"


def relayout_text(placement: Placement, source: Layout, target: Layout, itemsize: int) -> str:
    """Steps from one layout to another with what the busiest rank moves; empty where the blocks lie alike already."""
    texts = []
    for step in redistribute(source, target, placement.mesh, placement.cost).steps:
        traffic = step_traffic(step, placement.mesh)
        if traffic.axes:
            moved = format_bytes(traffic.elements * itemsize)
            texts.append(f"{step.kind} along {', '.join(traffic.axes)}, {moved}")
        else:
            texts.append(step.kind)
    return "; then ".join(texts)


def _op_lines(graph: Annotated, placement: Placement, op: OpNode) -> Iterator[str]:
    strategy = placement.strategies[op.name]
    derived = placement.derived(op)
    note = ", ".join(_notes(graph, op, strategy, derived))
    first: str | None = None
    for index, result in enumerate(op.call.results):
        if result is None:
            continue
        dims = _port_dims(op.rule, op.rule.outputs[index], strategy, derived.outputs[index], result.shape)
        name = _name(graph, (op.name, index))
        made = _call_text(graph, op) if first is None else f"result {index} of {first}"
        first = first or name
        pending = _pending_text(derived.outputs[index].layout)
        comment = f"  # {note}" if note else ""
        yield f"{name}: {_dtype(result.dtype)}[{', '.join(dims)}]{pending} = {made}{comment}"
    yield from _body_lines(graph, op)


def _body_lines(graph: Annotated, op: OpNode) -> Iterator[str]:
    """The ops of a region, each run on its part of a block."""
    region = op.call.target
    if not isinstance(region, Region):
        return
    for j, inner in enumerate(region.body):
        reads = [_name(graph, op.operands[r]) if i < 0 else f"#{i}{f'.{r}' if r else ''}" for i, r in inner.sources]
        yield f"    #{j} = {inner.kind}({', '.join(reads)})"
    yield f"    -> {', '.join(f'#{i}' + (f'.{r}' if r else '') for i, r in region.outputs)}"


def _port_dims(
    rule: OpRule, tensor: Iterable[DimMap], strategy: Strategy, port: Port, shape: tuple[int, ...]
) -> list[str]:
    return [_dim_text(rule, dim, strategy, port, size) for dim, size in zip(tensor, shape, strict=True)]


def _dim_text(rule: OpRule, dim: DimMap, strategy: Strategy, port: Port, size: int) -> str:
    cuts = []
    for factor in dim:
        digits = [_resting(d, strategy, port) for d in strategy.digits[factor] if not (d.tau and port.motion == SLICE)]
        if digits:
            cuts.append(f"{rule.factors[factor].name.upper()}:{'.'.join(map(str, digits))}")
    if not cuts:
        return str(size)
    return f"{size}@{cuts[0]}" if len(cuts) == 1 else f"{size}@({' '.join(cuts)})"


def _resting(digit: Digit, strategy: Strategy, port: Port) -> Digit:
    """The form of a result's block: a result that moves comes to rest after the last step."""
    return digit.at_rest(strategy.steps - 1 if port.motion == MOVE else 0)


def _notes(graph: Annotated, op: OpNode, strategy: Strategy, derived: Derived) -> Iterator[str]:
    if op.module_path:
        yield op.module_path
    for key, port in zip(op.operands, derived.inputs, strict=True):
        if port.motion == MOVE:
            yield f"moves {_name(graph, key)} along {_axes(port.shift)}"
    for port in derived.outputs:
        if port.motion == MOVE:
            yield f"moves the result along {_axes(port.shift)}"
    if strategy.steps > 1:
        yield f"{strategy.steps} steps"
    if not op.has_rule:
        yield "no rule: whole on every rank"


def _axes(shift: Shift) -> str:
    return ", ".join(axis for axis, _ in shift)


def _resting_line(graph: Annotated, key: ValueKey, placement: Placement | None) -> str:
    info = graph.values[key]
    layout = str(placement.layout(key)) if placement else f"[{', '.join(map(str, info.shape))}]"
    return f"%{key[0]}: {_dtype(info.dtype)}{layout}  # {info.kind} {_given_name(graph, key)}".rstrip()


def _given_name(graph: Annotated, key: ValueKey) -> str:
    """The user's name of a parameter, buffer or input."""
    captured = graph.captured
    names = {info.node: info.name for info in (*captured.params, *captured.buffers) if info.node}
    names |= {info.node: info.path for info in captured.inputs if info.node}
    names |= {name: f"of output {index}" for index, name in captured.tangents}
    return names.get(key[0], "")


def _pending_text(layout: Layout) -> str:
    return layout.pending_text


def _dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _name(graph: Annotated, key: ValueKey) -> str:
    op = graph.by_name.get(key[0])
    several = op is not None and len(op.call.results) > 1
    return f"%{key[0]}.{key[1]}" if several else f"%{key[0]}"


def _call_text(graph: Annotated, op: OpNode) -> str:
    args = [_argument_text(graph, op, arg) for arg in op.call.args]
    args += [f"{name}={_argument_text(graph, op, arg)}" for name, arg in op.call.kwargs.items()]
    return f"{target_text(op)}({', '.join(args)})"


def target_text(op: OpNode) -> str:
    """Name of an op without the library it comes from and without the default overload."""
    return str(op.call.target).removeprefix("aten.").removesuffix(".default")


def _argument_text(graph: Annotated, op: OpNode, arg: Any) -> str:
    if isinstance(arg, Operand):
        return _name(graph, op.operands[arg.index])
    if isinstance(arg, (list, tuple)):
        text = f"[{', '.join(_argument_text(graph, op, part) for part in arg)}]"
    elif isinstance(arg, torch.dtype):
        text = _dtype(arg)
    else:
        text = str(arg)
    has_operand = isinstance(arg, (list, tuple)) and any(isinstance(part, Operand) for part in arg)
    return text if has_operand or len(text) <= _LONGEST_ARGUMENT else f"{text[: _LONGEST_ARGUMENT - 3]}..."


_FILL = {False: "#dbe9f6", True: "#fde7d3"}  # forward, backward
_BORDER = {"whole": "#888888", "spatial": "#2b6cb0", "temporal": "#c53030"}


def to_dot(graph: Annotated, placement: Placement) -> str:
    """DOT text: forward blue, backward orange; bordered red for temporal maps, blue for spatial, grey for whole ops.

    Edges with a re-layout are red and labelled with it.
    """
    schedule = MakeSchedule(placement.cost).apply(graph, placement.derived, placement.layout)
    saved = dict(schedule.saved)
    lines = ["digraph plan {", "  rankdir=TB;", '  node [shape=box, style="filled", fontname="monospace", fontsize=9];']
    lines += [_resting_node(graph, placement, key) for key, info in graph.values.items() if info.kind != "op"]
    for op in graph.ops:
        lines.append(_op_node(graph, placement, op))
        lines += [
            _edge(graph, placement, op, key, port.layout, saved)
            for key, port in zip(op.operands, placement.derived(op).inputs, strict=True)
        ]
    return "\n".join([*lines, "}"]) + "\n"


def _resting_node(graph: Annotated, placement: Placement, key: ValueKey) -> str:
    info = graph.values[key]
    title = _given_name(graph, key) or key[0]
    label = _quoted(f"{info.kind} {title}\n{placement.layout(key)}")
    return f'  {_quoted(key[0])} [label={label}, shape=ellipse, fillcolor="#eeeeee"];'


def _op_node(graph: Annotated, placement: Placement, op: OpNode) -> str:
    strategy = placement.strategies[op.name]
    lines = (f"{op.name} = {target_text(op)}", op.module_path, strategy.describe(op.rule))
    label = _quoted("\n".join(line for line in lines if line))
    fill = _FILL[op.name in graph.backward]
    return f'  {_quoted(op.name)} [label={label}, fillcolor="{fill}", color="{_BORDER[strategy_kind(strategy)]}"];'


def strategy_kind(strategy: Strategy) -> str:
    """ "temporal" (several steps), "spatial" (cut over ranks) or "whole" (every rank computes all of it)."""
    if strategy.steps > 1:
        return "temporal"
    return "spatial" if any(strategy.digits) else "whole"


def _edge(
    graph: Annotated, placement: Placement, op: OpNode, key: ValueKey, wanted: Layout, saved: dict[ValueKey, Layout]
) -> str:
    source = saved.get(key) if op.name in graph.backward else None
    source = source or placement.layout(key)
    how = relayout_text(placement, source, wanted, graph.values[key].dtype.itemsize) if source != wanted else ""
    style = f' [label={_quoted(how)}, color="#c53030", fontsize=8]' if how else ""
    return f"  {_quoted(key[0])} -> {_quoted(op.name)}{style};"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
