"""Cases of the torch.compile backend, each a comparison with eager, and what one rank of several does."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 1e-10
SEQUENCE, VOCABULARY = 8, 32
MESHES: dict[int, Any] = {2: 2, 4: (2, 2)}
SOLVER = {"time_limit_s": 20.0, "patience_s": 0.5, "yardsticks": False}


class Block(nn.Module):
    """Layers with running statistics that it updates in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.training:
            self.steps.add_(1)
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return self.down(functional.gelu(hidden - self.mean))


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.block(x)
        return functional.mse_loss(out, y), out


class Norm(nn.Module):
    """RMSNorm that stays in its input's dtype; transformers' own computes in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.variance_epsilon  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def llama_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Next-token cross entropy in the logits' dtype."""
    shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=SEQUENCE, use_cache=False
    )
    model = LlamaForCausalLM(config)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, Norm(child))
    model.loss_function = llama_loss
    return model.double()


def pair(model: nn.Module, mesh: Any, **options: Any) -> tuple[Any, nn.Module]:
    """The compiled model, and a copy to run in eager."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    return torch.compile(model, backend="stpart", options={"mesh": mesh, "solver": SOLVER, **options}), eager


def check_close(got: Any, expected: Any, what: str) -> None:
    assert (got is None) == (expected is None), what
    if expected is not None:
        assert got.shape == expected.shape and got.dtype == expected.dtype, what
        error = (got.double() - expected.double()).norm() / (expected.double().norm() + 1e-30)
        assert error.item() <= TOLERANCE, f"{what}: relative error {error.item()}"


def check_state(compiled: Any, eager: nn.Module) -> None:
    """Whole gradients and the same buffers on this rank."""
    for name, param in compiled._orig_mod.named_parameters():
        check_close(param.grad, eager.get_parameter(name).grad, f"gradient of {name}")
    for name, buffer in compiled._orig_mod.named_buffers():
        check_close(buffer, eager.get_buffer(name), f"buffer {name}")


def loss_outside(mesh: Any) -> None:
    """New batch sizes, a scaled loss, gradients that accumulate, also those of the input."""
    compiled, eager = pair(Block().double(), mesh, template="megatron")
    for batch in (4, 6, 8):
        x = torch.randn(batch, 8, dtype=torch.float64)
        inputs = [x.clone().requires_grad_(batch == 6) for _ in range(2)]
        outputs = [model(own) for model, own in zip((compiled, eager), inputs, strict=True)]
        check_close(*outputs, f"output at batch {batch}")
        for output in outputs:
            (1024 * output.square().mean()).backward()
        check_state(compiled, eager)
        check_close(inputs[0].grad, inputs[1].grad, "gradient of the input")


def loss_inside(mesh: Any) -> None:
    """The loss is one of the outputs; then evaluation without gradients, and training again after an optimizer step."""
    compiled, eager = pair(LossInside().double(), mesh, template="data")
    x, y = torch.randn(2, 4, 8, dtype=torch.float64)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (compiled, eager)]
    for _ in range(2):
        for model, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            model(x, y)[0].backward()
        check_state(compiled, eager)
        for optimizer in optimizers:
            optimizer.step()
    for model in (compiled, eager):
        model.eval()
    with torch.no_grad():
        for got, expected in zip(compiled(x, y), eager(x, y), strict=True):
            assert not got.requires_grad
            check_close(got, expected, "evaluation")
    check_state(compiled, eager)


def swapped_parameter(mesh: Any) -> None:
    """Dynamo does not compile again for another parameter of the same shape: the new one must be used."""
    compiled, eager = pair(nn.Linear(4, 4).double(), mesh)
    x = torch.randn(4, 4, dtype=torch.float64)
    compiled(x)
    compiled._orig_mod.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    eager.weight = nn.Parameter(compiled._orig_mod.weight.detach().clone())
    for model in (compiled, eager):
        model(x).square().sum().backward()
    check_state(compiled, eager)


def hf_llama(mesh: Any) -> None:
    """Loss and logits of a causal language model called with labels."""
    compiled, eager = pair(llama(), mesh, template="megatron")
    ids = torch.randint(VOCABULARY, (4, SEQUENCE))
    labels = ids.masked_fill(torch.arange(SEQUENCE) < 3, -100)
    got, expected = (model(input_ids=ids, labels=labels) for model in (compiled, eager))
    check_close(got.loss, expected.loss, "loss")
    check_close(got.logits, expected.logits, "logits")
    got.loss.backward()
    expected.loss.backward()
    check_state(compiled, eager)


def partitioned(mesh: Any) -> None:
    """Compute is cut over the ranks, and each rank's parameters are the model's own, whole."""
    from stpart_compiler import backend

    seen: list[Any] = []
    compile_model = backend.compile_model
    backend.compile_model = lambda *args, **kwargs: seen.append(compile_model(*args, **kwargs)) or seen[-1]  # type: ignore
    try:
        compiled, _ = pair(Block().double(), mesh, template="megatron")
        compiled(torch.randn(4, 8, dtype=torch.float64)).sum().backward()
    finally:
        backend.compile_model = compile_model
    plan = seen[0].plan
    assert set(plan.params) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert all(layout.is_replicated for layout in plan.params.values())
    cut = any(digits for row in plan.strategies.values() for digits in row.digits)
    assert cut == (seen[0].world_size > 1)


def cached_plan(mesh: Any) -> None:
    """Rank 0 alone looks into its cache, and all ranks take what it finds there."""
    import stpart_compiler as st

    with tempfile.TemporaryDirectory() as folder:
        os.environ["STPART_CACHE"] = folder
        try:
            args = (torch.randn(4, 8, dtype=torch.float64),)
            plans = [st.compile_model(Block().double(), args, mesh=mesh, template="data").plan for _ in range(2)]
        finally:
            os.environ["STPART_CACHE"] = "off"
        entries = list(Path(folder).iterdir())
    assert len(entries) == (0 if dist.is_initialized() and dist.get_rank() else 1)
    assert [plan.solver.get("cached") for plan in plans] == [None, True]
    assert plans[0].digest == plans[1].digest


CASES: tuple[Callable[[Any], None], ...] = (
    loss_outside,
    loss_inside,
    swapped_parameter,
    hf_llama,
    partitioned,
    cached_plan,
)
ON_RANKS = {2: CASES, 4: (loss_inside, partitioned)}


def run_cases(world: int) -> Iterator[str]:
    for case in ON_RANKS[world]:
        torch.manual_seed(0)
        case(MESHES[world])
        yield case.__name__


def larger_mesh(world: int) -> None:
    try:
        torch.compile(nn.Linear(2, 2), backend="stpart", options={"mesh": 2 * world})(torch.randn(2, 2))
    except Exception as error:
        assert f"has {2 * world} ranks, larger than the process group's {world}" in str(error), error
        return
    raise AssertionError("a mesh larger than the world was taken")


def main(rank: int, world: int, store: Path) -> None:
    """All cases over gloo, on the mesh of that many ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=240)
    )
    larger_mesh(world)
    for name in run_cases(world):
        print(f"rank {rank}: {name} ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()
