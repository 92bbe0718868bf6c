"""The longest sequence whose training step fits in a rank's memory: templates and our plan, and their predicted steps.

    python benchmarks/metp_lengths.py [--models gpt-12288 ...] [--plans megatron ... solved] [--ranks 8] [--memory 80GB]

Models (bfloat16, batch 1, AdamW, on the meta device, cluster a100-80gb-8): GPT with multi-head attention and a GELU MLP
of 4 h, vocabulary 51200, no learned positions, of (h, layers) = (12288, 1), (8192, 5), (1024, 24), (4096, 32); and
Llama-3-8B. Plans only, no programs: the bytes are the solver's estimate, which is within a few percent of the programs'
peak (benchmarks/prediction.py). Every layer of a template is in a torch.utils.checkpoint, as such plans are run;
"solved" has all regions, and the recomputation of its choice or such checkpoints, whichever is leaner. Of each the
leanest plan is taken that the solver finds. Deep models are folded: bytes and seconds of many layers are those of two,
and as many times what a third adds. Lengths are found to 1 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stpart_compiler as st
from stpart_compiler.capture import capture
from stpart_compiler.cost_models.cluster import load_cluster
from stpart_compiler.cost_models.sizes import parse_bytes
from stpart_compiler.graphs import Graphs, annotate, regions_of
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.make_plan import MakePlan
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.regions import REGIONS
from stpart_compiler.passes.solve import InfeasibleError

SPATIAL = ("megatron", "megatron_sp", "ulysses_zero3", "cp_zero3")
PLANS = (*SPATIAL, "metp", "solved")
ROUND = 1024  # tokens
FIRST = 1 << 17
TRIALS = 12
OPTIONS = st.SolverOptions(time_limit_s=20, patience_s=1)


@dataclass(frozen=True)
class Shape:
    """A decoder. `gated`: Llama's MLP and grouped heads, else GPT's. `causal`: attention has that mask."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    gated: bool = False
    causal: bool = True


SHAPES = {
    "gpt-12288": Shape(12288, 1, 96, 96, 4 * 12288, 51200),
    "gpt-8192": Shape(8192, 5, 64, 64, 4 * 8192, 51200),
    "gpt-1024": Shape(1024, 24, 16, 16, 4 * 1024, 51200),
    "gpt-4096": Shape(4096, 32, 32, 32, 4 * 4096, 51200),
    "llama-3-8b": Shape(4096, 32, 32, 8, 14336, 128256, gated=True),
}


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.hidden // shape.heads
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norms = nn.ModuleList([norm(h), norm(h)])
        sizes = (shape.heads * d, shape.kv_heads * d, shape.kv_heads * d)
        self.qkv = nn.ModuleList([nn.Linear(h, size, bias=False) for size in sizes])
        self.out = nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, shape.width, bias=False), nn.Linear(shape.width, h, bias=False)
        self.gate = nn.Linear(h, shape.width, bias=False) if shape.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        d = self.shape.hidden // self.shape.heads
        q, k, v = (layer(y).unflatten(-1, (-1, d)).transpose(1, 2) for layer in self.qkv)
        gqa = self.gate is not None
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=gqa)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        middle = nn.functional.gelu(self.up(y)) if self.gate is None else nn.functional.silu(self.gate(y)) * self.up(y)
        return x + self.down(middle)


class Decoder(nn.Module):
    def __init__(self, shape: Shape, layers: int, marked: bool) -> None:
        super().__init__()
        self.marked = marked
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(layers)])
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.marked else layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Need(NamedTuple):
    """Bytes per rank and seconds of a step."""

    nbytes: float
    seconds: float


Figures = TypeVar("Figures", bound=tuple[float, ...])


def deeper(one: Figures, other: Figures, more: int) -> Figures:
    """The figures of `one`, with what `other` has more, `more` times."""
    return type(one)(*(a + more * (b - a) for a, b in zip(one, other, strict=True)))


def needs(options: argparse.Namespace, shape: Shape, layers: int, name: str, marked: bool, length: int) -> Need:
    """Of a plan for so many layers. `marked`: each is in a checkpoint."""
    with torch.device("meta"):
        model = Decoder(shape, layers, marked).to(torch.bfloat16)
        tokens = torch.zeros(1, length, dtype=torch.long)
    graphs = Graphs(annotate(capture(model, (tokens, tokens)), stripes=options.ranks), Dumper(None))
    costs = Costs(load_cluster(options.cluster), Mesh(("d",), (options.ranks,)))

    template = None if name == "solved" else name
    kind = REGIONS[-1] if template is None else regions_of(graphs, template)
    return leanest(MakePlan(costs, OPTIONS, 1, template), graphs.of(kind))


def leanest(maker: MakePlan, graph: Annotated) -> Need:
    """Of the plan that needs least, or hardly more and is faster."""
    try:
        plan = maker.apply(graph)
    except InfeasibleError as error:
        plan = replace(maker, memory_limit=round(1.01 * error.least)).apply(graph)
    return Need(plan.memory["solver estimate"], plan.seconds)


def whole(options: argparse.Namespace, shape: Shape, name: str, length: int) -> Need:
    """Of all layers."""
    found = [deep(options, shape, name, marked, length) for marked in ((True, False) if name == "solved" else (True,))]
    return min(found, key=lambda need: need.nbytes)


def deep(options: argparse.Namespace, shape: Shape, name: str, marked: bool, length: int) -> Need:
    if shape.layers <= 3:
        return needs(options, shape, shape.layers, name, marked, length)
    two, three = (needs(options, shape, layers, name, marked, length) for layers in (2, 3))
    return deeper(two, three, shape.layers - 2)


def longest(need: Callable[[int], Need], room: float, guess: int) -> tuple[int, Need | None]:
    """The longest length that fits, to 1 %, and its need: between one that fits and one that does not."""
    low = high = 0
    for _ in range(TRIALS):
        if need(guess).nbytes <= room:
            low = guess
        else:
            high = guess
        if high and high - low <= max(ROUND, low // 100):
            break
        if not high:
            guess = rounded(low * min(8.0, 1.02 * room / need(low).nbytes))
        elif not low:
            guess = rounded(high / 4)
        else:
            share = (room - need(low).nbytes) / (need(high).nbytes - need(low).nbytes)
            guess = rounded(low + (high - low) * min(max(share, 0.1), 0.9))
    return low, need(low) if low else None


def rounded(length: float) -> int:
    return max(1, int(length) // ROUND) * ROUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--plans", nargs="+", default=PLANS, choices=PLANS)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--memory", default="80GB")
    parser.add_argument("--cluster", default="a100-80gb-8")
    options = parser.parse_args()
    room = parse_bytes(options.memory)
    for model in options.models:
        best = 0
        for name in options.plans:
            start = time.perf_counter()
            need = cache(partial(whole, options, SHAPES[model], name))
            length, found = longest(need, room, best or FIRST)
            best = max(best, length) if name in SPATIAL else best
            ratio = f"{length / best:.2f}x the best spatial" if best and name not in SPATIAL else ""
            what = f"step {found.seconds:8.2f} s, {found.nbytes / 1e9:5.1f} GB" if found else "does not fit"
            took = time.perf_counter() - start
            print(f"{model:>11} {name:>14}: {length:>9} tokens, {what} {ratio} ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
