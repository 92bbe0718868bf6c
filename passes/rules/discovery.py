"""Factor rules of ops that nobody wrote a rule for, found by running them: aten's rarer ops, and users' own.

The op runs on small random inputs, whole and in blocks. Dims whose blocks combine to the whole, cut evenly, unevenly,
in single places and in strides, become a factor; all other dims are kept whole. What data might hide is refused: a
factor must hold for several draws that differ in sign and magnitude, and sums of zeros are no evidence. Work is counted
in elements, not in seconds, so that every rank finds the same rules.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from stpart_compiler.ir.layout import chunk_range
from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors
from stpart_compiler.passes.rules.registry import OF_CALLS, Block, LocalCall, OpCall, Operand, keeps_sums
from stpart_compiler.passes.rules.trial import (
    DRAWS_NEEDED,
    FEWEST,
    WORK,
    Draw,
    Path,
    Results,
    Small,
    Tensors,
    Trial,
    integers,
    is_close,
    largest,
    mapped,
    numel,
    shapes_of,
    smallest,
    trial_of,
    variants,
)
from stpart_compiler.runtime import local_ops

RESTORED = 2**18  # elements up to which a factor found at a smaller size is tried again at its own
LIMIT_S = 60.0  # without an answer, when a broken child hangs
MAX_CANDIDATES = 2000
MAX_FACTORS = 6  # all of them are cut in two at once: 64 blocks
MAX_RESIZED = 3  # equal integer arguments of which every subset is tried

NOTHING = "nothing"  # how blocks combine to a result that is no tensor, or an empty one

STDERR = 2

_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"})
_UNFIT_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)

Place = tuple[str, int, int]  # ("in" or "out", operand or result, dim)
Part = tuple[int, ...]  # positions of a dim that one block holds
Way = int | str  # how blocks combine: the dim along which they are joined, SUM or NOTHING


@dataclass(frozen=True)
class Discovery:
    """What was found of one call: its rule, and how a block is run.

    `resized`: integer arguments that are the size of the given dim. `contiguous`: the operands must be.
    """

    rule: OpRule
    resized: dict[Path, Place]
    contiguous: bool


def discovered_rule(call: OpCall) -> OpRule | None:
    """The rule found by running the op, cached per call text; None where nothing may be cut or the op cannot be run."""
    key = (call.target, call.text)
    if key not in _KNOWN:
        _KNOWN[key] = _isolated(call) if _is_fit(call) else None
    found = _KNOWN[key]
    if found is None:
        return None
    OF_CALLS.setdefault(call.target, {})[call.text] = _localizer(found)
    return found.rule


_KNOWN: dict[tuple[Any, str], Discovery | None] = {}


def _is_fit(call: OpCall) -> bool:
    """Whether the op may be run here: it writes nothing, draws nothing, sends nothing, and its shapes are known."""
    op = call.target
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or op.namespace in _COMMUNICATION:
        return False
    tensors = [*call.operands, *(r for r in call.results if r is not None)]
    has_both = bool(call.operands) and len(tensors) > len(call.operands)
    return has_both and not any(tag in op.tags for tag in _UNFIT_TAGS) and all(0 not in x.shape for x in call.operands)


def _isolated(call: OpCall) -> Discovery | None:
    """`_discover` in a child process: a kernel that does not check shapes may write anywhere, and the child dies."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12: other threads stay behind, as they may
        child = os.fork()
    if child == 0:
        _answer(call, writing)
    os.close(writing)
    data = b""
    with open(reading, "rb", buffering=0) as pipe:
        while wait([pipe.fileno()], LIMIT_S) and (more := pipe.read(2**16)):
            data += more
    os.kill(child, signal.SIGKILL)  # it has answered, died or hangs
    os.waitpid(child, 0)
    found = pickle.loads(data) if data.endswith(pickle.STOP) else None
    assert found is None or isinstance(found, Discovery)
    return found


