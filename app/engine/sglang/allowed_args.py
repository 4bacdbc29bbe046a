"""The arguments of SGLang 0.5.20's server that an operator may set, and why not the others.

An argument is allowed unless it stands below. tests/contract/test_sglang_allowed_args.py keeps a digest of
all names: it fails when SGLang adds, renames or drops one, which then has to be looked at.
"""

from __future__ import annotations

import difflib
import json
import linecache
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from app.settings import SettingsError

WHERE = "[engine.sglang]"

REFUSALS: Mapping[str, str] = {
    "set `model`": "model_path",
    "set `served_model_name`": "served_model_name",
    "set `tp`": "tp_size",
    "the server listens by itself: set `host` and `port`, and put TLS into a proxy": """
        host port fastapi_root_path *http2* *ssl_*
    """,
    "the server has keys of its own": "*api_key",
    "the server speaks HTTP": "grpc_* smg_* *sidecar*",
    "it belongs to SGLang's own HTTP server, which does not run here": """
        log_level_http uvicorn_* tool_server file_storage_path enable_response_store asr_*
        batch_notify_size stream_response_default_include_usage return_input_ids return_output_ids
    """,
    "prompts and answers never reach a log, a file or another program": """
        log_requests* crash_dump_folder export_metrics_* kv_events_config load_publish_endpoint
        debug_tensor_dump_* msprobe_dump_config spec_trace_dir
    """,
    "SGLang's metrics and traces are not collected here: see /metrics": """
        *_metrics* extra_metric_labels bucket_* *_buckets *trace* stat_loggers
    """,
    "every token is handed over as it arrives": "stream_interval",
    "deltas are incremental by contract": "incremental_streaming_output",
    "cached tokens have a price of their own": "enable_cache_report",
    "the server warms the engine up by itself": "skip_server_warmup warmups",
    "tokenizing and hand-over happen in this process": "tokenizer_worker_num",
    "the hand-over reads from one detokenizer": "detokenizer_worker_num",
    "the server needs text": "skip_tokenizer_init",
    "a prompt that does not fit is refused, never cut": "allow_auto_truncate",
    "SGLang's bound would end requests that were admitted: set `max_queued_requests`": "max_queued_requests",
    "a request's priority is its key's tier, and higher tiers go first": """
        default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
    """,
    "admission chooses the replica of each request": "load_balance_method",
    "the server owns the signals of its process": "custom_sigquit_handler",
    "the server serves chat models": "is_embedding enable_mis prefill_only_disable_kv_cache encoder_only",
    "the engine lives in this process": "use_ray",
    "it runs code that a caller sends": "enable_custom_logit_processor",
    "a disconnect would corrupt the session": "enable_streaming_session enable_session_radix_cache",
    "this process runs the first node: start the others with `tokenring node --rank`": "node_rank",
    "one engine does all the work: run SGLang's own servers, and set `engine` to remote": """
        disaggregation_* num_reserved_decode_tokens optimistic_prefill_attempts language_only encoder_*
        enable_adaptive_dispatch_to_encoder enable_prefix_mm_cache decoupled_spec_*
        enable_tp_lm_head_all_to_all
    """,
    "no request can choose an adapter: merge it into the weights": "*lora* experts_shared_outer_loras",
    "no request can ask for what it returns": """
        enable_return_* return_hidden_states_mode sampling_mask_max_tokens
    """,
    "the scheduler runs another loop with it, in which continued answers were never tried": """
        *pdmux* sm_group_num dllm_*
    """,
    "ranks do not join or leave: a lost engine is restarted as a whole": """
        *elastic_e* ep_join_* max_ep_size gated_launch_port
    """,
    "weights are loaded at the start, and never replaced": """
        checkpoint_engine_wait_weights_before_ready custom_weight_loader
        remote_instance_weight_loader_start_* remote_instance_weight_loader_send_* engine_info_*
        rl_on_policy_target rl_quant_profile
    """,
    "it does not know who may share a prefix (`isolation`)": """
        *lmcache* *flexkv* radix_cache_backend *unified_cache_*
    """,
    "a caller could name another's image by its hash": "trust_mm_content_hashes",
    "GPU memory that this process holds for images would outlive a lost engine": "keep_mm_feature_on_device",
    "it is for other grammar backends than xgrammar": """
        constrained_json_whitespace_pattern disable_outlines_disk_cache
    """,
    "SGLang derives it by itself": "uses_mamba_radix_cache",
}
"""The names of refused arguments by the reason, as patterns; of two that match, the first counts."""
LIMITED: Mapping[str, tuple[tuple[str | None, ...], str]] = {
    "grammar_backend": (
        ("xgrammar", "none"),
        "the time that a caller's grammar may take is bounded with xgrammar alone",
    ),
    "mm_feature_transport": (
        ("cpu",),
        "GPU memory that this process holds for images would outlive a lost engine",
    ),
}
"""Arguments that may have some values only, and why."""


