"""`Prompt.continued` with an engine whose model runs in another server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.core import Engine
from tests.support.engines import Answer, ask, chat, fresh_rid

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


async def go_on(engine: Engine, whole: Answer, *cuts: int) -> Answer:
    """The answer of a process that knows so many tokens of each choice."""
    runs = [whole.token_ids(choice)[:cut] for choice, cut in enumerate(cuts)]
    prompt = dataclasses.replace(whole.prompt, continued=runs)
    return Answer(prompt, [delta async for delta in engine.generate(fresh_rid(), prompt)])


@pytest.mark.parametrize("cut", [1, 7, 29, 30])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": True},
        {"stop": "token "},
        {"min_tokens": 20},
        {"regex": "[a-f]{40}"},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=["plain", "logprobs", "stop", "least", "grammar", "penalties"],
)
async def test_an_answer_goes_on_behind_its_ids(remote_engine: Engine, options: Any, cut: int) -> None:
    """All of it comes, from its first token, as if it had not been interrupted."""
    request = chat(temperature=0, max_tokens=30, **options)
    whole = await ask(remote_engine, request)
    answer = await go_on(remote_engine, whole, cut)
    assert answer.text() == whole.text()
    assert answer.token_ids() == whole.token_ids()
    assert answer.finish_reason() == whole.finish_reason()
    assert answer.counts()._replace(cached_tokens=0) == whole.counts()._replace(cached_tokens=0)
    assert len(answer.deltas[0].token_ids) == min(cut, len(whole.token_ids()))


async def test_each_choice_goes_on_behind_its_own_ids(remote_engine: Engine) -> None:
    """One that has not begun yet begins."""
    whole = await ask(remote_engine, chat(temperature=0, max_tokens=20, ignore_eos=True, n=3))
    answer = await go_on(remote_engine, whole, 5, 0, 20)
    for choice in range(3):
        assert answer.text(choice) == whole.text(choice)
        assert answer.token_ids(choice) == whole.token_ids(choice)
        assert answer.finish_reason(choice) == "length"
