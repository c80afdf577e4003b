"""A small GPT: RMS norms, rotary positions, causal attention, squared ReLU, no biases and no dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import ConfigError


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; `tied` uses the embedding as the output layer too."""

    vocab_size: int = 256
    layers: int = 3
    width: int = 128
    heads: int = 4
    context: int = 64
    tied: bool = True

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.layers, self.width, self.heads, self.context) < 1:
            raise ConfigError(f"sizes must be positive: {self}")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width {self.width} does not give each of {self.heads} heads an even share\n"
                f"hint: a multiple of {2 * self.heads}"
            )


def gpt_tiny() -> GPTConfig:
    """0.11M parameters, for tests and first tries."""
    return GPTConfig(layers=2, width=64)


def gpt_small_study() -> GPTConfig:
    """0.66M parameters, for studies on two cores."""
    return GPTConfig(layers=3, width=128, context=64, tied=False)


class GPT(nn.Module):
    """Predicts the next token.

    >>> model = GPT(gpt_tiny())
    >>> tokens = torch.randint(256, (2, 65))
    >>> model(tokens[:, :-1]).shape
    torch.Size([2, 64, 256])
    >>> 5.0 < model.loss(tokens).item() < 6.5      # about log(256): it knows nothing yet
    True
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # what writes into the residual stream starts smaller, so that the stream's variance is free of depth
                depth = 2 * config.layers if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=1 / math.sqrt(config.width * depth))
        if config.tied:
            # after the draw, so that tied and untied models of one seed have the same blocks
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `(B, T, vocab)` for tokens `(B, T)`, T at most the context."""
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ConfigError(f"{length} tokens in a context of {self.config.context}\nhint: cut the batch")
        x = self.embedding(tokens)
        # once for all layers
        turn = rotation(length, self.config.width // self.config.heads, x)
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of `tokens[:, 1:]`, each predicted from those before it."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention_in = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """The layer on `(B, T, width)`; `turn` is the rotation of the positions."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(rotate(query, turn), rotate(key, turn), value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        hidden: Tensor = self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))).square())
        return x + hidden


def rotation(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine `(length, width / 2)` of position times frequency, in the type of `like`.

    Computed anew at each step, which is cheap, so that the model has no buffers to keep in step between replicas.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, device=like.device) / width)
    angles = torch.outer(torch.arange(length, device=like.device), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of features of `(..., T, width)` by its position's angle."""
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def gpt2_small_shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of GPT-2 small's 124.4M parameters (output tied), for byte tables without the memory.

    >>> sum(math.prod(shape) for _, shape in gpt2_small_shapes())
    124439808
    """
    width = 768
    # matrices are stored with the input first; the output layer is `wte` once more and not listed
    shapes: list[tuple[str, tuple[int, ...]]] = [("wte.weight", (50_257, width)), ("wpe.weight", (1_024, width))]
    for layer in range(12):
        block = f"h.{layer}"
        shapes += [(f"{block}.ln_1.{part}", (width,)) for part in ("weight", "bias")]
        for name, inner, outer in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes += [(f"{block}.{name}.weight", (inner, outer)), (f"{block}.{name}.bias", (outer,))]
        shapes += [(f"{block}.ln_2.{part}", (width,)) for part in ("weight", "bias")]
    return shapes + [(f"ln_f.{part}", (width,)) for part in ("weight", "bias")]
