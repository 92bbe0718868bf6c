"""Calibration writes a cluster that can be planned for; what it measures is not checked, only that it fits."""

from pathlib import Path

import pytest

from stpart_compiler import cli
from stpart_compiler.cli import main
from stpart_compiler.cost_models.cluster import SOURCED, load_cluster
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.local_ranks import launch
from stpart_compiler.runtime import bench, calibrate

TESTS = str(Path(__file__).parents[1])


def test_one_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "SIZES", {"cpu": (16, 32, 64)})
    monkeypatch.setattr(bench, "SAMPLE_S", 0.0)
    monkeypatch.setattr(cli, "launch", lambda ranks, module, path, limit_s: calibrate.calibrate_here(Path(path)))
    path = tmp_path / "mine.toml"
    assert main(["calibrate", str(path), "--ranks=1"]) == 0
    assert f"use it as --cluster {path}" in capsys.readouterr().out
    cluster = load_cluster(path)
    assert [dtype for dtype, _ in cluster.device.peak_flops] == list(calibrate.DTYPES)
    assert max(share for _, share in cluster.device.matmul_efficiency) == pytest.approx(1.0, rel=1e-3)
    assert cluster.device.memory_bandwidth > 1e8 and cluster.device.transcendental_rate > 1e6
    assert cluster.device.attention_efficiency and len(cluster.device.memory_efficiency) > 1
    assert {name for name, _ in cluster.sources} == set(SOURCED)


def test_local_ranks_fit_a_link_and_report_residuals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=":")
    path = tmp_path / "mine.toml"
    launch(2, "calibrate_ranks", str(path), 120.0)
    cluster = load_cluster(path)
    link = cluster.link_for(("d",), Mesh(("d",), (2,)))
    assert 0 <= link.latency < 1 and link.bandwidth > 1e3
    assert {kind for kind, _ in link.efficiency} <= set(bench.COLLECTIVES)
    for kind in ("p2p", "exchange", *bench.COLLECTIVES):
        assert f"{kind} off by " in path.read_text()
    assert "links in a host: " in capfd.readouterr().err


def test_a_file_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    assert main(["calibrate", str(tmp_path / "none" / "mine.toml")]) == 2