def refusal_of(name: str) -> str | None:
    """The reason for which an argument is refused; None for one that is not."""
    matches = (why for why, names in REFUSALS.items() if any(fnmatchcase(name, p) for p in names.split()))
    return next(matches, None)


def check(passed: Mapping[str, Any], where: str = WHERE) -> None:
    """Raise SettingsError for what SGLang does not have, what has the wrong type, and what is not allowed."""
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    for name, value in passed.items():
        if name.startswith("_") or name not in hints:
            _refuse_unknown(name, [hint for hint in hints if refusal_of(hint) is None], where)
        why = refusal_of(name)
        if why is not None and (where == WHERE or name != "tp_size"):  # `tp` is the main model's
            raise SettingsError(f"{where} {name}: not available here: {why}")
        _check_value(name, value, hints[name], where)
    if is_speculative(passed) and passed.get("grammar_backend", "none") != "none":
        raise SettingsError(
            f"{where} grammar_backend: nothing bounds the cost of grammars with speculative decoding;"
            " leave this or speculative_algorithm out"
        )
    if passed.get("nnodes", 1) > 1 and not passed.get("dist_init_addr"):
        raise SettingsError(
            f"{where} nnodes: set dist_init_addr too, the first node's address and a free port"
        )


def is_speculative(arguments: Mapping[str, Any]) -> bool:
    """True if SGLang would speculate with these server arguments; it then has no grammars here.

    A step of SGLang 0.5.20 then computes a mask for each draft token, through functions of its own
    (`traverse_tree`, `eagle_sample`), and nothing bounds the cost: a mask that stalls holds everyone, and a
    row without a way on ends the scheduler. app.engine.sglang.grammar.GrammarCheck says so to callers.
    """
    return bool(arguments.get("speculative_algorithm"))


def check_weight_cache(arguments: Mapping[str, Any], where: str, *, has_gpu: bool) -> None:
    """Raise SettingsError for a weight cache (docs/weights.md) that SGLang 0.5.20 cannot have here."""
    mode = arguments.get("weight_cache_mode", "off")
    if mode == "off":
        return

    def refuse(why: str) -> None:
        raise SettingsError(f"{where} weight_cache_mode: {why}")

    if where != WHERE:
        refuse("a GPU has one cache, and that is the main model's")
    if mode != "client":
        refuse("a cache that the engine starts ends with it; set 'client' and run scripts/weight-cache")
    if not has_gpu:
        refuse("it keeps weights in GPU memory, and this machine has no GPU")
    if is_speculative(arguments):
        refuse("it does not keep the draft model of speculative_algorithm; leave one of the two out")
    if arguments.get("enable_memory_saver"):
        refuse("enable_memory_saver cannot release weights that another process holds; choose one")
    method, blocks = _quantization(arguments)
    if method and not (method == "fp8" and blocks):
        refuse(f"it takes weights that are not quantised, or in block-wise FP8, and these are {method!r}")


def _quantization(arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """The quantisation of a checkpoint, empty without one, and whether it is block-wise."""
    asked = str(arguments.get("quantization") or "")
    path = Path(arguments["model_path"]) / "config.json"
    if not path.is_file():
        return asked, asked == "fp8"
    config = json.loads(path.read_text("utf-8")).get("quantization_config") or {}
    return asked or str(config.get("quant_method") or ""), bool(config.get("weight_block_size"))


def refused(exc: Exception, passed: Collection[str], where: str = WHERE) -> SettingsError:
    """The error for arguments that SGLang refuses together: its message, and the arguments in it."""
    words = str(exc) or f"it requires {_failed_line(exc)}"
    spoken = set(re.findall(r"\w+", words.replace("-", "_")))
    named = [name for name in passed if name in spoken or f"__{name}" in spoken] or list(passed)
    return SettingsError(f"{' '.join([where, ', '.join(named)]).rstrip()}: SGLang refuses it: {words}")


def _failed_line(exc: Exception) -> str:
    """The source line that raised, of an assertion without words."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(exc).__name__
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return line.strip().removeprefix("assert ")


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
    values, reason = LIMITED.get(name, ((), ""))
    if values and value not in values:
        raise SettingsError(f"{where} {name}: only {' or '.join(map(str, values))} works here: {reason}")
    for choices in (getattr(metadatum, "choices", None) for metadatum in metadata):
        if choices and value is not None and value not in choices:
            allowed = ", ".join(map(str, choices))
            raise SettingsError(f"{where} {name}: expected one of {allowed}, got {value!r}")
