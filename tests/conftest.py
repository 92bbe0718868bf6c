"""Settings shared by all tests: one thread per process, reproducible hypothesis examples, no plan cache."""

import gc
import os
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import settings

# Test processes run side by side on few cores, and one thread sums in one order.
torch.set_num_threads(1)

# The first call of an op can take long (imports, tracing), so no deadline per example.
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="also strategies that differ by the names of mesh axes alone")


# Tests solve, whatever was solved before; processes that they start inherit this.
os.environ["STPART_CACHE"] = "off"


def pytest_collection_finish() -> None:
    """From here on garbage is looked for between tests alone, and not in what the imports made."""
    gc.collect()
    gc.freeze()
    gc.disable()


_run: Iterator[int] = count(1)


def pytest_runtest_teardown() -> None:
    """Compiling makes millions of objects and little garbage: looking for it as often as Python does takes a fifth of
    the time. What models that are traced once for many tests leave is old, and looked through seldom.
    """
    done = next(_run)
    if done % 5 == 0:
        gc.collect(2 if done % 200 == 0 else 1)
