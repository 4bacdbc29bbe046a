"""Draws whole conversations: one question, several turns, foreign system prompts, tools, long contexts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scripts.training.builtin_model.corpus.background import foreign_text, system_prompt
from scripts.training.builtin_model.corpus.intents import Wordings, draw_question
from scripts.training.builtin_model.corpus.noise import roughen
from scripts.training.builtin_model.corpus.skills import draw_skill
from scripts.training.builtin_model.corpus.toolbox import draw_call, draw_tools


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; only an assistant's content is learnt. `intent` is the number of the intent it answers."""

    role: str
    content: str
    intent: int | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation that ends with an assistant's turn."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = field(default=())


class DialogueSource:
    """An endless, seeded stream of conversations."""

    def __init__(self, wordings: Wordings, seed: int) -> None:
        self._wordings = wordings
        self._rng = Random(seed)  # noqa: S311 -- text from a seed, no secret
        self._weights = [len(intent.wordings) ** 0.5 for intent in wordings.intents]

    def draw(self) -> Dialogue:
        """The next conversation."""
        draw = self._rng.random()
        if draw < 0.87:
            return self._single()
        if draw < 0.93:
            return self._several_turns(self._rng.randint(2, 4))
        if draw < 0.96:
            return self._with_tools()
        if draw < 0.999:
            return self._behind_long_prompt(self._rng.randint(40, 250))
        return self._long()

    def question_and_answer(self) -> tuple[Message, Message]:
        """One turn about anything: mostly an intent, now and then a skill."""
        if self._rng.random() < 0.04:
            question, answer = draw_skill(self._rng)
            return Message("user", question), Message("assistant", answer)
        number = self._rng.choices(range(len(self._weights)), weights=self._weights, k=1)[0]
        intent = self._wordings.intents[number]
        question = roughen(draw_question(intent, self._wordings, self._rng), self._wordings, self._rng)
        return Message("user", question), Message("assistant", self._rng.choice(intent.answers), number)

    def _opening(self, chance: float) -> tuple[Message, ...]:
        if self._rng.random() >= chance:
            return ()
        return (Message("system", system_prompt(self._rng)),)

    def _single(self) -> Dialogue:
        return Dialogue((*self._opening(0.2), *self.question_and_answer()))

    def _several_turns(self, turns: int) -> Dialogue:
        messages = [*self._opening(0.2)]
        for _ in range(turns):
            messages.extend(self.question_and_answer())
        return Dialogue(tuple(messages))

    def _behind_long_prompt(self, words: int) -> Dialogue:
        prompt = Message("system", f"{system_prompt(self._rng)} {foreign_text(self._rng, words)}")
        messages = [prompt]
        for _ in range(self._rng.choice((1, 1, 2))):
            messages.extend(self.question_and_answer())
        return Dialogue(tuple(messages))

    def _long(self) -> Dialogue:
        messages = [*self._opening(0.5)]
        for _ in range(self._rng.randint(2, 12)):
            question, answer = self.question_and_answer()
            if self._rng.random() < 0.5:
                pasted = foreign_text(self._rng, self._rng.randint(20, 700))
                question = Message("user", f"{pasted}\n\n{question.content}")
            messages.extend((question, answer))
        return Dialogue(tuple(messages))

    def _with_tools(self) -> Dialogue:
        tools = draw_tools(self._rng)
        opening = self._opening(0.3)
        if self._rng.random() < 0.35:
            return Dialogue((*opening, *self.question_and_answer()), tools)
        question, name, arguments, result, reply = draw_call(self._rng, tools)
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        messages = [
            *opening,
            Message("user", question),
            Message("assistant", f"<tool_call>\n{call}\n</tool_call>"),
        ]
        if self._rng.random() < 0.5:
            messages += [
                Message("tool", f"<tool_response>\n{result}\n</tool_response>"),
                Message("assistant", reply),
            ]
        return Dialogue(tuple(messages), tools)