def _answer(call: OpCall, pipe: int) -> NoReturn:
    """Write what was found, and end this process whatever happens."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
        torch.set_num_threads(1)  # the pool's threads are not there after a fork
        warnings.simplefilter("ignore")
        with unset_fake_temporarily(), torch.no_grad(), open(pipe, "wb") as answer:
            pickle.dump(_discover(call), answer)
    finally:
        os._exit(0)


def _discover(call: OpCall) -> Discovery | None:
    for small in variants(call):
        trial = trial_of(small.call)
        if trial is not None:
            return _discovery(call, small, trial)
    return None


def _discovery(call: OpCall, small: Small, trial: Trial) -> Discovery | None:
    if trial.contiguous and (call.target.is_view or "as_strided" in call.target.name()):
        return None  # what such an op means depends on the operand's strides
    found = [f for f in _search(trial, call) if _holds_at_own_size(small, f)]
    found = sorted(_jointly(trial, found[:MAX_FACTORS]), key=lambda factor: factor.places)
    if not found:
        return None
    linear = [s for s in _linear_sets(trial) if keeps_sums(call, s)]
    resized = {path: factor.places[0] for factor in found for path in factor.candidate.resized}
    return Discovery(_rule(call, found, linear), resized, trial.contiguous)


# --- cutting it


@dataclass(frozen=True)
class Candidate:
    """Dims of equal size, at most one per operand, and the integer arguments that become the size of a block."""

    size: int
    dims: tuple[int | None, ...]
    resized: tuple[Path, ...]

    def block(self, tensors: Tensors, part: Part) -> Tensors:
        index = torch.tensor(part, device="cpu")
        return tuple(x if d is None else x.index_select(d, index) for x, d in zip(tensors, self.dims, strict=True))

    def values(self, part: Part) -> dict[Path, int]:
        return dict.fromkeys(self.resized, len(part))


@dataclass(frozen=True)
class Found:
    """A factor: a candidate that holds, and per result the dim that it cuts there."""

    candidate: Candidate
    outputs: tuple[int | None, ...]
    kind: str

    @property
    def places(self) -> list[Place]:
        ins = [("in", i, d) for i, d in enumerate(self.candidate.dims) if d is not None]
        return [*ins, *(("out", j, d) for j, d in enumerate(self.outputs) if d is not None)]


def _search(trial: Trial, call: OpCall) -> list[Found]:
    """Factors that hold alone, those that cut more operands first; no dim or argument is in two of them."""
    found: list[Found] = []
    used: set[Place | Path] = set()
    for candidate in itertools.islice(_candidates(trial.call), MAX_CANDIDATES):
        ins = {("in", i, d) for i, d in enumerate(candidate.dims) if d is not None}
        if used & {*ins, *candidate.resized}:
            continue
        factor = _outcome(trial, candidate)
        if factor is not None and not used & set(factor.places) and _has_one_size(call, factor):
            found.append(factor)
            used |= {*factor.places, *candidate.resized}
    return found


def _has_one_size(call: OpCall, factor: Found) -> bool:
    """Whether all that is of one size in the small call is so in the call itself."""
    values = integers(call)
    sizes = {_size(call, place) for place in factor.places} | {values[path] for path in factor.candidate.resized}
    return len(sizes) == 1


def _size(call: OpCall, place: Place) -> int:
    side, tensor, dim = place
    operand = call.operands[tensor] if side == "in" else call.results[tensor]
    assert operand is not None, f"{call.target}: result {tensor} is no tensor"
    return operand.shape[dim]


def _candidates(small: OpCall) -> Iterator[Candidate]:
    """For every size of a dim: every choice of operands, most first, of a dim in each, and of arguments to resize."""
    values = integers(small)
    fewest = _fewest(small)
    for size in sorted({size for shape in shapes_of(small) for size in shape if size > 1 and size >= 2 * fewest}):
        paths = [path for path, value in values.items() if value == size]
        subsets = [s for n in range(min(len(paths), MAX_RESIZED) + 1) for s in itertools.combinations(paths, n)]
        dims = [[d for d, s in enumerate(operand.shape) if s == size] for operand in small.operands]
        for chosen in _choices(dims):
            for resized in subsets:
                if resized or any(d is not None for d in chosen):
                    yield Candidate(size, chosen, resized)


def _fewest(call: OpCall) -> int:
    """Places that a block must have."""
    dtypes = (operand.dtype for operand in call.operands)
    has_indices = any(not (t.is_floating_point or t.is_complex or t == torch.bool) for t in dtypes)
    return FEWEST if has_indices else 1


def _choices(dims: Sequence[Sequence[int]]) -> Iterator[tuple[int | None, ...]]:
    having = [i for i, options in enumerate(dims) if options]
    for count in range(len(having), -1, -1):
        for operands in itertools.combinations(having, count):
            for chosen in itertools.product(*(dims[i] for i in operands)):
                picked = dict(zip(operands, chosen, strict=True))
                yield tuple(picked.get(i) for i in range(len(dims)))


def _partitions(size: int, fewest: int) -> list[list[Part]]:
    """Ways to cut a dim: as few places as may be left over, strides, and three or two blocks."""
    places = range(size)
    chunks = [[tuple(places[slice(*chunk_range(size, q, i))]) for i in range(q)] for q in (3, 2)]
    uneven, strided = [tuple(places[:-fewest]), tuple(places[-fewest:])], [tuple(places[i::2]) for i in range(2)]
    cuts = [[part for part in parts if part] for parts in (uneven, strided, *chunks)]
    return [parts for parts in cuts if min(map(len, parts)) >= fewest]


def _outcome(trial: Trial, candidate: Candidate) -> Found | None:
    """How the blocks of a candidate combine, if all draws and all ways to cut it agree."""
    agreed: list[set[Way]] = []
    partitions = _partitions(candidate.size, _fewest(trial.call))
    if not trial.accepts(candidate.block(trial.draws[0].tensors, partitions[0][0]), candidate.values(partitions[0][0])):
        return None
    for draw, parts in itertools.product(trial.draws, partitions):
        blocks = []
        for part in parts:
            made = trial.run(candidate.block(draw.tensors, part), candidate.values(part))
            if made is None or len(made) != len(draw.whole):
                return None
            blocks.append(made)
        made_of = zip(*blocks, strict=True)
        ways = [_ways(w, b, parts, candidate.size) for w, b in zip(draw.whole, made_of, strict=True)]
        agreed = [a & b for a, b in zip(agreed or ways, ways, strict=True)]
        if not all(agreed):
            return None
    return _classified(trial, candidate, agreed)


def _ways(whole: torch.Tensor | None, blocks: Results, parts: Sequence[Part], size: int) -> set[Way]:
    """How the blocks of one result make the whole: joined along a dim, or added."""
    made = [b for b in blocks if b is not None]
    if whole is None or len(made) < len(blocks):
        return {NOTHING} if whole is None and not made else set()
    if all(b.shape == whole.shape for b in made):
        if not whole.numel():
            return {NOTHING}
        is_sum = whole.dtype != torch.bool and is_close(sum(made[1:], made[0]), whole, max(map(largest, made)))
        return {SUM} if is_sum else set()
    for dim in range(whole.ndim):
        shapes = [(*whole.shape[:dim], len(part), *whole.shape[dim + 1 :]) for part in parts]
        if whole.shape[dim] == size and [tuple(b.shape) for b in made] == shapes:
            order = torch.tensor([p for part in parts for p in part], device="cpu").argsort()
            return {dim} if is_close(torch.cat(made, dim).index_select(dim, order), whole) else set()
    return set()


def _classified(trial: Trial, candidate: Candidate, agreed: Sequence[set[Way]]) -> Found | None:
    """The factor, if it cuts something and all that adds up is not zero."""
    summed = [j for j, ways in enumerate(agreed) if SUM in ways]
    outputs = tuple(next((way for way in ways if isinstance(way, int)), None) for ways in agreed)
    dims = (*outputs, *(candidate.dims if summed else ()))
    if all(d is None for d in dims) or not all(_is_often_nonzero(trial, j) for j in summed):
        return None
    return Found(candidate, outputs, SUM if summed else PARALLEL)


def _is_often_nonzero(trial: Trial, result: int) -> bool:
    wholes = [draw.whole[result] for draw in trial.draws]
    return sum(bool(whole.any()) for whole in wholes if whole is not None) >= min(len(wholes), DRAWS_NEEDED)


def _holds_at_own_size(small: Small, found: Found) -> bool:
    """Whether a factor also holds where its dims have their own size, which may be beyond some constant in the op."""
    place = found.places[0]
    own = _size(small.original, place)
    if own == found.candidate.size:
        return True
    larger = smallest(small.original, own).call
    trial = trial_of(larger, 2) if numel(larger) <= RESTORED else None
    if trial is None:
        return True  # too large to look at
    again = _outcome(trial, replace(found.candidate, size=own))
    return again is not None and (again.outputs, again.kind) == (found.outputs, found.kind)


def _jointly(trial: Trial, found: list[Found]) -> list[Found]:
    """Those factors that also hold when all of them are cut at once."""
    trial.work = WORK
    if _hold(trial, found):
        return found
    kept: list[Found] = []
    for factor in found:
        if _hold(trial, [*kept, factor]):
            kept.append(factor)
    return kept


def _hold(trial: Trial, found: Sequence[Found]) -> bool:
    fewest = _fewest(trial.call)
    return all(
        _holds(trial, draw, found, [_partitions(f.candidate.size, fewest)[-way] for f in found])
        for way, draw in enumerate(trial.draws[:2])
    )


def _holds(trial: Trial, draw: Draw, found: Sequence[Found], partitions: Sequence[list[Part]]) -> bool:
    """Whether the blocks of all factors at once, put in place and added, make the whole."""
    totals = [None if whole is None else torch.zeros_like(whole) for whole in draw.whole]
    scales = [0.0] * len(totals)
    for parts in itertools.product(*partitions):
        tensors, values = draw.tensors, dict[Path, int]()
        for factor, part in zip(found, parts, strict=True):
            tensors = factor.candidate.block(tensors, part)
            values |= factor.candidate.values(part)
        made = trial.run(tensors, values)
        if made is None or len(made) != len(totals):
            return False
        for j, (total, result) in enumerate(zip(totals, made, strict=True)):
            cut = {f.outputs[j]: part for f, part in zip(found, parts, strict=True)}
            if not _placed(total, cut, result):
                return False
            scales[j] = max(scales[j], 0.0 if result is None else largest(result))
    return all(map(is_close, totals, draw.whole, scales))


def _placed(total: torch.Tensor | None, cut: Mapping[int | None, Part], result: torch.Tensor | None) -> bool:
    """Add a block's result at its places in `cut` dims; False where it is of another shape."""
    if total is None or result is None:
        return total is result
    kept = [cut.get(d, range(size)) for d, size in enumerate(total.shape)]
    if tuple(result.shape) != tuple(map(len, kept)):
        return False
    places = [torch.tensor(part, dtype=torch.int64, device="cpu") for part in kept]
    total[torch.meshgrid(*places, indexing="ij") if places else ()] += result
    return True


