"""What functions of several ops make on the way is in a program's peak: against real tensors, and the allocator."""

from __future__ import annotations

import pytest
import torch
from slow_ranks import CLUSTER
from torch import nn

import stpart_compiler as st
from stpart_compiler.ir.program import Builder, Instr, RankProgram
from stpart_compiler.passes.scratch import CountScratch
from stpart_compiler.runtime import local_ops
from stpart_compiler.runtime.memory import allocator_peak


class Attention(nn.Module):
    """Causal attention with its projections under autocast; `written` out, without a mask."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written = written
        self.embedding, self.norm = nn.Embedding(7, 12), nn.LayerNorm(12)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12, bias=False) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embedding(tokens)
            y = self.norm(x)
            q, k, v = (layer(y).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            if self.written:
                y = torch.softmax(q @ k.transpose(-2, -1) / 3**0.5, dim=-1) @ v
            else:
                y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return (x + self.out(y.transpose(1, 2).flatten(2))).float().square().mean()


@pytest.mark.parametrize("template", ["metp", "cp_zero3"])
@pytest.mark.parametrize("written", [True, False], ids=["written", "fused"])
@pytest.mark.parametrize("length", [32, 29])  # in stripes, and in pieces
def test_peak_under_autocast(template: str, written: bool, length: int) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (4, length))
    compiled = st.compile_model(Attention(written), (tokens,), mesh=4, template=template, cluster=CLUSTER)
    real = min(max(compiled.run_in_process(tokens).peak_bytes) for _ in range(2))  # gloo may let go of tensors late
    memory = compiled.plan.memory
    assert real <= 1.002 * memory["step peak"]
    assert memory["step peak"] <= 1.002 * real
    if length % 4 == 0:
        assert memory["step peak"] <= memory["solver estimate"] - memory["optimizer state"]
    found = {
        instr.target for artifact in compiled.artifacts for i in artifact.programs for instr in i.body if instr.scratch
    }
    merges = {local_ops.merge_attention, local_ops.merge_written}
    assert bool(found & merges) == (not written or template == "metp")  # rings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_against_the_allocator(dtype: torch.dtype) -> None:
    """Results and scratch are all that is allocated, whatever the type of the block that is merged."""
    out, lse = torch.randn(2, 4, 64, 32), torch.randn(2, 4, 64)
    parts = torch.randn(2, 4, 64, 32).to(dtype), torch.randn(2, 4, 64)
    instr = _merging(dtype)
    (merged, _), peak = allocator_peak(lambda: local_ops.merge_attention(out, lse, *parts))
    made = sum(value.nbytes for value in instr.outs if value is not None)
    assert instr.scratch >= merged.nbytes  # the share of the block
    assert made + instr.scratch == pytest.approx(peak, rel=0.02)


def _merging(dtype: torch.dtype) -> Instr:
    builder = Builder(0, "forward", torch.device("cpu"))
    out, part = (builder.value(name, (2, 4, 64, 32), kind) for name, kind in (("out", torch.float32), ("part", dtype)))
    lse, other = (builder.value(name, (2, 4, 64), torch.float32) for name in ("lse", "other"))
    made = builder.call_multi(
        local_ops.merge_attention, (out, lse, part, other), {}, [(x.name, x.shape, x.dtype) for x in (out, lse)]
    )
    program = RankProgram(0, "forward", [out, lse, part, other], list(made), builder.body)
    CountScratch().apply([program])
    return program.body[0]
