"""Engines of other configurations and fates than the tests share, because SGLang keeps one per process.

`python sglang_scenarios.py` reads `NAME [ARGUMENT]` from each line of its input, runs that, one engine after
another, and prints what happened as JSON. What fails ends the process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import uvloop

from app.core import ChatRequest, Prompt
from app.engine.sglang.args import BUILTIN_MODEL, SGLangOptions
from app.engine.sglang.engine import SGLangEngine
from app.engine.sglang.platform import prepare_process
from app.engine.sglang.run import SGLangRun
from app.engine.supervise import RestartLimits
from app.engine_factory import GUARD_ARGS
from app.errors import BadRequest, ServingError
from app.safety.guard.templates import FORMATS
from app.safety.guard.tier import Guard
from tests.support.clocks import unhindered_s
from tests.support.engines import Answer, ask, chat, next_turn
from tests.support.preloaded import named

LONG = {"max_tokens": 4000, "ignore_eos": True}


async def started(
    on_death: Callable[[str], None] | None = None, limits: RestartLimits | None = None, **options: Any
) -> SGLangEngine:
    """A running engine."""
    engine = SGLangEngine(SGLangOptions(**options), on_death=on_death, limits=limits)
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


async def _death_of(engine: SGLangEngine, name: str) -> dict[str, Any]:
    """Kill a child in the middle of a generation."""
    request = chat(n=2, **LONG)
    prompt = await engine.render(request)
    received, error, killed_at, noticed_s = 0, None, 0.0, 0.0
    try:
        async for delta in engine.generate(request.request_id, prompt):
            received += len(delta.token_ids)
            if received >= 10 and not killed_at:
                killed_at = unhindered_s()
                os.kill(child(name), signal.SIGKILL)
    except ServingError as exc:
        noticed_s, error = unhindered_s() - killed_at, type(exc).__name__
    render_error = None
    try:
        await engine.render(chat())
    except ServingError as exc:
        render_error = type(exc).__name__
    return {
        "received": received,
        "error": error,
        "noticed_s": noticed_s,
        "health": engine.health().value,
        "render_error": render_error,
    }


async def restarts(_: str) -> dict[str, Any]:
    """One engine that loses a process three times under several kinds of requests, and one that gives up."""
    deaths: list[str] = []
    limits = RestartLimits(restarts=3, hang_s=4)
    engine = await started(deaths.append, limits, server_args={"random_seed": 1})
    undisturbed = [await ask(engine, request) for request in _kinds()]
    held, rounds = [_held()], []
    losses = [("scheduler", signal.SIGKILL), ("detokenizer", signal.SIGKILL), ("scheduler", signal.SIGSTOP)]
    for name, signum in losses:
        answers = [asyncio.create_task(ask(engine, request)) for request in _kinds()]
        while len(engine._live.running) < CHOICES or min(len(c.ids) for c in _running(engine)) < CUT:
            await asyncio.sleep(0.002)
        os.kill(child(name), signum)
        given = await asyncio.gather(*answers)
        rounds.append([_same(*pair) for pair in zip(given, undisturbed, strict=True)])
        held.append(_held())
    history = engine.restarts
    counts = [
        dict(history.losses),
        history.num_restarts,
        history.num_choices_continued,
        history.num_choices_lost,
        deaths[:],
    ]
    end = await _death_of(engine, "scheduler")
    await engine.aclose()
    return {
        "rounds": rounds,
        "held": held,
        "counts": counts,
        "end": end | {"deaths": deaths, "children_left": children_left()},
        "after": _held(),
    }


async def hung_starts(_: str) -> dict[str, Any]:
    """An engine whose second start stands still as it loads, and whose fourth does so as it warms up."""
    deaths: list[str] = []
    engine = await started(deaths.append, RestartLimits(restarts=3, hang_s=5), server_args={"random_seed": 1})
    request = chat("Number 1?", temperature=0, max_tokens=300, ignore_eos=True)
    undisturbed = await ask(engine, request)
    held = _held()
    reading = asyncio.create_task(ask(engine, request))
    while not _running(engine):
        await asyncio.sleep(0.002)
    lost, took_s = child("scheduler"), engine.restarts.start_s
    engine.restarts.start_s = 1.0  # the next start has little time
    os.kill(lost, signal.SIGKILL)
    os.kill(await _next_scheduler(lost), signal.SIGSTOP)
    engine.restarts.start_s = took_s
    same = _same(await reading, undisturbed)
    losses, reason = dict(engine.restarts.losses), engine.restarts.reason
    later = _held()
    reading = asyncio.create_task(ask(engine, request))
    while not _running(engine):
        await asyncio.sleep(0.002)
    engine.restarts.start_s = 100.0  # the limit on the warm-up is reached before that on the whole start
    with _stopped_in_warm_up():
        os.kill(child("scheduler"), signal.SIGKILL)
        [end] = await asyncio.gather(reading, return_exceptions=True)
    health = engine.health().value
    await engine.aclose()
    return {
        "same": same,
        "losses": losses,
        "reason": reason,
        "held": [held, later],
        "last": [type(end).__name__, health, deaths],
        "children_left": children_left(),
    }


async def _next_scheduler(lost: int) -> int:
    """The process id of the scheduler that follows, as soon as it is one."""
    while True:
        for process in named("scheduler", os.getpid()):
            if process.pid != lost:
                return int(process.pid)
        await asyncio.sleep(0.002)


@contextlib.contextmanager
def _stopped_in_warm_up() -> Iterator[None]:
    """Schedulers that have loaded their model stand still from then on."""
    watch = SGLangRun._watch

    def watch_and_stop(self: SGLangRun) -> None:
        watch(self)
        os.kill(child("scheduler"), signal.SIGSTOP)

    SGLangRun._watch = watch_and_stop  # type: ignore[method-assign]
    yield
    SGLangRun._watch = watch  # type: ignore[method-assign]


async def reasoning(_: str) -> dict[str, Any]:
    """An answer that only reasons, cut at several places and gone on with; at last the engine dies."""
    deaths: list[str] = []
    limits = RestartLimits(restarts=0)
    options = {"random_seed": 1, "reasoning_parser": "deepseek-r1"}
    engine = await started(deaths.append, limits, server_args=options)
    request = chat("Think", temperature=0, max_tokens=40, ignore_eos=True)
    whole = await ask(engine, request)
    seen = []
    for cut in (0, 1, 17, 39):
        prompt = await engine.render(request)
        prompt = dataclasses.replace(prompt, continued=[whole.token_ids()[:cut]])
        rid = f"{cut:032x}"
        again = Answer(prompt, [delta async for delta in engine.generate(rid, prompt)])
        seen.append(_reasoned(again))
    end = await _death_of(engine, "detokenizer")
    await engine.aclose()
    return {
        "whole": _reasoned(whole),
        "again": seen,
        "end": end | {"deaths": deaths, "children_left": children_left()},
        "after": _held(),
    }


def _reasoned(answer: Answer) -> list[Any]:
    counts = answer.counts()._replace(cached_tokens=0)
    return [answer.text(channel="reasoning"), answer.text(), answer.token_ids(), counts]


CUT = 20
SCHEMA = {
    "type": "object",
    "properties": {"ring": {"type": "string", "pattern": "^[a-z]{120}$"}},
    "required": ["ring"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "ring", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "ring", "strict": True, "parameters": SCHEMA}}
KINDS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "n": 2},
    {"ignore_eos": True, "frequency_penalty": 0.5},
    {"ignore_eos": True, "logprobs": True, "top_logprobs": 1},
    {"ignore_eos": True, "stop": ["no such words"]},
    {"min_tokens": 150},
    {"response_format": FORM},
    {"tools": [TOOL], "tool_choice": "required"},
)
CHOICES = sum(kind.get("n", 1) for kind in KINDS)


def _kinds() -> list[ChatRequest]:
    """Greedy requests whose states are rebuilt in different ways."""
    return [
        chat(f"Number {number}?", temperature=0, max_tokens=300, **kind) for number, kind in enumerate(KINDS)
    ]


def _running(engine: SGLangEngine) -> list[Any]:
    return list(engine._live.running.values())


def _same(given: Answer, undisturbed: Answer) -> list[bool]:
    """Whether the choices of two answers agree in ids, text, arguments, counts, logprobs and end."""
    return [
        given.token_ids(choice) == undisturbed.token_ids(choice)
        and given.text(choice) == undisturbed.text(choice)
        and given.text(choice, "tool") == undisturbed.text(choice, "tool")
        and given.counts(choice)._replace(cached_tokens=0)
        == undisturbed.counts(choice)._replace(cached_tokens=0)
        and len(given.logprobs(choice)) == len(undisturbed.logprobs(choice))
        and given.finish_reason(choice) == undisturbed.finish_reason(choice)
        for choice in range(given.prompt.handle.choices)
    ]


def _held() -> dict[str, int]:
    """What this process holds of the machine."""
    process = psutil.Process()
    zombies = [p for p in process.children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE]
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "zombies": len(zombies),
    }


STALLING = "ring((([a-p]{0,99}){0,99}){0,99}){0,99}"
"""Behind the word, a mask takes 2.8 s."""
MASK_MS = 10_000.0
"""An allowance that no mask uses up: only the limit on one mask's time can end its request."""
GPU_SWITCHES = {"disable_overlap_schedule": False, "chunked_prefill_size": 64}


