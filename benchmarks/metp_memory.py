"""Bytes per rank of attention under `metp` and `megatron`, from the generated programs.

    python benchmarks/metp_memory.py [--ranks 2 4 8] [--length 16384] [--hidden 1024] [--heads 16]

A layer norm and multi-head attention with its projections and a residual (batch 1, float32, meta device). Columns, in
MiB of the fullest rank:

    counted   x, q, k, v and the attention's output, all that is alive of them at once in forward: what the formulas
              bsh(1+4/p) of tensor parallelism and bsh(2/p+3/p^2) of METP count. Here also what is merged twice in a
              ring; left out: buffers of the ring, slices of weights, the layer's output.
    kept      all that forward keeps for backward, without parameters
    forward, backward   peak of all that the phase holds while attention runs, without parameters, their gradients and
              inputs: buffers, slices of weights and outputs too
    scores    of attention written out, in a second table: the largest tensor with one number per query and key

    python benchmarks/metp_memory.py --check --ranks 4 --length 1024 --hidden 64 --heads 8

compares the programs' peak under `metp` with that of real tensors, all ranks run in this process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

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


def scores(program: RankProgram) -> int:
    """Bytes of the largest tensor of scores or probabilities: one per pair of a query and a key."""
    return max(
        value.nbytes
        for instr in program.body
        if "exp_minus" in str(instr.target) or "_softmax" in str(instr.target)
        for value in instr.outs
        if value is not None
    )


def fused(options: argparse.Namespace) -> None:
    """Attention as one kernel: bytes of what stands around it."""
    bsh = 4 * options.length * options.hidden
    print("ranks template   counted  formula     kept  forward backward")
    for ranks in options.ranks:
        formulas = {"megatron": bsh * (1 + 4 / ranks), "metp": bsh * (2 / ranks + 3 / ranks**2)}
        found = {name: measured(options, ranks, name, formula) for name, formula in formulas.items()}
        for name, row in found.items():
            print(f"{ranks:>5} {name:>8} " + " ".join(f"{x / MIB:8.1f}" for x in row), flush=True)
        less = [1 - ours / theirs for ours, theirs in zip(found["metp"], found["megatron"], strict=True)]
        print(f"{'':>5} {'less':>8} " + " ".join(f"{x:8.1%}" for x in less))


def measured(options: argparse.Namespace, ranks: int, template: str, formula: float) -> tuple[float, ...]:
    """A row of the table, in bytes: of each column the fullest rank's."""
    model = compiled(options, ranks, template, False, "meta")
    steps = [phases_of(artifact) for artifact in model.artifacts]
    forwards = [forward for forward, _ in steps]
    kept = max(sum(v.nbytes for v in f.program.outputs if v is not None and v.name not in f.kept) for f in forwards)
    return (
        max(counted(f.program, f.kept) for f in forwards),
        formula,
        kept,
        max(map(held, forwards)),
        max(held(backward) for _, backward in steps),
    )


def written(options: argparse.Namespace) -> None:
    """Attention written out: bytes of its scores."""
    print("ranks template    scores  b n s^2 / p^3  b n s^2 / p  forward backward")
    whole = 4 * options.heads * options.length**2
    for ranks in options.ranks:
        for template in ("megatron", "metp"):
            model = compiled(options, ranks, template, True, "meta")
            steps = [phases_of(artifact) for artifact in model.artifacts]
            sizes = max(max(scores(phase.program) for phase in step) for step in steps)
            peaks = [max(held(step[i]) for step in steps) for i in (0, 1)]
            row = (sizes, whole / ranks**3, whole / ranks, *peaks)
            text = " ".join(f"{x / MIB:{width}.1f}" for x, width in zip(row, (9, 14, 12, 8, 8), strict=True))
            print(f"{ranks:>5} {template:>8} {text}", flush=True)


def check(options: argparse.Namespace) -> None:
    """The programs' peak, by the lives of their tensors, beside that of real tensors: the largest of all ranks."""
    for form in (False, True):
        model = compiled(options, options.ranks[0], "metp", form, "cpu")
        predicted = model.simulate().peak_bytes
        real = max(model.run_in_process(torch.zeros(1, options.length, dtype=torch.long)).peak_bytes)
        name = "written out" if form else "fused"
        print(f"{name}, {options.ranks[0]} ranks: programs {predicted / MIB:.2f} MiB, run {real / MIB:.2f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--check", action="store_true", help="run instead on all ranks; give small sizes")
    options = parser.parse_args()
    if options.check:
        check(options)
        return
    fused(options)
    written(options)


if __name__ == "__main__":
    main()
