"""What an op raises while a program runs says where in the model that was, and stops all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_ranks import CLUSTER, SOLVER
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.runtime.engine import CommTimeoutError, Engine
from stpart_compiler.runtime.threads import run_ranks

VOCABULARY = 12
TIMEOUT_S = 30.0


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)  # EMBED
        return self.head(x).square().mean()


@pytest.fixture(scope="module", params=["data", "zero3", "megatron"])
def compiled(request: pytest.FixtureRequest) -> st.CompiledModel:
    ids = torch.zeros(4, 3, dtype=torch.long)
    return st.compile_model(Tagger(), (ids,), mesh=2, template=request.param, cluster=CLUSTER, solver=SOLVER)


def where(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i + 1 for i, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_bad_token_is_traced_to_the_line_of_the_model(compiled: st.CompiledModel, token: int) -> None:
    ids = torch.zeros(4, 3, dtype=torch.long)
    ids[3, 2] = token  # among the rows of the last rank
    started = time.monotonic()
    with pytest.raises(IndexError, match="index out of range") as caught:
        compiled.run_in_process(ids, timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2, "nobody waits for the rank that has stopped"
    [note, _] = caught.value.__notes__
    assert "by op embedding" in note and "module tokens" in note and note.endswith(f"at {where('EMBED')}")


def test_the_other_ranks_say_who_stopped_and_why(compiled: st.CompiledModel) -> None:
    """Also where no runner stops them: the failing rank closes its connections, and goes on by itself."""
    seen: dict[int, str] = {}

    def rank(index: int, engine: Engine) -> None:
        module = compiled.rank_module(index, engine)
        if index == 1:
            break_once(module, "embedding")
        for _ in range(2):
            try:
                module(torch.zeros(4, 3, dtype=torch.long)).backward()
            except (CommTimeoutError, ZeroDivisionError) as error:
                seen[index] = str(error)

    started = time.monotonic()
    with pytest.raises(CommTimeoutError, match="a peer has stopped|stopped, rank 1 raised"):
        run_ranks(2, rank, timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert "stopped, rank 1 raised ZeroDivisionError: broken" in seen[1]
    assert "stopped, rank 0 has failed before" in seen[0]


def break_once(module: Any, name: str) -> None:
    """The first op of that name fails, in the first run."""
    failures = [ZeroDivisionError("broken")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    gm = module._stpart.forward_gm
    node = next(node for node in gm.graph.nodes if node.name.startswith(name))
    with gm.graph.inserting_before(node):
        gm.graph.call_function(fail, ()).meta["origin"] = node.meta["origin"]
    gm.recompile()
