"""The encoder as a torch module: MiniLM-L6 (a BERT of 6 layers, 384 wide) with heads for harm and category.

Written out instead of taken from transformers so that the exported graph has only what serving needs:
no token types (their one embedding is added to the positions'), no pooler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

WIDTH = 384
HEADS = 12
INNER = 1536
LAYERS = 6
POSITIONS = 512
DROPPED = 26
"""Of 256."""
_HALVES = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001  # there is no public way to ask


class _Product(torch.autograd.Function):
    """A linear layer in bfloat16, in and out in float32: twice as fast where the CPU has it.

    Under autocast all in between is bfloat16 too, and what the products gain is lost again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        short, weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(short, weight)
        return linear(short, weight).float() + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        short = flat.bfloat16()
        wanted = ctx.needs_input_grad
        return (
            (short @ weight).float().view_as(x) if wanted[0] else None,
            (short.t() @ x.reshape(-1, x.shape[-1])).float() if wanted[1] else None,
            flat.sum(0) if wanted[2] else None,
        )


class Linear(nn.Linear):
    """A linear layer that is exact only in the exported graph."""

    def forward(self, x: Tensor) -> Tensor:
        if _HALVES and not torch.onnx.is_in_onnx_export():
            return _Product.apply(x, self.weight, self.bias)
        return super().forward(x)


class Dropout(nn.Module):
    """Drops a tenth. Torch's own takes as long as a small product: its random numbers come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.Generator(np.random.SFC64(int(torch.randint(2**31, ()))))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = np.frombuffer(self._rng.bytes(x.numel()), np.uint8).reshape(x.shape)
        return x * torch.from_numpy(drawn >= DROPPED) * (256 / (256 - DROPPED))


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Linear(WIDTH, WIDTH)
        self.key = Linear(WIDTH, WIDTH)
        self.value = Linear(WIDTH, WIDTH)
        self.attended = Linear(WIDTH, WIDTH)
        self.attended_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.inner = Linear(WIDTH, INNER)
        self.outer = Linear(INNER, WIDTH)
        self.outer_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.dropout = Dropout()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, tokens, width) to the same; mask is added to the attention's logits."""
        batch, tokens, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)

        mixed = scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), attn_mask=mask
        )
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, WIDTH)
        x = self.attended_norm(x + self.dropout(self.attended(mixed)))
        return self.outer_norm(x + self.dropout(self.outer(gelu(self.inner(x)))))


class MiniLM(nn.Module):
    """Token ids to the harm logit of a prompt, one logit per category, and the harm logit of an answer."""

    def __init__(self, vocabulary: int, categories: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.dropout = Dropout()
        self.head = nn.Linear(WIDTH, 2 + categories)

    def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
        """(batch, tokens) ids and 0/1 attention to (batch, 2 + categories) logits; see the class."""
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        x = self.dropout(self.norm(x))
        keep = attention.to(x.dtype)
        mask = ((1.0 - keep) * -1e4)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        weights = keep / keep.sum(1, keepdim=True)
        pooled = (x * weights[:, :, None]).sum(1)
        return self.head(self.dropout(pooled))


_NAMES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attended",
    "attention.output.LayerNorm": "attended_norm",
    "intermediate.dense": "inner",
    "output.dense": "outer",
    "output.LayerNorm": "outer_norm",
}


def pretrained(folder: Path, categories: int) -> MiniLM:
    """The published weights (model.safetensors of all-MiniLM-L6-v2) with fresh heads."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    model = MiniLM(len(tensors["embeddings.word_embeddings.weight"]), categories)
    own: dict[str, Tensor] = {
        "words.weight": tensors["embeddings.word_embeddings.weight"],
        "positions.weight": tensors["embeddings.position_embeddings.weight"]
        + tensors["embeddings.token_type_embeddings.weight"][0],
        "norm.weight": tensors["embeddings.LayerNorm.weight"],
        "norm.bias": tensors["embeddings.LayerNorm.bias"],
    }
    for index in range(LAYERS):
        for theirs, ours in _NAMES.items():
            for kind in ("weight", "bias"):
                own[f"layers.{index}.{ours}.{kind}"] = tensors[f"encoder.layer.{index}.{theirs}.{kind}"]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert set(missing) == {"head.weight", "head.bias"}, missing
    assert not unexpected, unexpected
    nn.init.normal_(model.head.weight, std=0.02)
    nn.init.zeros_(model.head.bias)
    return model
