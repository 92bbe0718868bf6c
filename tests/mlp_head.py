"""A step with a linear layer, an MLP, and a head with its loss."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from stpart_compiler.capture import capture
from stpart_compiler.graphs import annotate
from stpart_compiler.passes.propagate import Annotated

TOKENS, WIDTH, HIDDEN, VOCABULARY = 64, 32, 48, 80


class MlpAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.down(torch.relu(self.up(x)))
        return nn.functional.cross_entropy(self.head(x), target)


@cache
def mlp_and_head() -> Annotated:
    with torch.device("meta"):
        call = torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.long)
        return annotate(capture(MlpAndHead(), call))
