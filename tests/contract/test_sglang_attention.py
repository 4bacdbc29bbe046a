"""Attention on the CPU gives what SGLang's own gives."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.sglang_platform import needs_cpu_platform, prepare_process

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not needs_cpu_platform(), reason="beside an accelerator SGLang has better"),
]

SLOTS, REQUESTS, LONGEST = 512, 8, 100
CASES = [(0, 1), (0, 40), (39, 1), (30, 10), (1, 60)]
"""Of each sequence: tokens that are cached, and new ones."""


@pytest.fixture(scope="module")
def backends() -> tuple[Any, Any]:
    """SGLang's own, and ours; neither has a model."""
    prepare_process()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from app.engine.sglang_attention import GroupedAttnBackend

    return object.__new__(TorchNativeAttnBackend), object.__new__(GroupedAttnBackend)


def arranged(heads: int, kv_heads: int) -> dict[str, Any]:
    """Random sequences, their tokens in any slots."""
    import torch

    torch.manual_seed(heads)
    return {
        "k_cache": torch.randn(SLOTS, kv_heads, 16),
        "v_cache": torch.randn(SLOTS, kv_heads, 16),
        "req_to_token": torch.randint(SLOTS, (REQUESTS, LONGEST), dtype=torch.int32),
        "req_pool_indices": torch.randperm(REQUESTS)[: len(CASES)],
        "seq_lens": torch.tensor([cached + new for cached, new in CASES]),
        "scaling": 0.2,
        "enable_gqa": heads != kv_heads,
    }


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_decode_step_is_the_same(backends: tuple[Any, Any], heads: int, kv_heads: int, windowed: bool):
    """One new token of each sequence."""
    import torch

    given = arranged(heads, kv_heads)
    query = torch.randn(len(CASES), heads, 16)
    options = {"sliding_window_size": 8} if windowed else {}
    theirs, ours = (
        one._run_sdpa_forward_decode(query, torch.empty_like(query), **given, **options) for one in backends
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "sliding_window_size": 8}, {}])
def test_a_prefill_is_the_same(backends: tuple[Any, Any], heads: int, kv_heads: int, options: dict[str, Any]):
    """The new tokens of each sequence, whatever of it is cached."""
    import torch

    given = arranged(heads, kv_heads)
    given["extend_prefix_lens"] = torch.tensor([cached for cached, _ in CASES])
    given["extend_seq_lens"] = torch.tensor([new for _, new in CASES])
    query = torch.randn(sum(new for _, new in CASES), heads, 16)
    theirs, ours = (
        one._run_sdpa_forward_extend(query, torch.empty_like(query), **given, **options) for one in backends
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
