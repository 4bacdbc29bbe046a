"""The numbers of tensor parallel ranks (`tp`) that SGLang 0.5.20 accepts for a model, from its configuration.

SGLang asserts most of this while the model is built, in each rank's process and one layer at a time. Vision
encoders are left out: those that cannot be divided by what divides the heads pad themselves. Nothing here
imports SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from app.settings import SettingsError

VOCABULARY_PADDING = 64
"""Entries to whose multiple SGLang pads a vocabulary (`DEFAULT_VOCAB_PADDING_SIZE`)."""
TEXT_CONFIGS = ("llm_config", "language_config", "text_config")
KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def config_of(folder: Path) -> Any:
    """The configuration of a model's folder as its file has it. Raises OSError, ValueError."""
    text = (folder / "config.json").read_text("utf-8")
    return json.loads(text, object_hook=lambda entries: SimpleNamespace(**entries))


def choose(config: Any, arguments: Mapping[str, Any], asked: int, devices: int, setting: str) -> int:
    """The ranks that the setting asks for, 0 being as many as work; `devices` is 0 without a GPU.

    Raises SettingsError, with the numbers that work, for one that does not.
    """
    # Without a GPU a rank is a share of the cores, of which there are always enough.
    max_ranks = largest(arguments, devices) if devices else max(1, asked)
    numbers = working(config, arguments, max_ranks)
    if asked in numbers or (numbers and not asked):
        return asked or numbers[-1]
    wanted = asked or max(1, max_ranks)
    why = obstacle(config, arguments, wanted)
    if why is None:
        why = f"this machine has GPUs for {max_ranks} ranks"
    works = f"{setting} can be {', '.join(map(str, numbers))}" if numbers else "no number works"
    raise SettingsError(f"{setting}: {wanted} GPUs cannot share the model, because {why}; {works}.")


def working(config: Any, arguments: Mapping[str, Any], max_ranks: int) -> list[int]:
    """The numbers of ranks up to `max_ranks` that work with SGLang's `arguments`."""
    return [tp for tp in range(1, max_ranks + 1) if obstacle(config, arguments, tp) is None]


