"""METP and its rivals on 8 A100-80GB over sequence lengths: curves fitted by their authors, beside our simulation.

    python benchmarks/metp_rivals.py [--models gpt-12288 ...] [--lengths 8192 ...] [--systems megatron_sp ... solved]
        [--cluster a100-80gb-8]

The curves a s^2 + b s + c are those in the code published with ParaDySe (AAAI-26; same group as METP): seconds of L
layers at batch 1. What is in them is not said. Their sizes agree with forward and backward of the layers alone, without
a causal mask, and without recomputation but METP's own: attention then runs at 180 to 220 TFLOP/s, of 312. So are ours:
decoder layers (bfloat16, batch 1, GELU MLP of 4 h, no mask, no embeddings, no head, an input that needs a gradient),
programs of the templates and of the solver's plan on the meta device, simulated, with no limit on memory. Of more than
three layers two and three are simulated, and each of the rest has what the third adds.

Ratios are ours over theirs. Rates: FLOPs of attention (14 h s^2 a layer) over a, of the linear layers (72 h^2 s) over
b; those of ours from the shortest, the middle and the longest length. c is what does not grow with the length; it stays
in their curves where transfers of weights could hide behind compute. One difference is ours: under megatron_sp
gradients are gathered twice, as they are and transposed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from metp_lengths import SHAPES, Layer, Shape, deeper
from torch import nn

import stpart_compiler as st

RANKS = 8
UNBOUND = 10**14  # bytes: lengths at which memory is short are another benchmark's
OPTIONS = st.SolverOptions(optimizer="sgd", yardsticks=False)
SYSTEMS = ("megatron_sp", "ulysses_zero3", "cp_zero3", "metp")
SHORT = {"megatron_sp": "Meg", "ulysses_zero3": "Uly", "cp_zero3": "CP", "metp": "METP", "solved": "solved"}
FITTED = {  # a, b, c of each system
    "gpt-12288": (
        (1.08e-10, 6.22e-6, 0.0101),
        (1.03e-10, 5.07e-6, 0.0935),
        (1.03e-10, 5.89e-6, 0.0937),
        (1.04e-10, 6.81e-6, 0.1128),
    ),
    "gpt-8192": (
        (3.59e-10, 1.6e-5, 0.0174),
        (3.41e-10, 1.2e-5, 0.316),
        (3.53e-10, 1.4e-5, 0.343),
        (3.33e-10, 2.0e-5, 0.290),
    ),
    "gpt-1024": (
        (2.36e-10, 5.22e-6, 0.0284),
        (2.41e-10, 7.3e-7, 0.162),
        (2.30e-10, 3.37e-6, 0.223),
        (3.28e-10, -1.2e-5, 1.369),
    ),
    "gpt-4096": (  # CP as Ulysses, in the source
        (1.23e-9, 3.3e-5, 0.0983),
        (1.05e-9, 2.7e-5, 0.971),
        (1.05e-9, 2.7e-5, 0.971),
        (1.18e-9, 3.9e-5, 1.436),
    ),
}

WEIGHTS_MOVED = {"ulysses_zero3": 3 * 12 * 7 / 8, "cp_zero3": 3 * 12 * 7 / 8, "metp": 8 * 22 / 8 + 4 * 21 / 8}
"""Elements of weights and their gradients that a rank of 8 sends per layer and step, in h^2: two gathers and a
reduce-scatter; METP's rings of MLPs, and gathers and reductions in attention. Megatron's stay."""


class Stack(nn.Module):
    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(shape.hidden))
        self.layers = nn.ModuleList([Layer(shape) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.square() * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Step(NamedTuple):
    """Seconds of a simulated step, and those in which a rank waits."""

    seconds: float
    exposed: float


def simulated(shape: Shape, layers: int, system: str, length: int, cluster: str) -> Step:
    with torch.device("meta"):
        model = Stack(shape, layers).to(torch.bfloat16)
        x = torch.zeros(1, length, shape.hidden, dtype=torch.bfloat16)
    template = None if system == "solved" else system
    compiled = st.compile_model(
        model, (x,), mesh=RANKS, cluster=cluster, template=template, memory_limit=UNBOUND, solver=OPTIONS
    )
    found = compiled.simulate()
    return Step(found.seconds, found.exposed_seconds)


@cache
def step(model: str, system: str, length: int, cluster: str) -> Step:
    """Of all layers."""
    shape = replace(SHAPES[model], causal=False)
    if shape.layers <= 3:
        return simulated(shape, shape.layers, system, length, cluster)
    two, three = (simulated(shape, layers, system, length, cluster) for layers in (2, 3))
    return deeper(two, three, shape.layers - 2)


def fitted(model: str, system: str, length: int) -> float:
    """Seconds by the authors' curve."""
    a, b, c = FITTED[model][SYSTEMS.index(system)]
    return a * length**2 + b * length + c


