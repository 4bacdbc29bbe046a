"""Texts that are no one's request are classified as a prompt would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.metering.traffic import Histogram
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.policies.policy import Policies
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.verdict import ScreenFailed
from tests.support.policies import WordClassifier, write_models


class Moderating:
    """A screen over a classifier of words."""

    def __init__(self, directory: Path, classifier: Any) -> None:
        self.counters = SafetyCounters(Histogram(HOLD_BACK_S))
        self.screen = PromptScreen(classifier, self.counters)
        self._policies = Policies(None, write_models(directory))

    async def result(self, text: str, level: str | None = None) -> dict[str, Any]:
        """The result for a key of that level."""
        return await self.screen.moderate(text, self._policies.current.at_level(level).enforced)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Moderating]]:
    """Screens; their threads end with the test."""
    moderators = [
        Moderating(tmp_path, WordClassifier(full={"bad": {"S2": 0.95, "S9": 0.97}, "odd": {"S2": 0.5}})),
        Moderating(tmp_path, object()),
    ]
    yield moderators
    for moderating in moderators:
        moderating.screen.close()


async def test_text_that_would_be_blocked_is_flagged_in_every_category_that_would(made: list[Moderating]):
    """By the full reading; the scores are those of the screen."""
    result = await made[0].result("a bad text")
    assert (result["flagged"], result["watched"]) == (True, True)
    assert sum(result["categories"].values()) >= 2
    assert max(result["category_scores"].values()) == 0.97


async def test_text_that_would_be_watched_is_not_flagged(made: list[Moderating]):
    """And no category is."""
    result = await made[0].result("an odd text")
    assert (result["flagged"], result["watched"]) == (False, True)
    assert not any(result["categories"].values())


async def test_key_of_a_strict_level_has_a_strict_answer(made: list[Moderating]):
    """Never a looser one."""
    plain = await made[0].result("an odd text")
    strict = await made[0].result("an odd text", "strict")
    assert strict["flagged"] >= plain["flagged"]
    assert strict["watched"]


async def test_text_that_cannot_be_read_has_no_result(made: list[Moderating]):
    """Nothing is called harmless for want of a screen."""
    with pytest.raises(ScreenFailed):
        await made[1].result("a text")