def _linear_sets(trial: Trial) -> list[frozenset[int]]:
    """Operands in which the op is additive: each alone, in pairs, and all together."""
    trial.work = WORK
    operands = [x.index for x in trial.call.operands if x.dtype.is_floating_point or x.dtype.is_complex]
    counts = sorted({1, 2, len(operands)} if operands else set())
    found: list[frozenset[int]] = []
    for tried in (frozenset(s) for n in counts for s in itertools.combinations(operands, n)):
        if not any(known < tried for known in found) and _is_linear(trial, tried):
            found.append(tried)
    return found


def _is_linear(trial: Trial, operands: frozenset[int]) -> bool:
    signed = [draw for draw in trial.draws if draw.signed]
    pairs = list(itertools.permutations(signed, 2))[:4]
    return len(pairs) > 1 and all(_adds(trial, one, two, operands) for one, two in pairs)


def _adds(trial: Trial, one: Draw, two: Draw, operands: frozenset[int]) -> bool:
    """f(a + b) = f(a) + f(b), not zero, for the given operands of both draws and all other operands of the first."""
    pairs = list(enumerate(zip(one.tensors, two.tensors, strict=True)))
    other = trial.run(tuple(b if i in operands else a for i, (a, b) in pairs), {})
    both = trial.run(tuple(a + b if i in operands else a for i, (a, b) in pairs), {})
    if other is None or both is None:
        return False
    return all(map(_is_sum, one.whole, other, both))


