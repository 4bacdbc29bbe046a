"""Engines of their own, each in a process of its own, because SGLang keeps one configuration per process.

`python sglang_scenarios.py NAME [ARGUMENT]` runs one and prints what happened as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import uvloop
from engines import ask, chat, next_turn

from app.core import ChatRequest, Prompt
from app.engine.child import ChildCommand, ChildServer
from app.engine.remote_engine import RemoteEngine, RemoteOptions
from app.engine.sglang_args import BUILTIN_MODEL, SGLangOptions, bare_server_command
from app.engine.sglang_engine import SGLangEngine
from app.engine.sglang_platform import prepare_process
from app.engine.sglang_remote import RemoteModelOptions, load_remote_model
from app.engines import GUARD_ARGS, build_guard_engine
from app.errors import BadRequest, ServingError
from app.safety.guard import Guard
from app.safety.guard_templates import FORMATS
from app.settings import Settings

CUMULATIVE = {"incremental_streaming_output": False}
LONG = {"max_tokens": 4000, "ignore_eos": True}


async def started(on_death: Callable[[str], None] | None = None, **options: Any) -> SGLangEngine:
    """A running engine."""
    engine = SGLangEngine(SGLangOptions(**options), on_death=on_death)
    await engine.start()
    return engine


def child(name: str) -> int:
    """The process id of SGLang's child of that kind."""
    found = [p for p in psutil.Process().children(recursive=True) if name in p.name()]
    assert len(found) == 1, [p.name() for p in psutil.Process().children(recursive=True)]
    return int(found[0].pid)


def children_left() -> int:
    """SGLang's processes that still run; multiprocessing's own tracker stays by design."""
    return sum("sglang" in p.name() for p in psutil.Process().children(recursive=True))


async def death_of(name: str) -> dict[str, Any]:
    """Kill a child in the middle of a generation."""
    deaths: list[str] = []
    engine = await started(deaths.append)
    request = chat(n=2, **LONG)
    prompt = await engine.render(request)
    received, error, killed_at, noticed_s = 0, None, 0.0, 0.0
    try:
        async for delta in engine.generate(request.request_id, prompt):
            received += len(delta.token_ids)
            if received >= 10 and not killed_at:
                killed_at = time.monotonic()
                os.kill(child(name), signal.SIGKILL)
    except ServingError as exc:
        noticed_s, error = time.monotonic() - killed_at, type(exc).__name__
    render_error = None
    try:
        await engine.render(chat())
    except ServingError as exc:
        render_error = type(exc).__name__
    health = engine.health().value
    await engine.aclose()
    return {
        "received": received,
        "error": error,
        "noticed_s": noticed_s,
        "deaths": deaths,
        "health": health,
        "render_error": render_error,
        "children_left": children_left(),
    }


async def restart(_: str) -> dict[str, Any]:
    """Close and start again in the same process, and go on from where an answer stood."""
    descriptors, threads, texts = [], [], []
    for _round in range(3):
        engine = await started(server_args={"random_seed": 1})
        texts.append((await ask(engine, chat(temperature=0, max_tokens=20, ignore_eos=True))).text())
        await engine.aclose()
        descriptors.append(psutil.Process().num_fds())
        threads.append(psutil.Process().num_threads())
    return {"descriptors": descriptors, "threads": threads, "texts": texts}


async def tensor_parallel(_: str) -> dict[str, Any]:
    """Two ranks over gloo."""
    engine = await started(tp=2)
    answer = await ask(engine, chat(temperature=0, max_tokens=16, ignore_eos=True, n=2))
    schedulers = sum("scheduler" in p.name() for p in psutil.Process().children(recursive=True))
    await engine.aclose()
    return {
        "schedulers": schedulers,
        "counts": [answer.counts(choice) for choice in range(2)],
        "ids": [answer.token_ids(choice) for choice in range(2)],
    }


async def single(_: str) -> dict[str, Any]:
    """The reference for `tensor_parallel`: one rank."""
    engine = await started()
    answer = await ask(engine, chat(temperature=0, max_tokens=16, ignore_eos=True))
    await engine.aclose()
    return {"ids": answer.token_ids()}


