"""What users get wrong: each message names the thing, what was expected, and what to do."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stpart_compiler as st
from stpart_compiler.ir.plan import Plan
from stpart_compiler.search import Restrictions, _fewest_over

QUICK = st.SolverOptions(time_limit_s=20.0, patience_s=0.5, yardsticks=False)


class Net(nn.Module):
    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x.square().mean()


def compiled_net(mesh: Any = 2, x: Tensor | None = None, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model if model is not None else Net().double()
    x = x if x is not None else torch.randn(4, 8, dtype=torch.float64)
    return st.compile_model(model, (x,), mesh=mesh, **{"solver": QUICK, **options})


def says(error: type[Exception], *texts: str) -> Any:
    """The error, with all texts in its message in this order."""
    return pytest.raises(error, match=r"(?s)" + ".*".join(map(re.escape, texts)))


@pytest.mark.parametrize(
    ("mesh", "texts"),
    [
        (0, ("mesh: axis 'd' has size 0", "every axis needs at least one rank")),
        ((), ("mesh: needs", "at least one axis")),
        ((2, 0), ("mesh: axis 'c' has size 0", "every axis needs at least one rank")),
        ({}, ("mesh: needs", "at least one axis")),
        ({"r": -2}, ("mesh: axis 'r' has size -2", "every axis needs at least one rank")),
        (10**6, ("mesh: d=1000000 has 1000000 ranks, expected at most 1024", "use a smaller mesh")),
    ],
)
def test_mesh_of_too_few_or_many_ranks(mesh: Any, texts: tuple[str, ...]) -> None:
    with says(ValueError, *texts):
        compiled_net(mesh)


def test_mesh_of_no_kind() -> None:
    with says(TypeError, "mesh: expected an int, a tuple of ints, a dict, or a DeviceMesh, got str"):
        compiled_net("2x2")


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mesh", [(2.7, 2), {"r": 2.9}, ("2", "2"), (2, None)])
def test_mesh_of_other_sizes(mesh: Any) -> None:
    with says(TypeError, "mesh: expected sizes that are ints, got"):
        compiled_net(mesh)


def test_one_tensor_is_no_tuple_of_arguments() -> None:
    with says(TypeError, "example_args: got Tensor, expected a tuple of the model's arguments; one argument is (x,)"):
        st.compile_model(nn.Linear(4, 4), torch.randn(1, 4), mesh=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"solver": {}}, "solver: got dict, expected SolverOptions"),
        ({"plan": "plan.json"}, "plan: got str, expected a Plan; Plan.from_json(text) reads a saved one"),
        ({"loss_fn": 3}, "loss_fn: got int, expected a function of the model's output"),
        ({"cluster": 8}, "cluster: expected the name of a preset, a path or a Cluster, got int"),
        ({"example_kwargs": [1]}, "example_kwargs: got list, expected a dict"),
    ],
)
def test_arguments_of_another_type(options: dict[str, Any], text: str) -> None:
    with says(TypeError, text):
        compiled_net(**options)


class Twice(nn.Module):
    def forward(self, x: Tensor, *, times: int = 2) -> Tensor:
        return x * times


class Wrapped(Twice):
    @functools.wraps(Twice.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **{"times" if key == "factor" else key: x for key, x in kwargs.items()})


@pytest.mark.parametrize("model", [Twice(), Wrapped()])
@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2), {}, "too many positional arguments"),
        ((1,), {"y": 3}, "got an unexpected keyword argument 'y'"),
    ],
)
def test_arguments_that_forward_does_not_take(model: nn.Module, args: Any, kwargs: Any, text: str) -> None:
    name = type(model).__name__
    signature = "forward(x: 'Tensor', *, times: 'int' = 2)"
    with says(TypeError, f"{name}.forward() {text}; example_args and example_kwargs must fit {signature}"):
        st.compile_model(model, tuple(torch.ones(2) for _ in args), kwargs, mesh=1)


def test_arguments_that_a_wrapper_of_forward_takes() -> None:
    compiled = st.compile_model(Wrapped(), (torch.ones(2),), {"factor": 3}, mesh=1, training=False)
    assert compiled.run_in_process(torch.ones(2), factor=3).outputs.tolist() == [3, 3]


def test_template_beside_a_plan(plan: Plan) -> None:
    with says(ValueError, "template: 'data' beside a plan, which says all that it would; give one of them"):
        compiled_net(2, plan=plan, template="data")


def test_recurrent_modules() -> None:
    model = nn.LSTM(4, 4)
    with says(st.GraphBreakError, "Dynamo does not support RNN, GRU, or LSTM", "a loop over nn.RNNCell", "allow_rnn"):
        st.compile_model(model, (torch.ones(2, 4),), mesh=1, loss_fn=lambda y: y[0].sum())


def test_a_call_nested_in_another_way() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return (pair[0] + pair[1]).sum()

    x = torch.ones(2, 2)
    module = st.compile_model(Pair(), ((x, x),), mesh=1).rank_module(0)
    with says(
        ValueError, "of which args[0] is a list of 2 instead of a tuple of 2; call it as it was compiled"
    ) as caught:
        module([x, x])
    assert "TreeSpec" not in str(caught.value)


@pytest.mark.usefixtures("world_of_one")
def test_mesh_larger_than_the_world() -> None:
    with says(ValueError, "mesh: r=2 x c=2 has 4 ranks, larger than the process group's 1", "one rank per process"):
        compiled_net((2, 2))


def test_mesh_larger_than_the_cluster() -> None:
    with says(ValueError, "cluster 'a100-80gb-8' joins 8 ranks, but mesh d=9 has 9", "use a smaller mesh"):
        compiled_net(9, cluster="a100-80gb-8")


def test_memory_limit_that_no_plan_meets() -> None:
    """The least named does as a limit, and a little less does not."""
    net, x = Net(64, 3).double(), torch.randn(16, 64, dtype=torch.float64)
    texts = (
        "memory_limit: 1.00 KiB per rank is too small",
        "need",
        "of parameters",
        "of inputs, activations and gradients",
        "of optimizer state (adamw). Over the limit alone: ",
    )
    with says(st.InfeasibleError, *texts, "Raise the limit") as caught:
        compiled_net(x=x, model=net, memory_limit="1KiB")
    least = caught.value.least
    assert f"({least} bytes)" in str(caught.value)
    done = compiled_net(x=x, model=net, memory_limit=least)
    assert done.plan.memory["peak"] <= least
    # The optimizer's state is not there yet. A collective keeps copies, here of one weight, that no prediction knows.
    weight = net.layers[0].weight.nbytes
    assert max(done.run_in_process(x).peak_bytes) <= 1.05 * done.plan.memory["step peak"] + weight
    with says(st.InfeasibleError, "is too small"):
        compiled_net(x=x, model=net, memory_limit=int(0.97 * least))


def test_memory_limit_says_what_clashes_with_it() -> None:
    """What is named as enough without the template is, and with the template it is not."""
    net, x = Net(64, 1).double(), torch.randn(8, 64, dtype=torch.float64)
    asked: dict[str, Any] = {"x": x, "model": net, "memory_limit": "100KiB"}
    text = "It clashes with template='data': without that, "
    with says(st.InfeasibleError, "Over the limit together: optimizer state (adamw) and inputs", text):
        compiled_net(template="data", **asked)
    with says(st.InfeasibleError, "It clashes with parameters whole on every rank: without that, "):
        compiled_net(restrictions=Restrictions(whole_parameters=True), **asked)
    assert compiled_net(**asked).plan.memory["peak"] <= 100 * 2**10
    with says(st.InfeasibleError, "memory_limit: 8.00 KiB per rank is too small") as caught:
        compiled_net(template="data", **asked | {"memory_limit": "8KiB"})
    assert "clashes" not in str(caught.value), "nothing would do"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"a": 5, "b": 11, "c": 3}, "Over the limit alone: b"),
        ({"a": 5, "b": 6, "c": 3}, "Over the limit together: b and a"),
        ({"a": 4, "b": 4, "c": 4}, "Any two of these would fit, all together do not"),
    ],
)
def test_the_fewest_parts_over_a_limit(parts: dict[str, int], text: str) -> None:
    assert _fewest_over(parts, 10) == text


@pytest.mark.parametrize("limit", ["16 apples", "", "GiB", "-3MiB", -1, float("nan")])
def test_memory_limit_that_cannot_be_read(limit: Any) -> None:
    with says(ValueError, f"memory_limit: size {limit!r}", "expected a number of bytes, or a string such as '16GiB'"):
        compiled_net(memory_limit=limit)


def test_unknown_template() -> None:
    with says(ValueError, "template: 'megatrom' is unknown; expected one of data, zero3, megatron"):
        compiled_net(template="megatrom")


def test_template_that_does_not_apply() -> None:
    with says(ValueError, "template 'primepar': needs two mesh axes of equal size", "got mesh d=2"):
        compiled_net(2, template="primepar")


def test_unknown_cluster() -> None:
    with says(ValueError, "cluster: no preset 'abacus'; presets are a100-80gb-8", "path of a .toml file"):
        compiled_net(cluster="abacus")
    with says(ValueError, "cluster: no file 'missing.toml'; give an existing .toml file"):
        compiled_net(cluster="missing.toml")


def test_unknown_options() -> None:
    with says(TypeError, "unexpected keyword argument 'speed'"):
        st.SolverOptions(speed=9)  # type: ignore[call-arg]
    with says(TypeError, "unexpected keyword argument 'colour'"):
        compiled_net(colour="red")


@pytest.fixture(scope="module")
def plan() -> Plan:
    found: Plan = compiled_net(2, template="data").plan
    return found


def test_plan_for_another_mesh(plan: Plan) -> None:
    with says(ValueError, "plan: made for mesh d=2, but the mesh is d=3; make a plan for this mesh"):
        compiled_net(3, plan=plan)


def test_plan_for_another_torch(plan: Plan) -> None:
    old = dataclasses.replace(plan, torch_version="1.0.0")
    with says(ValueError, "plan: made with torch 1.0.0, but this is torch " + torch.__version__, "make the plan anew"):
        compiled_net(2, plan=old)


def test_plan_for_another_model(plan: Plan) -> None:
    with says(ValueError, "plan: made for another model", "only in the model: [", "that differ: ['layers.2."):
        compiled_net(2, plan=plan, model=Net(layers=3).double())
    with says(ValueError, "plan: made for another model", "parameters that differ: ['layers.0.bias', 'layers.0."):
        compiled_net(2, plan=plan, model=Net(width=6).double(), x=torch.randn(4, 6, dtype=torch.float64))


def test_plan_text_that_is_none() -> None:
    with says(ValueError, "plan: not JSON", "expected the text that Plan.to_json() wrote"):
        Plan.from_json("{")
    with says(ValueError, "plan: expected a plan of format", "make the plan anew"):
        Plan.from_json("[]")


class Printing(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # BREAK
        return super().forward(x)


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # BRANCH
            x = x + 1
        return super().forward(x)


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x > 0].sum() * x[: int(x[0, 0].item())])  # COUNT


@pytest.mark.parametrize(("model", "mark"), [(Printing, "BREAK"), (Branching, "BRANCH"), (Counting, "COUNT")])
def test_model_of_several_graphs(model: type[nn.Module], mark: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i + 1 for i, text in enumerate(lines) if text.endswith(f"# {mark}"))
    with says(st.GraphBreakError, f"{__file__}:{line}", "capture needs one graph: replace the construct"):
        compiled_net(model=model().double())


def test_other_inputs_than_compiled_for() -> None:
    module = compiled_net(1, template="data")
    texts = ("input 'args[0]': expected torch.float64 of shape (4, 8), got",)
    with says(ValueError, *texts, "torch.float64 of shape (5, 8, 1)", "compile for that shape and dtype"):
        module.run_in_process(torch.randn(5, 8, 1, dtype=torch.float64))
    with says(ValueError, *texts, "torch.float32 of shape (4, 8)", "compile for that shape and dtype"):
        module.run_in_process(torch.randn(4, 8))
    with says(ValueError, "compiled for a call with 1 positional arguments", "got 0 positional", "compile again"):
        module.run_in_process(x=torch.randn(4, 8, dtype=torch.float64))
    with says(ValueError, "input 'args[0]': expected a tensor of shape (4, 8), got 3"):
        module.run_in_process(3)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank: int) -> None:
    compiled = compiled_net(2, template="data")
    for method in (compiled.program, compiled.rank_module):
        with says(ValueError, f"rank: {rank} is not in 0..1, the ranks of mesh d=2"):
            method(rank)


def test_local_module_without_process_group() -> None:
    with says(RuntimeError, "local_module: no process group; start under torchrun", "or use run_in_process"):
        compiled_net(2, template="data").local_module()


def test_directory_without_a_compiled_model(tmp_path: Path) -> None:
    with says(ValueError, f"load_compiled: {tmp_path} holds no compiled model", "give a directory that save() wrote"):
        st.load_compiled(tmp_path)


def test_save_and_load(tmp_path: Path) -> None:
    compiled = compiled_net(2, template="megatron")
    compiled.save(tmp_path)
    loaded = st.load_compiled(tmp_path)
    assert loaded.plan.digest == compiled.plan.digest
    assert loaded.plan.to_json() == compiled.plan.to_json()
    x = torch.randn(4, 8, dtype=torch.float64)
    mine, theirs = compiled.run_in_process(x), loaded.run_in_process(x)
    assert torch.equal(mine.loss, theirs.loss)
    assert mine.grads.keys() == theirs.grads.keys()
    assert all(torch.equal(mine.grads[name], theirs.grads[name]) for name in mine.grads)
    for rank in range(2):
        one, two = compiled.program(rank), loaded.program(rank)
        assert (one.forward.code, one.backward.code) == (two.forward.code, two.backward.code)
        for before, after in zip(compiled.local_state(rank), loaded.local_state(rank), strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_load_with_another_torch(tmp_path: Path) -> None:
    compiled_net(1, template="data").save(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_text(meta.read_text().replace(torch.__version__, "1.0.0"))
    with says(ValueError, "was made with torch 1.0.0, this is torch " + torch.__version__, "compile again"):
        st.load_compiled(tmp_path)
