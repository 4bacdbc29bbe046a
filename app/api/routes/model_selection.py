"""Model selection: `model: "auto"`, and degraded mode. See docs/routing.md.

Decided once, before anything is reserved; told in headers, of refusals too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args
from urllib.parse import quote

from starlette.requests import Request

from app.api.http.auth import Caller
from app.api.http.stream_headers import yes_or_no
from app.core import ChatRequest, ModelCard
from app.errors import BadRequest, NotFound
from app.metering.estimate import CountText, prompt_estimate
from app.routing.backend import Backends
from app.routing.degraded_mode import DegradedMode, Step
from app.routing.router import AUTO, NOTHING_BEFORE, Router, Size
from app.store.conversations import BranchSummary, summarize_branch
from app.store.database import Database

_UNNAMED = (None, "", "default")
"""The names in requests of clients that leave the choice of a model to the server."""


@dataclass(frozen=True, slots=True)
class RoutingHeaders:
    """The caller's wishes: one of the two models, and whether degraded mode must not apply."""

    route: Size | None = None
    in_full: bool | None = None
    """None where the caller does not say: then the key's terms do."""

    @classmethod
    def of(cls, request: Request) -> RoutingHeaders:
        """Read `x-route` and `x-no-degrade`. Raises BadRequest."""
        named = request.headers.get("x-route")
        if named not in (None, *get_args(Size)):
            raise BadRequest(f"x-route must be small or large, got {named!r}.", param="x-route")
        route = next((size for size in get_args(Size) if size == named), None)
        return cls(route, yes_or_no(request, "x-no-degrade"))

    def insists(self, caller: Caller) -> bool:
        """Whether the request is to be served as it was asked for, or refused."""
        if self.in_full is not None:
            return self.in_full
        return caller.key is not None and caller.key.terms.degrade == "off"


class ModelSelector:
    """Routing and degraded mode in front of a request."""

    def __init__(
        self,
        backends: Backends,
        router: Router | None,
        degrade: DegradedMode | None,
        database: Database,
        *,
        count_text: CountText,
    ) -> None:
        """`router` is None where there is a single model, `degrade` with `degrade` off."""
        self._backends = backends
        self._router = router
        self._degrade = degrade
        self._database = database
        self._count_text = count_text

    def with_model(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with the model's name, where the caller leaves it out and only one model is served."""
        if body.get("model") in _UNNAMED and self._backends.small is None:
            return {**body, "model": self._backends.large.id}
        return body

    async def select(self, chat: ChatRequest, caller: Caller, routing: RoutingHeaders) -> ChatRequest:
        """The request as it is to be served, and what is told of that. Raises StorageUnavailable."""
        router = self._router if chat.model == AUTO else None
        degrade = self._degrade
        if degrade is not None and degrade.step is Step.NORMAL:
            degrade = None
        if router is None and degrade is None:
            return chat
        so_far, tokens = NOTHING_BEFORE, 0
        if self._backends.small is not None:  # else there is nothing to choose
            so_far = await self._load_so_far(chat)
            tokens = prompt_estimate(chat, self._count_text)
        if router is not None:
            chat = _routed(router, chat, tokens, caller, routing=routing, so_far=so_far)
        if degrade is not None and chat.model == self._backends.large.id:
            chat = self._degraded(degrade, chat, tokens, caller, routing=routing, so_far=so_far)
        return chat

    def refused(self, model: str) -> Mapping[str, str]:
        """The headers of a refusal by a model's full queue; the small model's is not degraded mode."""
        degrade = self._degrade
        return {} if degrade is None or model != self._backends.large.id else degrade.refused()

    def _degraded(
        self,
        degrade: DegradedMode,
        chat: ChatRequest,
        tokens: int,
        caller: Caller,
        *,
        routing: RoutingHeaders,
        so_far: BranchSummary,
    ) -> ChatRequest:
        small, insists = self._taker(caller), routing.insists(caller)
        if chat.raw is not None and chat.raw.token_ids is not None:
            small = None  # its vocabulary may be another
        done = degrade.apply(chat, tokens + so_far.tokens, small=small, so_far=so_far, insists=insists)
        capped = done.max_tokens != chat.max_tokens
        served = _served_by(chat, done.model)
        headers = {**chat.placement.response_headers, **_as_headers(done.headers)}
        served = served.placed(length_capped=capped, response_headers=headers)
        return replace(served, max_tokens=done.max_tokens)

    def _taker(self, caller: Caller) -> ModelCard | None:
        """The small model, where it is there, has room, and the caller may use it."""
        small = self._backends.small
        if small is None or small not in self._backends.allowed(caller.models):
            return None
        return small.engine.model if small.ready and not small.admission.busy else None

    async def _load_so_far(self, chat: ChatRequest) -> BranchSummary:
        """A summary of the conversation that the request continues."""
        conversation_id = chat.conversation_id
        if conversation_id is None or chat.new_conversation:
            return NOTHING_BEFORE
        try:
            return await self._database.read(
                lambda c: summarize_branch(c, chat.owner, conversation_id, chat.parent_id)
            )
        except NotFound:  # said by the pipeline, after all else that can be said
            return NOTHING_BEFORE


def _routed(
    router: Router,
    chat: ChatRequest,
    tokens: int,
    caller: Caller,
    *,
    routing: RoutingHeaders,
    so_far: BranchSummary,
) -> ChatRequest:
    route = router.route(chat, tokens, requested=routing.route, allowed=caller.models, so_far=so_far)
    headers = _as_headers({"x-route-reason": route.header, "x-served-model": route.model})
    return _served_by(chat, route.model).placed(response_headers=headers)


def _as_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The same in ASCII: a model's name may be in any language, and is percent-encoded then."""
    return {name: text if text.isascii() else quote(text, safe=" /:;,=+") for name, text in headers.items()}


def _served_by(chat: ChatRequest, model: str) -> ChatRequest:
    if model == chat.model:
        return chat
    return replace(chat, model=model, body={**chat.body, "model": model})
