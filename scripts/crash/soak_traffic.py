"""The clients of a soak: some all the time, and now and then more at once than the server takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from scripts.crash.soak_cases import Case
from scripts.crash.soak_clients import Act, Manner, SoakClient, Story
from scripts.crash.soak_lives import Lives

WORKERS = 10
NARROW_WORKERS = 3
"""Workers whose key has fewer generations than they ask for: some of their requests are 429."""
BURST = 36
"""Requests at once; the queue has 8."""
_ACTS: Mapping[Act, int] = {"listen": 50, "drop": 20, "leave": 7, "cancel": 6, "delete": 3, "repeat": 14}
_LONGEST_AWAY_S = 3.0


class SoakTraffic:
    """Makes requests and holds them; their stories are taken when all have ended."""

    def __init__(
        self,
        cases: Sequence[Case],
        lives: Lives,
        rng: random.Random,
        headers: Mapping[str, Mapping[str, str]],
    ) -> None:
        """`headers` are those of the keys "wide" and "narrow"."""
        self._cases = cases
        self._lives = lives
        self._rng = rng
        self._headers = headers
        self._is_open = False
        self._running: list[asyncio.Task[None]] = []
        self._stories: list[Story] = []
        self._num_keys = 0

    def begin(self) -> None:
        """Let clients ask, until `end`."""
        self._is_open = True
        keys = ["wide"] * (WORKERS - NARROW_WORKERS) + ["narrow"] * NARROW_WORKERS
        self._running = [asyncio.create_task(self._work(key)) for key in keys]

    def burst(self) -> None:
        """Let more clients ask at once than the server takes."""
        self._running += [asyncio.create_task(self._one("wide")) for _ in range(BURST)]

    async def end(self, timeout_s: float) -> list[Story]:
        """Ask nothing more; wait until every client has its end, and return those that have none."""
        self._is_open = False
        _, late = await asyncio.wait(self._running, timeout=timeout_s)
        for task in self._running:
            if task in late:
                task.cancel()
            else:
                task.result()
        return [story for story in self._stories if not story.ended_s]

    def take(self) -> list[Story]:
        """The stories since the last time."""
        stories, self._stories = self._stories, []
        return stories

    async def _work(self, key: str) -> None:
        while self._is_open:
            await self._one(key)

    async def _one(self, key: str) -> None:
        case = self._rng.choice(self._cases)
        story = await self._hold(case, self._manner(case), key)
        # An answer that was stopped ends as one that its model ended does: its text is shorter.
        whole = story.attempts and story.reply.text == case.expected.text and not story.deleted
        if case.then is not None and story.manner.stored and whole and self._chance(0.6):
            # Without a key: sent again after an interruption, it would be a turn behind another one.
            manner = self._manner(case.then)._replace(path="/api", stored=True, streamed=True)
            await self._hold(case.then, manner, key, story.conversation_id)

    async def _hold(self, case: Case, manner: Manner, key: str, conversation_id: str | None = None) -> Story:
        self._num_keys += 1
        is_keyed = conversation_id is None and self._chance(0.8)
        story = Story(case, manner, f"soak-{self._num_keys}" if is_keyed else None)
        self._stories.append(story)
        headers = self._headers[key]
        return await SoakClient(self._lives, story, headers, conversation_id=conversation_id).run()

    def _manner(self, case: Case) -> Manner:
        streamed = self._chance(0.8)
        act = self._rng.choices(list(_ACTS), list(_ACTS.values()))[0]
        if not streamed and act != "leave":
            act = "listen"
        return Manner(
            path="/api" if self._chance(0.5) else "/v1",
            stored=self._chance(0.5),
            streamed=streamed,
            act=act,
            after=self._rng.randint(1, max(1, case.expected.characters)),
            away_s=self._rng.uniform(0, _LONGEST_AWAY_S),
            repeats_at_end=self._chance(0.15),
        )

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share