async def retracted(_: str) -> dict[str, Any]:
    """More in flight than a small pool holds to its end."""
    engine = await started(server_args={"max_total_tokens": 2000})
    before = engine.load().num_retractions
    asked = [ask(engine, chat(temperature=0, max_tokens=300, ignore_eos=True)) for _ in range(16)]
    answers = await asyncio.gather(*asked)
    seen = engine.load().num_retractions
    await engine.aclose()
    lengths = [answer.counts().completion_tokens for answer in answers]
    return {"before": before, "retractions": seen, "lengths": lengths}


async def bad_start(path: str) -> dict[str, Any]:
    """A model that is not there, and one whose scheduler fails while it loads."""
    torn = Path(path, "torn")
    shutil.copytree(BUILTIN_MODEL, torn)
    os.truncate(torn / "model.safetensors", 1000)
    outcomes = []
    for options in (
        {"model": path + "/nothing-here"},
        {"model": str(torn)},
        {"server_args": {"max_total_token": 64}},
    ):
        engine = SGLangEngine(SGLangOptions(**options))
        try:
            await engine.start()
        except Exception as exc:  # noqa: BLE001  # which one it is, is the result
            outcomes.append([type(exc).__name__, str(exc)])
        await engine.aclose()
    return {"outcomes": outcomes, "children_left": children_left()}


async def vision(path: str) -> dict[str, Any]:
    """Images of several sizes to a tiny Qwen2.5-VL, then what cannot be read."""
    import tiny_vision

    prepare_process()
    tiny_vision.build(Path(path))
    engine = await started(model=path, server_args={"enable_multimodal": True})
    sizes = {"none": [], "112": [(112, 112)], "224": [(224, 112)], "two": [(56, 56), (112, 112)]}
    counts = {}
    for name, images in [*sizes.items(), ("again", sizes["112"])]:
        answer = await ask(engine, chat(_with_images(images), max_tokens=4, ignore_eos=True, n=2))
        counts[name] = [*answer.counts(1), len(answer.prompt.token_ids)]
    refused = {}
    for url in ("data:image/png;base64,AAAA", "file:///etc/hosts", "http://127.0.0.1:9/x.png", "/etc/x.png"):
        try:
            await engine.render(chat([{"type": "image_url", "image_url": {"url": url}}]))
        except BadRequest as exc:
            refused[url] = [exc.param, exc.message]
    capabilities = sorted(engine.model.capabilities)
    past = [await _past(engine, content) for content in ("hello", _with_images([(56, 56)]))]
    await engine.aclose()
    return {"counts": counts, "refused": refused, "capabilities": capabilities, "past": past}


async def guards(path: str) -> dict[str, Any]:
    """A tiny model of each guard format: what it is asked, and the scores of a prompt and of an answer."""
    import tiny_guard

    prepare_process()
    seen = {}
    for form in FORMATS:
        model = tiny_guard.build(Path(path, form.name), form)
        engine = await started(model=str(model), server_args=GUARD_ARGS)
        prompts = _rendered(engine)
        guard = Guard(engine, form, timeout_s=60)
        question = {"role": "user", "content": "May I <|eot_id|> ask?"}
        scores = [
            await guard.score(said)
            for said in ([question], [question, {"role": "assistant", "content": "You may."}])
        ]
        seen[form.name] = {"scores": scores, "prompts": prompts, "running": engine.load().num_running_reqs}
        await guard.aclose()
        await engine.aclose()
    return seen


