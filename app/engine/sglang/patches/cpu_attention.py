"""Attention on the CPU: SGLang 0.5.20's `torch_native`, without the work that it does for nothing.

SGLang copies keys and values once for each head that shares them, and computes the queries of the part of a
prompt that is cached too. On the built-in model a decode step of 14 streams of 700 tokens is nearly all
attention. The sequences stay apart, so that an answer does not depend on those beside it. Encoders, sliding
windows and prompts that are not causal go the original's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

REPLACED: Mapping[str, str] = {
    "layers.attention.torch_native_backend:TorchNativeAttnBackend"
    "._run_sdpa_forward_decode": "062856df45d2fe12",
    "layers.attention.torch_native_backend:TorchNativeAttnBackend"
    "._run_sdpa_forward_extend": "cd0f84f549310107",
}


class GroupedAttnBackend(TorchNativeAttnBackend):
    """SGLang's `torch_native`; heads that share keys and values are read together, cached tokens not queried.

    Both methods are given query, output, keys, values, the sequences' places, and last the encoder's lengths.
    """

    def _run_sdpa_forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
        *tensors, encoder_lens = args
        if encoder_lens is not None or options["sliding_window_size"] is not None:
            return super()._run_sdpa_forward_decode(*args, **options)
        query, output, k_cache, v_cache, *places = tensors
        # One query a sequence: `query` and `output` are [sequences, heads, head size].
        groups = query.unflatten(1, (k_cache.shape[1], -1))
        outputs = output.unflatten(1, (k_cache.shape[1], -1))
        for row, tokens in enumerate(_tokens(*places)):
            key, value = _of(k_cache, tokens, query.dtype), _of(v_cache, tokens, query.dtype)
            attended = scaled_dot_product_attention(
                groups[row].unsqueeze(0), key, value, scale=options["scaling"]
            )
            outputs[row] = attended.squeeze(0)
        return output

    def _run_sdpa_forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
        *tensors, encoder_lens = args
        unsupported = encoder_lens is not None or options["sliding_window_size"] is not None
        if unsupported or not options["causal"]:
            return super()._run_sdpa_forward_extend(*args, **options)
        query, output, k_cache, v_cache, *places, prefix_lens, extend_lens = tensors
        # The new tokens of each sequence, one sequence after the other: [tokens, heads, head size].
        start = 0
        sequences = zip(_tokens(*places), prefix_lens.tolist(), extend_lens.tolist(), strict=True)
        for tokens, prefix, new in sequences:
            key, value = _of(k_cache, tokens, query.dtype), _of(v_cache, tokens, query.dtype)
            mask = torch.ones(new, len(tokens), dtype=torch.bool).tril(prefix) if prefix else None
            attended = scaled_dot_product_attention(
                query[start : start + new].transpose(0, 1).unsqueeze(0),
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=options["scaling"],
                enable_gqa=query.shape[1] != k_cache.shape[1],
            )
            output[start : start + new] = attended.squeeze(0).transpose(0, 1)
            start += new
        return output


def _tokens(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> list[torch.Tensor]:
    """The places of each sequence's tokens in the cache."""
    sequences = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    return [req_to_token[request, :length] for request, length in sequences]


def _of(cache: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cached vectors of these tokens: [1, heads, tokens, head size]."""
    return cache.index_select(0, tokens).transpose(0, 1).unsqueeze(0).to(dtype)
