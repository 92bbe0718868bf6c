"""Bytes per rank of attention under `metp` and `megatron`, from the generated programs.

    python benchmarks/metp_memory.py [--ranks 2 4 8] [--length 16384] [--hidden 1024] [--heads 16]

A layer norm and multi-head attention with its projections and a residual (batch 1, float32, meta device). Columns, in
MiB of the fullest rank:

    counted   x, q, k, v and the attention's output, all that is alive of them at once in forward: what the formulas
              bsh(1+4/p) of tensor parallelism and bsh(2/p+3/p^2) of METP count. Here also what is merged twice in a
              ring; left out: buffers of the ring, gathered weights, the layer's output.
    kept      all that forward keeps for backward, without parameters
    forward, backward   peak of all that the phase holds while attention runs, without parameters, their gradients and
              inputs: buffers, gathered weights and outputs too
    scores    of attention written out: the largest tensor of scores

With `--check` the smallest case also runs on all ranks in this process; its peak is that of real tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import torch
from torch import nn

import stpart_compiler as st
from stpart_compiler.cost_models.liveness import alive_tensors, storage_base
from stpart_compiler.cost_models.resting import StepPhase, phases_of
from stpart_compiler.ir.program import Instr, RankProgram

MIB = 2**20


class Attention(nn.Module):
    """x [b, s, h] -> x + attention of its norm. `written`: products and softmax, else the fused kernel."""

    def __init__(self, hidden: int, heads: int, written: bool) -> None:
        super().__init__()
        self.heads, self.written = heads, written
        self.norm = nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.written:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            y = torch.softmax(scores, dim=-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, hidden: int, heads: int, written: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, hidden)
        self.attention = Attention(hidden, heads, written)
        self.head = nn.Linear(hidden, 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.embedding(tokens))).square().mean()


def compiled(options: argparse.Namespace, ranks: int, template: str, written: bool, device: str) -> st.CompiledModel:
    with torch.device(device):
        model = Model(options.hidden, options.heads, written)
        tokens = torch.zeros(1, options.length, dtype=torch.long)
    return st.compile_model(model, (tokens,), mesh=ranks, template=template, cluster="a100-80gb-8")


def owners(program: RankProgram) -> dict[str, str]:
    """Name of each value -> that of the value whose storage it is on."""
    found = {value.name: value.name for value in (*program.inputs, *program.constants)}
    for instr in program.body:
        base = storage_base(instr)
        for value in instr.outs:
            if value is not None:
                found[value.name] = found[base.name] if base is not None else value.name
    return found


def is_kernel(instr: Instr) -> bool:
    return any(part in str(instr.target) for part in ("scaled_dot_product", "attention_block"))


def counted(program: RankProgram, keep: Iterable[str]) -> int:
    """Bytes of x, q, k, v and attention's output: the most alive of them in any attention kernel."""
    owner, computed = owners(program), {v.name for i in program.body if i.kind == "compute" for v in i.outs if v}
    attended = {
        owner[value.name]
        for instr in program.body
        if is_kernel(instr) or "merge" in str(instr.target)
        for value in (*instr.inputs(), *instr.outs)
        if value is not None
    }
    attended &= computed
    for instr in program.body:
        if ".mm." in str(instr.target) and any(owner[v.name] in attended for v in instr.outs if v):
            attended |= {owner[value.name] for value in instr.inputs()} & computed
    at = [i for i, instr in enumerate(program.body) if is_kernel(instr)]
    return max(sum(x.nbytes for x in alive if x.name in attended) for alive in alive_tensors(program, at, keep))


def held(phase: StepPhase) -> int:
    """Peak of what is neither a parameter nor a gradient of one, while attention runs."""
    program = phase.program
    given = {value.name for value in program.inputs if value.name in phase.kept}
    owner = owners(program)
    final = {owner[v.name] for v in program.outputs if v is not None}
    gradients = final if program.phase == "backward" else set()
    inside = [i for i, instr in enumerate(program.body) if instr.origin.module_path.startswith("attention")]
    beside = given | gradients
    found = alive_tensors(program, inside, phase.kept)
    return max(sum(x.nbytes for x in alive if x.name not in beside) for alive in found)


def scores(program: RankProgram, length: int) -> int:
    """Bytes of the largest result of a product of activations: those with a dim of many keys and one of queries."""
    return max((value.nbytes for value in _products(program)), default=0)


def _products(program: RankProgram) -> Iterator[torch.Tensor]:
    for instr in program.body:
        if "bmm" in str(instr.target):
            yield from (value for value in instr.outs if value is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    bsh = 4 * options.length * options.hidden
    print("ranks template   counted  formula     kept  forward backward")
    for ranks in options.ranks:
        found = {}
        formulas = {"megatron": bsh * (1 + 4 / ranks), "metp": bsh * (2 / ranks + 3 / ranks**2)}
        for template in ("megatron", "metp"):
            model = compiled(options, ranks, template, False, "meta")
            steps = [phases_of(artifact) for artifact in model.artifacts]
            forwards = [forward for forward, _ in steps]
            kept = max(
                sum(v.nbytes for v in f.program.outputs if v is not None and v.name not in f.kept) for f in forwards
            )
            found[template] = (
                max(counted(f.program, f.kept) for f in forwards),
                formulas[template],
                kept,
                max(map(held, forwards)),
                max(held(backward) for _, backward in steps),
            )
            print(f"{ranks:>5} {template:>8} " + " ".join(f"{x / MIB:8.1f}" for x in found[template]), flush=True)
        less = [1 - ours / theirs for ours, theirs in zip(found["metp"], found["megatron"], strict=True)]
        print(f"{'':>5} {'less':>8} " + " ".join(f"{x:8.1%}" for x in less))


if __name__ == "__main__":
    main()