async def tensor_parallel(switches: str) -> dict[str, Any]:
    """Two ranks over gloo, which tell what they do; a grammar that stalls, and the loss of a rank."""
    own = GPU_SWITCHES if switches == "gpu" else {}
    limits = RestartLimits(restarts=1)
    options = {"random_seed": 1, "log_level": "debug", **own}
    engine = await started(limits=limits, tp=2, grammar_mask_ms=MASK_MS, server_args=options)
    answer = await ask(engine, chat(temperature=0, max_tokens=16, ignore_eos=True, n=2))
    schedulers = sum("scheduler" in p.name() for p in psutil.Process().children(recursive=True))
    stalled = await _stalled(engine)
    kinds = [kind for kind in _kinds() if set(kind.body) & {"frequency_penalty", "response_format"}]
    undisturbed = [await ask(engine, request) for request in kinds]
    answers = [asyncio.create_task(ask(engine, request)) for request in kinds]
    while len(engine._live.running) < len(kinds) or min(len(c.ids) for c in _running(engine)) < CUT:
        await asyncio.sleep(0.002)
    os.kill(child("scheduler_TP1"), signal.SIGKILL)
    same = [_same(*pair) for pair in zip(await asyncio.gather(*answers), undisturbed, strict=True)]
    losses = dict(engine.restarts.losses)
    return {
        "schedulers": schedulers,
        "counts": [answer.counts(choice) for choice in range(2)],
        "ids": [answer.token_ids(choice) for choice in range(2)],
        "stalled": stalled,
        "same": same,
        "losses": losses,
        "exit_codes": await _closed_as_on_a_gpu(engine),
        "children_left": children_left(),
    }


