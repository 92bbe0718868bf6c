"""Formulas against brute counts, the space-time maps they describe, and the papers' closed forms."""

import itertools
import math

import pytest
import sympy as sp
import torch

from stpart_compiler.cost_models import formulas as fm
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.cost_models.communication import collective_seconds, temporal_seconds
from stpart_compiler.ir.layout import Digit, form, local_shape
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import SUM, Factor, OpRule
from stpart_compiler.ir.spacetime import MOVE, Derived, Port, Strategy, check_covers, derive

SIZES = {"M": 12, "N": 24, "K": 36}  # divisible by 2 and 3
TENSORS = {"I": ("M", "N"), "W": ("N", "K"), "O": ("M", "K")}


def matmul_phase(out: str, forms: dict[str, Digit], mesh: Mesh) -> dict[str, Port]:
    """Ports of I, W, O (or their gradients) in the phase that computes `out` from the other two."""
    names = list(SIZES)
    ins = [name for name in TENSORS if name != out]
    summed = next(dim for dim in names if dim not in TENSORS[out])
    factors = tuple(Factor(dim, SIZES[dim], SUM if dim == summed else "parallel") for dim in names)

    def dims(tensor: str) -> tuple[tuple[int, ...], ...]:
        return tuple((names.index(dim),) for dim in TENSORS[tensor])

    rule = OpRule(factors, (dims(ins[0]), dims(ins[1])), (dims(out),))
    steps = next(digit.q for digit in forms.values() if digit.tau)
    strategy = Strategy(tuple((forms[dim],) if dim in forms else () for dim in names), steps)
    check_covers(rule, strategy, mesh)
    found: Derived = derive(rule, strategy, mesh)
    assert not any(port.layout.partial for port in (*found.inputs, *found.outputs))
    return {ins[0]: found.inputs[0], ins[1]: found.inputs[1], out: found.outputs[0]}


def moved_elements(ports: dict[str, Port], steps: int, mesh: Mesh) -> int:
    """Elements that each rank sends between steps, from the blocks that the layouts give it."""
    per_rank = {
        sum(
            (steps - 1) * math.prod(local_shape(port.layout, mesh, rank))
            for port in ports.values()
            if port.motion == MOVE
        )
        for rank in range(mesh.world_size)
    }
    (elements,) = per_rank
    return elements


def stands_at(dims: dict[str, Digit], tensor: str, t: int) -> dict[str, Digit]:
    return {dim: dims[dim].at_rest(t) for dim in TENSORS[tensor]}


@pytest.mark.parametrize("q", [2, 3])
def test_primepar_volumes_equal_the_closed_forms(q):
    """Forms of Eq. 4-6, steps and home moves counted from the maps; closed forms of F, B and G in elements."""
    mesh = Mesh(("r", "c"), (q, q))
    last = q - 1
    forward = {"M": form(q, r=1), "N": form(q, 1, r=1, c=1), "K": form(q, c=1)}
    backward = {"M": form(q, r=1), "N": form(q, 0, -1, r=1, c=1), "K": form(q, 1, c=1)}
    gradient = {"M": form(q, 1, r=1), "N": form(q, 0, -1, r=1, c=1), "K": form(q, 0, -1, c=1)}
    size = {name: math.prod(SIZES[dim] for dim in dims) for name, dims in TENSORS.items()}

    moved = {
        phase: moved_elements(matmul_phase(out, forms, mesh), q, mesh)
        for phase, out, forms in (("F", "O", forward), ("B", "I", backward), ("G", "W", gradient))
    }
    # W stands at another rank than where forward wants it once B is done, and so does dW after the sum of G's steps.
    assert stands_at(forward, "W", last) == stands_at(backward, "W", 0)
    assert stands_at(backward, "O", last) == stands_at(gradient, "O", 0)
    home = {
        "B": size["W"] // q**2 * (stands_at(backward, "W", last) != stands_at(forward, "W", 0)),
        "G": size["W"] // q**2 * (stands_at(gradient, "W", 0) != stands_at(forward, "W", 0)),
    }
    assert moved["F"] == (q - 1) * (size["I"] + size["W"]) // q**2
    assert moved["B"] + home["B"] == ((q - 1) * (size["O"] + size["W"]) + size["W"]) // q**2
    assert moved["G"] + home["G"] == ((q - 1) * (size["I"] + size["O"]) + size["W"]) // q**2
    total = sum(moved.values()) + sum(home.values())
    assert total == (2 * (q - 1) * (size["I"] + size["O"]) + 2 * q * size["W"]) // q**2


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize(("out", "time"), [("O", "N"), ("I", "K"), ("W", "M")])
def test_2d_formula_equals_the_derived_map(q, out, time):
    mesh = Mesh(("r", "c"), (q, q))
    forms = {"M": form(q, r=1), "N": form(q, r=1, c=1), "K": form(q, c=1)}
    step = forms[time]
    forms[time] = Digit(step.coeffs, q, 1)
    ports = matmul_phase(out, forms, mesh)
    formula = fm.temporal_2d(time)
    assert set(formula.moving) == {name for name, port in ports.items() if port.motion == MOVE}
    values = {fm.SYMBOLS[dim]: size for dim, size in SIZES.items()} | {fm.e: 1, fm.q: q}
    assert formula.total_bytes().subs(values) == moved_elements(ports, q, mesh)
    assert formula.step_flops().subs(values) * q * q**2 == 2 * math.prod(SIZES.values())


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize(("space", "time"), list(itertools.permutations("MNK", 2)))
def test_1d_formulas_equal_the_derived_maps(p, space, time):
    mesh = Mesh(("d",), (p,))
    forms = {space: form(p, d=1), time: form(p, 1, d=1)}
    ports = matmul_phase("O", forms, mesh)
    formula = fm.temporal_1d(space, time)
    moving = {name for name, port in ports.items() if port.motion == MOVE}
    assert set(formula.moving) == moving
    assert len(moving) == 1
    values = {fm.SYMBOLS[dim]: size for dim, size in SIZES.items()} | {fm.e: 1, fm.p: p}
    assert formula.total_bytes().subs(values) == moved_elements(ports, p, mesh)
    assert formula.step_flops().subs(values) * p * p == 2 * math.prod(SIZES.values())
    assert formula.buffer_bytes().subs(values) * (p - 1) == 2 * moved_elements(ports, p, mesh)