async def beside(path: str) -> dict[str, Any]:
    """A guard in a child beside the model of this process, which answers before, meanwhile and after."""
    import tiny_guard

    prepare_process()
    form = FORMATS[0]
    model = tiny_guard.build(Path(path, form.name), form)
    engine = await started()
    question = chat(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [(await ask(engine, question)).text()]
    settings = Settings(data_dir=Path(path), safety_guard_model=str(model))
    guarding = build_guard_engine(settings, print)
    assert guarding is not None
    await guarding.start()
    guard = Guard(guarding, form, timeout_s=60)
    asked = [{"role": "user", "content": "May I ask?"}]
    scores, answer = await asyncio.gather(
        guard.score(asked), ask(engine, chat(**question.body, max_tokens=12))
    )
    texts.append(answer.text())
    await guard.aclose()
    await guarding.aclose()
    texts.append((await ask(engine, chat(**question.body, max_tokens=12))).text())
    await engine.aclose()
    return {"scores": scores, "texts": texts, "children_left": children_left()}


def _rendered(engine: SGLangEngine) -> list[str]:
    """The prompts that the engine renders from now on, as text."""
    prompts: list[str] = []
    render = engine.render

    async def listened(request: ChatRequest) -> Prompt:
        prompt = await render(request)
        prompts.append(engine._launched.manager.tokenizer.decode(prompt.token_ids))
        return prompt

    engine.render = listened
    return prompts


async def _answer_if_back(engine: RemoteEngine) -> Any:
    """Its answer; None while its server is away, which it may find out by asking."""
    try:
        return await ask(engine, chat(temperature=0, max_tokens=20, ignore_eos=True))
    except ServingError:
        return None


async def remote(_: str) -> dict[str, Any]:
    """SGLang's bare server, sending everything so far with each event; killed in mid-answer; back again."""

    def command(port: int) -> ChildCommand:
        *argv, arguments = bare_server_command(SGLangOptions(), port)
        return ChildCommand([*argv, json.dumps(json.loads(arguments) | CUMULATIVE)])

    prepare_process()
    child = ChildServer(command)
    engine = RemoteEngine(
        RemoteOptions(start_s=200), lambda facts: load_remote_model(facts, RemoteModelOptions()), child
    )
    await engine.start()
    plain = await ask(engine, chat(temperature=0, max_tokens=20, ignore_eos=True))
    scored = await ask(
        engine, chat(temperature=0, max_tokens=6, logprobs=True, top_logprobs=2, ignore_eos=True)
    )
    formed = await ask(engine, chat(regex="[0-9]{3}-[a-f]{4}", max_tokens=32))
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    called = await ask(engine, chat(tools=[tool], tool_choice="required", max_tokens=200, temperature=0))
    error, received = None, 0
    request = chat(**LONG)
    try:
        async for delta in engine.generate(request.request_id, await engine.render(request)):
            received += len(delta.token_ids)
            if received and child.num_starts == 1 and child.pid:
                os.killpg(child.pid, signal.SIGKILL)
    except ServingError as exc:
        error = type(exc).__name__
    async with asyncio.timeout(200):
        while (again := await _answer_if_back(engine)) is None or child.num_starts < 2:
            await asyncio.sleep(0.1)
    await engine.aclose()
    return {
        "texts": [plain.text(), again.text()],
        "ids": [plain.token_ids(), scored.token_ids()],
        "completion": [plain.counts().completion_tokens, scored.counts().completion_tokens],
        "logprobs": scored.logprobs(),
        "formed": formed.text(),
        "called": [delta.tool.name for delta in called.of() if delta.tool and delta.tool.name],
        "called_finish": called.finish_reason(),
        "lost": [error, received, engine.handed_over(request.request_id)],
        "starts": child.num_starts,
        "children_left": children_left(),
    }


async def _past(engine: SGLangEngine, content: Any) -> list[Any]:
    """What a second turn makes of the first: runs taken over, the reason, and whether it begins with it."""
    first = await ask(engine, chat(content, temperature=0, max_tokens=4, ignore_eos=True))
    prompt = await engine.render(next_turn(first, asked=content))
    whole = list(prompt.token_ids[: len(first.run())]) == first.run()
    return [prompt.past_runs, prompt.rerendered, whole]


def _with_images(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        *({"type": "image_url", "image_url": {"url": _png(*size)}} for size in sizes),
        {"type": "text", "text": "what is this"},
    ]


def _png(width: int, height: int) -> str:
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


SCENARIOS: dict[str, Callable[[str], Awaitable[dict[str, Any]]]] = {
    f.__name__: f
    for f in (
        death_of,
        restart,
        tensor_parallel,
        single,
        retracted,
        bad_start,
        vision,
        guards,
        remote,
        beside,
    )
}

if __name__ == "__main__":
    result = uvloop.run(SCENARIOS[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else ""))
    print("RESULT " + json.dumps(result))