async def _stalled(engine: SGLangEngine) -> dict[str, Any]:
    """How a request with a grammar that stalls ends, and what another stream does meanwhile."""
    request = chat("Number 0?", temperature=0, max_tokens=400, ignore_eos=True)
    undisturbed = await ask(engine, request)
    check, engine._grammar = engine._grammar, None  # it would be refused before it got there
    beside = asyncio.create_task(ask(engine, request))
    [end] = await asyncio.gather(
        ask(engine, chat(regex=STALLING, temperature=0, max_tokens=400, min_tokens=40)),
        return_exceptions=True,
    )
    engine._grammar = check
    same = _same(await beside, undisturbed)
    formed = await ask(engine, chat("Rings?", temperature=0, regex="[a-e]{8}"))
    return {
        "end": [type(end).__name__, str(end)],
        "same": same,
        "formed": formed.text(),
        "losses": sum(engine.restarts.losses.values()),
    }


async def _closed_as_on_a_gpu(engine: SGLangEngine) -> list[int | None]:
    """Close an engine as beside a GPU; the exit statuses that its schedulers had before any kill."""
    from app.engine.sglang import launch

    kill = launch._kill
    schedulers = [p for name, p in engine._running().launched.processes if name.startswith("scheduler")]
    exit_codes: list[int | None] = []

    def note_and_kill(processes: list[Any]) -> None:
        exit_codes.extend(process.exitcode for process in schedulers)
        kill(processes)

    with mock.patch.multiple(launch, needs_cpu_platform=lambda: False, _kill=note_and_kill):
        await engine.aclose()
    return exit_codes


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
        engine = SGLangEngine(SGLangOptions(**options), limits=RestartLimits(restarts=0))
        try:
            await engine.start()
        except Exception as exc:  # noqa: BLE001  # which one it is, is the result
            outcomes.append([type(exc).__name__, str(exc)])
        await engine.aclose()
    return {"outcomes": outcomes, "children_left": children_left()}


