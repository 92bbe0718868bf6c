"""Models that users bring, at tiny sizes, mostly of one layer: Hugging Face ones from configs, others written here.

Each entry makes a training step with random weights. `tolerance`: relative error allowed in float64; Hugging Face
computes norms, softmax or losses of some models in float32 whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

EXACT = 1e-9
FLOAT32 = 1e-4
KERNEL_FLOAT32 = 1.01e-4  # kernels without float64


@dataclass(frozen=True)
class Step:
    """A model and one call of it. `loss_fn`: scalar from its output; None: the output is, or has, the loss."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    tolerance: float = EXACT

    def double(self) -> Step:
        """The same step in float64, where its kernels take that."""
        if self.tolerance == KERNEL_FLOAT32:
            return self
        args = tuple(_double(arg) for arg in self.args)
        kwargs = {name: _double(value) for name, value in self.kwargs.items()}
        return Step(self.model.double(), args, kwargs, self.loss_fn, self.tolerance)

    def loss(self) -> torch.Tensor:
        """Loss of one device."""
        is_hf = isinstance(self.model, transformers.PreTrainedModel)
        cache = {"use_cache": False} if is_hf and hasattr(self.model.config, "use_cache") else {}
        output = self.model(*self.args, **self.kwargs, **cache)
        if self.loss_fn is not None:
            return self.loss_fn(output)
        return output.loss if is_hf else output


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tokens(batch: int = 4, length: int = 8, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def _causal(family: str, tolerance: float = FLOAT32, **config: Any) -> Step:
    ids = _tokens()
    labels = ids.clone()
    labels[0, :3] = -100
    made = getattr(transformers, f"{family}Config")(
        vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=2, **config
    )
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(made)
    return Step(model, (), {"input_ids": ids, "labels": labels}, tolerance=tolerance)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}


def llama() -> Step:
    return _causal("Llama", **_GROUPED)


def gpt2() -> Step:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
    return _causal("GPT2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)


def opt() -> Step:
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return _causal("OPT", word_embed_proj_dim=32, max_position_embeddings=16, dropout=0.0, **sizes)


def bloom() -> Step:
    return _causal("Bloom", hidden_size=32, n_layer=1, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)


def mistral() -> Step:
    return _causal("Mistral", sliding_window=4, **_GROUPED)


def qwen3() -> Step:
    return _causal("Qwen3", head_dim=8, **_GROUPED)


def gemma2() -> Step:
    capping = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4}
    return _causal(
        "Gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_implementation="eager",
        **capping,
        **(_GROUPED | {"num_hidden_layers": 2}),
    )


def gpt_neox() -> Step:
    return _causal("GPTNeoX", use_parallel_residual=True, attention_dropout=0.0, hidden_dropout=0.0, **_SIZES)


def mixtral() -> Step:
    return _causal("Mixtral", KERNEL_FLOAT32, num_local_experts=4, num_experts_per_tok=2, **_GROUPED)


def bert() -> Step:
    config = transformers.BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_SIZES)
    ids = _tokens()
    labels = torch.where(torch.arange(8) % 3 == 0, ids, -100)
    mask = (torch.arange(8) < torch.tensor([[8], [5], [7], [8]])).long()
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Step(transformers.BertForMaskedLM(config), (), call, tolerance=FLOAT32)


def t5() -> Step:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    call = {"input_ids": _tokens(), "labels": _tokens(length=6)}
    return Step(transformers.T5ForConditionalGeneration(config), (), call, tolerance=FLOAT32)


def vit() -> Step:
    sizes = {key: value for key, value in _SIZES.items() if key != "max_position_embeddings"}
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, num_labels=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    model = transformers.ViTForImageClassification(config)
    call = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([1, 0, 5, 2])}
    return Step(model, (), call, tolerance=FLOAT32)


def whisper() -> Step:
    layers = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _WHISPER.items()}
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=12,
        dropout=0.0,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        **layers,
    )
    call = {"input_features": torch.randn(4, 8, 24), "labels": _tokens(length=6)}
    return Step(transformers.WhisperForConditionalGeneration(config), (), call, tolerance=FLOAT32)


_WHISPER = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}


class ConformerBlock(nn.Module):
    """Half feed-forwards around attention and a depthwise convolution with BatchNorm."""

    def __init__(self, width: int = 16, heads: int = 4, kernel: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.ff1 = _feed_forward(width)
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv_norm = nn.LayerNorm(width)
        self.expand = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.project = nn.Conv1d(width, width, 1)
        self.ff2 = _feed_forward(width)
        self.final = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.ff1(x)
        x = x + self._attention(self.norm(x))
        x = x + self._convolution(self.conv_norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + 0.5 * self.ff2(x)
        return self.final(x)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))

    def _convolution(self, x: torch.Tensor) -> torch.Tensor:
        x = F.glu(self.expand(x), dim=1)
        return self.project(F.silu(self.batch_norm(self.depthwise(x))))


def _feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


def conformer() -> Step:
    return Step(ConformerBlock(), (torch.randn(4, 12, 16),), loss_fn=_square)


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class DiTBlock(nn.Module):
    """A diffusion transformer block: shifts, scales and gates of both norms come from a condition (adaLN)."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self._attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def dit() -> Step:
    return Step(DiTBlock(), (torch.randn(4, 8, 16), torch.randn(4, 16)), loss_fn=_square)


class MixerBlock(nn.Module):
    """MLPs over tokens and over channels."""

    def __init__(self, tokens: int = 12, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


def mixer() -> Step:
    return Step(MixerBlock(), (torch.randn(4, 12, 16),), loss_fn=_square)


class Bottleneck(nn.Module):
    """A ResNet bottleneck with a stem, max pooling, a strided shortcut and a classifier."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 1, bias=False),
            nn.BatchNorm2d(2 * width),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(width, 2 * width, 1, stride=2, bias=False), nn.BatchNorm2d(2 * width))
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        x = F.relu(self.body(x) + self.shortcut(x))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), target, label_smoothing=0.1)


def resnet() -> Step:
    return Step(Bottleneck(), (torch.randn(4, 3, 12, 12), torch.tensor([1, 0, 4, 2])))


ZOO: dict[str, Callable[[], Step]] = {
    make.__name__: make
    for make in (
        llama,
        gpt2,
        opt,
        bloom,
        mistral,
        qwen3,
        gemma2,
        gpt_neox,
        bert,
        t5,
        vit,
        mixtral,
        whisper,
        conformer,
        dit,
        mixer,
        resnet,
    )
}


def make(name: str) -> Step:
    """The named step, always with the same weights and inputs."""
    torch.manual_seed(0)
    return ZOO[name]()
