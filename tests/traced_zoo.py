"""The zoo's models in float64, each captured once: the tests of one model run in one process, one after another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import pytest
from zoo import ZOO, Step, make

from stpart_compiler.capture import Captured, capture
from stpart_compiler.graphs import annotate
from stpart_compiler.passes.propagate import Annotated


def _each(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names])


by_model = _each(ZOO)
by_other_model = _each(name for name in ZOO if name not in ("llama", "gpt2"))
"""`test_models.py` plans the two left out, on more meshes."""


class Traced(NamedTuple):
    """`captured` is decomposed."""

    step: Step
    captured: Captured
    graph: Annotated


@lru_cache(maxsize=1)
def traced(name: str) -> Traced:
    step = make(name).double()
    captured = capture(step.model, step.args, dict(step.kwargs), loss_fn=step.loss_fn)
    return Traced(step, captured, annotate(captured))