async def vision(path: str) -> dict[str, Any]:
    """Images of several sizes to a tiny Qwen2.5-VL, then what cannot be read."""
    from tests.support import tiny_vision

    prepare_process()
    tiny_vision.build(Path(path))
    engine = await started(model=path, server_args={"enable_multimodal": True})
    sizes = {"none": [], "112": [(112, 112)], "224": [(224, 112)], "two": [(56, 56), (112, 112)]}
    counts = {}
    for name, images in [*sizes.items(), ("again", sizes["112"])]:
        answer = await ask(engine, chat(_with_images(images), max_tokens=4, ignore_eos=True, n=2))
        counts[name] = [*answer.counts(1), len(answer.prompt.token_ids)]
    refused = {}
    bomb = "data:image/png;base64," + base64.b64encode(tiny_vision.png_of(30_000, 28_000)).decode()
    for url in (
        "data:image/png;base64,AAAA",
        bomb,
        "file:///etc/hosts",
        "http://127.0.0.1:9/x.png",
        "/etc/x.png",
    ):
        try:
            await engine.render(chat([{"type": "image_url", "image_url": {"url": url}}]))
        except BadRequest as exc:
            refused["bomb" if url == bomb else url] = [exc.param, exc.message]
    capabilities = sorted(engine.model.capabilities)
    past = [await _past(engine, content) for content in ("hello", _with_images([(56, 56)]))]
    await engine.aclose()
    return {
        "counts": counts,
        "refused": refused,
        "capabilities": capabilities,
        "past": past,
        "children_left": children_left(),
    }


async def guards(path: str) -> dict[str, Any]:
    """A tiny guard with each format's template: what it is asked, and its scores of a prompt, an answer."""
    from tests.support import tiny_guard

    prepare_process()
    model = str(tiny_guard.build(Path(path, "model"), FORMATS[0]))
    engine = await started(model=model, server_args=GUARD_ARGS)
    question = {"role": "user", "content": "May I <|eot_id|> ask?"}
    seen = {}
    for form in FORMATS:
        chat, template = engine._running().launched.chat, tiny_guard.template(Path(path), form)
        chat.template_manager.load_chat_template(engine._running().launched.manager, str(template), model)
        guard = Guard(engine, form, timeout_s=60)
        with _rendered(engine) as prompts:
            scores = [
                await guard.score(said)
                for said in ([question], [question, {"role": "assistant", "content": "You may."}])
            ]
        seen[form.name] = {"scores": scores, "prompts": prompts, "running": engine.load().num_running_reqs}
        await guard.aclose()
    await engine.aclose()
    return seen


@contextlib.contextmanager
def _rendered(engine: SGLangEngine) -> Iterator[list[str]]:
    """The prompts that the engine is asked to generate from meanwhile, as text."""
    prompts: list[str] = []
    render = engine.render

    async def listened(request: ChatRequest) -> Prompt:
        prompt = await render(request)
        prompts.append(engine._running().launched.manager.tokenizer.decode(prompt.token_ids))
        return prompt

    engine.render = listened  # type: ignore[method-assign]
    yield prompts
    engine.render = render  # type: ignore[method-assign]


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
    f.__name__: f for f in (restarts, hung_starts, reasoning, tensor_parallel, bad_start, vision, guards)
}


async def main() -> None:
    """Run what is asked for, until nothing more is."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, _, argument = line.strip().partition(" ")
        print("RESULT " + json.dumps(await SCENARIOS[name](argument)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
