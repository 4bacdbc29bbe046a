"""Stage `start`: our server with the built-in model; the engine's own report, then a chat of each kind."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks import engine_args
from scripts.benchmarks.driver import served_model
from scripts.benchmarks.findings import unjudged
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.crash.engine_clients import PATH, Client
from scripts.crash.engine_kinds import FORM, TOOL
from scripts.crash.http import Connection, get_json
from scripts.gpu.state import Checkup
from scripts.gpu.workload import small_pool

KEPT = (
    "device",
    "attention_backend",
    "sampling_backend",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "chunked_prefill_size",
    "max_running_requests",
    "mem_fraction_static",
    "max_total_tokens",
    "page_size",
    "dtype",
    "kv_cache_dtype",
    "schedule_policy",
    "memory_usage",
    "startup_time",
)
EXPECTED_OF_GPU: Mapping[str, tuple[object, ...]] = {
    "device": ("cuda",),
    "attention_backend": ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha"),
    "disable_cuda_graph": (False,),
    "disable_overlap_schedule": (False,),
    "dtype": ("auto", "bfloat16"),
}
EXPECTED_OF_CPU: Mapping[str, tuple[object, ...]] = {
    "device": ("cpu",),
    "attention_backend": ("torch_native",),
    "disable_cuda_graph": (True,),
    "disable_overlap_schedule": (True,),
    "dtype": ("float32",),
}
"""By argument of SGLang, the values that it may have."""
TOKENS, RESUME_AT = 120, 20
"""Tokens of an answer, and after how many of them a client drops."""
LONGEST_STOP_S = 10.0
"""Seconds of an orderly stop; schedulers that do not end when asked to are killed after 15 s."""
ANSWER_S = 120.0
"""Longest wait for an answer: the first of its kind may compile kernels."""


def run(check: Checkup) -> None:
    """See the module."""
    port, report = free_port(), check.work / "report.json"
    config = check.work / "tokenring.toml"
    config.write_text(engine_args.config(small_pool(check.options)))
    command = [sys.executable, "-m", "scripts.gpu.observed", str(report), "serve", "--port", str(port)]
    command += ["--data-dir", str(check.work / "data"), "--config", str(config), "--safety", "off"]
    server = ServerProcess("ours", command, port, check.work / "server.log", ready_path="/readyz")
    began_s = time.monotonic()
    try:
        server.start()
        server.wait_ready(check.left_s())
        check.find(unjudged("start until ready, s", f"{time.monotonic() - began_s:.1f}"))
        check_report(check, json.loads(report.read_text()))
        asyncio.run(_chats(check, port))
        began_s = time.monotonic()
    finally:
        server.stop()
    took_s = time.monotonic() - began_s
    check.holds("orderly stop, s", f"{took_s:.1f}", f"less than {LONGEST_STOP_S:g}", took_s < LONGEST_STOP_S)


def check_report(check: Checkup, report: Mapping[str, Any]) -> None:
    """The engine's own report against what its machine must have."""
    check.keep("engine", {name: report.get(name) for name in KEPT})
    passed, has_gpu = check.options.engine_args, not check.options.dry_run
    expected = EXPECTED_OF_GPU if has_gpu else EXPECTED_OF_CPU
    for name, values in expected.items():
        allowed = (passed[name],) if name in passed else values  # what was asked for must be in force
        value = report.get(name)
        check.holds(name.replace("_", " "), value, " or ".join(map(str, allowed)), value in allowed)
    memory, chunk = report["memory_usage"], report["chunked_prefill_size"]
    if has_gpu and "chunked_prefill_size" not in passed:
        check.holds("chunked prefill size", chunk, "more than 0", chunk > 0)
    if not report["disable_cuda_graph"]:
        capture_s = report["startup_time"]["cuda_graph"]["decode"]
        check.holds("capture of CUDA graphs for decode, s", f"{capture_s:.1f}", "more than 0", capture_s > 0)
    tokens = memory["token_capacity"]
    check.holds("KV pool, tokens", tokens, "more than 0", tokens > 0)
    for name in ("max_running_requests", "sampling_backend", "mem_fraction_static", "page_size"):
        check.find(unjudged(name.replace("_", " "), report.get(name)))
    check.find(unjudged("weights, KV pool, GB", f"{memory['weight']}, {memory['kvcache']}"))