def show(model: str, length: int, systems: Sequence[str], cluster: str) -> None:
    """A line per length: milliseconds ours, theirs and the ratio per system, and both orders."""
    cells = []
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for system in systems:
        found = step(model, system, length, cluster)
        ours[system] = found.seconds
        cell = f"{found.seconds * 1e3:.0f}"
        if system in SYSTEMS:
            theirs[system] = fitted(model, system, length)
            cell += f" {theirs[system] * 1e3:.0f} {found.seconds / theirs[system]:.2f}"
        cells.append(f"{cell} ({found.exposed / found.seconds:.0%})")
    orders = [" ".join(SHORT[s] for s in sorted(times, key=times.__getitem__)) for times in (theirs, ours)]
    print(f"{length:>7}{''.join(f'{cell:>24}' for cell in cells)}  {' | '.join(orders)}", flush=True)


def show_rates(model: str, system: str, lengths: Sequence[int], cluster: str) -> None:
    """TFLOP/s that the coefficients amount to, theirs and ours."""
    shape = SHAPES[model]
    chosen = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
    seconds = [step(model, system, length, cluster).seconds for length in chosen]
    ours = np.linalg.solve(np.vander(chosen, 3).astype(float), np.array(seconds))
    theirs = np.array(FITTED[model][SYSTEMS.index(system)])
    attention = 14 * shape.layers * shape.hidden / RANKS / 1e12  # per token squared, forward 4 and backward 10
    linear = 72 * shape.layers * shape.hidden**2 / RANKS / 1e12  # per token
    pairs = ((attention / theirs[0], attention / ours[0]), (linear / theirs[1], linear / ours[1]))
    text = ", ".join(
        f"{name} {one:.0f} and {two:.0f} TFLOP/s" for name, (one, two) in zip(("a", "b"), pairs, strict=True)
    )
    moved = 2e-9 * WEIGHTS_MOVED.get(system, 0) * shape.layers * shape.hidden**2
    rate = f"; theirs is that of {moved:.1f} GB of weights at {moved / theirs[2]:.0f} GB/s" if moved else ""
    print(f"  {SHORT[system]:>6}, theirs and ours: {text}, c {theirs[2] * 1e3:.0f} and {ours[2] * 1e3:.0f} ms{rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(FITTED), choices=list(FITTED))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 102400, 256000, 512000])
    parser.add_argument("--systems", nargs="+", default=list(SHORT), choices=list(SHORT))
    parser.add_argument("--cluster", default="a100-80gb-8")
    args = parser.parse_args()
    print(
        "ms: ours simulated, theirs fitted, ratio (of ours exposed); then the systems from fast to slow: theirs | ours"
    )
    for model in args.models:
        shape = SHAPES[model]
        print(f"\n{model}, {shape.layers} layers\n{'':7}{''.join(f'{SHORT[system]:>24}' for system in args.systems)}")
        for length in args.lengths:
            show(model, length, args.systems, args.cluster)
        for system in args.systems if len(args.lengths) >= 3 else ():
            if system in SYSTEMS:
                show_rates(model, system, args.lengths, args.cluster)


if __name__ == "__main__":
    main()
