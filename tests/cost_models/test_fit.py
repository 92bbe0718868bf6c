"""Fits find the parameters that times were made with, and clusters survive being written."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stpart_compiler.cost_models.cluster import Link, load_cluster, parse_cluster, presets
from stpart_compiler.cost_models.cluster_text import to_toml
from stpart_compiler.cost_models.communication import collective_seconds, p2p_seconds
from stpart_compiler.cost_models.fit import (
    Transfer,
    fit_curve,
    fit_efficiency,
    fit_latencies,
    fit_link,
    fit_peak,
    fit_shares,
    residuals,
    rounded,
    rounded_curve,
)

SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)


def measured(link: Link, noise: float = 0.0) -> list[Transfer]:
    found = [Transfer("p2p", size, 2, p2p_seconds(size, link)) for size in SIZES]
    for kind in ("exchange", "all_reduce", "all_gather"):
        found += [Transfer(kind, size, 4, collective_seconds(kind, size, 4, link)) for size in SIZES]
    return [replace(x, seconds=x.seconds * (1 + noise * (-1) ** i)) for i, x in enumerate(found)]


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12), st.booleans())
def test_a_link_is_found_again(latency, bandwidth, full_duplex):
    link = Link(latency, bandwidth, full_duplex)
    found = fit_link(measured(link))
    assert max(residuals(measured(link), found).values()) < 1e-3
    assert found.latency == pytest.approx(latency, rel=1e-2) or latency * 1e3 < 1e3 / bandwidth


def test_noise_stays_in_the_residuals():
    link = Link(5e-5, 2e9, False)
    found = fit_link(measured(link, 0.1))
    assert (found.bandwidth, found.full_duplex) == (pytest.approx(2e9, rel=0.1), False)
    assert all(0 < error < 0.15 for error in residuals(measured(link, 0.1), found).values())
    with pytest.raises(ValueError, match="got 1 transfers; a latency and a bandwidth need at least two"):
        fit_link(measured(link)[:1])


@pytest.mark.parametrize("full_duplex", [True, False])
def test_what_collectives_reach_of_a_link_is_found_again(full_duplex):
    """Of four ranks, whose all-gather sends three quarters; the smallest is all latency and tells nothing."""
    curve = ((7.5e4, 0.2), (7.5e5, 0.3), (7.5e6, 0.4))
    bare = Link(1e-4, 1e9, full_duplex)
    link = replace(bare, efficiency=(("all_gather", curve), ("all_to_all", ((1.0, 0.5),))))
    times = [Transfer(kind, n, 4, collective_seconds(kind, n, 4, link)) for kind, _ in link.efficiency for n in SIZES]
    (_, gathers), (_, exchanges) = fit_efficiency(times, bare)
    assert gathers[-2:] == curve[1:]
    assert [share for _, share in exchanges] == [0.5] * len(exchanges) and len(exchanges) < len(SIZES)
    found = replace(bare, efficiency=(("all_gather", gathers), ("all_to_all", exchanges)))
    assert max(residuals(times, found).values()) < 0.01 < max(residuals(times, bare).values())


def test_a_message_of_a_collective_may_wait_shorter_or_longer_than_another():
    link = Link(1e-3, 1e9, latencies=(("all_reduce", 1e-4), ("all_gather", 2e-3)))
    times = [Transfer(kind, n, 4, collective_seconds(kind, n, 4, link)) for kind, _ in link.latencies for n in SIZES]
    found = dict(fit_latencies(times, True))
    assert found == {"all_reduce": pytest.approx(1e-4, rel=1e-3), "all_gather": pytest.approx(2e-3, rel=1e-3)}
    assert max(residuals(times, link).values()) < 1e-9 < 0.4 < max(residuals(times, Link(1e-3, 1e9)).values())
    assert collective_seconds("all_to_all", 0.0, 4, link) == 3e-3


def test_collectives_faster_than_messages_or_out_of_order_make_a_curve_all_the_same():
    link = Link(1e-6, 1e9)
    times = [
        Transfer("all_reduce", 1e6, 2, 1e-4),
        Transfer("all_reduce", 2e6, 2, 4e-3),
        Transfer("all_reduce", 4e6, 2, 1e-3),
    ]
    assert fit_efficiency(times, link) == (("all_reduce", ((1e6, 1.0), (2e6, 0.5003), (4e6, 1.0))),)
    Link(1e-6, 1e9, efficiency=fit_efficiency(times, link))  # which refuses curves by which time falls
    assert fit_efficiency([Transfer("all_reduce", 1.0, 2, 2e-6)], link) == ()


def test_a_link_has_no_negative_latency():
    falling = [Transfer("p2p", size, 2, 1e-12 * size**1.2) for size in SIZES]
    assert fit_link(falling).latency == 0.0


def test_a_curve_has_the_best_rate_as_its_peak_and_time_never_falls():
    products = [(1e6, 1e-3), (1e8, 5e-3), (1e7, 6e-3)]
    peak, curve = fit_curve(products)
    assert peak == pytest.approx(1e8 / 6e-3)
    assert curve == ((1e6, pytest.approx(0.06)), (1e7, pytest.approx(0.1)), (1e8, pytest.approx(1.0)))
    device = replace(load_cluster(None).device, matmul_efficiency=curve)
    assert device.efficiency(1e8) == pytest.approx(1.0)


def test_other_ops_are_fitted_against_a_peak_or_a_curve_that_is_known():
    assert fit_shares([(1e6, 1e-3), (1e8, 1e-3)], 1e10) == ((1e6, pytest.approx(0.1)), (1e8, pytest.approx(1.0)))
    curve = ((1e6, 0.1), (1e8, 1.0))
    times = [(1e6, 1e6 / 5e9 / 0.1), (1e8, 1e8 / 5e9), (1e7, 1.0)]  # the last one is an outlier
    assert fit_peak(times, curve) == pytest.approx(5e9)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-7, 10.0)), min_size=1, unique_by=lambda x: x[0]))
def test_a_rounded_curve_is_still_one_and_off_by_rounding_only(measured_at):
    _, curve = fit_curve([(2.0 * size**3, seconds) for size, seconds in measured_at])
    found = rounded_curve(curve)
    replace(load_cluster(None).device, matmul_efficiency=found)  # refuses curves by which time falls
    for (_, exact), (_, share) in zip(curve, found, strict=True):
        assert share == pytest.approx(exact, rel=2e-3 * len(curve))
        assert share == rounded(share)


@pytest.mark.parametrize("name", presets())
def test_written_clusters_are_read_as_they_were(name):
    cluster = load_cluster(name)
    assert parse_cluster(to_toml(cluster, ("made by a test",)), "test") == cluster


def test_rounding_keeps_significant_digits():
    assert (rounded(123456.0), rounded(1.23456e-7), rounded(0.0)) == (123500.0, 1.235e-7, 0.0)
