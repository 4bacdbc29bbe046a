"""Answers that go on behind token ids: SGLang says of the whole what it would have said undisturbed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.engines import Answer, ask, chat, fresh_rid

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "born": {"type": "integer", "minimum": 1000, "maximum": 9999},
    },
    "required": ["name", "born"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 24, "ignore_eos": True},
    "its own end": {"max_tokens": 200},
    "json schema": {"max_tokens": 60, "response_format": JSON},
    "tool": {"max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"},
    "min_tokens": {"max_tokens": 200, "min_tokens": 120},
    # Few letters to choose from, so that each choice depends on all before it.
    "frequency penalty": {"max_tokens": 60, "regex": "[a-e]{40}", "frequency_penalty": 2.0},
    "presence penalty": {"max_tokens": 60, "regex": "[a-z]{24}", "presence_penalty": 2.0},
    "repetition penalty": {"max_tokens": 60, "regex": "[a-z]{24}", "repetition_penalty": 2.0},
    "multi-byte characters": {"max_tokens": 64, "regex": "[\u4e16\u754c\U0001f600]{12}"},
}


@pytest.fixture(params=["sglang_engine", "overlap_engine"], scope="module")
def engine(request: pytest.FixtureRequest) -> Any:
    """SGLang with the scheduler of a CPU, and with that of a GPU."""
    return request.getfixturevalue(request.param)


async def continued(
    engine: Any, request: Any, prior: Sequence[Sequence[int]], abort_after: int | None = None
) -> Answer:
    """The answer to a request whose choices have generated `prior` already."""
    request = dataclasses.replace(request, request_id=fresh_rid())
    prompt = dataclasses.replace(await engine.render(request), continued=prior)
    deltas = []
    async for delta in engine.generate(request.request_id, prompt):
        deltas.append(delta)
        if abort_after and sum(len(d.token_ids) for d in deltas) >= abort_after:
            engine.abort(request.request_id)
    assert engine.pop_emitted_tokens(request.request_id) == sum(len(delta.token_ids) for delta in deltas)
    return Answer(prompt, deltas)


def essence(answer: Answer, choice: int = 0) -> dict[str, Any]:
    """What both runs must agree in: everything but how much was cached, and the calls' random ids."""
    tools = [(d.tool.index, d.tool.name) for d in answer.of(choice) if d.tool is not None and d.tool.name]
    return {
        "ids": answer.token_ids(choice),
        "text": answer.text(choice),
        "arguments": answer.text(choice, "tool"),
        "tools": tools,
        "finish": answer.finish_reason(choice),
        "matched": answer.of(choice)[-1].matched_stop,
        "counts": answer.counts(choice)._replace(cached_tokens=0),
    }


