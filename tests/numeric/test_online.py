"""Ranks that are processes, in a gloo process group: training, checkpoints, and what happens when a rank fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from online_ranks import (
    HANG_S,
    LIMIT_S,
    MAX_NORM,
    MESH,
    PATIENCE_S,
    RANKS,
    SAVED_AFTER,
    SOLVER,
    _Squares,
    adamw,
    batches,
    code_of,
    compiled_llama,
    llama,
    main,
    noise_losses,
    noisy,
    smaller,
    train,
)
from processes import run_processes
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import stpart_compiler as st


def launch(scenario: str, directory: Path, world_size: int = RANKS) -> list[dict[str, Any]]:
    """Run the ranks; what each found, in rank order, empty for one that left nothing. None is left running."""
    arguments = [(scenario, directory, rank, world_size) for rank in range(world_size)]
    ended = run_processes(main, arguments, LIMIT_S)
    found = []
    for rank, (status, log) in enumerate(ended):
        path = directory / f"{scenario}{rank}.json"
        assert status in (0, 9), f"rank {rank} ended with status {status}:\n{log}"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    return found


def _close(found: list[float], expected: list[float], tolerance: float = 1e-5) -> bool:
    return len(found) == len(expected) and all(abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True))


def test_training(tmp_path: Path) -> None:
    offline = compiled_llama(llama(), MESH)
    offline.save(tmp_path / "offline")
    assert any(any(strategy.digits) for strategy in offline.plan.strategies.values())
    found = launch("trains", tmp_path)

    model = llama()
    plain, _ = train(model, adamw(model), None, batches())
    less, _ = train(model, adamw(model), None, smaller())
    model = llama()
    clipped, norms = train(model, adamw(model), nn.utils.clip_grad_norm_, batches())
    assert min(norms) > MAX_NORM
    noisy_model, x = noisy()
    torch.manual_seed(0)  # that of rank 0
    noise = noise_losses(nn.Sequential(*noisy_model, _Squares()), x)
    assert abs(noise[0] - noise[1]) > 1e-3
    for rank, seen in enumerate(found):
        assert _close(seen["noise"], noise, 1e-4), rank
        assert _close(seen["plain"], plain), rank
        assert _close(seen["smaller"], less), rank
        assert _close(seen["clipped"], clipped), rank
        assert _close(seen["norms"], norms), rank
        assert not seen["drifted"]
        assert all(seen[key] == found[0][key] for key in ("plain", "clipped", "norms")), rank

    # Rank 0 solved online, this process offline: the same plan and programs; and given the plan, the same programs.
    given = compiled_llama(llama(), MESH, plan=st.Plan.from_json((tmp_path / "online.json").read_text()))
    for rank, seen in enumerate(found):
        assert seen["digest"] == offline.plan.digest == given.plan.digest
        assert seen["code"] == seen["offline code"] == code_of(offline, rank) == code_of(given, rank)

    _check_resumed_on_two_ranks(tmp_path, clipped, norms)
    _check_resumed_on_one_device(tmp_path, clipped, norms)


def _check_resumed_on_two_ranks(directory: Path, clipped: list[float], norms: list[float]) -> None:
    compiled_llama(llama(), 2, template="zero3").save(directory / "pair")
    for seen in launch("resumes", directory, 2):
        assert _close(seen["clipped"], clipped[SAVED_AFTER:])
        assert _close(seen["norms"], norms[SAVED_AFTER:])


def _check_resumed_on_one_device(directory: Path, clipped: list[float], norms: list[float]) -> None:
    dcp_to_torch_save(directory / "checkpoint", directory / "whole.pt")
    state = torch.load(directory / "whole.pt")
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    missing, _ = model.load_state_dict({name: state[name] for name in names}, strict=False)
    assert not missing
    optimizer = adamw(model)
    keys = ("step", "exp_avg", "exp_avg_sq")
    moments = {i: {key: state[f"optimizer.{name}.{key}"] for key in keys} for i, name in enumerate(names)}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    found = train(model, optimizer, nn.utils.clip_grad_norm_, batches()[SAVED_AFTER:])
    assert _close(found[0], clipped[SAVED_AFTER:])
    assert _close(found[1], norms[SAVED_AFTER:])


def test_failures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(8, 8)
    torch.save(x, tmp_path / "x.pt")
    for name, template in (("plan", "megatron"), ("other", "zero3")):
        compiled = st.compile_model(model, (x,), mesh=MESH, template=template, loss_fn=torch.sum, solver=SOLVER)
        compiled.save(tmp_path / name)
    found = launch("fails", tmp_path)
    assert not found[3]  # the rank that died

    for seen in found[:3]:
        assert seen["plan"]["kind"] == "RuntimeError"
        assert "plan digests differ" in seen["plan"]["text"]
        assert "rank 2" in seen["plan"]["text"]
        assert "program digests differ" in seen["program"]["text"]
        assert "rank 1" in seen["program"]["text"]
    for case in ("hang", "death"):
        # A rank that needs nothing of the failed one in this step may finish it.
        stopped = [seen[case] for seen in found[:3] if seen[case]["kind"] != "none"]
        assert stopped, case
        for seen in stopped:
            assert seen["kind"] == "CommTimeoutError", seen
            assert all(part in seen["text"] for part in ("node ", "module ", "peer ")), seen
            # Nobody waits longer than the timeout; a death is noticed at once.
            assert seen["seconds"] < (2 * HANG_S if case == "hang" else PATIENCE_S), seen
    assert any(f"no answer within the timeout of {HANG_S:g} s" in seen["hang"]["text"] for seen in found[:3])