def test_matmul_flops_by_counting():
    count = sum(2 for _ in itertools.product(range(3), range(4), range(5)))
    assert fm.matmul_flops(3, 4, 5) == count


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_collective_formula_agrees_with_the_time_model(kind):
    cluster = load_cluster("h100-80gb-8")
    link = cluster.link_for(("d",), Mesh(("d",), (8,)))
    nbytes = fm.collective_bytes(kind).subs({fm.n: 8, fm.X: 2**30})
    latency = (14 if kind == "all_reduce" else 7) * link.latency
    expected = float(nbytes) / link.bandwidth + latency
    assert collective_seconds(kind, 2**30, 8, link) == pytest.approx(expected, rel=1e-12)


ratio = fm.F / fm.B
FACTS = {
    "primepar_input": fm.K / fm.q,
    "primepar_weight": fm.M / fm.q,
    "metp_mlp_forward": fm.b * fm.s / fm.p,
    "metp_mlp_backward": fm.b * fm.s / fm.p / sp.Rational(8, 10),
    "metp_ring_forward": fm.s / fm.p,
    "metp_ring_backward": fm.s / fm.p / sp.Rational(8, 10),
    "metp_outer_broadcast": (fm.b * fm.s / fm.p) * (1 + fm.s / (2 * fm.h)),
    "ring_weight": fm.M / fm.p,
    "ring_input": fm.K / fm.p,
}


@pytest.mark.parametrize("kind", FACTS)
def test_derived_overlap_conditions_are_the_papers(kind):
    condition = fm.overlap_condition(kind)
    assert sp.simplify(condition.lhs - FACTS[kind]) == 0
    assert condition.rhs == ratio
    assert condition.rel_op == ">="


def test_a_shared_link_is_the_harmonic_sum_and_wider_elements_double_the_bound():
    shared = fm.overlap_condition("primepar_shared_link").lhs
    assert sp.simplify(1 / shared - fm.q / fm.K - fm.q / fm.M) == 0
    assert sp.simplify(shared.subs(fm.M, fm.K) - fm.K / fm.q / 2) == 0
    for kind in fm.overlap_kinds():
        wide = fm.overlap_condition(kind, element_bytes=4).lhs
        assert sp.simplify(2 * wide - fm.overlap_condition(kind).lhs) == 0
        assert sp.simplify(fm.overlap_condition(kind, None).lhs.subs(fm.e, 2) - fm.overlap_condition(kind).lhs) == 0


@pytest.mark.parametrize("kind", fm.overlap_kinds())
def test_least_solves_the_condition(kind):
    condition = fm.overlap_condition(kind)
    values = dict(zip(fm.SYMBOLS.values(), itertools.cycle((3, 5, 7, 11)), strict=False))
    for unknown in condition.lhs.free_symbols - {fm.p, fm.q}:
        others = {symbol: value for symbol, value in values.items() if symbol is not unknown}
        at_bound = others | {unknown: fm.least(kind, unknown.name).subs(others)}
        assert float((condition.lhs - condition.rhs).subs(at_bound)) == pytest.approx(0, abs=1e-9)


def test_the_bound_is_where_the_loop_stops_waiting():
    """METP's MLP with the peak and the link of a preset: above the bound the steps cost their compute, below more."""
    cluster = load_cluster("a100-80gb-8")
    link = cluster.link_for((), Mesh(("d",), (8,)))
    rate = cluster.device.peak(torch.bfloat16)
    tokens = int(fm.least("metp_mlp_forward", "b").subs({fm.s: 1, fm.p: 8, fm.F: rate, fm.B: link.bandwidth}))
    assert tokens == 8 * 1040  # F/B of an A100 with NVLink, in tokens per rank
    hidden, width = 4096, 16384

    def exposed(factor: float) -> float:
        compute = 2 * 2 * factor * tokens / 8 * hidden * width / 8 / rate
        nbytes = 2 * 2 * hidden * width / 8
        return temporal_seconds(compute, nbytes / link.bandwidth, 8) / (8 * compute) - 1

    assert exposed(1.01) == pytest.approx(0, abs=1e-12)
    assert exposed(0.9) > 0.05


def test_f_over_b_of_h200():
    cluster = load_cluster("h200-141gb-8")
    assert cluster.device.peak(torch.bfloat16) / cluster.levels[0][1].bandwidth == pytest.approx(2198, abs=0.5)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"overlap condition 'magic' is unknown; use one of primepar_input"):
        fm.overlap_condition("magic")
    with pytest.raises(ValueError, match=r"'ring_weight' does not depend on 'K'; it depends on M, p"):
        fm.least("ring_weight", "K")
    with pytest.raises(ValueError, match=r"collective 'gossip' has no formula"):
        fm.collective_bytes("gossip")