def cuts(total: int) -> list[int]:
    """After nothing, one id, some, half, and all but one."""
    return sorted({0, 1, total // 4, total // 2, total // 2 + 1, total - 1})


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_goes_on_as_it_would_have(engine: Any, name: str) -> None:
    """Wherever it is cut, the text, the ids, the counts and the end are those of the whole run."""
    request = chat("Tell me of rings", temperature=0, **BODIES[name])
    whole = await ask(engine, request)
    ids = whole.token_ids()
    for cut in cuts(len(ids)):
        again = await continued(engine, request, [ids[:cut]])
        assert essence(again) == essence(whole), f"cut after {cut} of {len(ids)} ids"
        counts = [delta.counts.completion_tokens for delta in again.deltas]
        assert counts == sorted(counts)


async def test_prompts_that_are_read_in_between_change_no_penalty(engine: Any) -> None:
    """Each token is counted once, and in the same step, whatever else the engine does."""
    request = chat(
        "Tell me of rings", temperature=0, max_tokens=220, regex="[a-e]{200}", frequency_penalty=0.7
    )
    alone = await ask(engine, request)
    beside = asyncio.create_task(ask(engine, dataclasses.replace(request, request_id=fresh_rid())))
    read = 0
    while not beside.done():
        await ask(engine, chat(f"Number {read}?", max_tokens=1))
        read += 1
    assert read > 2
    assert essence(await beside) == essence(alone)


async def test_every_cut_through_a_character_gives_whole_characters(engine: Any) -> None:
    """Ids in the middle of a character lose no byte of it and repeat none."""
    request = chat("Say it", temperature=0, **BODIES["multi-byte characters"])
    whole = await ask(engine, request)
    ids = whole.token_ids()
    tokenizer = engine._running().launched.manager.tokenizer
    broken = [cut for cut in range(1, len(ids)) if tokenizer.decode(ids[:cut]).endswith("\ufffd")]
    assert broken
    for cut in broken[:8]:
        again = await continued(engine, request, [ids[:cut]])
        assert essence(again) == essence(whole)
        assert "\ufffd" not in again.text()


async def test_a_stop_string_across_the_cut_ends_the_answer_before_it(engine: Any) -> None:
    """Half of a stop string is in the ids that were there, half in those to come."""
    free = await ask(engine, chat(temperature=0, max_tokens=40, ignore_eos=True))
    tokenizer = engine._running().launched.manager.tokenizer
    middle = len(free.token_ids()) // 2
    before, after = tokenizer.decode(free.token_ids()[:middle]), free.text()
    stop = after[len(before) - 2 : len(before) + 2]
    assert stop not in before
    request = chat(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
    whole = await ask(engine, request)
    assert whole.finish_reason() == "stop"
    again = await continued(engine, request, [free.token_ids()[:middle]])
    assert essence(again) == essence(whole)


async def test_two_choices_go_on_each_behind_its_own_ids(engine: Any) -> None:
    """One choice may be further than the other, or not have begun."""
    request = chat("Two", temperature=0, n=2, max_tokens=24, ignore_eos=True)
    whole = await ask(engine, request)
    again = await continued(engine, request, [whole.token_ids(0)[:9], []])
    assert [essence(again, choice) for choice in range(2)] == [essence(whole, choice) for choice in range(2)]


async def test_logprobs_come_for_the_new_tokens_alone(engine: Any) -> None:
    """The ids that were there have none; the others have theirs, as in the whole run."""
    request = chat(temperature=0, max_tokens=16, ignore_eos=True, logprobs=True, top_logprobs=2)
    whole = await ask(engine, request)
    again = await continued(engine, request, [whole.token_ids()[:6]])
    assert essence(again) == essence(whole)
    assert len(again.logprobs()) == 10
    for entry, expected in zip(again.logprobs(), whole.logprobs()[6:], strict=True):
        assert entry["token"] == expected["token"]
        assert entry["logprob"] == pytest.approx(expected["logprob"], abs=1e-3)
        assert len(entry["top_logprobs"]) == 2


@pytest.mark.parametrize(
    "body",
    [{"max_tokens": 12, "ignore_eos": True}, {"max_tokens": 60, "response_format": JSON}],
    ids=["length", "stop"],
)
async def test_an_answer_that_was_complete_just_ends(engine: Any, body: dict[str, Any]) -> None:
    """With all of its ids there, nothing is generated, and its end is what it was."""
    request = chat("Rings?", temperature=0, **body)
    whole = await ask(engine, request)
    again = await continued(engine, request, [whole.token_ids()])
    assert essence(again) == essence(whole)


async def test_an_answer_that_its_grammar_forbids_is_refused(engine: Any) -> None:
    """Ids that no run with this grammar can have made do not go on."""
    from app.errors import EngineFailed

    free = await ask(engine, chat("Hello", temperature=0, max_tokens=8, ignore_eos=True))
    request = chat("Rings?", temperature=0, response_format=JSON, max_tokens=60)
    with pytest.raises(EngineFailed) as refused:
        await continued(engine, request, [free.token_ids()])
    assert refused.value.code == "engine_restarted"


async def test_an_abort_ends_an_answer_that_goes_on(engine: Any) -> None:
    """Its counts are those of all its ids."""
    request = chat("Go", temperature=0, max_tokens=2000, ignore_eos=True)
    first = await ask(engine, request, abort_after=10)
    again = await continued(engine, request, [first.token_ids()[:8]], abort_after=20)
    assert again.finish_reason() == "abort"
    assert again.token_ids()[:8] == first.token_ids()[:8]
    assert again.counts().completion_tokens == len(again.token_ids()) >= 20
