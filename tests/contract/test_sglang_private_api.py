"""What this server uses of SGLang's insides, at the pinned version: a new version must be looked at first."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest

from app.engine.sglang.args import BUILTIN_MODEL
from app.engine.sglang.platform import CPU_PLATFORM, activate, needs_cpu_platform, prepare_process

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

PARAMETERS = {
    "managers.tokenizer_manager:TokenizerManager.__init__": ("self", "server_args", "port_args"),
    "managers.tokenizer_manager:TokenizerManager._send_one_request": ("self", "tokenized_obj"),
    "managers.tokenizer_manager:TokenizerManager._tokenize_one_request": ("self", "obj"),
    "managers.tokenizer_manager:TokenizerManager._tokenize_texts": ("self", "texts", "is_cross_encoder"),
    "managers.tokenizer_manager:TokenizerManager._validate_one_request": ("self", "obj", "input_ids"),
    "managers.tokenizer_manager:TokenizerManager._init_req_state": ("self", "obj", "request"),
    "managers.tokenizer_manager:TokenizerManager._handle_batch_output": ("self", "recv_obj"),
    "managers.tokenizer_manager:TokenizerManager._handle_abort_req": ("self", "recv_obj"),
    "managers.tokenizer_manager:TokenizerManager._dispatch_to_scheduler": ("self", "obj"),
    "managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop": ("self",),
    "managers.io_struct:sock_recv": ("socket", "flags"),
    "constrained.xgrammar_backend:XGrammarGrammar.fill_vocab_mask": ("self", "vocab_mask", "idx"),
    "constrained.xgrammar_backend:XGrammarGrammar.accept_token": ("self", "token"),
    "constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched": ("entries", "vocab_mask"),
    "constrained.base_grammar_backend:BaseGrammarBackend.__init__": ("self",),
    "managers.scheduler:Scheduler._poll_timeout_aborts": ("self",),
    "managers.scheduler:Scheduler.collect_inflight_reqs": ("self",),
    "managers.scheduler:Scheduler._add_request_to_queue": ("self", "req", "is_retracted"),
    "managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens": ("self",),
    "constrained.grammar_manager:GrammarManager.get_ready_grammar_requests": ("self",),
    "layers.sampler:Sampler._sync_token_ids_across_tp": ("self", "batch_next_token_ids", "sampling_info"),
    "managers.schedule_batch:Req.update_finish_state": ("self", "new_accepted_len"),
    "managers.schedule_batch:Req.set_finish_with_abort": ("self", "error_msg", "status_code"),
    "managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
    "._maybe_update_reasoning_tokens": ("self", "req", "next_token_id"),
    "managers.scheduler_components.output_streamer:SchedulerOutputStreamer.stream_output": (
        "self",
        "reqs",
        "return_logprob",
    ),
    "sampling.penaltylib.orchestrator:_BatchedPenalizer.prepare": ("self",),
    "entrypoints.openai.serving_chat:OpenAIServingChat.__init__": (
        "self",
        "tokenizer_manager",
        "template_manager",
    ),
    "entrypoints.openai.serving_chat:OpenAIServingChat._convert_to_internal_request": (
        "self",
        "request",
        "raw_request",
    ),
    "entrypoints.openai.serving_chat:OpenAIServingChat._render_and_encode_chat_template": (
        "self",
        "messages",
        "tools",
        "template_kwargs",
        "encode_kwargs",
        "use_cache",
    ),
    "entrypoints.openai.serving_chat:OpenAIServingChat._validate_request": ("self", "request"),
    "entrypoints.openai.serving_chat:OpenAIServingChat._tool_call_parsing_active": ("self", "request"),
    "entrypoints.openai.serving_chat:OpenAIServingChat._effective_tools": ("self", "request"),
    "entrypoints.openai.serving_chat:OpenAIServingChat._get_history_tool_calls_cnt": ("self", "request"),
    "entrypoints.openai.serving_chat:OpenAIServingChat._process_tool_call_id": (
        "self",
        "call_item",
        "history_tool_calls_cnt",
    ),
    "entrypoints.openai.serving_chat:OpenAIServingChat._process_reasoning_stream": (
        "self",
        "index",
        "delta",
        "reasoning_parser_dict",
        "content",
        "request",
        "finish_reason_type",
    ),
    "entrypoints.openai.serving_chat:OpenAIServingChat._check_for_unstreamed_tool_args": (
        "self",
        "parser",
        "content",
        "request",
        "index",
    ),
    "entrypoints.engine:Engine._launch_subprocesses": (
        "server_args",
        "init_tokenizer_manager_func",
        "run_scheduler_process_func",
        "run_detokenizer_process_func",
        "port_args",
        "placement_group",
    ),
    "entrypoints.engine:init_tokenizer_manager": ("server_args", "port_args", "TokenizerManagerClass"),
    "utils.patch_tokenizer:decode_without_hf_kwargs": ("tokenizer", "token_ids", "skip_special_tokens"),
    "managers.detokenizer_manager:DetokenizerManager.handle_batch_token_id_out": ("self", "recv_obj"),
    "managers.scheduler:run_scheduler_process": ("server_args", "port_args"),
    "layers.attention.torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_decode": (
        "self",
        "query",
        "output",
        "k_cache",
        "v_cache",
        "req_to_token",
        "req_pool_indices",
        "seq_lens",
        "encoder_lens",
        "scaling",
    ),
    "layers.attention.torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_extend": (
        "self",
        "query",
        "output",
        "k_cache",
        "v_cache",
        "req_to_token",
        "req_pool_indices",
        "seq_lens",
        "extend_prefix_lens",
        "extend_seq_lens",
        "encoder_lens",
        "scaling",
    ),
    "managers.detokenizer_manager:run_detokenizer_process": (
        "server_args",
        "port_args",
        "detokenizer_manager_class",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _importable() -> None:
    prepare_process()


def test_the_pinned_version_is_the_one_installed() -> None:
    """Everything below was read in this version."""
    assert version("sglang") == "0.5.20"


@pytest.mark.parametrize("where", PARAMETERS)
def test_a_private_function_has_the_parameters_we_call_it_with(where: str) -> None:
    """A method that was renamed, or takes other arguments, fails here and not in production."""
    import pkgutil

    function = pkgutil.resolve_name(f"sglang.srt.{where}")
    parameters = tuple(inspect.signature(function).parameters)
    assert parameters[: len(PARAMETERS[where])] == PARAMETERS[where]


def test_a_batch_has_the_columns_that_are_handed_over() -> None:
    """The hand-over reads these columns of a batch by name."""
    import msgspec
    from sglang.srt.managers.io_struct import BatchStrOutput

    from app.engine.sglang.live_choices import StepBatch

    columns = {field.name for field in msgspec.structs.fields(BatchStrOutput)}
    assert columns >= set(StepBatch._fields)


def test_a_plain_delta_is_what_its_constructor_makes() -> None:
    """The hot path builds its tuples without the constructor; they must stay of one shape."""
    from app.core import Counts, Delta
    from app.engine.sglang.parse import PlainChoice

    made: list[Delta] = []

    class Output:
        put = staticmethod(made.append)

    PlainChoice(3, Output(), 9).take("x", [1], None, Counts(9, 1), None, 0)
    assert made == [Delta(3, "text", "x", [1], Counts(9, 1))]
    assert type(made[0]) is Delta


def test_this_machine_runs_our_platform_unless_it_has_an_accelerator() -> None:
    """SGLang resolves the CPU platform through the entry point where it finds no device of its own."""
    from sglang.srt.platforms import current_platform

    assert activate() == (CPU_PLATFORM if needs_cpu_platform() else None)
    assert (type(current_platform).__name__ == "CpuPlatform") is needs_cpu_platform()


def test_only_the_engine_and_its_process_modules_import_before_start() -> None:
    """What the server imports before `start()` has no SGLang in it at module level."""
    engine = Path(__file__).parents[2] / "app" / "engine"
    early = (
        "engine run args allowed_args platform process_work watchdog live_choices recovery remote child node"
    )
    for name in [*(f"sglang/{name}" for name in early.split()), "sink"]:
        tree = ast.parse((engine / f"{name}.py").read_text())
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
        assert not any(imported.split(".")[0] in {"sglang", "torch", "transformers"} for imported in names)


def test_speculation_takes_the_grammars_away() -> None:
    """SGLang then has none, whatever reaches it."""
    from app.engine.sglang.args import SGLangOptions, server_arguments

    alone = server_arguments(SGLangOptions())
    drafted = server_arguments(SGLangOptions(server_args={"speculative_algorithm": "NGRAM"}))
    assert (alone["grammar_backend"], drafted["grammar_backend"]) == ("xgrammar", "none")


def test_a_child_model_s_arguments_are_refused_by_name_too() -> None:
    """At the start of this process, not over and over in the child's."""
    from app.engine_factory import check_child_args
    from app.settings import Settings, SettingsError

    check_child_args(Settings())
    for table, setting in (("small", "small_model"), ("guard", "safety_guard_model")):
        model = {setting: str(BUILTIN_MODEL)}
        check_child_args(Settings(**model, engine_args={table: {"max_total_tokens": 1, "tp_size": 0}}))
        with pytest.raises(SettingsError, match=rf"^\[engine.{table}\] nonsense: SGLang has no such"):
            check_child_args(Settings(**model, engine_args={table: {"nonsense": 1}}))
        with pytest.raises(SettingsError, match=rf"^\[engine.{table}\] tp_size: 8 GPUs .* 4 attention heads"):
            check_child_args(Settings(**model, engine_args={table: {"tp_size": 8}}))
