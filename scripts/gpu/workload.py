"""What the stages serve: which model, with which arguments of SGLang, in how much of the GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.gpu import random_llama
from scripts.gpu.state import Options

SMALL_POOL_TOKENS = 262_144
"""KV tokens of the built-in model where several engines share a GPU: its pool on a CPU, 32 contexts."""
LOAD_POOL_TOKENS, BENCH_POOL_TOKENS = 131_072, 98_304
"""KV tokens of the 8B model for 256 streams: 17 GB, and 13 GB where two servers share 80 GB."""
SCRIPT = "rate=200,tokens=128"
"""Speed of the scripted engine, in tokens a second and stream."""


def small_pool(options: Options) -> dict[str, Any]:
    """SGLang's arguments for the built-in model in a small part of a GPU's memory."""
    pool = {} if options.dry_run else {"max_total_tokens": SMALL_POOL_TOKENS}
    return {**pool, **options.engine_args}


def model_path(options: Options, work: Path) -> str:
    """The path or hub id of the model of `load` and `bench`, made if need be; "" is the built-in one."""
    if options.model == random_llama.NAME:
        shape = random_llama.TINY_SHAPE if options.dry_run else random_llama.SHAPE
        return str(random_llama.make(work / random_llama.NAME, shape))
    return "" if options.model in ("builtin", "scripted") else options.model


def model_args(options: Options, pool_tokens: int) -> Mapping[str, Any]:
    """SGLang's arguments for that model; the command line's win."""
    arguments: dict[str, Any] = {} if options.dry_run else {"max_total_tokens": pool_tokens}
    if options.model == random_llama.NAME:
        arguments |= random_llama.SERVER_ARGS
    return {**arguments, **options.engine_args}


def scripted_command(port: int, data_dir: Path) -> list[str]:
    """The arguments of Python that start our server with the scripted engine."""
    options = ["--port", str(port), "--data-dir", str(data_dir), "--engine", "scripted", "--scripted", SCRIPT]
    return ["-m", "app", "serve", *options, "--safety", "off"]
