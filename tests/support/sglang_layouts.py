"""Engines whose starts fail, whose pools shrink, that have replicas or another node: one scenario a process.

`python -m tests.support.sglang_layouts NAME FOLDER` prints what happened as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import uvloop

from app.core import ChatRequest, Delta
from app.engine.sglang.engine import SGLangEngine
from app.engine.sglang.platform import ChildEntry
from app.engine.supervise import RestartLimits
from app.errors import ServingError
from tests.support import compiling_scheduler
from tests.support.engines import Answer, ask, chat
from tests.support.sglang_scenarios import child, children_left, started

SMALL_POOL = 700
WITHOUT_PRIORITIES = {"schedule_policy": "lpm", "enable_priority_scheduling": False}
WITH_PRIORITIES = {
    "schedule_policy": "lof",
    "retraction_policy": "priority",
    "radix_eviction_policy": "slru",
    "priority_scheduling_preemption_threshold": 20,
    "max_running_requests": 16,
}
"""Arguments of the scheduler that may be set: with them answers go on as well."""
HANG_S = 4.0
COMPILES_S = 3.5 * HANG_S


def note(what: str) -> None:
    """Say on standard error how far a scenario has come, for whoever looks why it failed."""
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)


async def told(engine: SGLangEngine, request: ChatRequest, replica: int | None = None) -> dict[str, Any]:
    """How an answer ends, and its ids; an error's code and words."""
    prompt = dataclasses.replace(await engine.render(request), replica=replica)
    deltas: list[Delta] = []
    error = None
    try:
        async for delta in engine.generate(request.request_id, prompt):
            deltas.append(delta)  # noqa: PERF401  # those before an error count too
    except ServingError as exc:
        error = [exc.code, exc.message]
    answer = Answer(prompt, deltas)
    ids = answer.token_ids() if deltas else []
    end = answer.finish_reason() if deltas else None
    return {"ids": ids, "end": end, "error": error, "tokens": len(ids)}


async def until_running(engine: SGLangEngine, choices: int, ids: int) -> None:
    """Wait until so many choices run and each has that many ids."""
    live = engine._live.running
    while len(live) < choices or min(len(choice.ids) for choice in live.values()) < ids:
        await asyncio.sleep(0.002)


async def smaller_pool(_: str) -> dict[str, Any]:
    """An engine that comes back with a smaller pool under three answers: too long, to be too long, short."""
    engine = await started(server_args={"random_seed": 1, **WITHOUT_PRIORITIES})
    first = engine.model.kv_capacity_tokens
    limit = engine._options.server_args["max_total_tokens"]
    short = chat("Short?", temperature=0, max_tokens=600, ignore_eos=True)
    undisturbed = await ask(engine, short)
    asked = [
        chat("Long?", temperature=0, max_tokens=4000, ignore_eos=True),
        chat("Later?", temperature=0, max_tokens=2000, ignore_eos=True),
        short,
    ]
    beginning = asyncio.create_task(told(engine, asked[0]))
    await until_running(engine, 1, SMALL_POOL)
    others = [
        asyncio.create_task(told(engine, dataclasses.replace(r, request_id=f"{n:032x}")))
        for n, r in enumerate(asked[1:])
    ]
    await until_running(engine, 3, 20)
    engine._options = dataclasses.replace(
        engine._options, server_args={**engine._options.server_args, "max_total_tokens": SMALL_POOL}
    )
    os.kill(child("scheduler"), signal.SIGKILL)
    too_long, later, same = await asyncio.gather(beginning, *others)
    then = engine.model.kv_capacity_tokens
    new = await told(engine, chat("New?", temperature=0, max_tokens=4000, ignore_eos=True))
    lost = engine.restarts.num_choices_lost
    await engine.aclose()
    return {
        "pools": [first, limit, then],
        "too_long": too_long,
        "later": later,
        "same": [same["ids"] == undisturbed.token_ids(), same["error"], same["end"]],
        "new": new,
        "lost": lost,
        "children_left": children_left(),
    }


async def slow_starts(path: str) -> dict[str, Any]:
    """A first start that compiles for longer than a hang takes; then one that fails."""
    folder = Path(path)
    os.environ[compiling_scheduler.FOLDER] = path
    (folder / "compiles_s").write_text(str(COMPILES_S))
    (folder / "fails").write_text("0")
    from app.engine.sglang.platform import prepare_process

    prepare_process()
    from app.engine.sglang import launch

    def entry(environ: dict[str, str], grammar_mask_ms: float) -> ChildEntry:
        return ChildEntry("tests.support.compiling_scheduler:run", environ, grammar_mask_ms=grammar_mask_ms)

    vars(launch)["scheduler_entry"] = entry
    limits = RestartLimits(restarts=3, hang_s=HANG_S)
    engine = await started(limits=limits, server_args={"random_seed": 1})
    starts = int((folder / "starts").read_text())
    began_s = time.monotonic()
    answer = await told(
        engine, chat("long " * compiling_scheduler.LONG_TOKENS, max_tokens=4, ignore_eos=True)
    )
    took_s = time.monotonic() - began_s
    losses = dict(engine.restarts.losses)
    await engine.aclose()
    (folder / "fails").write_text("1")
    (folder / "starts").write_text("0")
    error = None
    try:
        await started(limits=limits)
    except ServingError as exc:
        error = [type(exc).__name__, exc.message]
    return {
        "starts": starts,
        "answer": answer["tokens"],
        "took_s": took_s,
        "losses": losses,
        "failed": [int((folder / "starts").read_text()), error],
        "children_left": children_left(),
    }


