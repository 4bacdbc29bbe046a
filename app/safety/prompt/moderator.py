"""Results of the prompt screen for texts outside of a chat request: `/moderations`."""

from __future__ import annotations

from app.safety import moderation
from app.safety.policies.policy import Policies
from app.safety.prompt.prompt_screen import PromptScreen


class Moderator:
    """A text's result, as it would meet the prompt screen in a conversation of its own."""

    def __init__(self, screen: PromptScreen, policies: Policies) -> None:
        self._screen = screen
        self._policies = policies

    async def result(self, text: str, level: str | None = None, *, owner: str = "") -> moderation.Result:
        """One entry of OpenAI's `results` for an owner, by the policy for a key of that level.

        Counted as the screen's verdicts are, stored nowhere. Raises ScreenFailed.
        """
        policy = self._policies.current.at_level(level).enforced
        verdict = await self._screen.evaluate([{"role": "user", "content": text}], policy, owner=owner)
        blocked = policy.blocked(verdict.scores, "encoder") if verdict.blocked else ()
        return moderation.result(verdict, blocked)
