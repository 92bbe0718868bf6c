"""Settings shared by all tests: one thread per process, reproducible hypothesis examples, no plan cache."""

import gc
import os

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
    """What the imports made stays: looking for garbage in it takes a tenth of a second each time.

    Models that are traced once for many tests stay too, so garbage is looked for less often than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
