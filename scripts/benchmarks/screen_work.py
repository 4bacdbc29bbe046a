"""What `bench screen` asks, chats whose prompts the policy neither refuses nor watches, and of which side."""

from __future__ import annotations

import json
from collections.abc import Sequence

from scripts.benchmarks.driver import RunFailed
from scripts.benchmarks.prompts import Work, chat_work
from scripts.benchmarks.screen_cpu import PromptJudge
from scripts.training.safety import rows

ON, OFF = "on", "off"


class OrdinaryChats:
    """Makes them, of so many words in no order or of the `questions`; `judge` says which are ordinary."""

    def __init__(self, judge: PromptJudge, prompt_words: int, questions: Sequence[str] = ()) -> None:
        self.judge = judge
        self._prompt_words = prompt_words
        self._questions = questions

    def work(self, model: str, requests: int, *, mean_tokens: int, spread: float, seed: int) -> Work:
        """So many of them. Raises RunFailed where a third and more of the prompts are not ordinary."""
        work = chat_work(
            model,
            requests + requests // 2 + 8,
            mean_tokens=mean_tokens,
            prompt_words=self._prompt_words,
            seed=seed,
            spread=spread,
            questions=self._questions,
        )
        passes = self.judge.passes
        kept = [at for at, body in enumerate(work.bodies) if passes(json.loads(body)["messages"])]
        if len(kept) < requests:
            raise RunFailed(f"{len(work.bodies) - len(kept)} of {len(work.bodies)} prompts are not ordinary")
        return Work(
            [work.bodies[at] for at in kept[:requests]], [work.output_tokens[at] for at in kept[:requests]]
        )


def questions() -> list[str]:
    """What people ask the built-in model, of intents that no classifier was trained on; short."""
    return [row.text for row in rows.asked() if row.held_out]


def sides_in_turn(pairs: int, number: int) -> list[str]:
    """Whose turn each request of run `number` is, both sides of a pair in a row.

    In the order of Thue and Morse: of requests that come in rounds of two, four or eight, the first is as
    often of the one side as of the other, and so is every other place.
    """
    return [(ON, OFF)[(at.bit_count() + number) % 2] for at in range(2 * pairs)]
