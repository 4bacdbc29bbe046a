"""The scripted engine beyond the contract: its script, its faults, its determinism."""

from __future__ import annotations

import asyncio

import pytest

from app.core import ChatRequest, Delta, Health, Prompt
from app.engine.scripted.engine import Script, ScriptedEngine, scripted_text
from app.errors import EngineFailed, EngineNotReady, EngineOverloaded
from app.settings import SettingsError


def request(rid: str = "r", n: int = 1, **body) -> ChatRequest:
    """A request to the scripted model."""
    messages = [{"role": "user", "content": "hello"}]
    return ChatRequest(rid, "local", "scripted", {"messages": messages, **body}, 0, n=n)


async def started(script: Script, **options) -> ScriptedEngine:
    """An engine that can take work."""
    engine = ScriptedEngine(script, **options)
    await engine.start()
    return engine


async def answer(engine: ScriptedEngine, chat: ChatRequest) -> list[Delta]:
    """All deltas of one request."""
    prompt = await engine.render(chat)
    return [delta async for delta in engine.generate(chat.request_id, prompt)]


def text_of(deltas: list[Delta], choice: int = 0, channel: str = "text") -> str:
    """The text of one choice and channel."""
    return "".join(d.text for d in deltas if d.choice == choice and d.channel == channel)


def test_script_is_parsed():
    """A script on the command line sets the keys it names."""
    script = Script.parse("rate=50,tokens=200,seed=1,tool=weather,finish=length")
    assert script == Script(rate=50.0, tokens=200, seed=1, tool="weather", finish="length")
    assert Script.parse("") == Script()


@pytest.mark.parametrize(
    "text", ["speed=1", "rate=fast", "tokens=1.5", "fault=explode", "finish=never", "rate"]
)
def test_malformed_scripts_are_refused(text: str):
    """An unknown key or a value of the wrong kind is an error that names it."""
    with pytest.raises(SettingsError, match=text.partition("=")[0]):
        Script.parse(text)


async def test_answers_are_a_function_of_the_seed():
    """The same seed gives the same text, another seed and another choice another."""
    engine = await started(Script(tokens=20, seed=4))
    first = await answer(engine, request(n=2))
    again = await answer(engine, request(n=2))
    other = await answer(engine, request(seed=5))
    assert text_of(first) == text_of(again) == "".join(scripted_text(4, 0, 20))
    assert text_of(first, 1) == "".join(scripted_text(4, 1, 20)) != text_of(first)
    assert text_of(other) == "".join(scripted_text(5, 0, 20))


async def test_reasoning_comes_first_and_is_counted():
    """The first tokens are reasoning, and counted as such within the completion."""
    deltas = await answer(await started(Script(tokens=10, reasoning=4)), request())
    pieces = scripted_text(0, 0, 10)
    assert text_of(deltas, channel="reasoning") == "".join(pieces[:4])
    assert text_of(deltas) == "".join(pieces[4:])
    assert (deltas[-1].counts.completion_tokens, deltas[-1].counts.reasoning_tokens) == (10, 4)


async def test_stop_string_cuts_the_text():
    """A stop string, also one across tokens, ends the text before it and is named."""
    pieces = scripted_text(0, 0, 30)
    stop = pieces[5][-3:] + pieces[6][:2]
    deltas = await answer(await started(Script(tokens=30)), request(stop=stop))
    assert (deltas[-1].finish_reason, deltas[-1].matched_stop) == ("stop", stop)
    assert stop not in text_of(deltas)
    assert "".join(pieces).startswith(text_of(deltas))


@pytest.mark.parametrize(("fault", "error"), [("fail", EngineFailed), ("overload", EngineOverloaded)])
async def test_faults_break_one_answer(fault: str, error: type[Exception]):
    """A fault comes after its number of tokens and leaves nothing running."""
    engine = await started(Script(tokens=20, fault=fault, fault_after=3))
    seen = []
    prompt = await engine.render(request())

    async def read() -> None:
        async for delta in engine.generate("r", prompt):
            seen.append(delta)  # noqa: PERF401  # what came before the error is kept

    with pytest.raises(error):
        await read()
    assert len(seen) == 3
    assert engine.load().num_running_reqs == 0
    assert engine.health() is Health.READY


async def test_death_ends_everything_and_is_told_once():
    """When the engine dies every answer in progress fails, and no new one begins."""
    reasons: list[str] = []
    engine = await started(Script(rate=1, tokens=99), on_death=reasons.append)
    running = [asyncio.create_task(answer(engine, request(f"r{i}"))) for i in range(3)]
    while engine.load().num_running_reqs < 3:
        await asyncio.sleep(0)
    engine.die("killed")
    for task in running:
        with pytest.raises(EngineFailed):
            await task
    assert (reasons, engine.health(), engine.load().num_running_reqs) == (["killed"], Health.DEAD, 0)
    prompt = await engine.render(request())
    with pytest.raises(EngineNotReady):
        engine.generate("r", prompt)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_miscount_claims_one_token_too_many(n: int):
    """The counts of one choice run ahead of the ids from the fault on; the tally does not."""
    engine = await started(Script(tokens=6, fault="miscount", fault_after=2))
    deltas = await answer(engine, request(n=n))
    first = [d.counts.completion_tokens for d in deltas if d.choice == 0]
    assert first == [1, 2, 4, 5, 6, 7, 7]
    assert engine.pop_emitted_tokens("r") == 6 * n
    assert sum(d.counts.completion_tokens for d in deltas if d.finish_reason) == 6 * n + 1


async def test_hang_ends_with_abort():
    """A hanging answer says nothing more until it is aborted, then ends with the true counts."""
    engine = await started(Script(tokens=20, fault="hang", fault_after=3))
    prompt = await engine.render(request())
    deltas = engine.generate("r", prompt)
    for _ in range(3):
        await anext(deltas)
    last = asyncio.ensure_future(anext(deltas))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not last.done()
    engine.abort("r")
    final = await last
    assert (final.finish_reason, final.counts.completion_tokens) == ("abort", 3)
    assert [d async for d in deltas] == []
    assert engine.load().num_running_reqs == 0


async def test_closing_fails_what_runs():
    """Closing the engine ends answers in progress; closing again does nothing."""
    engine = await started(Script(rate=1, tokens=99))
    running = asyncio.create_task(answer(engine, request()))
    while not engine.load().num_running_reqs:
        await asyncio.sleep(0)
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineFailed):
        await running


async def test_a_past_answer_is_taken_over():
    """The next turn's ids begin with the last prompt and answer, unless the answer was changed."""
    engine = await started(Script(tokens=40))
    first = request()
    deltas = await answer(engine, first)
    run = [*(await engine.render(first)).token_ids, *(i for d in deltas for i in d.token_ids)]

    async def next_turn(said: str) -> Prompt:
        messages = [*first.body["messages"], {"role": "assistant", "content": said}]
        body = {"messages": [*messages, {"role": "user", "content": "and then?"}]}
        return await engine.render(ChatRequest("r2", "local", "scripted", body, 0, past=[run]))

    prompt = await next_turn(text_of(deltas))
    assert (prompt.past_runs, prompt.rerendered) == (1, None)
    assert prompt.token_ids[: len(run)] == run
    changed = await next_turn("something else")
    assert (changed.past_runs, changed.rerendered) == (0, "template changed turn 1")
