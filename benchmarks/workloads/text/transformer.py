"""An encoder-decoder transformer (Vaswani et al., 2017), normalised before each part, which trains at any depth.

Its embedding tables are not shared: one that the output uses too never stops training, and then the
gradient has to go through every frozen layer on its way to it.

Shapes: B sentences, S source and T target tokens, D width, H heads, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a transformer."""

    vocabulary: int
    width: int
    inner_width: int
    num_heads: int
    num_layers: int
    """Of the encoder, and of the decoder."""
    dropout: float


class Embedding(nn.Module):
    """Tokens with sinusoidal positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.width = size.width
        nn.init.normal_(self.tokens.weight, std=size.width**-0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return [B, T, D]."""
        embedded_BTD = self.tokens(tokens_BT) * math.sqrt(self.width)
        return self.dropout(embedded_BTD + positions(tokens_BT.shape[1], self.width).to(embedded_BTD))


def positions(length: int, width: int) -> Tensor:
    """Return sines and cosines of the positions [T, D] (§3.5 there)."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class Attention(nn.Module):
    """Attention of many heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.query = nn.Linear(size.width, size.width)
        self.key = nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.output = nn.Linear(size.width, size.width)
        self.num_heads = size.num_heads

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor, mask: Tensor) -> Tensor:
        """Return [B, T, D].

        Args:
            x_BTD: asks.
            memory_BSD: is asked.
            mask: broadcast to [B, H, T, S]; true where a token may be seen.
        """
        parts = (self.query(x_BTD), self.key(memory_BSD), self.value(memory_BSD))
        query, key, value = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        # Spelt out: for rows this short, torch's fused attention takes ten times as long backwards in bf16 on a CPU.
        scores = (query @ key.transpose(2, 3)) * key.shape[3] ** -0.5
        weights = scores.float().masked_fill(~mask, -torch.inf).softmax(3)
        return self.output((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """The part of a layer that works on each token alone."""

    def __init__(self, size: Size) -> None:
        super().__init__(nn.Linear(size.width, size.inner_width), nn.ReLU(), nn.Linear(size.inner_width, size.width))


class EncoderLayer(nn.Module):
    """Attention to the source, then each token alone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BSD: Tensor, mask: Tensor) -> Tensor:
        """Return [B, S, D]."""
        normal = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(normal, normal, mask))
        return x_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))


class DecoderLayer(nn.Module):
    """Attention to the target so far and to the source, then each token alone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(size.width)
        self.self_attention = Attention(size)
        self.source_norm = nn.LayerNorm(size.width)
        self.source_attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor, mask: Tensor, memory_mask: Tensor) -> Tensor:
        """Return [B, T, D]."""
        normal = self.self_norm(x_BTD)
        x_BTD = x_BTD + self.dropout(self.self_attention(normal, normal, mask))
        x_BTD = x_BTD + self.dropout(self.source_attention(self.source_norm(x_BTD), memory_BSD, memory_mask))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Transformer(nn.Module):
    """Gives scores to the next token of the target, at every position at once."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.source_embedding = Embedding(size)
        self.encoder = nn.ModuleList(EncoderLayer(size) for _ in range(size.num_layers))
        self.encoder_norm = nn.LayerNorm(size.width)
        self.target_embedding = Embedding(size)
        self.decoder = nn.ModuleList(DecoderLayer(size) for _ in range(size.num_layers))
        self.decoder_norm = nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, size.vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self, *, source: Tensor, attention_mask: Tensor, target: Tensor, decoder_attention_mask: Tensor
    ) -> Tensor:
        """Return scores [B, T, V]; those at a position are of the token behind it.

        Args:
            source: numbers [B, S], padded on the right.
            attention_mask: of the source [B, S], 1 where it is no padding.
            target: what is known of the translation, from its first token on [B, T].
            decoder_attention_mask: of the target [B, T].
        """
        source_mask = attention_mask.bool()[:, None, None, :]
        causal_TT = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        target_mask = decoder_attention_mask.bool()[:, None, None, :] & causal_TT
        memory_BSD = self.source_embedding(source)
        for layer in self.encoder:
            memory_BSD = layer(memory_BSD, source_mask)
        memory_BSD = self.encoder_norm(memory_BSD)
        x_BTD = self.target_embedding(target)
        for layer in self.decoder:
            x_BTD = layer(x_BTD, memory_BSD, target_mask, source_mask)
        return self.output(self.decoder_norm(x_BTD))