async def replicas(_: str) -> dict[str, Any]:
    """Two replicas: answers go where they are sent, and one that loses its scheduler takes none with it."""
    server_args = {"random_seed": 1, "dp_size": 2, **WITH_PRIORITIES}
    engine = await started(limits=RestartLimits(hang_s=120), server_args=server_args)
    model = engine.model
    request = chat("Where?", temperature=0, max_tokens=300, ignore_eos=True)
    undisturbed = await told(engine, request, replica=0)

    async def cached(replica: int) -> int:
        """How much of a prompt a replica has cached that was sent to the second one only."""
        prompt = await engine.render(chat("Cached? " * 40, temperature=0, max_tokens=2, ignore_eos=True))
        prompt = dataclasses.replace(prompt, replica=replica)
        deltas = [delta async for delta in engine.generate(f"{time.monotonic_ns():032x}", prompt)]
        return deltas[-1].counts.cached_tokens

    hits = [await cached(1), await cached(1), await cached(0), await cached(0)]
    going = [
        asyncio.create_task(told(engine, dataclasses.replace(request, request_id=f"{n:032x}"), replica=n % 2))
        for n in range(4)
    ]
    await until_running(engine, 4, 20)
    used = list(engine.load().replica_used_tokens)
    lost = engine._running().launched.scheduler_pids[1]
    name = psutil.Process(lost).name()
    os.kill(lost, signal.SIGKILL)
    answers = await asyncio.gather(*going)
    history, left = engine.restarts, await ended_in_order(engine)
    return {
        "left_to_kill": left,
        "model": [model.replicas, model.kv_capacity_tokens],
        "pool": engine._options.server_args["max_total_tokens"],
        "hits": hits,
        "used": used,
        "lost": name,
        "same": [answer["ids"] == undisturbed["ids"] for answer in answers],
        "errors": [answer["error"] for answer in answers],
        "losses": dict(history.losses),
        "children_left": children_left(),
    }


async def ended_in_order(engine: Any) -> list[int]:
    """Close the engine as beside a GPU; the schedulers that had not ended by themselves."""
    from app.engine.sglang import launch

    pids, kill, left = engine._running().launched.scheduler_pids, launch._kill, []

    def killing(processes: list[Any]) -> None:
        left.extend(
            p.pid for p in map(psutil.Process, filter(psutil.pid_exists, pids)) if p.status() != "zombie"
        )
        kill(processes)

    with mock.patch.multiple(launch, needs_cpu_platform=lambda: False, _kill=killing):
        await engine.aclose()
    return left


def _settings_file(path: Path, server_args: dict[str, Any]) -> Path:
    """A settings file with SGLang's arguments."""
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in server_args.items()]
    path.write_text("".join(["[engine.sglang]\n", *lines]))
    return path


async def two_nodes(path: str) -> dict[str, Any]:
    """One rank here and one of `tokenring node`: each is lost once under the same answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server_args = {
        "random_seed": 1,
        "nnodes": 2,
        "dist_init_addr": f"127.0.0.1:{port}",
        "max_total_tokens": 16_384,
    }
    config = _settings_file(Path(path, "node.toml"), server_args)
    command = [sys.executable, "-m", "app", "node", "--rank", "1", "--tp", "2", "--config", str(config)]
    node = psutil.Popen(command)
    engine = await started(limits=RestartLimits(hang_s=120), tp=2, server_args=server_args)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 150, "maxLength": 200}},
        "required": ["a"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    asked = [
        chat("Where?", temperature=0, max_tokens=300, ignore_eos=True),
        chat("Who?", temperature=0, max_tokens=300, ignore_eos=True, frequency_penalty=0.5),
        chat("What?", temperature=0, max_tokens=300, response_format=form),
    ]

    async def ask_all() -> list[asyncio.Task[dict[str, Any]]]:
        """All of them, once each has made some tokens."""
        fresh = [dataclasses.replace(r, request_id=f"{time.monotonic_ns():032x}") for r in asked]
        going = [asyncio.create_task(told(engine, request)) for request in fresh]
        await until_running(engine, len(asked), 20)
        return going

    note("started")
    undisturbed = await asyncio.gather(*await ask_all())
    same, ranks = [], []
    for lost in ("theirs", "ours"):
        going = await ask_all()
        theirs = [p for p in node.children(recursive=True) if "scheduler" in p.name()]
        ours = [p for p in psutil.Process().children(recursive=True) if "scheduler" in p.name()]
        ours = [p for p in ours if p not in theirs]
        ranks.append([[p.name() for p in theirs], [p.name() for p in ours]])
        (theirs if lost == "theirs" else ours)[0].kill()
        note(f"lost {lost}")
        answers = await asyncio.gather(*going)
        note(f"back {engine.restarts.losses} {[answer['error'] for answer in answers]}")
        same.append([answer == whole for answer, whole in zip(answers, undisturbed, strict=True)])
    losses = engine.restarts.num_restarts
    await engine.aclose()
    node.terminate()
    status = await asyncio.to_thread(node.wait, 60)
    return {
        "ranks": ranks,
        "tokens": [answer["tokens"] for answer in undisturbed],
        "same": same,
        "restarts": losses,
        "status": status,
        "children_left": children_left(),
    }


SCENARIOS: dict[str, Callable[[str], Awaitable[dict[str, Any]]]] = {
    f.__name__: f for f in (smaller_pool, slow_starts, replicas, two_nodes)
}

if __name__ == "__main__":
    print("RESULT " + json.dumps(uvloop.run(SCENARIOS[sys.argv[1]](sys.argv[2]))), flush=True)