async def _chats(check: Checkup, port: int) -> None:
    _, info = await get_json(port, "/server_info")
    capacity = check.record.facts["engine"]["memory_usage"]["token_capacity"]
    believed = info["max_total_num_tokens"]
    check.holds("KV pool that admission goes by", believed, str(capacity), believed == capacity)
    model = await asyncio.to_thread(served_model, port)
    for chat in (_whole, _stream, _resumed, _schema, _choices, _logprobs, _tool):
        async with asyncio.timeout(min(ANSWER_S, check.left_s())):
            await chat(check, port, model)


def _body(model: str, **parameters: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How do I resume a stream?"}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": TOKENS, **parameters}


async def _ask(port: int, body: Mapping[str, Any]) -> tuple[int, Any]:
    async with await Connection.to(port) as connection:
        answer = await connection.ask("POST", PATH, body)
        return answer.status, await answer.json()


async def _whole(check: Checkup, port: int, model: str) -> None:
    status, answer = await _ask(port, _body(model, ignore_eos=True))
    check.holds("a chat", status, "200", status == 200)
    usage = answer["usage"]
    check.holds("its tokens", usage["completion_tokens"], str(TOKENS), usage["completion_tokens"] == TOKENS)
    check.find(unjudged("its beginning", answer["choices"][0]["message"]["content"][:60].replace("\n", " ")))


def _streamed(model: str, **parameters: Any) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return _body(model, ignore_eos=True, stream=True, stream_options=options, **parameters)


async def _stream(check: Checkup, port: int, model: str) -> None:
    reply = await Client(port, _streamed(model)).run()
    check.holds(
        "a stream ends with [DONE]", reply.error or reply.done, "True", reply.done and not reply.error
    )
    check.holds("its tokens", reply.tokens, str(TOKENS), reply.tokens == TOKENS)
    check.find(unjudged("first text, ms", f"{reply.first_text_s * 1e3:.0f}"))


async def _resumed(check: Checkup, port: int, model: str) -> None:
    client = Client(port, _streamed(model, max_tokens=10 * TOKENS))
    running = asyncio.create_task(client.run())
    while client.reply.tokens < RESUME_AT and not running.done():  # noqa: ASYNC110  # per token
        await asyncio.sleep(0.001)
    client.drop()
    reply = await running
    replayed = await client.replay()
    increasing = all(a < b for a, b in zip(reply.ids, reply.ids[1:], strict=False))
    check.holds("drops of a client, resumed with Last-Event-ID", reply.drops, "1", reply.drops == 1)
    check.holds("its ids", "increasing" if increasing else "not increasing", "increasing", increasing)
    same = reply.done and reply.text == replayed.text
    check.holds("its text is the replay's", same, "True", same)


async def _schema(check: Checkup, port: int, model: str) -> None:
    status, answer = await _ask(port, _body(model, response_format=FORM, max_tokens=400))
    text = answer["choices"][0]["message"]["content"] if status == 200 else ""
    check.holds("a JSON schema", f"{status} {text[:30]}", "200 and JSON of it", _is_ring(text))


async def _tool(check: Checkup, port: int, model: str) -> None:
    status, answer = await _ask(port, _body(model, tools=[TOOL], tool_choice="required", max_tokens=400))
    calls = (answer["choices"][0]["message"].get("tool_calls") or ()) if status == 200 else ()
    arguments = calls[0]["function"]["arguments"] if calls else ""
    check.holds(
        "a tool call", f"{status} {arguments[:30]}", "200 and JSON of the schema", _is_ring(arguments)
    )


def _is_ring(text: str) -> bool:
    try:
        ring = json.loads(text)["ring"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(re.fullmatch("[a-z]{150}", ring))


async def _choices(check: Checkup, port: int, model: str) -> None:
    status, answer = await _ask(port, _body(model, n=2, ignore_eos=True))
    ends = [choice["finish_reason"] for choice in answer["choices"]] if status == 200 else []
    check.holds("two choices", f"{status} {ends}", "200 and two ends", ends == ["length", "length"])


async def _logprobs(check: Checkup, port: int, model: str) -> None:
    status, answer = await _ask(port, _body(model, logprobs=True, top_logprobs=2, ignore_eos=True))
    entries = answer["choices"][0]["logprobs"]["content"] if status == 200 else []
    true = len(entries) == TOKENS and all(
        entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries
    )
    check.holds("logprobs", f"{status}, {len(entries)} tokens", f"200, {TOKENS} tokens", true)
