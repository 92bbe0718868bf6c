"""Clusters: presets, TOML messages, and which link a mesh axis crosses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stpart_compiler.cost_models.cluster import (
    SOURCED,
    Cluster,
    Device,
    Hidden,
    Link,
    load_cluster,
    parse_cluster,
    presets,
)
from stpart_compiler.cost_models.cluster_text import to_toml
from stpart_compiler.ir.mesh import Mesh

FAST, SLOW = Link(1e-6, 64e9), Link(1e-5, 2e9)
DEVICE = Device("d", "cpu", (("float32", 1e12),), 2**30, 1e11)

GOOD = """
name = "mine"
[device]
name = "box"
type = "cpu"
memory = "8GiB"
memory_bandwidth = 1e10
launch_overhead = 1e-6
matmul_efficiency = [[1e6, 0.5], [1e9, 0.9]]
[device.peak_flops]
float32 = 1e11
[[links]]
ranks = 4
latency = 1e-5
bandwidth = 1e9
full_duplex = false
"""


def test_the_named_presets_exist():
    assert set(presets()) == {
        "cpu-gloo",
        "gpu-generic",
        "v100-32gb-8x4",
        "a100-80gb-8",
        "h100-80gb-8",
        "h200-141gb-8",
        "b200-180gb-8",
        "pcie-l40s-8",
        "v100-32gb-8x4-stated",
    }


@pytest.mark.parametrize("name", presets())
def test_preset_loads_under_its_own_name(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device.memory >= 16e9
    sizes = (4, 8) if cluster.max_ranks in (None, 32) else (cluster.max_ranks,)
    mesh = Mesh(("x", "y")[: len(sizes)], sizes)
    assert cluster.link_for(mesh.axes, mesh).bandwidth == min(link.bandwidth for _, link in cluster.levels)
    not_told = {"attention_efficiency", "memory_efficiency", "transcendental_rate", "transfer_overhead"}  # by vendors
    assert {name for name, _ in cluster.sources} == set(SOURCED) - not_told


def test_none_gives_the_generic_preset_of_the_device_type():
    assert load_cluster(None).device.type == "cpu"
    assert load_cluster(None, "cuda").device.type == "cuda"
    with pytest.raises(ValueError, match=r"device type 'tpu', only cpu, cuda"):
        load_cluster(None, "tpu")


def test_a_cluster_passes_through():
    cluster = Cluster("c", DEVICE, ((None, FAST),))
    assert load_cluster(cluster) is cluster


def test_unknown_preset_lists_presets():
    with pytest.raises(
        ValueError, match=r"no preset 'h1000'; presets are a100-80gb-8, b200-180gb-8, cpu-gloo, .*v100-32gb-8x4"
    ):
        load_cluster("h1000")


def test_file_is_read_by_string_and_by_path(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert load_cluster(file) == load_cluster(str(file))
    assert load_cluster(file).levels == ((4, Link(1e-5, 1e9, False)),)
    assert load_cluster(file).device.memory == 8 * 2**30


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no file '.*nowhere\.toml'"):
        load_cluster(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('type = "cpu"', "type = 3", r"f\.toml: key 'device\.type': expected a string, got 3"),
        ('type = "cpu"', 'type = "tpu"', r"f\.toml: device 'box': type 'tpu' is unknown; use one of cpu, cuda"),
        ('"8GiB"', '"lots"', r"f\.toml: key 'device\.memory': size 'lots' cannot be read"),
        ("float32 = 1e11", 'float32 = "fast"', r"key 'device\.peak_flops\.float32': expected a number, got 'fast'"),
        ("float32 = 1e11", "fp32 = 1e11", r"peak_flops\.fp32 is no torch dtype"),
        ("float32 = 1e11", "float32 = -1.0", r"peak_flops\.float32 is -1\.0; expected a positive number"),
        ("float32 = 1e11", "", r"peak_flops is empty"),
        ("launch_overhead = 1e-6", "", r"key 'device\.launch_overhead' is missing; expected a number"),
        ("full_duplex = false", "full_duplex = 1", r"key 'links\[0\]\.full_duplex': expected true or false, got 1"),
        ("ranks = 4", "ranks = 4.5", r"key 'links\[0\]\.ranks': expected a positive integer, got 4\.5"),
        ("latency = 1e-5", "latency = -1.0", r"f\.toml: key 'links\[0\]': link: latency is -1\.0"),
        (
            "latency = 1e-5",
            "latency = 1e-5\nlag = 2",
            r"key 'links\[0\]\.lag' is unknown; known here: algorithms, b",
        ),
        ("[[links]]", "[links]", r"key 'links': expected tables, each headed \[\[links\]\]"),
        ("[1e9, 0.9]", "[1e9]", r"key 'device\.matmul_efficiency': expected a list of \[number, number\]"),
        ("[1e9, 0.9]", "[1e9, 1.9]", r"expected FLOPs >= 1 and an efficiency in \(0, 1\]"),
        ("[1e9, 0.9]", "[1e5, 0.9]", r"FLOPs must ascend"),
        ("[1e9, 0.9]", "[1.5e6, 0.9]", r"the time would fall"),
        ('name = "mine"', "name = ", r"f\.toml: no valid TOML"),
    ],
)
def test_malformed_file_names_file_key_and_expected_type(old, new, message):
    assert GOOD.count(old) == 1
    with pytest.raises(ValueError, match=message) as error:
        parse_cluster(GOOD.replace(old, new), "f.toml")
    assert str(error.value).startswith("f.toml: ")


def test_innermost_axes_lie_inside_a_host():
    cluster = Cluster("c", DEVICE, ((4, FAST), (32, SLOW)))
    mesh = Mesh(("x", "y"), (8, 4))
    assert cluster.link_for(("y",), mesh) is FAST
    assert cluster.link_for(("x",), mesh) is SLOW
    assert cluster.link_for(("y", "x"), mesh) is SLOW
    assert cluster.link_for((), mesh) is FAST


def test_an_axis_that_straddles_hosts_anywhere_is_slow():
    cluster = Cluster("c", DEVICE, ((4, FAST), (None, SLOW)))
    assert cluster.link_for(("y",), Mesh(("x", "y"), (2, 2))) is FAST
    assert cluster.link_for(("y",), Mesh(("x", "y"), (2, 3))) is SLOW  # ranks 3, 4, 5
    assert cluster.link_for(("x",), Mesh(("x", "y"), (4, 2))) is SLOW


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_link_agrees_with_every_pair_of_ranks(sizes, data):
    mesh = Mesh(("x", "y", "z")[: len(sizes)], tuple(sizes))
    axes = data.draw(st.sets(st.sampled_from(mesh.axes)))
    cluster = Cluster("c", DEVICE, ((4, FAST), (None, SLOW)))

    def together(i: int, j: int) -> bool:
        return all(mesh.coords[i][a] == mesh.coords[j][a] for a in mesh.axes if a not in axes)

    ranks = range(mesh.world_size)
    leaves_host = any(i // 4 != j // 4 for i in ranks for j in ranks if together(i, j))
    assert cluster.link_for(axes, mesh) is (SLOW if leaves_host else FAST)


def test_mesh_larger_than_the_cluster_and_unknown_axis():
    cluster = load_cluster("h100-80gb-8")
    with pytest.raises(ValueError, match=r"'h100-80gb-8' joins 8 ranks, but mesh d=16 has 16; use a smaller mesh"):
        cluster.link_for(("d",), Mesh(("d",), (16,)))
    with pytest.raises(ValueError, match=r"no axis 'k' in mesh d=8"):
        cluster.link_for(("k",), Mesh(("d",), (8,)))


def test_levels_must_nest():
    with pytest.raises(ValueError, match=r"levels join \[4, 6\] ranks"):
        Cluster("c", DEVICE, ((4, FAST), (6, SLOW)))
    with pytest.raises(ValueError, match="only the outermost level"):
        Cluster("c", DEVICE, ((None, FAST), (8, SLOW)))
    with pytest.raises(ValueError, match="no links"):
        Cluster("c", DEVICE, ())


def test_efficiency_meets_its_points_and_is_constant_beyond():
    device = replace(DEVICE, matmul_efficiency=((1e6, 0.1), (1e8, 0.4)))
    assert device.efficiency(0) == device.efficiency(1e6) == 0.1
    assert device.efficiency(1e7) == pytest.approx(0.2)  # half-way in both logarithms
    assert device.efficiency(1e8) == device.efficiency(1e12) == 0.4


def test_attention_and_memory_have_curves_of_their_own():
    device = replace(DEVICE, matmul_efficiency=((1.0, 0.5),), memory_efficiency=((1e3, 1.0), (1e5, 0.25)))
    assert device.matmul_seconds(1e12, torch.float32) == device.matmul_seconds(1e12, torch.float32, True) == 2.0
    other = replace(device, attention_efficiency=((1.0, 0.25),))
    assert other.matmul_seconds(1e12, torch.float32, True) == 4.0
    assert device.memory_seconds(1e11) == pytest.approx(4.0) and device.memory_seconds(0) == 0.0
    assert device.memory_seconds(1e4) == pytest.approx(1e4 / 1e11 / 0.5)  # half-way in both logarithms


def test_curves_of_one_op_are_read_and_written():
    own = "matmul_efficiency = [[1e6, 0.5], [1e9, 0.9]]\n"
    extra = "attention_efficiency = [[1e6, 0.25]]\nmemory_efficiency = [[1e5, 0.5]]\ntranscendental_rate = 1e9\n"
    extra += "transfer_overhead = 2e-4\n"
    found = parse_cluster(GOOD.replace(own, own + extra), "mine.toml")
    device = found.device
    assert (device.attention_efficiency, device.memory_efficiency) == (((1e6, 0.25),), ((1e5, 0.5),))
    assert device.transcendental_rate == 1e9 and parse_cluster(to_toml(found), "mine.toml") == found
    with pytest.raises(ValueError, match="transcendental_rate is -1.0; expected elements/s >= 0"):
        replace(DEVICE, transcendental_rate=-1.0)
    with pytest.raises(ValueError, match="memory_efficiency: from 1.0 to 4.0 bytes the time would fall"):
        replace(DEVICE, memory_efficiency=((1.0, 0.1), (4.0, 1.0)))


@pytest.mark.parametrize("name", presets())
@given(st.floats(1, 1e16), st.floats(1, 1e16))
def test_more_flops_are_never_cheaper(name, one, other):
    device = load_cluster(name).device
    low, high = sorted((one, other))
    assert device.matmul_seconds(low, torch.float32) <= device.matmul_seconds(high, torch.float32) * (1 + 1e-12)


def test_unlisted_dtype_runs_like_float32():
    device = replace(DEVICE, peak_flops=(("bfloat16", 8.0), ("float32", 2.0)))
    assert device.peak(torch.bfloat16) == 8.0
    assert device.peak(torch.float64) == device.peak(torch.int8) == 2.0


def test_groups_share_a_link_that_several_ranks_have_together():
    hosts = Cluster("hosts", DEVICE, ((4, FAST), (32, Link(1e-5, 8e9, shared_by=4))))
    mesh = Mesh(("d", "m"), (8, 4))
    assert hosts.link_for(("d",), mesh) == Link(1e-5, 2e9)  # the four groups of a host, a quarter each
    assert hosts.link_for(("d", "m"), mesh) == Link(1e-5, 8e9)  # one group, which leaves each host once
    assert hosts.link_for(("m",), mesh) == FAST
    assert (hosts.level_between(4, 7), hosts.level_between(3, 4)) == (0, 1)
    with pytest.raises(ValueError, match=r"no link between ranks 0 and 32"):
        hosts.level_between(0, 32)


def test_ranks_on_one_link_must_divide_those_it_joins():
    with pytest.raises(ValueError, match=r"links\[0\] joins 4 ranks, 3 of which share one link"):
        Cluster("c", DEVICE, ((4, Link(0.0, 1.0, shared_by=3)),))
    assert parse_cluster(GOOD + "shared_by = 2\n", "mine.toml").levels[0][1].shared_by == 2
    found = parse_cluster(GOOD + "[hidden]\ncollectives = 0.25\n", "mine.toml")
    assert found.hidden == Hidden(1.0, 0.25) and parse_cluster(to_toml(found), "mine.toml") == found
    with pytest.raises(ValueError, match=r"mine.toml: hidden: exchanges is 2.0; expected a part between 0 and 1"):
        parse_cluster(GOOD + "[hidden]\nexchanges = 2\n", "mine.toml")
    with pytest.raises(ValueError, match=r"mine.toml: key 'hidden.rings' is unknown; known: exchanges, collectives"):
        parse_cluster(GOOD + "[hidden]\nrings = 0.5\n", "mine.toml")
    with pytest.raises(ValueError, match=r"mine.toml: key 'links\[0\].shared_by': expected a positive integer, got 0"):
        parse_cluster(GOOD + "shared_by = 0\n", "mine.toml")


COLLECTIVES = """
algorithms = ["ring", "tree"]
[links.efficiency]
all_reduce = [[1e6, 0.2], [1e9, 0.8]]
all_gather = [[1e6, 0.5]]
[links.latencies]
all_reduce = 3e-6
"""


def test_a_link_says_how_its_collectives_go():
    cluster = parse_cluster(GOOD + COLLECTIVES, "mine.toml")
    ((_, link),) = cluster.levels
    assert link.algorithms == ("ring", "tree")
    sizes = (1.0, 1e6, 10**7.5, 1e9, 1e12)
    assert [link.reached("all_reduce", nbytes) for nbytes in sizes] == pytest.approx([0.2, 0.2, 0.4, 0.8, 0.8])
    assert (link.reached("all_gather", 1e9), link.reached("all_to_all", 1e9)) == (0.5, 1.0)
    assert [link.latency_of(kind) for kind in ("all_reduce", "all_gather", "p2p")] == [3e-6, link.latency, link.latency]
    assert parse_cluster(to_toml(cluster), "mine.toml") == cluster


def test_collectives_in_a_row_wait_two_at_a_time_on_cpus_alone():
    link = Link(4.0, 1e9, latencies=(("all_gather", 1.0),))
    ((_, found),) = Cluster("c", DEVICE, ((None, link),)).in_rows.levels
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "exchange")
    assert [found.latency_of(kind) for kind in kinds] == [2.0, 0.5, 2.0, 2.0, 4.0, 4.0]
    accelerated = Cluster("c", replace(DEVICE, type="cuda"), ((None, link),))
    assert accelerated.in_rows is accelerated


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"tree"',
            '"star"',
            r"key 'links\[0\]': link: algorithms is \['ring', 'star'\]; expected one or more of ",
        ),
        ('"ring", "tree"', "", r"link: algorithms is \[\]; expected one or more of ring, tree, hierarchical"),
        ('["ring", "tree"]', '"tree"', r"key 'links\[0\].algorithms': expected a list of strings, got 'tree'"),
        (
            '"tree"',
            '"hierarchical"',
            r"links\[0\] has the algorithm 'hierarchical', but no level of links ",
        ),
        ("all_gather", "exchange", r"link: efficiency.exchange is no collective; use one of all_reduce, all_gather, "),
        ("[1e9, 0.8]", "[1e9, 1.8]", r"link: efficiency.all_reduce has .*; expected bytes >= 1 and an efficiency in"),
        (
            "[1e6, 0.5]",
            "[1e6, 0.5], [1.1e6, 0.9]",
            r"efficiency.all_gather: from .* bytes the time would fall",
        ),
        ("all_reduce = 3", "exchange = 3", r"link: latencies.exchange is no collective; use one of all_reduce, "),
        ("3e-6", "-3e-6", r"link: latencies.all_reduce is -3e-06; expected seconds >= 0"),
        ("[[1e6, 0.5]]", "0.5", r"key 'links\[0\].efficiency.all_gather': expected a list of \[number, number\]"),
    ],
)
def test_collectives_that_cannot_be_are_refused(old, new, message):
    assert COLLECTIVES.count(old) == 1
    with pytest.raises(ValueError, match=message) as error:
        parse_cluster(GOOD + COLLECTIVES.replace(old, new), "f.toml")
    assert str(error.value).startswith("f.toml: ")


def test_sources_are_of_figures_that_there_are():
    cluster = parse_cluster(GOOD + '[sources]\nlinks = "measured"\n', "mine.toml")
    assert cluster.sources == (("links", "measured"),)
    with pytest.raises(ValueError, match=r"mine.toml: cluster 'mine': sources.link is unknown; known: memory, "):
        parse_cluster(GOOD + '[sources]\nlink = "measured"\n', "mine.toml")
