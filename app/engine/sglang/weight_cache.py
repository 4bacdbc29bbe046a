"""SGLang's weight cache: a process beside the server keeps the weights while engines come and go.

`[engine.sglang] weight_cache_mode = "client"` has the engine take them from there (docs/weights.md). Here the
settings with which that cannot work are refused; app.engine.sglang.weight_daemon starts the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.settings import SettingsError


def check_weight_cache(arguments: Mapping[str, Any], where: str, *, has_gpu: bool) -> None:
    """Raise SettingsError for a weight cache that SGLang 0.5.20 cannot have with these server arguments."""
    mode = arguments.get("weight_cache_mode", "off")
    if mode == "off":
        return

    def refuse(why: str) -> None:
        raise SettingsError(f"{where} weight_cache_mode: {why}")

    if where != "[engine.sglang]":
        refuse("a GPU has one cache, and that is the main model's")
    if mode != "client":
        refuse("a cache that the engine starts ends with it; set 'client' and run scripts/weight-cache")
    if not has_gpu:
        refuse("it keeps weights in GPU memory, and this machine has no GPU")
    if arguments.get("speculative_algorithm"):
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
