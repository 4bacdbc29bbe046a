"""Stage `load`: TTFT, TPOT, tokens/s and the GPU's use as more streams run at once, in bf16 and in FP8."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks.driver import RunFailed, RunResult, record_load, served_model
from scripts.benchmarks.findings import Finding, none_of, unjudged
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import chat_work
from scripts.benchmarks.serve import our_command
from scripts.gpu import workload
from scripts.gpu.state import Checkup
from scripts.gpu.usage import GpuUse, sampled

TOKENS, PROMPT_WORDS = 128, 100
"""Mean tokens of an answer, and words of a prompt."""
ROUNDS, DRY_ROUNDS = {1: 3, 16: 3, 64: 2, 256: 2}, {1: 2, 4: 2}
"""Requests of each stream by the number of streams, in the order of the loads."""
LOAD_S = 60.0
"""Seconds without which another load is not begun."""
HEADS = (
    "precision",
    "streams",
    "failed",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "TPOT p50, ms",
    "ITL p99, ms",
    "tokens/s",
    "GPU busy, %",
    "GPU memory, MiB",
    "GPU power, W",
    "server CPU/token, us",
    "event loop busy, %",
)
PRECISIONS: Mapping[str, Mapping[str, Any]] = {"bf16": {}, "fp8": {"quantization": "fp8"}}


def run(check: Checkup) -> None:
    """See the module. One precision that fails does not keep the other from being measured."""
    model = workload.model_path(check.options, check.work)
    precisions = ["bf16"] if check.options.dry_run else list(PRECISIONS)
    speeds: dict[str, dict[int, float]] = {}
    failures: list[Exception] = []
    for precision in precisions:
        try:
            speeds[precision] = _measure(check, precision, model)
        except Exception as exc:  # noqa: BLE001  # told below, once the other is measured
            check.find(
                Finding(f"{precision} failed", f"{type(exc).__name__}: {exc}"[-300:].replace("|", "/"))
            )
            failures.append(exc)
    for streams, speed in speeds.get("fp8", {}).items():
        if plain := speeds.get("bf16", {}).get(streams):
            check.find(unjudged(f"tokens/s of FP8 to bf16, {streams} streams", f"{speed / plain:.2f}"))
    check.find(none_of("precisions that failed", len(failures)))
    if failures:
        raise failures[0]


def _measure(check: Checkup, precision: str, model: str) -> dict[int, float]:
    """Tokens/s by the number of streams."""
    folder = check.work / precision
    folder.mkdir()
    server = _server(check, precision, model)
    speeds, began_s = {}, time.monotonic()
    try:
        server.start()
        server.wait_ready(check.left_s())
        check.find(unjudged(f"start until ready with {precision}, s", f"{time.monotonic() - began_s:.1f}"))
        name = served_model(server.port)
        rounds = DRY_ROUNDS if check.options.dry_run else ROUNDS
        for streams in rounds:
            if check.left_s() < LOAD_S:
                check.tell(f"{streams} streams: skipped, {check.left_s():.0f} s are left")
                continue
            _run(check, server, name, streams, rounds=1)  # kernels of this size, and what admission expects
            before_s = server.event_loop_s()
            with sampled() as use:
                result, failed = _run(check, server, name, streams, rounds=rounds[streams])
            speeds[streams] = result.tokens_per_s
            loop_percent = 100 * (server.event_loop_s() - before_s) / result.wall_s
            _keep(check, precision, result, failed, use, loop_percent)
    finally:
        server.stop()
    return speeds


def _server(check: Checkup, precision: str, model: str) -> ServerProcess:
    port, folder = free_port(), check.work / precision
    if check.options.model == "scripted":
        command = [sys.executable, *workload.scripted_command(port, folder / "data")]
    else:
        arguments = {**workload.model_args(check.options, workload.LOAD_POOL_TOKENS), **PRECISIONS[precision]}
        command = our_command(port, folder / "data", model=model, server_args=arguments)
    return ServerProcess(precision, command, port, folder / "server.log")


def _run(
    check: Checkup, server: ServerProcess, model: str, streams: int, *, rounds: int
) -> tuple[RunResult, str]:
    """What was measured, and how many were refused or cut: an overloaded server is a result too."""
    requests, seed = streams * rounds, 1000 * streams + rounds
    tokens = TOKENS // 8 if check.options.dry_run else TOKENS
    work = chat_work(model, requests, mean_tokens=tokens, prompt_words=PROMPT_WORDS, seed=seed)
    path = "/api/chat/completions"
    bodies, output_tokens = work.bodies, work.output_tokens
    plan = LoadPlan("127.0.0.1", server.port, path, bodies, output_tokens, streams, check.left_s())
    recorded = record_load(server, plan)
    failed = recorded.failed()
    reason = next((recorded.report["requests"][at]["error"] for at in failed), "")
    if len(failed) == requests:
        raise RunFailed(f"all {requests} streams failed; first: {reason}")
    return recorded.result(failed), f"{len(failed)}: {reason}"[:120].replace("|", "/") if failed else "0"


def _keep(
    check: Checkup, precision: str, result: RunResult, failed: str, use: GpuUse, loop_percent: float
) -> None:
    row = (
        precision,
        result.streams,
        failed,
        result.ttft_p50_ms,
        result.ttft_p99_ms,
        result.tpot_p50_ms,
        result.itl_p99_ms,
        result.tokens_per_s,
        use.busy_percent,
        use.memory_mib,
        use.power_w,
        result.serving_cpu_us_per_token,
        loop_percent,
    )
    check.add_row("Rising load", HEADS, row)
    check.tell(
        f"{precision}, {result.streams} streams: {result.tokens_per_s:.0f} tokens/s, "
        f"failed {failed}, TTFT p50 {result.ttft_p50_ms:.0f} ms, TPOT p50 {result.tpot_p50_ms:.1f} ms, "
        f"GPU busy {use.busy_percent:.0f} %"
    )
