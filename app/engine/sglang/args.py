"""SGLang's server arguments from our settings: ours, our defaults, and the operator's.

`allowed_args` says which of SGLang's arguments can be set in `[engine.sglang]`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from app.engine.grammar.cost import GrammarBudget
from app.engine.request_limits import ImageLimits
from app.engine.sglang import ranks
from app.engine.sglang.allowed_args import check, check_weight_cache, is_speculative
from app.engine.sglang.platform import needs_cpu_platform, visible_devices
from app.settings import SettingsError

BUILTIN_MODEL = Path(__file__).parents[1] / "builtin"
BUILTIN_NAME = "tokenring-builtin"

# Any host name that cannot exist: with the list empty SGLang fetches from every domain.
NO_MEDIA_DOMAIN = "media.invalid"

DEFAULTS: Mapping[str, Any] = {
    "incremental_streaming_output": True,
    "stream_interval": 1,
    "enable_cache_report": True,
    "grammar_backend": "xgrammar",
    "tool_call_parser": "auto",
    "reasoning_parser": "auto",
    "sampling_defaults": "model",
    "trust_remote_code": False,
    "allowed_media_domains": [NO_MEDIA_DOMAIN],
    "log_level": "error",
    "skip_server_warmup": True,
    # By default SGLang ends itself when a forward pass takes 5 minutes, compilation included; here
    # app.engine.sglang.watchdog judges, which sees compilers. It is the default of `engine_start_s`.
    "watchdog_timeout": 1800.0,
    # A request's priority is its key's tier (app.routing.backend.PRIORITIES).
    "enable_priority_scheduling": True,
    # SGLang prefills as long as anything waits. Requests that arrive one by one, as those of many prompts do,
    # had a pass each, and running answers stood still for 0.8 s at a time. Now all have a step in between.
    "prefill_decode_interval": 1,
}

CPU_DEFAULTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    # SGLang refuses to start when more than this of the free memory is taken while it loads, by weights or
    # other processes. The size of the pool is `max_total_tokens` (_cpu_pool_tokens).
    "mem_fraction_static": 0.9,
    "max_running_requests": 256,
    # An idle scheduler would poll without rest and take a core from everything else.
    "sleep_on_idle": True,
    # Measured with an attention that padded each chunk's query to the whole key length: they only added cost.
    "chunked_prefill_size": -1,
}

BUILTIN_TOOL_PARSER = "tokenring"
BUILTIN_DEFAULTS: Mapping[str, Any] = {
    # SGLang's detection from the template knows no rule for the plain `<tool_call>` format.
    "tool_call_parser": BUILTIN_TOOL_PARSER,
    "reasoning_parser": None,
    # A model that never saw JSON would fill the answer with the white space that a schema allows.
    "constrained_json_disable_any_whitespace": True,
}

CPU_POOL_BYTES = 4 * 1024**3
CPU_POOL_CONTEXTS = 32
SMALL_MODEL_BYTES = 2 * 1024**3
TINY_MODEL_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """The engine's options from the settings; `server_args` are the keys of `[engine.sglang]`."""

    model: str = ""
    served_model_name: str = ""
    tp: int = 1  # 0: as many as there are GPUs and the model allows
    server_args: Mapping[str, Any] = field(default_factory=dict)
    default_max_tokens: int = sys.maxsize
    table: str = "sglang"
    images: ImageLimits = field(default_factory=ImageLimits)
    grammar_mask_ms: float = GrammarBudget().mask_ms
    grammar_check_s: float = GrammarBudget().check_s

    def as_dict(self) -> dict[str, Any]:
        """The options for another process, as JSON has them."""
        return dataclasses.asdict(self) | {"server_args": dict(self.server_args)}

    @property
    def where(self) -> str:
        """The table of the settings that `server_args` come from."""
        return f"[engine.{self.table}]"

    @property
    def tp_setting(self) -> str:
        """The name of the setting that `tp` comes from."""
        return "tp" if self.table == "sglang" else f"{self.where} tp_size"

    @property
    def model_path(self) -> str:
        return self.model or str(BUILTIN_MODEL)

    @property
    def name(self) -> str:
        if self.served_model_name:
            return self.served_model_name
        return self.model.rstrip("/").rsplit("/", 1)[-1] if self.model else BUILTIN_NAME