def _is_sum(a: torch.Tensor | None, b: torch.Tensor | None, both: torch.Tensor | None) -> bool:
    if a is None or b is None or both is None:
        return a is b is both
    if not (both.is_floating_point() or both.is_complex()) or not bool(both.isfinite().all()):
        return False
    if both.numel() and not bool(both.any()):
        return False
    return a.shape == b.shape and is_close(a + b, both, max(largest(a), largest(b)))


# --- what was found, as a rule


def _rule(call: OpCall, found: Sequence[Found], linear: Sequence[frozenset[int]]) -> OpRule:
    factors = Factors()
    known: dict[Place, int] = {}
    for factor in found:
        known |= dict.fromkeys(factor.places, factors.add(_size(call, factor.places[0]), factor.kind))

    def maps(side: str, tensors: Sequence[Operand | None]) -> list[TensorMap]:
        return [
            tuple(
                (known[side, i, d],) if (side, i, d) in known else factors.dim(size, WHOLE)
                for d, size in enumerate(x.shape)
            )
            if x is not None
            else ()
            for i, x in enumerate(tensors)
        ]

    return factors.rule(maps("in", call.operands), maps("out", call.results), [sorted(s) for s in linear])


def _localizer(found: Discovery) -> Callable[[OpCall, Block], LocalCall]:
    """Arguments that are the size of a dim become that of the block."""

    def local(call: OpCall, block: Block) -> LocalCall:
        maps = {"in": block.rule.inputs, "out": block.rule.outputs}
        values = {path: block.extent(maps[side][tensor][dim]) for path, (side, tensor, dim) in found.resized.items()}

        def leaf(path: Path, item: Any) -> Any:
            return values.get(path, item)

        args, kwargs = mapped(call.args, leaf), mapped(call.kwargs, leaf)
        return (
            (local_ops.contiguous_call, (call.target, *args), kwargs)
            if found.contiguous
            else (call.target, args, kwargs)
        )

    return local
