"""Arguments that may be set: a weight cache that cannot work is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.engine.sglang.allowed_args import check_weight_cache
from app.engine.sglang.args import SGLangOptions, server_arguments
from app.engine.sglang.platform import prepare_process
from app.settings import SettingsError

WHERE = "[engine.sglang]"


def model(folder: Path, quantization: dict[str, Any] | None) -> str:
    """A checkpoint's configuration."""
    config = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def refused(**arguments: Any) -> str:
    """The words with which the arguments are refused; none where they are not."""
    has_gpu, where = arguments.pop("has_gpu", True), arguments.pop("where", WHERE)
    arguments = {"model_path": "org/model", "weight_cache_mode": "client"} | arguments
    try:
        check_weight_cache(arguments, where, has_gpu=has_gpu)
    except SettingsError as error:
        prefix, _, reason = str(error).partition(" weight_cache_mode: ")
        return reason if prefix == where else f"about something else: {prefix}"
    return ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight_cache_mode": "daemon"}, "scripts/weight-cache"),
        ({"has_gpu": False}, "no GPU"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm"),
        ({"enable_memory_saver": True}, "enable_memory_saver"),
        ({"quantization": "awq"}, "'awq'"),
        ({"where": "[engine.small]"}, "main model"),
    ],
)
def test_what_cannot_work_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    """At start, and not by a process that dies while it loads."""
    assert words in refused(**arguments)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (None, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ""),
        ({"quant_method": "fp8"}, "'fp8'"),
        ({"quant_method": "gptq"}, "'gptq'"),
    ],
)
def test_a_checkpoint_says_how_it_is_quantised(tmp_path: Path, quantization: Any, words: str) -> None:
    """Weights that are not quantised, and block-wise FP8."""
    reason = refused(model_path=model(tmp_path, quantization))
    assert bool(reason) == bool(words)
    assert words in reason


def test_without_a_cache_nothing_is_refused() -> None:
    """Every machine and model."""
    assert not refused(weight_cache_mode="off", has_gpu=False, speculative_algorithm="EAGLE")


@pytest.mark.sglang
def test_a_cpu_has_no_cache() -> None:
    """The server says so at start."""
    prepare_process()
    with pytest.raises(SettingsError, match="no GPU"):
        server_arguments(SGLangOptions(server_args={"weight_cache_mode": "client"}))
