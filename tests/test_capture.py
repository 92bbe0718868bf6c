"""Capture: the flat joint graph computes exactly what eager mode computes, and describes the user's model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_code, run_processes
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from stpart_compiler.capture import Captured, GraphBreakError, capture

DOUBLE = torch.float64


@dataclass
class Result:
    outputs: list[Any]
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def run_captured(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Run the flat graph on the model's own tensors, with ones for tangents."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = pytree.tree_leaves((args, kwargs))
    values = {info.node: state[info.name].detach() for info in (*captured.params, *captured.buffers) if info.node}
    values |= {info.node: leaf for info, leaf in zip(captured.inputs, leaves, strict=True) if info.node}
    values |= {node: torch.ones_like(placeholder_val(captured, node)) for _, node in captured.tangents}
    order = [node.name for node in captured.gm.graph.find_nodes(op="placeholder")]
    assert order == list(values)
    flat = captured.gm(*(values[name] for name in order))
    count = len(captured.outputs)
    outputs, rest = list(flat[:count]), list(flat[count:])
    buffers = {name: rest.pop(0) for name in captured.mutations}
    grads = {name: None if node is None else rest.pop(0) for name, node in captured.grads.items()}
    assert not rest
    return Result(outputs, grads, buffers)


def placeholder_val(captured: Captured, name: str) -> torch.Tensor:
    node = next(node for node in captured.gm.graph.nodes if node.name == name)
    return torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)


def run_eager(model: nn.Module, step: Callable[[nn.Module], Any]) -> Result:
    """The step in eager mode on a copy of the model."""
    model = copy.deepcopy(model)
    outputs = pytree.tree_leaves(step(model))
    differentiable = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(x) for x in differentiable])
    grads = {name: param.grad for name, param in model.named_parameters()}
    return Result(outputs, grads, dict(model.named_buffers()))


def assert_same(got: Result, want: Result) -> None:
    assert len(got.outputs) == len(want.outputs)
    for mine, other in zip(got.outputs, want.outputs, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(mine, other.detach(), rtol=0, atol=1e-12)
        else:
            assert mine == other
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        assert (got.grads[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(got.grads[name], grad, rtol=0, atol=1e-12)
    for name, value in got.buffers.items():
        torch.testing.assert_close(value, want.buffers[name], rtol=0, atol=1e-12)


def check(model: nn.Module, *args: Any, eager: Callable[..., Any] | None = None, **kwargs: Any) -> Captured:
    """Capture, run both ways, compare; and the model is what it was."""
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    captured = capture(model, args, kwargs)
    after = model.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == {name: key for name, (key, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    step = (lambda m: eager(m)) if eager else (lambda m: m(*args, **kwargs))
    assert_same(run_captured(captured, model, args, kwargs), run_eager(model, step))
    return captured


class TiedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("unused", torch.zeros(2), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.down(F.gelu(self.up(self.embed(ids))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def ids(*shape: int, high: int = 11) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(3))


def x64(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))


def test_tied_and_unused_parameters() -> None:
    captured = check(TiedLM().double(), ids(2, 4), labels=ids(2, 4))
    params = {info.name: info for info in captured.params}
    assert params["embed.weight"].aliases == ("head.weight",)
    assert "head.weight" not in params
    assert params["spare.weight"].node is None and captured.grads["spare.weight"] is None
    assert params["embed.weight"].info.shape == (11, 6)
    assert [(info.name, info.node, info.persistent) for info in captured.buffers] == [("unused", None, False)]
    assert [info.path for info in captured.inputs] == ["args[0]", "labels"]
    assert captured.loss_index == 0 and captured.training
    assert [index for index, _ in captured.tangents] == [0]


def test_batch_norm_buffers_are_mutated() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    captured = check(model, x64(5, 4))
    assert set(captured.mutations) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert captured.loss_index is None
    assert not capture(model.eval(), (x64(5, 4),)).mutations


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], scale: float = 2.0) -> dict[str, Any]:
        y = self.linear(batch["x"]) * scale + batch["more"][0]
        return {"loss": y.square().mean(), "best": y.argmax(-1), "n": 7, "none": None, "y": (y, y.t())}


def test_nested_inputs_and_dict_output() -> None:
    captured = check(DictOutput().double(), {"x": x64(3, 4), "more": [x64(4), "tag"]}, scale=3.0)
    assert [(info.path, info.constant) for info in captured.inputs] == [
        ("args[0].x", None),
        ("args[0].more[0]", None),
        ("args[0].more[1]", "tag"),
        ("scale", 3.0),
    ]
    assert [info.constant for info in captured.outputs if info.node is None] == [7, None]
    assert [index for index, _ in captured.tangents] == [0, 4, 5]
    assert captured.loss_index is None
    rebuilt = pytree.tree_unflatten([info.index for info in captured.outputs], captured.out_spec)
    assert rebuilt == {"loss": 0, "best": 1, "n": 2, "none": 3, "y": (4, 5)}


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Output:
        logits = self.linear(x)
        return Output(logits.square().sum(), logits)


def test_dataclass_output() -> None:
    captured = check(DataclassOutput().double(), x64(3, 4))
    assert pytree.tree_unflatten([0, 1], captured.out_spec) == Output(0, 1)  # type: ignore[arg-type]


def test_same_tensor_twice_stays_two_inputs() -> None:
    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * 2 + b * 3

    x = x64(2)
    captured = capture(Product(), (x, x))
    first, second = (info.node for info in captured.inputs)
    assert first != second and captured.params == []
    (result,) = captured.gm(x, 2 * x)
    assert torch.equal(result, x * 8)


def test_frozen_parameter_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].weight.requires_grad_(False)
    captured = check(model, x64(3, 4))
    assert captured.grads["0.weight"] is None and captured.grads["0.bias"] is not None


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.offset = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.detach() * self.weight + self.offset + torch.tensor([1.0, 2.0, 3.0])


def test_constant_tensors_are_kept_and_noops_removed() -> None:
    captured = check(Constants().double(), x64(2, 3))
    nodes = captured.gm.graph.find_nodes(op="get_attr")
    values = [getattr(captured.gm, node.target).tolist() for node in nodes]
    assert sorted(values) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    targets = {str(node.target) for node in captured.gm.graph.nodes}
    assert not targets & {"aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default"}


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(x64(3, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * self.weight
        return y, y, y[0], self.weight, self.weight.t(), x


def test_outputs_that_alias_each_other_have_their_own_tangents() -> None:
    captured = check(Views(), x64(3, 4))
    assert [index for index, _ in captured.tangents] == [0, 1, 2, 3, 4]


def test_loss_fn_and_loss_module_are_traced_in() -> None:
    model = nn.Linear(4, 3).double()
    captured = capture(model, (x64(5, 4),), loss_fn=lambda y: y.square().mean())
    assert captured.loss_index == 0
    assert_same(
        run_captured(captured, model, (x64(5, 4),), {}), run_eager(model, lambda m: m(x64(5, 4)).square().mean())
    )

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(2.0))

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return (y * self.factor).sum()

    captured = capture(model, (x64(5, 4),), loss_fn=Weighted())
    assert [info.name for info in captured.params] == ["weight", "bias"]
    assert [info.name for info in captured.buffers] == ["loss_fn.factor"]


def test_inference_graph() -> None:
    model = TiedLM().double()
    captured = capture(model, (ids(2, 4),), {"labels": ids(2, 4)}, training=False)
    assert captured.tangents == [] and set(captured.grads.values()) == {None} and captured.loss_index == 0
    with torch.no_grad():
        want = model(ids(2, 4), ids(2, 4))
    assert torch.equal(run_captured(captured, model, (ids(2, 4),), {"labels": ids(2, 4)}).outputs[0], want)


def test_module_paths_and_backward_marks() -> None:
    captured = capture(TiedLM(), (ids(2, 4), ids(2, 4)))
    nodes = list(captured.gm.graph.nodes)
    products = {n.meta["module_path"] for n in nodes if "mm" in str(n.target) and not n.meta["is_backward"]}
    assert products == {"up", "down", "head"}
    backward = {n.meta["module_path"] for n in nodes if "mm" in str(n.target) and n.meta["is_backward"]}
    assert backward == products
    assert all(n.meta["is_backward"] for n in nodes if n.name in set(captured.grads.values()) - {None})
    weight = next(n for n in nodes if n.name == captured.params[1].node)
    assert weight.meta["module_path"] == "up"


def llama(attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).double()


def gpt2(attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        **dropout,
    )
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_hf_causal_lm_with_labels(build: Callable[[str], nn.Module], attention: str) -> None:
    model, tokens = build(attention), ids(2, 8, high=32)
    captured = check(model, input_ids=tokens, labels=tokens, eager=lambda m: m(input_ids=tokens, labels=tokens).loss)
    assert captured.loss_index == 0 and len(captured.outputs) == 1
    assert None not in captured.grads.values()
    attended = [n for n in captured.gm.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert bool(attended) == (attention == "sdpa")
    assert all(not isinstance(n.kwargs.get("attn_mask"), torch.fx.Node) for n in attended)
    paths = {n.meta["module_path"] for n in captured.gm.graph.nodes}
    assert ("model.layers.1.self_attn.q_proj" if build is llama else "transformer.h.1.attn.c_attn") in paths


def test_hf_tied_head() -> None:
    captured = capture(gpt2(), (), {"input_ids": ids(2, 8, high=32)})
    assert captured.params[0].aliases == ("lm_head.weight",)


def test_hf_padding_and_packed_positions_reach_the_mask() -> None:
    tokens, mask = ids(2, 8, high=32), torch.ones(2, 8, dtype=torch.int64)
    mask[1, :3] = 0
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(2, 8).contiguous()
    for extra in ({"attention_mask": mask}, {"position_ids": positions}):
        call = {"input_ids": tokens, "labels": tokens, **extra}
        check(llama(), eager=lambda m, call=call: m(**call, use_cache=False).loss, **call)


def test_hf_logits_and_loss_fn() -> None:
    model, tokens = llama(), ids(2, 8, high=32)
    captured = check(model, tokens, eager=lambda m: m(tokens).logits)
    assert captured.loss_index is None and len(captured.outputs) == 1
    captured = capture(model, (tokens,), loss_fn=lambda out: out.logits.square().mean())
    want = run_eager(model, lambda m: m(tokens).logits.square().mean())
    assert_same(run_captured(captured, model, (tokens,), {}), want)
    assert captured.loss_index == 0


def test_meta_and_real_models_give_the_same_graph() -> None:
    real = TiedLM()
    with torch.device("meta"):
        meta = TiedLM()
        tokens = torch.empty(2, 4, dtype=torch.int64)
    digest = capture(real, (ids(2, 4), ids(2, 4))).digest()
    assert capture(meta, (tokens, tokens)).digest() == digest
    assert next(meta.parameters()).is_meta
    assert capture(real, (ids(2, 5), ids(2, 5))).digest() != digest


def test_digest_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from torch import nn; from stpart_compiler.capture import capture\n"
        "m = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.BatchNorm1d(3))\n"
        "print(capture(m, (torch.zeros(2, 4),)).digest())"
    )
    ((status, text),) = run_processes(run_code, [(code,)], 60.0)
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.BatchNorm1d(3))
    assert status == 0, text
    assert text.strip() == capture(model, (torch.ones(2, 4),)).digest()


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line in the message
            return x
        return -x


class Select(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Break(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branch(), "if x.sum() > 0:"), (Select(), "x[x > 0].sum()"), (Break(), "torch._dynamo.graph_break()")],
)
def test_graph_breaks_name_the_line(model: nn.Module, line: str) -> None:
    with open(__file__) as source:
        number = next(i for i, text in enumerate(source, 1) if line in text)
    with pytest.raises(GraphBreakError, match=rf"test_capture\.py:{number}: (?s:.*)capture needs one graph: replace"):
        capture(model, (torch.ones(3),))


def test_errors_of_the_model_come_through() -> None:
    with pytest.raises(RuntimeError, match="reduction dim|cannot be multiplied") as caught:
        capture(nn.Linear(4, 3), (torch.ones(2, 5),))
    assert any("the model raised this on the example inputs" in note for note in caught.value.__notes__)

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(Picky(), (torch.ones(2),))


def test_writing_into_an_input_is_refused() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    with pytest.raises(ValueError, match=r"writes into its input args\[0\]; only buffers may change"):
        capture(InPlace(), (torch.ones(2),))


def test_tensors_outside_the_model_that_require_grad_are_refused() -> None:
    hidden = torch.ones(2, requires_grad=True)

    class Closure(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * hidden

    with pytest.raises(ValueError, match="neither a parameter nor a buffer of the model .* register_parameter"):
        capture(Closure(), (torch.ones(2),))


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        capture(lambda x: x, (torch.ones(2),))  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [False, True])
def test_state_that_is_no_buffer_is_told(inside: bool) -> None:
    """The compiled step could not keep it, which must not go unnoticed."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.last = torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x) + self.last
            self.last = y.detach().mean(0)
            return y.sum()

    model = nn.Sequential(nn.Linear(4, 4), Remembers()) if inside else Remembers()
    name = "1" if inside else r"\(the model\)"
    with pytest.warns(UserWarning, match=f"module {name} assigns to an attribute of its own in forward"):
        capture(model, (torch.randn(2, 4),))


class Grumbling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn(f"old shape {x.shape[0]}", DeprecationWarning, stacklevel=1)  # GRUMBLE
        return self.layer(x)


def test_warnings_of_traced_code_are_shown_at_their_line() -> None:
    """Each once; and warn is Python's own again afterwards."""
    lines = Path(__file__).read_text().splitlines()
    warn = warnings.warn
    with pytest.warns() as caught:
        capture(Grumbling(), (torch.ones(3, 4),))
    [warning] = caught
    assert (str(warning.message), warning.category) == ("old shape 3", DeprecationWarning)
    assert (warning.filename, lines[warning.lineno - 1].split("# ")[-1]) == (__file__, "GRUMBLE")
    assert warnings.warn is warn