def server_arguments(options: SGLangOptions) -> dict[str, Any]:
    """The keyword arguments for SGLang's `ServerArgs`. Raises SettingsError naming the culprit.

    Imports SGLang, which takes seconds.
    """
    check(options.server_args, options.where)
    options = with_ranks(options)
    arguments = dict(DEFAULTS)
    if not options.model:
        arguments |= BUILTIN_DEFAULTS
    arguments |= {
        "model_path": options.model_path,
        "served_model_name": options.name,
        "tp_size": options.tp,
    }
    if needs_cpu_platform():
        arguments |= CPU_DEFAULTS
        arguments["dtype"] = _cpu_dtype(options)
    arguments |= options.server_args
    if is_speculative(arguments):
        arguments["grammar_backend"] = "none"
    check_weight_cache(arguments, options.where, has_gpu=not needs_cpu_platform())
    if needs_cpu_platform() and "max_total_tokens" not in arguments:
        arguments["max_total_tokens"] = _cpu_pool_tokens(options, arguments)
    return arguments


def with_ranks(options: SGLangOptions) -> SGLangOptions:
    """The options with the number of ranks settled; a model beside the main one has `tp_size`.

    Raises SettingsError for a number that cannot work. Imports SGLang unless the number is 1.
    """
    arguments = dict(options.server_args)
    asked, devices = arguments.pop("tp_size", options.tp), visible_devices()
    tp = asked or 1
    # On AMX, SGLang's own CPU engine pads what cannot be divided.
    if asked != 1 and (devices or needs_cpu_platform()):
        config = _model_config(options, arguments)
        tp = ranks.choose(config, arguments, asked, devices, options.tp_setting)
        if not asked:
            idle = tp < devices and ranks.obstacle(config, arguments, devices)
            hint = {"hint": f"{devices} GPUs cannot share it: {idle}"} if idle else {}
            structlog.get_logger().info("tensor_parallel", model=options.name, tp=tp, gpus=devices, **hint)
    return dataclasses.replace(options, tp=tp, server_args=arguments)


def _model_config(options: SGLangOptions, arguments: Mapping[str, Any]) -> Any:
    """The configuration of the model, from its folder or the hub. Imports SGLang.

    Raises SettingsError where transformers cannot read it, as without the model's own code.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    trusted = arguments.get("trust_remote_code", DEFAULTS["trust_remote_code"])
    try:
        return get_config(options.model_path, trust_remote_code=trusted, revision=arguments.get("revision"))
    except OSError:  # some are ValueErrors too: the network, which another start may find again
        raise
    except ValueError as exc:
        raise SettingsError(f"{options.where} cannot serve the model {options.name}: {exc}") from exc


def as_started(options: SGLangOptions, tp: int, tokens: int) -> SGLangOptions:
    """The options for restarts: `tp` ranks and KV pools of `tokens` at most, as at the first start.

    Else a `tp` of 0 follows the GPUs that are seen at the moment, and a pool the memory that is free. Ranks
    on another node do not learn of the pool, and the pools of all ranks must be alike.
    """
    options = dataclasses.replace(options, tp=tp)
    if options.server_args.get("nnodes", 1) > 1:
        return options
    return dataclasses.replace(options, server_args={**options.server_args, "max_total_tokens": tokens})


def checkpoint_bytes(model_path: str) -> int | None:
    """Bytes of a local model's weight files; None for a hub id."""
    folder = Path(model_path)
    if not folder.is_dir():
        return None
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in {".safetensors", ".bin"})


def _cpu_dtype(options: SGLangOptions) -> str:
    """float32 for small models: no slower on a CPU without AMX, and greedy output is reproducible."""
    size = checkpoint_bytes(options.model_path)
    return "float32" if size is not None and size <= SMALL_MODEL_BYTES else "bfloat16"


def cpu_threads(options: SGLangOptions, cores: int) -> int:
    """OpenMP threads of each scheduler: one for a tiny model, which more only slow down."""
    size = checkpoint_bytes(options.model_path)
    tiny = size is not None and size <= TINY_MODEL_BYTES
    return 1 if tiny else max(1, cores // max(1, options.tp))


def _cpu_pool_tokens(options: SGLangOptions, arguments: Mapping[str, Any]) -> int:
    """Tokens of KV for a quarter of the free memory, at most 4 GiB and 32 full contexts."""
    import psutil

    config = ranks.text_config(_model_config(options, arguments))
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    element_bytes = 4 if arguments["dtype"] == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * element_bytes
    context = arguments.get("context_length") or config.max_position_embeddings
    budget_bytes = min(psutil.virtual_memory().available // 4, CPU_POOL_BYTES)
    return int(max(min(budget_bytes // token_bytes, CPU_POOL_CONTEXTS * context), 1024))
