"""The out-of-tree platform that runs SGLang's models on any CPU, by each layer's plain torch forward.

SGLang resolves it in every process through `app.engine.sglang.platform.activate`.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as SGLang's out-of-tree device; the dispatch key stays the base class's "native"."""

    # CPU would switch SGLang to its AMX kernels.
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def init_backend(self) -> None:
        """See the base class: called in each process that runs a model."""
        from sglang.srt.model_executor import model_runner

        from app.engine.sglang import attention as sglang_attention

        sglang_attention.register()
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
