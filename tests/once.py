"""One capture of a model for many plans: tracing takes longer than a plan of a small model, and gives the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stpart_compiler import compile as compiling
from stpart_compiler import graphs
from stpart_compiler.capture import Captured
from stpart_compiler.inspect.dump import Dumper
from stpart_compiler.passes.propagate import Annotated

_known: dict[tuple[str, Hashable], Any] = {}


@contextmanager
def traced_before(captured: Captured, graph: Callable[[int], Annotated]) -> Iterator[None]:
    """Inside, `compile_model` takes this step as captured, and as annotated with so many stripes."""
    with _patched(lambda *args, **kwargs: captured, lambda captured, dumper, stripes: graph(stripes)):
        yield


@contextmanager
def traced_once(key: Hashable) -> Iterator[None]:
    """Inside, `compile_model` captures what `key` stands for, if it has not done so before in this process."""
    annotate = graphs.annotate

    def annotated(captured: Captured, dumper: Dumper, stripes: int) -> Annotated:
        return _once("annotate", (key, stripes), annotate)(captured, dumper, stripes)  # type: ignore[no-any-return]

    with _patched(_once("capture", key, compiling.capture), annotated):
        yield


def _once(what: str, key: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
    def known(*args: Any, **kwargs: Any) -> Any:
        if (what, key) not in _known:
            _known[what, key] = function(*args, **kwargs)
        return _known[what, key]

    return known


@contextmanager
def _patched(capture: Callable[..., Any], annotate: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "capture", capture)
        patch.setattr(graphs, "annotate", annotate)
        yield
