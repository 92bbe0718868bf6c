"""Named plans users know, each a sub-space of the same search space, so that it is priced and run like any other.

A template says which strategies ops may take and where parameters may rest; the solver fills in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from stpart_compiler.ir.layout import Digit, Layout, max_local_numel
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.spacetime import MOVE, STAY, Strategy, derive
from stpart_compiler.passes.norms import norms_of_regions
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueInfo
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.space import Restriction
from stpart_compiler.passes.strategies import TILE_STEPS, is_contraction


@dataclass(frozen=True)
class Template:
    """A named sub-space. `applies`: None, or why the mesh does not allow it."""

    name: str
    summary: str
    restriction: Restriction
    applies: Callable[[Mesh], str | None]
    weights_stay: bool = False  # parameters are used where they rest: no gathering of weights
    regions: str | None = None  # kind of regions that are one op each
    again: Callable[[Annotated], frozenset[str]] = lambda graph: frozenset()  # ops of forward that backward runs again
    yardstick: bool = True  # plans are compared with it; not where solving it takes as long as solving for the plan

    @property
    def pairs(self) -> bool:
        """Whether it maps a pair of equal axes at once, beside cuts along others."""
        return self.applies is _square


def _axes(digits: tuple[Digit, ...]) -> set[str]:
    return {axis for digit in digits for axis, _ in digit.coeffs}


def _cut_axes(strategy: Strategy) -> dict[int, set[str]]:
    return {f: _axes(digits) for f, digits in enumerate(strategy.digits) if digits}


def _spatial(strategy: Strategy) -> bool:
    return strategy.steps == 1 and not _skewed(strategy)


def _skewed(strategy: Strategy) -> bool:
    return any(len(d.coeffs) > 1 for digits in strategy.digits for d in digits)


def _wide(mesh: Mesh) -> list[str]:
    return [axis for axis in mesh.axes if mesh.size[axis] > 1]


def _data(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Only the batch is cut, and parameters where they rest: a cast of a block is sent, not the block cast later."""
    return _spatial(strategy) and (_of_parameters(op) or set(_cut_axes(strategy)) <= op.batch)


def _of_parameters(op: OpNode) -> bool:
    """A view or cast of a parameter or of its gradient."""
    return not op.data and len(op.operands) == 1


def _cuts(op: OpNode, strategy: Strategy, mesh: Mesh) -> int:
    """Mesh axes in use."""
    return 0 if _of_parameters(op) else len(set().union(*_cut_axes(strategy).values()))


def _roles(mesh: Mesh) -> tuple[set[str], set[str]]:
    """(data axes, model axes): the first of several axes carries the batch, the others the model."""
    wide = _wide(mesh)
    return (set(wide[:1]), set(wide[1:])) if len(wide) > 1 else (set(), set(wide))


