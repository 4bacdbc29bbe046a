"""Attention on the CPU gives what SGLang's own gives."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.sglang.platform import needs_cpu_platform, prepare_process

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

    from app.engine.sglang.patches.cpu_attention import GroupedAttnBackend

    return object.__new__(TorchNativeAttnBackend), object.__new__(GroupedAttnBackend)


def test_sglang_takes_ours(backends: tuple[Any, Any]) -> None:
    """By the name that its arguments have for attention on the CPU."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from app.engine.sglang.patches.cpu_platform import CpuPlatform

    CpuPlatform().init_backend()
    assert ATTENTION_BACKENDS["torch_native"] is type(backends[1])


def both(backends: tuple[Any, Any], step: str, given: list[Any], **options: Any) -> list[Any]:
    """What a step writes, called as SGLang does: the query, an output, and the rest."""
    import torch

    query, *rest = given
    return [getattr(one, step)(query, torch.empty_like(query), *rest, **options) for one in backends]


def arranged(tokens: int, heads: int, kv_heads: int) -> list[Any]:
    """A query, and sequences of random keys and values that lie in any slots."""
    import torch

    torch.manual_seed(heads)
    return [
        torch.randn(tokens, heads, 16),
        torch.randn(SLOTS, kv_heads, 16),
        torch.randn(SLOTS, kv_heads, 16),
        torch.randint(SLOTS, (REQUESTS, LONGEST), dtype=torch.int32),
        torch.randperm(REQUESTS)[: len(CASES)],
        torch.tensor([cached + new for cached, new in CASES]),
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("window", [None, 8])
def test_a_decode_step_is_the_same(backends: tuple[Any, Any], heads: int, kv_heads: int, window: int | None):
    """One new token of each sequence."""
    import torch

    given = [*arranged(len(CASES), heads, kv_heads), None]
    options = {"scaling": 0.2, "enable_gqa": heads != kv_heads, "sliding_window_size": window}
    theirs, ours = both(backends, "_run_sdpa_forward_decode", given, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 8), (False, None)])
def test_a_prefill_is_the_same(
    backends: tuple[Any, Any], heads: int, kv_heads: int, causal: bool, window: int | None
):
    """The new tokens of each sequence, whatever of it is cached."""
    import torch

    cached, new = (torch.tensor(column) for column in zip(*CASES, strict=True))
    given = [*arranged(int(new.sum()), heads, kv_heads), cached, new, None]
    options = {"scaling": 0.2, "enable_gqa": heads != kv_heads}
    theirs, ours = both(
        backends, "_run_sdpa_forward_extend", given, causal=causal, sliding_window_size=window, **options
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
