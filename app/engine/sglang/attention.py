"""Attention on the CPU: SGLang's `torch_native`, without the work that it does for nothing.

It copies keys and values once for each head that shares them, and where part of a prompt is cached it
computes the queries of that part too and throws them away (sglang 0.5.20,
layers/attention/torch_native_backend.py). On the built-in model a decode step of 14 streams of 700
tokens is all but attention. The sequences stay apart, so that an answer does not depend on those
beside it. What this does not know (encoders, sliding windows) goes the original's way.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class GroupedAttnBackend(TorchNativeAttnBackend):
    """Heads that share keys and values are read together, and cached positions have no queries.

    Both methods are given query, output, keys, values, the sequences' places, and last the encoder's lengths.
    """

    def _run_sdpa_forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
        *tensors, encoder_lens = args
        if encoder_lens is not None or options["sliding_window_size"] is not None:
            return super()._run_sdpa_forward_decode(*args, **options)
        return _decode(*tensors, scaling=options["scaling"])

    def _run_sdpa_forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
        *tensors, encoder_lens = args
        unknown = encoder_lens is not None or options["sliding_window_size"] is not None
        if unknown or not options["causal"]:
            return super()._run_sdpa_forward_extend(*args, **options)
        return _extend(*tensors, scaling=options["scaling"])


def _decode(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    """One query a sequence: `query` and `output` are [sequences, heads, head size]."""
    groups = query.unflatten(1, (k_cache.shape[1], -1))
    outputs = output.unflatten(1, (k_cache.shape[1], -1))
    sequences = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for row, (request, length) in enumerate(sequences):
        tokens = req_to_token[request, :length]
        key, value = _of(k_cache, tokens, query.dtype), _of(v_cache, tokens, query.dtype)
        attended = scaled_dot_product_attention(groups[row].unsqueeze(0), key, value, scale=scaling)
        outputs[row] = attended.squeeze(0)
    return output


def _extend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    """The new tokens of each sequence, one sequence after the other: [tokens, heads, head size]."""
    numbers = (req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens)
    start = 0
    for request, length, prefix, new in zip(*(each.tolist() for each in numbers), strict=True):
        tokens = req_to_token[request, :length]
        key, value = _of(k_cache, tokens, query.dtype), _of(v_cache, tokens, query.dtype)
        mask = torch.ones(new, length, dtype=torch.bool).tril(prefix) if prefix else None
        attended = scaled_dot_product_attention(
            query[start : start + new].transpose(0, 1).unsqueeze(0),
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != k_cache.shape[1],
        )
        output[start : start + new] = attended.squeeze(0).transpose(0, 1)
        start += new
    return output


def _of(cache: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cached vectors of these tokens: [1, heads, tokens, head size]."""
    return cache.index_select(0, tokens).transpose(0, 1).unsqueeze(0).to(dtype)


def register() -> None:
    """Have SGLang take it for `torch_native`; to be called in each process that runs a model."""
    register_attention_backend("torch_native")(GroupedAttnBackend)
