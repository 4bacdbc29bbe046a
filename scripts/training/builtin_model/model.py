"""A small Llama for training: the weights and names of transformers' `LlamaForCausalLM`, with dropout added.

Rows of a batch are right-padded, so the causal mask alone is right for every real token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE = 0.4


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network; head_dim 64 is what GPU attention kernels take."""

    vocab_size: int = 10240
    hidden_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    max_positions: int = 8192
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normed input, in the input's dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over the row up to each position, or where the mask allows it."""
        rows, length, _ = x.shape
        head_dim = self.shape.head_dim
        q = self.q_proj(x).view(rows, length, -1, head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, -1, head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, -1, head_dim).transpose(1, 2)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), k, v.repeat_interleave(groups, dim=1), attn_mask=mask, is_causal=mask is None
        )
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return merged


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SiLU-gated projection up and down."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """The residual stream after attention and feed-forward."""
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        out: Tensor = x + self.drop(self.mlp(self.post_attention_layernorm(x)))
        return out


class SmallLlama(nn.Module):
    """Embedding, layers, final norm; the output projection is the embedding (tied)."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        # Tokens that answers are made of. The tied output projection must not push the others' rows about:
        # they stand where their meaning put them.
        self.spoken = torch.ones(shape.vocab_size, 1, dtype=torch.bool)
        self.drop = nn.Dropout(dropout)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                scale = (
                    (2 * self.shape.num_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                )
                nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)

    def noisy(self, embedded: Tensor) -> Tensor:
        """In training, the embedding moved a little at random: words of like meaning are to be read alike."""
        if not self.training:
            return embedded
        spread = NOISE * embedded.detach().pow(2).mean(-1, keepdim=True).sqrt()
        return embedded + spread * torch.randn_like(embedded)

    def silence_upper_layers(self) -> None:
        """Make the layers above the first add nothing yet: training goes on from the first one's state."""
        for layer in list(self.layers)[1:]:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def hidden(self, ids: Tensor, hidden_before: Tensor | None = None) -> Tensor:
        """Final hidden states, shape (rows, length, hidden_size).

        Above the first layer, a row's places from `hidden_before[row]` on do not see those before it.
        """
        mask = None if hidden_before is None else answer_mask(hidden_before, ids.shape[1])
        cos, sin = rotary(self.shape, ids.shape[1])
        x = self.drop(self.noisy(self.embed_tokens(ids)))
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask if number else None)
        out: Tensor = self.norm(x)
        return out

    def loss(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted next-token cross-entropy; `weights[r, t]` belongs to predicting `ids[r, t]`."""
        hidden = hidden[:, :-1]
        wanted = weights[:, 1:] > 0
        rows = self.embed_tokens.weight
        logits = F.linear(hidden[wanted], torch.where(self.spoken, rows, rows.detach())).float()
        losses = F.cross_entropy(logits, ids[:, 1:][wanted], reduction="none")
        scale = weights[:, 1:][wanted]
        return (losses * scale).sum() / scale.sum()

    def exported(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights under transformers' names; the tied output projection is not repeated."""
        return {
            f"model.{name}": weight.detach().to(dtype).contiguous()
            for name, weight in self.named_parameters()
        }

    def load_exported(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights that `exported` gave."""
        self.load_state_dict(
            {name.removeprefix("model."): weight.float() for name, weight in weights.items()}
        )


def answer_mask(hidden_before: Tensor, length: int) -> Tensor:
    """Which key each query may see, shape (rows, 1, length, length); 0 hides nothing in a row."""
    place = torch.arange(length)
    causal = place[:, None] >= place[None, :]
    first = hidden_before[:, None, None]
    hidden = (place[None, :, None] >= first) & (place[None, None, :] < first)
    return (causal[None] & ~hidden).unsqueeze(1)


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of transformers' default rotary embedding, shape (length, head_dim)."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-steps)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads turned by their positions."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
