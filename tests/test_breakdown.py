"""The phases of a step in `benchmarks/primepar_breakdown.py`: they are all of it, and those that the paper shows."""

from __future__ import annotations

import pytest
from _phases import breakdown
from primepar_breakdown import HOST, MEGATRON_MS, PRIMEPAR_MS, SHOWN, Partition, megatron, primepar, simulated

from stpart_compiler.cost_models.cluster import load_cluster


@pytest.mark.parametrize(
    ("partition", "paper"),
    [
        pytest.param(megatron(SHOWN, HOST), MEGATRON_MS, id="megatron"),
        pytest.param(primepar(SHOWN)[0], PRIMEPAR_MS, id="primepar"),
    ],
)
def test_phases_are_the_whole_step(partition: Partition, paper: dict[str, float]) -> None:
    cluster = load_cluster("v100-32gb-8x4")
    for rank in simulated(SHOWN.graph, cluster, partition).timeline:
        found = breakdown(SHOWN.graph, cluster, rank)
        assert found.computed + found.waited == pytest.approx(rank.end)
        assert found.computed == pytest.approx(rank.compute_seconds)
        assert found.exposed >= rank.end - found.late - 1e-9
        large = {name for name, row in (found.compute | found.transfers).items() if row.seconds > 0.005}
        assert large - {"around"} == set(paper)
