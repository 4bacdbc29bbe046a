"""SGLang's server arguments from our settings: ours, our defaults, and the operator's.

Every argument of SGLang can be set in `[engine.sglang]`, except those whose meaning this server
owns. An unknown name, a wrong type or an owned argument is a `SettingsError` at start.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from app.engine.grammar.cost import GrammarBudget
from app.engine.image_limits import ImageLimits
from app.engine.sglang.platform import needs_cpu_platform, visible_devices
from app.engine.sglang.speculation import check_speculation, is_speculative
from app.engine.sglang.weight_cache import check_weight_cache
from app.settings import SettingsError

BUILTIN_MODEL = Path(__file__).parents[1] / "builtin"
BUILTIN_NAME = "tokenring-builtin"
WHERE = "[engine.sglang]"

# Arguments whose value this server's own contract depends on, and why.
OWNED: Mapping[str, str] = {
    "model_path": "set `model`",
    "served_model_name": "set `served_model_name`",
    "tp_size": "set `tp`",
    "host": "the server listens by itself: set `host`",
    "port": "the server listens by itself: set `port`",
    "api_key": "the server has keys of its own",
    "admin_api_key": "the server has keys of its own",
    "stream_interval": "every token is handed over as it comes",
    "incremental_streaming_output": "deltas are incremental by contract",
    "tokenizer_worker_num": "tokenizing and hand-over happen in this process",
    "skip_tokenizer_init": "the server needs text",
    "allow_auto_truncate": "a prompt that does not fit is refused, never cut",
    "custom_sigquit_handler": "the server owns the signals of its process",
    "is_embedding": "the server serves chat models",
    "use_ray": "the engine lives in this process",
    "grpc_port": "the server speaks HTTP",
    "grpc_mode": "the server speaks HTTP",
    "smg_grpc_mode": "the server speaks HTTP",
    "log_requests": "prompts and answers never reach a log",
    "crash_dump_folder": "prompts and answers never reach a file",
    "enable_custom_logit_processor": "it runs code that a caller sends",
    "enable_streaming_session": "a disconnect would corrupt the session",
    "node_rank": "the server is the first node",
}

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
    # A request's priority is its key's tier (app.routing.backend.PRIORITIES).
    "enable_priority_scheduling": True,
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
MIN_PORT = 1


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """The engine's options from the settings; `server_args` are the keys of `[engine.sglang]`."""

    model: str = ""
    served_model_name: str = ""
    tp: int = 1  # 0: as many as there are accelerators
    server_args: Mapping[str, Any] = field(default_factory=dict)
    default_max_tokens: int = sys.maxsize
    table: str = "sglang"
    images: ImageLimits = field(default_factory=ImageLimits)
    grammar_mask_ms: float = GrammarBudget().mask_ms
    grammar_check_s: float = GrammarBudget().check_s

    @property
    def where(self) -> str:
        """The table of the settings that `server_args` come from."""
        return f"[engine.{self.table}]"

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
        arguments["max_total_tokens"] = _cpu_pool_tokens(arguments)
    return arguments


def with_ranks(options: SGLangOptions) -> SGLangOptions:
    """The options with the number of tensor parallel ranks settled. Imports torch."""
    return options if options.tp else dataclasses.replace(options, tp=visible_devices())


def with_pool(options: SGLangOptions, tokens: int) -> SGLangOptions:
    """The options for a restart, with the KV pool of the run before: what was let in has to fit.

    On a CPU the pool would follow the memory that is free at the moment.
    """
    if not needs_cpu_platform():
        return options
    return dataclasses.replace(options, server_args={"max_total_tokens": tokens, **options.server_args})


def check(passed: Mapping[str, Any], where: str = WHERE) -> None:
    """Refuse what SGLang does not have, what has the wrong type, and what is ours."""
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    for name, value in passed.items():
        if name in OWNED:
            raise SettingsError(f"{where} {name}: not available here: {OWNED[name]}")
        if name.startswith("_") or name not in hints:
            _refuse_unknown(name, [names for names in hints if names not in OWNED], where)
        _check_value(name, value, hints[name], where)
    check_speculation(passed, where)


def _refuse_unknown(name: str, names: list[str], where: str) -> NoReturn:
    near = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SettingsError(f"{where} {name}: SGLang has no such server argument{hint}")


def _check_value(name: str, value: object, annotation: Any, where: str) -> None:
    import msgspec

    metadata = getattr(annotation, "__metadata__", ())
    kind = annotation.__origin__ if metadata else annotation
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as exc:
        raise SettingsError(f"{where} {name}: {exc}") from exc
    except TypeError as exc:  # a field that holds a callable or a class
        raise SettingsError(f"{where} {name}: cannot be set from a file") from exc
    for choices in (getattr(metadatum, "choices", None) for metadatum in metadata):
        if choices and value is not None and value not in choices:
            allowed = ", ".join(map(str, choices))
            raise SettingsError(f"{where} {name}: expected one of {allowed}, got {value!r}")


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


def _cpu_pool_tokens(arguments: Mapping[str, Any]) -> int:
    """Tokens of KV for a quarter of the free memory, at most 4 GiB and 32 full contexts."""
    import psutil
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        arguments["model_path"],
        trust_remote_code=arguments["trust_remote_code"],
        revision=arguments.get("revision"),
    )
    config = getattr(config, "text_config", None) or config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    element_bytes = 4 if arguments["dtype"] == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * element_bytes
    context = arguments.get("context_length") or config.max_position_embeddings
    budget_bytes = min(psutil.virtual_memory().available // 4, CPU_POOL_BYTES)
    return int(max(min(budget_bytes // token_bytes, CPU_POOL_CONTEXTS * context), 1024))


def bare_server_command(options: SGLangOptions, port: int) -> list[str]:
    """The argv of SGLang's own HTTP server on the same model, platform and engine flags."""
    if port < MIN_PORT:
        raise SettingsError(f"port: must be at least {MIN_PORT}, got {port}")
    arguments = server_arguments(options)
    return [
        sys.executable,
        "-m",
        "app.engine.sglang.bare",
        "--threads",
        str(cpu_threads(options, _cores())),
        json.dumps(arguments | {"host": "127.0.0.1", "port": port}),
    ]


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))
