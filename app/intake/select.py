"""Model selection: `model: "auto"`, and degraded mode. See docs/routing.md.

Decided once, before anything is reserved; told in headers, of refusals too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from app.core import ChatRequest, ModelCard, RawPrompt
from app.errors import BadRequest, ContextOverflow, NotFound, UnsupportedParameter
from app.intake.caller import Caller
from app.intake.head import Head
from app.metering.estimate import prompt_estimate
from app.routing.degraded_mode import Step
from app.routing.router import AUTO, EMPTY_BRANCH
from app.runtime import Runtime
from app.store.conversations import BranchSummary, summarize_branch

_UNNAMED = (None, "", "default")
"""The names in requests of clients that leave the choice of a model to the server."""


class ModelSelector:
    """Chooses the model of a request, and what of it is served in degraded mode."""

    def __init__(self, runtime: Runtime) -> None:
        self._backends = runtime.backends
        self._router = runtime.router
        self._degrade = runtime.degrade
        self._database = runtime.database
        self._count_text = runtime.limiter.count_text
        self._check_model = runtime.check_model

    def with_model(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with the model's name, where the caller leaves it out and only one model is served."""
        if body.get("model") in _UNNAMED and self._backends.small is None:
            return {**body, "model": self._backends.large.id}
        return body

    async def authorized_with_text(
        self, chats: Sequence[ChatRequest], caller: Caller
    ) -> Sequence[ChatRequest]:
        """The request's prompts, after a check that the caller may use the model.

        A prompt of token ids gets its text.

        Raises UnknownModel, Forbidden, BadRequest, ContextOverflow.
        """
        self._check_model(chats[0].model, caller.models)
        chats = [await self._with_text(chat) for chat in chats]
        caller.check_grammars(chats[0])  # the prompts share it
        return chats

    async def _with_text(self, chat: ChatRequest) -> ChatRequest:
        """A prompt of token ids with its text, which the screens read."""
        if chat.raw is None or chat.raw.token_ids is None:
            return chat
        token_ids, place = chat.raw.token_ids, chat.caller_names["prompt"]
        if chat.model == AUTO:
            raise UnsupportedParameter(
                f"{place}: token ids belong to one model's vocabulary; name the model, or send text.",
                param=place,
            )
        engine = self._backends.of(chat.model).engine
        limit = engine.model.max_prompt_tokens
        if len(token_ids) > limit:
            raise ContextOverflow(
                f"A prompt of this model has at most {limit:,} tokens, got {len(token_ids):,}.", param=place
            )
        try:
            text = await engine.detokenize(chat.owner, token_ids)
        except BadRequest as error:
            raise BadRequest(f"{place}: {error.message}", param=place) from None
        body = {**chat.body, "messages": [{"role": "user", "content": text}]}
        return replace(chat, raw=RawPrompt(text, token_ids), body=body)

    async def select(self, chat: ChatRequest, caller: Caller, head: Head) -> ChatRequest:
        """The request as it is to be served, with the reply's routing headers. Raises StorageUnavailable."""
        router = self._router if chat.model == AUTO else None
        degrade = self._degrade
        if degrade is not None and degrade.step is Step.NORMAL:
            degrade = None
        if router is None and degrade is None:
            return chat
        branch, tokens = EMPTY_BRANCH, 0
        if self._backends.small is not None:  # else there is nothing to choose
            branch = await self._load_branch(chat)
            tokens = prompt_estimate(chat, self._count_text)
        if router is not None:
            route = router.route(chat, tokens, requested=head.route, allowed=caller.models, branch=branch)
            chat = _served_by(
                chat, route.model, {"x-route-reason": route.header, "x-served-model": route.model}
            )
        if degrade is not None and chat.model == self._backends.large.id:
            small, tokens = self._small_for(chat, caller), tokens + branch.tokens
            decision = degrade.apply(chat, tokens, small=small, branch=branch, no_degrade=head.no_degrade)
            capped = decision.max_tokens != chat.max_tokens
            chat = _served_by(chat, decision.model, decision.headers).with_placement(length_capped=capped)
            chat = replace(chat, max_tokens=decision.max_tokens)
        return chat

    def note_refusal(self, model: str) -> Mapping[str, str]:
        """Count a refusal by a model's full queue; returns its headers. Only the large model is degraded."""
        degrade = self._degrade
        return {} if degrade is None or model != self._backends.large.id else degrade.note_refusal()

    def _small_for(self, chat: ChatRequest, caller: Caller) -> ModelCard | None:
        """The small model, where it is ready, has room, and may serve the request."""
        small = self._backends.small
        if small is None or small not in self._backends.allowed(caller.models):
            return None
        if chat.raw is not None and chat.raw.token_ids is not None:
            return None  # its vocabulary may be another
        return small.engine.model if small.ready and not small.admission.busy else None

    async def _load_branch(self, chat: ChatRequest) -> BranchSummary:
        """A summary of the conversation that the request continues."""
        conversation_id = chat.conversation_id
        if conversation_id is None or chat.new_conversation:
            return EMPTY_BRANCH
        try:
            return await self._database.read(
                lambda c: summarize_branch(c, chat.owner, conversation_id, chat.parent_id)
            )
        except NotFound:  # said by the pipeline, after all else that can be said
            return EMPTY_BRANCH


def _served_by(chat: ChatRequest, model: str, headers: Mapping[str, str]) -> ChatRequest:
    """The request for a model, with `headers` of its answer.

    They are in ASCII: a model's name may be in any language, and is percent-encoded then.
    """
    ascii_only = {
        name: text if text.isascii() else quote(text, safe=" /:;,=+") for name, text in headers.items()
    }
    if model != chat.model:
        chat = replace(chat, model=model, body={**chat.body, "model": model})
    return chat.with_placement(response_headers={**chat.placement.response_headers, **ascii_only})
