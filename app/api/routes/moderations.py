"""POST /api/moderations and /v1/moderations: texts classified by this server's screens, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.schema.moderations import MAX_CHARS, parse_moderation
from app.concurrency.fair_gate import FairGate
from app.errors import SafetyUnavailable, Unavailable
from app.intake.bodies import OVERHEAD_BYTES, BodyReader
from app.intake.caller import Caller
from app.intake.client import Client
from app.metering.estimate import texts_estimate
from app.metering.limits import Lease, Limiter
from app.safety import moderation
from app.safety.prompt.prompt_screen import FAST_CHARS
from app.safety.session.service import SafetyService

MAX_BYTES = OVERHEAD_BYTES + 6 * MAX_CHARS
"""Bytes of a body: in JSON's ASCII a letter takes up to six."""
LONG_AT_ONCE = 1
SHORT_AT_ONCE = 2
"""Texts at the screen at the same time. Chat shares its thread, and waits for so many slices at most, of
different callers; a text of one or two slices does not wait for one that takes seconds."""
MAX_WAITING = 256
"""Requests of a caller in progress: pipelines send hundreds of short ones at once."""
MAX_WAITING_TOTAL = 1_024


class ModerationRoutes:
    """The handler of both routes."""

    def __init__(self, safety: SafetyService | None, limiter: Limiter, bodies: BodyReader) -> None:
        """`safety` is None with `safety` off."""
        self._safety = safety
        self._limiter = limiter
        self._bodies = bodies
        self._requests = FairGate(0, "moderations", max_per_owner=MAX_WAITING, max_total=MAX_WAITING_TOTAL)
        self._owners = FairGate(MAX_WAITING_TOTAL, one_each=True)  # one text of an owner at a time
        self._long, self._short = FairGate(LONG_AT_ONCE), FairGate(SHORT_AT_ONCE)

    async def create(self, request: Request, caller: Caller) -> Response:
        """Classify each input as the prompt that it would be.

        Raises RateLimited, SafetyUnavailable where nothing can be classified.
        """
        lease = self._limiter.begin(caller.key, generates=False)
        try:
            results = await self._read_and_classify(request, caller, lease)
        except Unavailable:
            lease.withdraw()
            raise
        answer_id = f"modr-{secrets.token_hex(14)}"
        return JSONResponse({"id": answer_id, "model": moderation.MODEL, "results": results})

    async def _read_and_classify(
        self, request: Request, caller: Caller, lease: Lease
    ) -> list[moderation.Result]:
        body = await self._bodies.read(request, caller.owner, MAX_BYTES)
        texts = await body.parse_as(parse_moderation)
        if self._safety is None:
            raise SafetyUnavailable(
                "This server runs with safety off: nothing is classified. Its operator can set `safety`.",
                should_retry=False,
            )
        lease.charge_tokens(texts_estimate(texts, self._limiter.count_text))
        level = None if caller.key is None else caller.key.terms.safety
        policy = self._safety.policies.current.at_level(level).enforced
        judge = partial(self._safety.prompts.moderate, policy=policy, owner=caller.owner)
        with self._requests.enter(caller.owner):
            client = Client(request)
            return await client.until_disconnect(self._results(judge, texts, caller.owner), "moderation")

    async def _results(
        self,
        judge: Callable[[str], Awaitable[moderation.Result]],
        texts: Sequence[str],
        owner: str,
    ) -> list[moderation.Result]:
        """A result for each text; callers alternate, text by text."""
        results = []
        for text in texts:
            gate = self._short if len(text) <= FAST_CHARS else self._long
            async with self._owners.place(owner), gate.place(owner):
                results.append(await judge(text))
            await asyncio.sleep(0)  # remembered texts are judged without waiting
        return results
