"""Checkpoints across meshes, plans and plain tensors, with optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten

from stpart_compiler.ir.artifact import Interface, RankArtifact, TensorSlot
from stpart_compiler.ir.layout import Atom, Layout, block, form, gather, holders, replicated, shard, take
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import RankProgram
from stpart_compiler.passes.emit_fx import emit_fx
from stpart_compiler.runtime.checkpoint import (
    load_checkpoint,
    local_pieces,
    save_all,
    save_checkpoint,
    state_for_checkpoint,
)
from stpart_compiler.runtime.rank_module import RankModule

F64 = torch.float64
GRID = Mesh(("r", "c"), (2, 2))
LINE = Mesh(("d",), (3,))
TWO = Mesh(("d",), (2,))

r, c, skew, d = form(2, r=1), form(2, c=1), form(2, r=1, c=1), form(3, d=1)
SHAPES = {"w": (6, 7), "heads": (12, 2), "b": (7,), "scalar": (), "nothing": (0, 3)}
ON_GRID = {
    "w": shard(SHAPES["w"], {0: (r,), 1: (skew,)}),
    # 12 is 3 x 4, of which the 4 is cut: rows 0-1, 4-5, 8-9 or 2-3, 6-7, 10-11
    "heads": Layout(((Atom(3), Atom(4, (skew,))), (Atom(2, (c,)),))),
    "b": shard(SHAPES["b"], {0: (c,)}),
    "scalar": replicated(()),
    "nothing": replicated(SHAPES["nothing"]),
}
ON_LINE = {
    "w": shard(SHAPES["w"], {0: (d,)}),
    "heads": shard(SHAPES["heads"], {1: (d,)}),  # 2 columns on 3 ranks: one block is empty
    "b": shard(SHAPES["b"], {0: (d,)}),
    "scalar": replicated(()),
    "nothing": shard(SHAPES["nothing"], {1: (d,)}),
}
ON_TWO = {name: replicated(shape) for name, shape in SHAPES.items()} | {
    "heads": Layout(((Atom(3), Atom(2, (form(2, d=1),)), Atom(2)), (Atom(2),))),
}


def whole_state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=F64, generator=generator) for name, shape in SHAPES.items()}


def modules_on(mesh: Mesh, layouts: dict[str, Layout], state: dict[str, Tensor]) -> list[RankModule]:
    params = tuple(
        TensorSlot(name, ("tied",) if name == "w" else (), layout.shape, F64, layout, True, True)
        for name, layout in layouts.items()
    )
    count = TensorSlot("count", (), (), torch.int64, replicated(()), False, True)
    cache = TensorSlot("cache", (), (2,), F64, replicated((2,)), False, True, persistent=False)
    spec = tree_flatten(((), {}))[1]
    none: Any = ()
    interface = Interface(
        mesh, params, (count, cache), none, none, spec, spec, None, none, none, none, none, groups=(), channels=0,
        plan_digest="", training=True,
    )  # fmt: skip
    modules = []
    for rank in range(mesh.world_size):
        artifact = RankArtifact(rank, interface, RankProgram(rank, "forward", [], [], []), None)
        local = {s.name: take(state[s.name], s.layout, mesh, rank).clone() for s in params}
        buffers = {"count": torch.tensor(int(state["scalar"] * 1000)), "cache": torch.zeros(2, dtype=F64)}
        modules.append(RankModule(artifact, emit_fx(artifact.forward), None, local, buffers))
    return modules


def gathered(modules: Sequence[RankModule]) -> dict[str, Tensor]:
    mesh = modules[0].interface.mesh
    pairs = zip(*(module.param_slots() for module in modules), strict=True)
    return {column[0][0].name: gather([p.detach() for _, p in column], column[0][0].layout, mesh) for column in pairs}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class Whole(nn.Module):
    """The same model on one device."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def step_on(modules: Sequence[RankModule], optimizers: Sequence[torch.optim.Optimizer], seed: int) -> None:
    grads = whole_state(seed)
    for module, optimizer in zip(modules, optimizers, strict=True):
        for slot, param in module.param_slots():
            if slot.name != "b":
                param.grad = take(grads[slot.name], slot.layout, module.interface.mesh, module.rank).clone()
        optimizer.step()


