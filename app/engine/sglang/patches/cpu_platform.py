"""SGLang 0.5.20 on any CPU: an out-of-tree platform, on which models run each layer's plain torch forward.

SGLang resolves `CpuPlatform` in every process through `app.engine.sglang.platform.activate`, in the middle of
its own import: nothing more of SGLang is imported at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

REPLACED: Mapping[str, str] = {
    "model_executor.model_runner:adjust_config_with_unaligned_cpu_tp": "1c4c716cd9aa3866",
}


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as SGLang's out-of-tree device; the dispatch key stays the base class's "native"."""

    # CPU would switch SGLang to its AMX kernels.
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def init_backend(self) -> None:
        """Replace SGLang's functions; SGLang calls this in each process that runs a model."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.model_executor import model_runner

        from app.engine.sglang.patches.cpu_attention import GroupedAttnBackend

        register_attention_backend("torch_native")(GroupedAttnBackend)
        # SGLang adds heads until the ranks can divide them, but loads weights so with its AMX kernels only:
        # without this a KV head is repeated on several ranks, as on a GPU.
        model_runner.adjust_config_with_unaligned_cpu_tp = lambda config, *_: config

    def is_pin_memory_available(self, device: Any = None) -> bool:
        del device
        return False

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        return _token_allocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        del mode
        return "eager"


def _token_allocator(size: int, *, page_size: int, **rest: Any) -> Any:
    """SGLang's allocator of single tokens; its constructor takes no page size."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    if page_size != 1:
        raise ValueError(f"page_size {page_size}: only 1 works on the CPU")
    return TokenToKVPoolAllocator(size, **rest)


def keep_images_on_the_cpu() -> None:
    """SGLang sends the fast image processor's work to `cuda:0` unless its AMX mode is on."""
    from sglang.srt.multimodal.processors import base_processor

    base_processor._is_cpu = True  # noqa: SLF001
