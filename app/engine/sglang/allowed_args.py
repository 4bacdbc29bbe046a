"""Which of SGLang's server arguments an operator may set, and why not the others.

Every argument of SGLang 0.5.20 stands in one of the three tables below. An argument that stands in none is
refused: it came with a newer SGLang, and nobody has looked yet whether it breaks what this server promises.
"""

from __future__ import annotations

import difflib
import linecache
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, get_type_hints

from app.engine.sglang.speculation import check_speculation
from app.settings import SettingsError

WHERE = "[engine.sglang]"

REFUSALS: Mapping[str, str] = {
    "set `model`": "model_path",
    "set `served_model_name`": "served_model_name",
    "set `tp`": "tp_size",
    "the server listens by itself: set `host` and `port`, and put TLS into a proxy": """
        host port fastapi_root_path enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
        ssl_keyfile_password enable_ssl_refresh
    """,
    "the server has keys of its own": "api_key admin_api_key",
    "the server speaks HTTP": """
        grpc_port grpc_mode smg_grpc_mode smg_http_sidecar_port grpc_worker_threads sidecar
        sidecar_args
    """,
    "it belongs to SGLang's own HTTP server, which does not run here": """
        log_level_http uvicorn_access_log_exclude_prefixes tool_server file_storage_path
        enable_response_store asr_max_buffer_seconds asr_max_concurrent_sessions batch_notify_size
        stream_response_default_include_usage return_input_ids return_output_ids
    """,
    "SGLang's metrics and traces are not collected here: see /metrics": """
        enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
        extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
        bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint stat_loggers
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
    """,
    "prompts and answers never reach a log, a file or another program": """
        log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder
        export_metrics_to_file export_metrics_to_file_dir kv_events_config load_publish_endpoint
        debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        msprobe_dump_config spec_trace_dir
    """,
    "every token is handed over as it comes": "stream_interval",
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
        disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
        num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts language_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder enable_prefix_mm_cache decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
        enable_tp_lm_head_all_to_all
    """,
    "no request can choose an adapter: merge it into the weights": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths
        max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
        lora_drain_wait_threshold uno_lora_path
    """,
    "no request can ask for what it returns": """
        enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts
        enable_return_indexer_topk sampling_mask_max_tokens
    """,
    "the scheduler runs another loop with it, in which continued answers were never tried": """
        enable_pdmux pdmux_config_path sm_group_num dllm_algorithm dllm_algorithm_config dllm_fdfo
    """,
    "ranks do not join or leave: a lost engine is started again as a whole": """
        elastic_ep_backend enable_elastic_expert_backup ep_join_mode ep_join_rank_offset
        elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout elastic_ep_rejoin
        gated_launch_port
    """,
    "weights are loaded at the start, and never replaced": """
        checkpoint_engine_wait_weights_before_ready custom_weight_loader
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        remote_instance_weight_loader_send_weights_group_ports rl_on_policy_target rl_quant_profile
    """,
    "it does not know who may share a prefix (`isolation`)": """
        enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file radix_cache_backend
        enable_unified_cache_external_linker unified_cache_external_linker_backend
    """,
    "a caller could name another's image by its hash": "trust_mm_content_hashes",
    "GPU memory that this process holds for images would outlive a lost engine": "keep_mm_feature_on_device",
    "it is for other grammar backends than xgrammar": """
        constrained_json_whitespace_pattern disable_outlines_disk_cache
    """,
    "SGLang derives it by itself": "uses_mamba_radix_cache",
}
_ALLOWED = """
    tokenizer_path tokenizer_mode tokenizer_backend weight_version chat_template hf_chat_template_name
    completion_template reasoning_parser default_chat_template_kwargs strip_thinking_cache
    enable_strict_thinking tool_call_parser sampling_defaults preferred_sampling_params
    constrained_json_disable_any_whitespace enable_dynamic_batch_tokenizer
    dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
    disable_tokenizer_batch_decode
    load_format model_loader_extra_config trust_remote_code context_length revision model_impl
    model_config_parser json_model_override_args dtype quantization quantization_param_path kv_cache_dtype
    modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
    quantize_and_serve startup_weight_load_mode weight_loader_disable_mmap
    weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_backend
    modelexpress_config download_dir model_checksum delete_ckpt_after_loading decrypted_config_file
    decrypted_draft_config_file weight_cache_mode weight_cache_socket weight_cache_timeout
    enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process mm_enable_dp_encoder
    mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
    media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request
    enable_mm_global_cache image_processor_backend mm_global_cache_backend disable_fast_image_processor
    enable_fp32_lm_head enable_tf32_matmul enable_memory_saver enable_weights_cpu_backup
    enable_draft_weights_cpu_backup
    mem_fraction_static max_running_requests max_total_tokens chunked_prefill_size prefill_decode_interval
    enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
    enable_priority_scheduling disable_priority_preemption priority_scheduling_preemption_threshold
    retraction_policy schedule_conservativeness page_size c128_page_size swa_full_tokens_ratio
    disable_hybrid_swa_memory disable_chunked_prefix_cache disable_overlap_schedule
    num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size
    mamba_full_memory_ratio enable_prefill_delayer prefill_delayer_max_delay_passes
    prefill_delayer_token_usage_low_watermark prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
    min_free_slots_delay
    radix_eviction_policy radix_eviction_policy_config disable_radix_cache enable_page_major_kv_layout
    enable_unified_memory enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size
    hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
    hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
    enable_hisparse hisparse_config
    nccl_port dist_timeout dist_init_addr nnodes dcp_size pp_size pp_max_micro_batch_size
    pp_async_batch_depth dp_size attn_cp_size moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj
    enable_prefill_cp cp_strategy enable_dsa_cache_layer_split enable_cp_decode_attn_tp
    enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
    enable_attn_tp_input_scattered enable_shared_experts_attn_tp enable_dense_mlp_attn_tp
    enable_layernorm_sp disable_attn_tp_gather enable_p2p_check ep_size moe_dense_tp_size
    device base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout soft_watchdog_timeout
    sleep_on_idle numa_node gc_threshold
    log_level show_time_cost load_snapshot_publish_interval gc_warning_threshold_secs decode_log_interval
    enable_request_time_stats_logging kv_canary kv_canary_real_data kv_canary_sweep_interval forward_hooks
    attention_backend decode_attention_backend enable_lean_attention prefill_attention_backend
    sampling_backend fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend
    dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
    disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
    triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
    enable_fused_qk_norm_rope enable_precise_embedding_interpolation enable_deepseek_v4_fp4_indexer
    dsv4_attn_backend
    mamba_backend mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
    mamba_cache_philox_rounds mamba_radix_cache_strategy mamba_track_interval enable_int8_mamba_checkpoint
    int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
    linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len
    enable_linear_replayssm_spec
    cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_tc_compiler
    disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
    enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_torch_compile
    enable_torch_compile_debug_mode torch_compile_max_bs
    enable_layerwise_nvtx_marker enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
    enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl enable_quant_communications
    enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
    flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
    enable_fused_moe_sum_all_reduce moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode
    moe_runner_backend flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode
    deepep_dispatcher_output_dtype ep_num_redundant_experts ep_dispatch_algorithm init_expert_location
    enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
    eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
    expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
    mooncake_ib_device enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
    disable_shared_experts_fusion enforce_shared_experts_fusion kt_weight_path kt_method kt_cpuinfer
    kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token flashinfer_a2a_dispatch_type
    speculative_algorithm speculative_draft_model_path speculative_draft_model_revision
    speculative_draft_load_format speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size
    speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
    speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
    speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map
    speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend
    speculative_draft_kv_cache_dtype speculative_draft_window_size speculative_moe_runner_backend
    speculative_moe_a2a_backend speculative_draft_model_quantization speculative_skip_dp_mlp_sync
    enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config
    speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
    speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path
    speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
    speculative_domino_candidate_pool_size
    enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
    cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
    ple_offload_embedding ple_offload_backend ple_offload_dir
    language_model_only
    enable_deterministic_inference
"""
ALLOWED = frozenset(_ALLOWED.split())