def largest(arguments: Mapping[str, Any], devices: int) -> int:
    """The ranks for which there are GPUs, beside data and pipeline parallel ones."""
    replicas = 1 if arguments.get("enable_dp_attention") else _number(arguments, "dp_size")
    step = _number(arguments, "gpu_id_step")
    usable = -(-(devices - int(arguments.get("base_gpu_id") or 0)) // step)
    return max(0, usable * _number(arguments, "nnodes") // (_number(arguments, "pp_size") * replicas))


def obstacle(config: Any, arguments: Mapping[str, Any], tp: int) -> str | None:
    """The first reason why so many ranks cannot share the model, as a clause; None where they can."""
    return next(_obstacles(config, arguments, tp), None)


def _obstacles(config: Any, arguments: Mapping[str, Any], tp: int) -> Iterator[str]:
    groups = _number(arguments, "attn_cp_size")
    if arguments.get("enable_dp_attention"):
        groups *= _number(arguments, "dp_size")
    if tp % groups:
        yield f"dp_size and attn_cp_size ask for a multiple of {groups}"
        return
    experts_apart = str(arguments.get("moe_a2a_backend") or "none") != "none"
    ep = tp if experts_apart else _number(arguments, "ep_size")
    expert_groups = ep * _number(arguments, "moe_dp_size")
    if tp % expert_groups:
        yield f"ep_size and moe_dp_size ask for a multiple of {expert_groups}"
        return
    if tp * _number(arguments, "pp_size") % _number(arguments, "nnodes"):
        yield f"{arguments['nnodes']} nodes cannot have the same number of them"
    text = text_config(config)
    attention = tp // groups
    yield from _attention(text, attention)
    width = attention if arguments.get("enable_dp_lm_head") else tp
    vocabulary = getattr(text, "vocab_size", None)
    if vocabulary and (padded := -(-vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING) % width:
        yield f"its vocabulary, {padded} entries once padded, cannot be divided by {width}"
    yield from _feed_forward(config, text, tp, tp // expert_groups)
    yield from _quantized_attention(config, text, attention)


def text_config(config: Any) -> Any:
    """The part of a multimodal model's configuration that its language model has."""
    thinker = getattr(config, "thinker_config", None)
    if thinker is not None:
        return getattr(thinker, "text_config", None) or thinker
    return next(
        (inner for name in TEXT_CONFIGS if (inner := getattr(config, name, None)) is not None), config
    )


def _attention(text: Any, ranks: int) -> Iterator[str]:
    heads, kv_heads = getattr(text, "num_attention_heads", None), kv_heads_of(text)
    if heads and heads % ranks:
        yield f"its {heads} attention heads cannot be divided by {ranks}"
    # MLA keeps one compressed cache, which every rank has.
    if kv_heads and not getattr(text, "kv_lora_rank", None) and not _shares(kv_heads, ranks):
        yield f"its {kv_heads} KV heads can neither be divided by {ranks} nor repeated on {ranks}"
    sliding = getattr(text, "swa_num_key_value_heads", None)
    if sliding and not _shares(sliding, ranks):
        yield f"the {sliding} KV heads of its sliding windows do not fit {ranks}"
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if (getattr(text, name, None) or 0) % ranks:
            yield f"its {name}, {getattr(text, name)}, cannot be divided by {ranks}"


def kv_heads_of(text: Any) -> int | None:
    """The KV heads of a language model, as SGLang's `ModelConfig` finds them."""
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    named = (getattr(text, name, None) for name in KV_HEADS)
    inner = getattr(getattr(text, "attn_config", None), "kv_n_heads", None)
    return inner or next((number for number in named if number), getattr(text, "num_attention_heads", None))


def _shares(kv_heads: int, ranks: int) -> bool:
    """True if each rank has some of the heads, or several ranks the same one."""
    return kv_heads % ranks == 0 if kv_heads >= ranks else ranks % kv_heads == 0


def _feed_forward(config: Any, text: Any, tp: int, expert_ranks: int) -> Iterator[str]:
    name, ranks = "intermediate_size", tp
    if any(getattr(text, expert, None) for expert in EXPERTS):
        name = "moe_intermediate_size" if hasattr(text, "moe_intermediate_size") else name
        ranks = expert_ranks
    size = getattr(text, name, None)
    if not isinstance(size, int):  # some models have one for each layer
        return
    if size % ranks:
        yield f"its {name}, {size}, cannot be divided by {ranks}"
    elif ranks > 1:
        for block in {*_blocks(config, text)}:
            if size // ranks % block:
                yield f"{size // ranks} of its {name} would not be whole blocks of {block} quantised weights"


def _quantized_attention(config: Any, text: Any, ranks: int) -> Iterator[str]:
    heads = getattr(text, "num_attention_heads", None)
    blocks = _blocks(config, text)
    if ranks == 1 or not blocks or not heads or getattr(text, "kv_lora_rank", None):
        return
    kept = _entry(config, text, "modules_to_not_convert") or _entry(config, text, "ignored_layers") or ()
    if any("attn" in layer for layer in kept):
        return
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = {heads // ranks * head_dim: blocks[-1]}
    if len(blocks) == 2:  # the output of q, k and v has blocks too
        sizes |= {max(1, (kv_heads_of(text) or heads) // ranks) * head_dim: blocks[0]}
    for size, block in sizes.items():
        if size % block:
            yield f"{size} of its attention would not be whole blocks of {block} quantised weights"


def _blocks(config: Any, text: Any) -> Sequence[int]:
    """The sides of the blocks in which weights are quantised: two in block-wise FP8, one in AWQ and GPTQ."""
    if blocks := _entry(config, text, "weight_block_size"):
        return tuple(blocks)
    size = (
        _entry(config, text, "group_size") if _entry(config, text, "quant_method") in {"awq", "gptq"} else 0
    )
    return (size,) if isinstance(size, int) and size > 1 else ()


def _entry(config: Any, text: Any, name: str) -> Any:
    """An entry of the quantisation; in a file it is an object, in transformers' configuration a dict."""
    table = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    return table.get(name) if isinstance(table, dict) else getattr(table, name, None)


def _number(arguments: Mapping[str, Any], name: str) -> int:
    return max(1, int(arguments.get(name) or 1))