def _megatron(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Batch on the data axis, features (heads, hidden of the MLP, vocabulary) on the model axes."""
    features = set(range(len(op.rule.factors))) - op.data
    return _spatial(strategy) and _in_roles(op, strategy, mesh, features)


def _in_roles(op: OpNode, strategy: Strategy, mesh: Mesh, others: Set[int]) -> bool:
    """The batch is cut on the data axis alone; on the model axes, of what is no batch, the factors `others` alone."""
    data, model = _roles(mesh)
    return all(
        axes <= data if f in op.batch else axes <= model and f in others for f, axes in _cut_axes(strategy).items()
    )


def _megatron_score(op: OpNode, strategy: Strategy, mesh: Mesh) -> int:
    """The batch is cut wherever it can be; products and attention use the model axes too."""
    data, _ = _roles(mesh)
    used = set().union(*_cut_axes(strategy).values())
    heavy = is_contraction(op.rule) or "scaled_dot_product" in str(op.call.target)
    return len(used) if heavy else len(used & data)


def _megatron_sp(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Megatron, with the sequence cut on the model axes outside the contractions and the embedding.

    Tokens that look up a table that is cut come and go in pieces; its gradient would else be summed over all ranks.
    """
    if is_contraction(op.rule) or "embedding" in str(op.call.target):
        return _megatron(op, strategy, mesh)
    return _spatial(strategy) and _in_roles(op, strategy, mesh, set(range(len(op.rule.factors))))


def _has_weight(op: OpNode) -> bool:
    """A product of two 2-D operands: linear layers and their gradients."""
    return is_contraction(op.rule) and all(operand.ndim == 2 for operand in op.call.operands)


def _async_tp(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Megatron with the sequence cut, or linear layers as loops over its pieces, while the weight stays where it rests.

    Forward and the input's gradient: the activation goes round, or the sum on its way to where it is wanted. The
    weight's gradient: the operand that is cut along the sequence goes round.
    """
    if strategy.steps == 1:
        return _megatron_sp(op, strategy, mesh)
    timed, features = strategy.time_factor, set(range(len(op.rule.factors))) - op.data
    if timed is None or timed not in op.data or not _has_weight(op) or _skewed(strategy):
        return False
    return _in_roles(op, strategy, mesh, features | {timed})


def _ring(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Tokens are cut; in linear layers the weight, or its gradient, goes round while activations stay."""
    if _skewed(strategy):
        return False
    if not _has_weight(op):
        return strategy.steps == 1 and (_of_parameters(op) or set(_cut_axes(strategy)) <= op.data)
    if strategy.steps == 1:
        return False
    derived = derive(op.rule, strategy, mesh)
    tokens = [i for i, tensor in enumerate(op.rule.inputs) if any(f in op.data for dim in tensor for f in dim)]
    return all(derived.inputs[i].motion != MOVE for i in tokens) and _ring_role(op, strategy)


def _ring_role(op: OpNode, strategy: Strategy) -> bool:
    """The factor cut in space alone is one of tokens, the one cut in time one of features."""
    spatial = {f for f, digits in enumerate(strategy.digits) for d in digits if not d.tau}
    return spatial <= op.data and strategy.time_factor not in op.data


def _metp(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Tokens are cut; keys and values go round in attention, weights in regions and linear layers (METP)."""
    if not op.rule.loops:
        return _ring(op, strategy, mesh)
    if op.rule.rings:
        return _ring_role(op, strategy) and _goes_round_inside(op, strategy, mesh)
    is_region = isinstance(op.call.target, Region)
    in_role = _ring_role(op, strategy) if is_region else set(_cut_axes(strategy)) <= op.data
    return in_role and _operands_travel(op, strategy, mesh)


def _goes_round_inside(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Attention with its projections: as many groups of heads, one after another, as there are ranks in the ring."""
    cut = [digit.q for f in op.rule.rings for digit in strategy.digits[f]]
    groups = [steps for steps in TILE_STEPS if steps <= max(cut, default=1)]
    return bool(cut) and strategy.steps == max(groups, default=1)


def _operands_travel(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    return any(port.motion == MOVE for port in derive(op.rule, strategy, mesh).inputs)


def _attends(op: OpNode) -> bool:
    """An attention kernel, or a product of two activations of attention written out."""
    return "scaled_dot_product" in str(op.call.target) or (is_contraction(op.rule) and not _has_weight(op))


def _ulysses(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """The sequence is cut on the model axes, in attention the heads: all-to-alls in between (Ulysses)."""
    if not _spatial(strategy):
        return False
    if not _attends(op):
        return _of_parameters(op) or _in_roles(op, strategy, mesh, op.data)
    return _in_roles(op, strategy, mesh, _in_all_operands(op) - op.data)


def _in_all_operands(op: OpNode) -> set[int]:
    return set.intersection(*({f for dim in tensor for f in dim} for tensor in op.rule.inputs[:2]))


def _context(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """The sequence is cut on the model axes; keys and values go round in attention (context parallel)."""
    if op.rule.loops:
        return _in_roles(op, strategy, mesh, op.data) and _operands_travel(op, strategy, mesh)
    return _spatial(strategy) and (_of_parameters(op) or _in_roles(op, strategy, mesh, op.data))


def _summa(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Tokens on the first of two axes, features (heads) on the second; products of linear layers use both.

    One of the three tensors stays; each other is gathered, or the sums of it scattered, along one axis (2-D SUMMA).
    The gradient of a weight may have rows on the one axis and columns on the other, or be a sum over tokens.
    """
    if not _spatial(strategy):
        return False
    (rows,), (columns,) = _roles(mesh)
    cuts = _cut_axes(strategy)
    if _has_weight(op) and not _in_result(op) & op.data and not cuts.keys() & op.data:
        return len(cuts) == 2 and set().union(*cuts.values()) == {rows, columns}
    return _of_parameters(op) or all(axes == {rows if f in op.data else columns} for f, axes in cuts.items())


def _in_result(op: OpNode) -> set[int]:
    return {f for dim in op.rule.outputs[0] for f in dim}


def _primepar(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Linear layers: the summed dim in time over two axes (the result stays, both operands move)."""
    if not _has_weight(op):
        return strategy.steps == 1
    if strategy.steps == 1:
        return False
    derived = derive(op.rule, strategy, mesh)
    return all(port.motion == MOVE for port in derived.inputs) and derived.outputs[0].motion == STAY


def _spatial_or_primepar(op: OpNode, strategy: Strategy, mesh: Mesh) -> bool:
    """Any op cut in space; linear layers by PrimePar's primitive too."""
    return _spatial(strategy) or (_has_weight(op) and _primepar(op, strategy, mesh))


def whole_layouts(graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
    """Every rank holds the parameter whole."""
    return [layout for layout in layouts if layout.is_replicated]


def _fully_sharded(graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
    """Layouts with the smallest block: the parameter is spread over all ranks where its dims allow."""
    plain = [layout for layout in layouts if all(len(d.coeffs) == 1 for d in layout.digits)]
    least = min(max_local_numel(layout) for layout in plain)
    return [layout for layout in plain if max_local_numel(layout) == least]


def _beside_groups(graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
    """As fully sharded, the weights of attention not along its heads: of each group of them every rank has a part."""
    found = _fully_sharded(graph, value, layouts, mesh)
    ports = [
        (op, port)
        for op in graph.readers.get(value.key[0], [])
        for port, key in enumerate(op.operands)
        if key == value.key
    ]
    groups = {
        d
        for op, port in ports
        if op.rule.rings
        for d, factors in enumerate(op.rule.inputs[port])
        if (op.rule.tiles - op.data) & set(factors)
    }
    return [layout for layout in found if not any(a.digits for d in groups for a in layout.dims[d])] or found


def _smallest(graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
    least = min(max_local_numel(layout) for layout in layouts)
    return [layout for layout in layouts if max_local_numel(layout) == least]


def _on_two_dims(graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
    """One dim cut on each axis; where there are no such two, the layouts with the smallest block."""
    apart = [layout for layout in layouts if sum(any(atom.digits for atom in dim) for dim in layout.dims) == 2]
    return _fully_sharded(graph, value, apart or layouts, mesh)


def _model_axes(graph: Annotated, value: ValueInfo, layouts: list[Layout], mesh: Mesh) -> list[Layout]:
    _, model = _roles(mesh)
    return [layout for layout in layouts if all(len(d.coeffs) == 1 and _axes((d,)) <= model for d in layout.digits)]


def _always(mesh: Mesh) -> str | None:
    return None


def _square(mesh: Mesh) -> str | None:
    wide = _wide(mesh)
    pairs = [(a, b) for i, a in enumerate(wide) for b in wide[i + 1 :] if mesh.size[a] == mesh.size[b]]
    return None if pairs else f"needs two mesh axes of equal size (or one axis of square size), got mesh {mesh}"


def _two(mesh: Mesh) -> str | None:
    wide = _wide(mesh)
    return None if len(wide) == 2 else f"needs two mesh axes (or one axis of square size), got mesh {mesh}"


_ALL = (
    Template(
        "data", "batch cut over all ranks, parameters replicated", Restriction(_data, whole_layouts, _cuts), _always
    ),
    Template(
        "zero3",
        "batch cut over all ranks, parameters sharded and gathered for use",
        Restriction(_data, _fully_sharded, _cuts),
        _always,
    ),
    Template(
        "megatron",
        "features cut on the model axes, batch on the first of several",
        Restriction(_megatron, _model_axes, _megatron_score),
        _always,
        True,
    ),
    Template(
        "megatron_sp",
        "megatron, with the sequence cut between the linear layers",
        Restriction(_megatron_sp, _model_axes, _cuts),
        _always,
        True,
    ),
    Template(
        "async_tp",
        "megatron_sp, with linear layers as loops in which activations or partial results travel",
        Restriction(_async_tp, _model_axes, _cuts),
        _always,
        True,
    ),
    Template("ring", "weights rotate over token shards", Restriction(_ring, _fully_sharded, _cuts), _always),
    Template(
        "metp",
        "tokens cut; keys and values rotate in attention, a group of heads at a time, weights in MLPs",
        Restriction(_metp, _beside_groups, _cuts),
        _always,
        regions="all",
        again=norms_of_regions,
    ),
    Template(
        "ulysses_zero3",
        "sequence cut on the model axes, heads in attention; parameters sharded and gathered for use",
        Restriction(_ulysses, _fully_sharded, _cuts),
        _always,
    ),
    Template(
        "cp_zero3",
        "sequence cut on the model axes, keys and values rotate; parameters sharded and gathered for use",
        Restriction(_context, _fully_sharded, _cuts),
        _always,
    ),
    Template(
        "summa",
        "tokens cut on one of two axes, features on the other; 2-D products, parameters cut on both axes",
        Restriction(_summa, _on_two_dims, _cuts),
        _two,
    ),
    Template(
        "primepar",
        "2-D temporal maps for all linear layers",
        Restriction(_primepar, _smallest, _cuts),
        _square,
    ),
    Template(
        "primepar_space",
        "PrimePar's space: ops cut in space, linear layers in 2-D temporal maps where that is faster",
        Restriction(_spatial_or_primepar),
        _square,
        weights_stay=True,
        yardstick=False,
    ),
)
TEMPLATES = {template.name: template for template in _ALL}


def templates() -> tuple[str, ...]:
    """Names of the template plans."""
    return tuple(TEMPLATES)


def template(name: str) -> Template:
    """The template of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in TEMPLATES:
        raise ValueError(f"template: {name!r} is unknown; expected one of {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