OWNED: Mapping[str, str] = {name: reason for reason, names in REFUSALS.items() for name in names.split()}
"""The reason for which each refused argument is refused."""
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


def check(passed: Mapping[str, Any], where: str = WHERE) -> None:
    """Raise SettingsError for what SGLang does not have, what has the wrong type, and what is not allowed."""
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    for name, value in passed.items():
        if name in OWNED and (where == WHERE or name != "tp_size"):  # `tp` is the main model's
            raise SettingsError(f"{where} {name}: not available here: {OWNED[name]}")
        if name.startswith("_") or name not in hints:
            _refuse_unknown(name, ALLOWED | set(LIMITED), where)
        if name not in ALLOWED and name not in LIMITED and name not in OWNED:
            raise SettingsError(f"{where} {name}: not available here: it is new in this SGLang, and untried")
        _check_value(name, value, hints[name], where)
    check_speculation(passed, where)
    if passed.get("nnodes", 1) > 1 and not passed.get("dist_init_addr"):
        raise SettingsError(
            f"{where} nnodes: set dist_init_addr too, the first node's address and a free port"
        )


def refused(exc: Exception, passed: Collection[str], where: str = WHERE) -> SettingsError:
    """The error for arguments that SGLang refuses together, in its own words, naming those it speaks of."""
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


def _refuse_unknown(name: str, names: Collection[str], where: str) -> NoReturn:
    near = difflib.get_close_matches(name.replace("-", "_"), list(names), n=1)
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