def step_whole(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Tensor]:
    grads = whole_state(seed)
    for name, param in model.named_parameters():
        param.grad = None if name == "b" else grads[name]
    optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


PLANS = {"grid": (GRID, ON_GRID), "line": (LINE, ON_LINE), "two": (TWO, ON_TWO)}


@pytest.mark.parametrize("layouts", PLANS)
def test_pieces_tile_the_tensor(layouts: str) -> None:
    mesh, plan = PLANS[layouts]
    for name, layout in plan.items():
        whole = torch.arange(whole_state()[name].numel()).reshape(SHAPES[name])
        hits = torch.zeros_like(whole)
        for ranks in (min(summands.values()) for summands in holders(layout, mesh).values()):
            local = take(whole, layout, mesh, ranks[0])
            for offsets, data in local_pieces(local, layout, block(layout, mesh, ranks[0])):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))
                assert torch.equal(whole[place], data)
                hits[place] += 1
        assert bool((hits == 1).all()), name


def test_from_skewed_grid_to_uneven_line_to_plain_tensors(tmp_path: Path) -> None:
    state = whole_state()
    whole = Whole(state)
    whole_optimizer = adamw(whole)
    modules = modules_on(GRID, ON_GRID, state)
    optimizers = [adamw(module) for module in modules]
    for seed in (1, 2):
        step_on(modules, optimizers, seed)
        expected = step_whole(whole, whole_optimizer, seed)
    same(gathered(modules), expected)
    save_all(modules, tmp_path / "grid", optimizers)

    modules = modules_on(LINE, ON_LINE, whole_state(99))
    optimizers = [adamw(module) for module in modules]
    for module, optimizer in zip(modules, optimizers, strict=True):
        load_checkpoint(module, tmp_path / "grid", optimizer)
        assert module.get_buffer("count") == int(state["scalar"] * 1000)
        assert module.get_parameter("b") not in optimizer.state, "had no gradient"
    same(gathered(modules), expected)
    step_on(modules, optimizers, 3)
    expected = step_whole(whole, whole_optimizer, 3)
    same(gathered(modules), expected)
    save_all(modules, tmp_path / "line", optimizers)

    dcp_to_torch_save(tmp_path / "line", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    kinds = ("exp_avg", "exp_avg_sq", "step")
    stepped = {f"optimizer.{name}.{kind}" for name in state if name != "b" for kind in kinds}
    assert plain.keys() == {"count", "tied", *state, *stepped}
    same({name: plain[name] for name in expected}, expected)
    assert torch.equal(plain["tied"], expected["w"])
    for name, param in whole.named_parameters():
        for key, value in whole_optimizer.state.get(param, {}).items():
            assert torch.equal(plain[f"optimizer.{name}.{key}"], value), (name, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_to_and_from_a_plain_model(tmp_path: Path) -> None:
    state = whole_state()
    save_all(modules_on(TWO, ON_TWO, state), tmp_path / "ours")
    model = Whole({name: torch.zeros_like(x) for name, x in state.items()})
    dcp.load(model.state_dict(), checkpoint_id=tmp_path / "ours")
    same({name: param.detach() for name, param in model.named_parameters()}, state)

    theirs = {"count": torch.tensor(7), **Whole(whole_state(5)).state_dict()}  # without the tied name
    dcp.save(theirs, checkpoint_id=tmp_path / "theirs")
    modules = modules_on(GRID, ON_GRID, state)
    for module in modules:
        load_checkpoint(module, tmp_path / "theirs")
        assert module.get_buffer("count") == 7
    same(gathered(modules), whole_state(5))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_goes_through_the_plain_dcp_calls(tmp_path: Path) -> None:
    one = Mesh(("d",), (1,))
    layouts = {name: replicated(shape) for name, shape in SHAPES.items()}
    [module] = modules_on(one, layouts, whole_state(1))
    save_checkpoint(module, tmp_path)
    [module] = modules_on(one, layouts, whole_state(2))
    dcp.load(state_for_checkpoint(module), checkpoint_id=tmp_path)
    same(gathered([module]), whole_state(1))


def test_optimizer_hyperparameters_and_other_states_stay(tmp_path: Path) -> None:
    modules = modules_on(TWO, ON_TWO, whole_state())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    step_on(modules, optimizers, 1)
    save_all(modules, tmp_path, optimizers)
    [module, _] = modules_on(TWO, ON_TWO, whole_state(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    load_checkpoint(module, tmp_path, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.3
    momentum = optimizer.state[module.get_parameter("w")]["momentum_buffer"]
    assert torch.equal(momentum, whole_state(1)["w"])


def test_refusals(tmp_path: Path) -> None:
    modules = modules_on(TWO, ON_TWO, whole_state())
    with pytest.raises(ValueError, match="the mesh has 2 ranks, but no process group is initialised; .* with save_all"):
        save_checkpoint(modules[0], tmp_path)
    with pytest.raises(ValueError, match=r"modules of all ranks of the mesh in rank order, got ranks \[1\]"):
        save_all(modules[1:], tmp_path)
    with pytest.raises(ValueError, match="2 modules need as many optimizers, got 1"):
        save_all(modules, tmp_path, [adamw(modules[0])])
    odd = adamw(modules[0])
    odd.state[modules[0].get_parameter("w")]["rows"] = torch.zeros(6)
    with pytest.raises(ValueError, match=r"optimizer state 'rows' of 'w' has shape \(6,\), which is neither a scalar"):
        state_for_checkpoint(modules[0], odd)
    with pytest.raises(TypeError, match="a BlockTensor is only for torch.distributed.checkpoint"):
        state_for_checkpoint(modules[0])["w"].sum()

    save_all(modules, tmp_path)
    fewer = {name: layout for name, layout in ON_TWO.items() if name != "b"}
    load_checkpoint(modules_on(TWO, fewer, whole_state())[0], tmp_path)  # what is saved in addition does no harm
    more = ON_TWO | {"extra": replicated((2,))}
    with pytest.raises(ValueError, match="has no extra; it is of another model"):
        load_checkpoint(modules_on(TWO, more, whole_state() | {"extra": torch.zeros(2, dtype=F64)})[0], tmp_path)
    wider = ON_TWO | {"b": replicated((9,))}
    with pytest.raises(ValueError, match=r"b has shape \(7,\), the model expects \(9,\)"):
        load_checkpoint(modules_on(TWO, wider, whole_state() | {"b": torch.zeros(9, dtype=F64)})[0], tmp_path)
    with pytest.raises(ValueError, match="elsewhere holds no checkpoint; give a directory that save_checkpoint wrote"):
        load_checkpoint(modules[0], tmp_path / "elsewhere")


def online(rank: int, path: Path) -> None:
    """One of two processes: saves with its process group, and loads what both have saved."""
    store = dist.FileStore(str(path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    module = modules_on(TWO, ON_TWO, whole_state())[rank]
    optimizer = adamw(module)
    step_on([module], [optimizer], 1)
    save_checkpoint(module, path / "saved", optimizer)
    fresh = modules_on(TWO, ON_TWO, whole_state(9))[rank]
    load_checkpoint(fresh, path / "saved", adamw(fresh))
    same({n: p.detach() for n, p in fresh.named_parameters()}, {n: p.detach() for n, p in module.named_parameters()})
    dist.destroy_process_group()


def test_with_a_process_group_each_block_is_written_once(tmp_path: Path) -> None:
    ended = run_processes(online, [(rank, tmp_path) for rank in range(2)], 120.0)
    assert [status for status, _ in ended] == [0, 0], ended
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    chunks = {name: len(entry.chunks) for name, entry in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]
    assert chunks["w"] == chunks["tied"] == 1 and chunks["heads"] == 6 and chunks["optimizer.heads.exp_avg"] == 6
    modules = modules_on(GRID, ON_GRID, whole_state(9))
    optimizers = [adamw(module) for module in modules]
    for module, optimizer in zip(modules, optimizers, strict=True):
        load_checkpoint(module, tmp_path / "saved", optimizer)
    step_on(modules, optimizers, 2)
    whole = Whole(whole_state())
    optimizer = adamw(whole)
    step_whole(whole, optimizer, 1)
    same(gathered(modules), step_whole(whole, optimizer, 2))
