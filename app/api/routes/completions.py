"""`/v1/completions`: prompts without a template, on the same way as a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.http.auth import Caller
from app.api.http.rate_limit_headers import STREAM_ID
from app.api.http.sse import EventStream
from app.api.http.text_completion import CompletionWire, text_completion
from app.api.routes.chat import AnswerFormat, ChatRoutes
from app.api.schema.completions import parse_completion
from app.core import ChatRequest, Engine, IdempotencyKey, RawPrompt
from app.errors import BadRequest, ContextOverflow, ServingError, UnsupportedParameter
from app.routing.router import AUTO


class CompletionRoutes(ChatRoutes):
    """Handlers of `/v1/completions`."""

    format = AnswerFormat("cmpl-", CompletionWire.OBJECT, CompletionWire, text_completion)

    async def create(self, request: Request) -> Response | EventStream:
        """See ChatRoutes; the stages of a generation know the prompt as a message."""
        try:
            return await super().create(request)
        except ServingError as error:
            if error.param == "messages" and STREAM_ID in request.scope:
                error.param = "prompt"
            raise

    async def _parsed(
        self,
        request: Request,
        body: dict[str, Any],
        caller: Caller,
        key: IdempotencyKey | None,
        socket_wait_s: float,
    ) -> Sequence[ChatRequest]:
        """See ChatRoutes."""
        sent = parse_completion(body)
        self._runtime.check_model(sent.model, caller.models)
        if key is not None and len(sent.prompts) > 1:
            raise BadRequest("Idempotency-Key needs a single prompt.", param="Idempotency-Key")
        engine = self._runtime.backends.of(sent.model).engine
        prompts = [await self._raw(engine, sent.model, caller.owner, prompt) for prompt in sent.prompts]
        return [
            sent.as_chat(prompt, self._new_id(), caller.owner, idempotency=key, socket_wait_s=socket_wait_s)
            for prompt in prompts
        ]

    async def _raw(self, engine: Engine, model: str, owner: str, prompt: str | Sequence[int]) -> RawPrompt:
        """A prompt and its text, which the screens read. Raises BadRequest, ContextOverflow."""
        if isinstance(prompt, str):
            return RawPrompt(prompt)
        if model == AUTO:
            raise UnsupportedParameter(
                "prompt: token ids belong to one model's vocabulary; name the model, or send text.",
                param="prompt",
            )
        limit = engine.model.max_prompt_tokens
        if len(prompt) > limit:
            raise ContextOverflow(
                f"A prompt of this model has at most {limit:,} tokens, got {len(prompt):,}.", param="prompt"
            )
        try:
            return RawPrompt(await engine.detokenize(owner, prompt), prompt)
        except BadRequest as error:
            error.param = "prompt"
            raise
