"""Models by name for the command line: shapes of known configurations, or a function in a Python file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class TrainingStep:
    """A model and one call of it on global inputs. `loss_fn`: scalar from its output; None: the output has the loss."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: LossFn | None = None


@dataclass(frozen=True)
class Preset:
    """A causal language model of transformers, with random weights. `family`: prefix of its config's class."""

    family: str
    config: Mapping[str, Any]
    batch: int
    sequence: int


PRESETS: dict[str, Preset] = {
    "llama-tiny": Preset(
        "Llama",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
        batch=4,
        sequence=64,
    ),
    "gpt2-tiny": Preset(
        "GPT2",
        {
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        batch=4,
        sequence=64,
    ),
    "llama-3-8b": Preset(
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        batch=4,
        sequence=8192,
    ),
}


def load_step(
    name: str, batch: int | None = None, sequence: int | None = None, device: str = "cpu", seed: int = 0
) -> TrainingStep:
    """The step that `name` stands for: a preset, or `path/to/file.py:function`.

    The function takes nothing and returns (model, args, kwargs) or (model, args, kwargs, loss_fn). `batch` and
    `sequence` replace those of a preset, `device` ("cpu" or "meta") is where its tensors are made.

    Raises:
        ValueError: no such preset, file or function, or the function returns something else.
    """
    if name in PRESETS:
        return _from_preset(PRESETS[name], batch, sequence, device, seed)
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"model: {name!r} is unknown; expected {', '.join(PRESETS)}, or path/to/file.py:function")
    if batch is not None or sequence is not None:
        raise ValueError(f"--batch and --seq: only for the named models; {name} brings its own inputs")
    return _from_file(Path(path), function)


def causal_lm(preset: Preset, device: str = "cpu", seed: int = 0) -> nn.Module:
    """A transformers model with random weights.

    Raises:
        ValueError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("model: the named models need transformers; install stpart_compiler[hf]") from error
    config = getattr(transformers, f"{preset.family}Config")(**preset.config, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    with torch.device(device):
        auto: Any = transformers.AutoModelForCausalLM
        model: nn.Module = auto.from_config(config)
    return model


def _from_preset(preset: Preset, batch: int | None, sequence: int | None, device: str, seed: int) -> TrainingStep:
    shape = (batch or preset.batch, sequence or preset.sequence)
    model = causal_lm(preset, device, seed)
    tokens = torch.randint(preset.config["vocab_size"], shape, device=device)
    return TrainingStep(model, (), {"input_ids": tokens, "labels": tokens.clone()})


def _from_file(path: Path, function: str) -> TrainingStep:
    if not path.is_file():
        raise ValueError(f"model: no file {path}; expected path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"stpart_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # tracing looks up globals of the model's functions there
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"model: {path} has no function {function!r} that returns (model, args, kwargs)")
    made = make()
    if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"model: {path}:{function} must return (model, args, kwargs) or (model, args, kwargs, loss_fn),"
            f" got {repr(made)[:80]}"
        )
    model, args, kwargs, *loss_fn = made
    return TrainingStep(model, tuple(args), dict(kwargs), loss_fn[0] if loss_fn else None)
