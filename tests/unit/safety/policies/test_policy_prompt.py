"""The operator's words in front of a prompt: where they stand, and what they cost nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.core import ChatRequest, Counts, Prompt, RawPrompt
from app.engine.scripted.engine import Script, ScriptedEngine
from app.errors import BadRequest
from app.safety.policies.policy_prompt import PolicyPrompt

TEXT = "Be kind to all"


class Engine(ScriptedEngine):
    """Keeps what it rendered; refuses system messages where its template has none."""

    def __init__(self, *, system: bool = True, name: str = "scripted") -> None:
        super().__init__(Script(), name=name)
        self.rendered: list[list[dict[str, Any]]] = []
        self._system = system

    async def render(self, request: ChatRequest) -> Prompt:
        """See Engine.render."""
        messages = list(request.body["messages"])
        if not self._system and any(m["role"] == "system" for m in messages):
            raise BadRequest("System role not supported")
        self.rendered.append(messages)
        return await super().render(request)


def asked(*messages: tuple[str, Any]) -> ChatRequest:
    """A request of these roles and contents."""
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return ChatRequest("chatcmpl-1", "local", "scripted", body, 0)


async def test_the_text_stands_before_a_prompt_without_a_template():
    """As text in front, and its tokens are not billed; they are counted once."""
    engine, policy_prompt = Engine(), PolicyPrompt()
    request = replace(asked(("user", "one two")), raw=RawPrompt("one two"))
    for text in (TEXT, TEXT, "Short"):
        prompt = await policy_prompt.render(engine, request, text)
        words = await engine.tokenize("", f"{text}\n\n", add_special_tokens=True)
        assert list(prompt.token_ids)[: len(words)] == words
        assert (prompt.unbilled_tokens, prompt.billed_tokens) == (len(words), 2)
    assert request.raw == RawPrompt("one two")


@pytest.mark.parametrize(
    ("messages", "first"),
    [
        ([("user", "hello there")], ("system", TEXT)),
        ([("system", "rules of mine"), ("user", "hi")], ("system", f"{TEXT}\n\nrules of mine")),
        ([("developer", "rules of mine"), ("user", "hi")], ("developer", f"{TEXT}\n\nrules of mine")),
        (
            [("system", [{"type": "text", "text": "mine"}]), ("user", "hi")],
            ("system", [{"type": "text", "text": TEXT}, {"type": "text", "text": "mine"}]),
        ),
    ],
)
async def test_the_text_stands_before_all_else(messages, first):
    """In a system message of its own, or at the head of the client's."""
    engine, request = Engine(), asked(*messages)
    await PolicyPrompt().render(engine, request, TEXT)
    rendered = engine.rendered[-1]
    assert (rendered[0]["role"], rendered[0]["content"]) == first
    assert rendered[-1] == request.body["messages"][-1]
    assert request.body["messages"][0]["content"] == messages[0][1]


async def test_its_tokens_are_not_billed():
    """The prompt counts as if it were not there."""
    engine, request = Engine(), asked(("user", "hello there"))
    plain = await engine.render(request)
    prompt = await PolicyPrompt().render(engine, request, TEXT)
    assert prompt.unbilled_tokens == len(prompt.token_ids) - len(plain.token_ids) == 5
    assert prompt.billed_tokens == len(plain.token_ids)


async def test_they_are_counted_once():
    """For a text and a place; then it costs one rendering as without."""
    engine, aligned = Engine(), PolicyPrompt()
    for _ in range(3):
        await aligned.render(engine, asked(("user", "hello")), TEXT)
    assert len(engine.rendered) == 2 + 3
    await aligned.render(engine, asked(("system", "mine"), ("user", "hello")), TEXT)
    assert len(engine.rendered) == 2 + 3 + 2 + 1


async def test_each_model_is_measured():
    """Their templates differ: one may have no place for system messages."""
    aligned, engines = PolicyPrompt(), (Engine(), Engine(system=False, name="other"))
    first, other = [await aligned.render(engine, asked(("user", "hello")), TEXT) for engine in engines]
    assert (first.unbilled_tokens, other.unbilled_tokens) == (5, 3)


async def test_a_template_without_system_messages_has_it_in_the_users():
    """At the head of the first."""
    engine = Engine(system=False)
    prompt = await PolicyPrompt().render(
        engine, asked(("user", "hello"), ("assistant", "hi"), ("user", "so")), TEXT
    )
    assert [m["content"] for m in engine.rendered[-1]] == [f"{TEXT}\n\nhello", "hi", "so"]
    assert prompt.unbilled_tokens > 0


async def test_a_prompt_that_cannot_be_rendered_is_refused_as_ever():
    """The error is the engine's own."""
    with pytest.raises(BadRequest):
        await PolicyPrompt().render(Engine(), asked(("user", [{"type": "image_url", "image_url": {}}])), TEXT)


@pytest.mark.parametrize(
    ("counts", "billed"),
    [
        (Counts(100, 7, 64, 2), Counts(90, 7, 54, 2)),
        (Counts(100, 7, 8, 2), Counts(90, 7, 0, 2)),
        (Counts(10, 7, 10, 2), Counts(0, 7, 0, 2)),
    ],
)
def test_cached_tokens_are_a_part_of_the_prompts(counts, billed):
    """What is not billed was cached first of all."""
    assert Prompt(range(100), 10, None, unbilled_tokens=10).as_billed(counts) == billed
