"""`/v1/completions`: prompts without a template, on the same way as a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from app.api.http.answer_format import TEXT_FORMAT
from app.api.http.auth import Caller
from app.api.routes.chat import ChatRoutes
from app.api.schema.completions import parse_completion
from app.core import ChatRequest, Engine, IdempotencyKey, RawPrompt
from app.errors import BadRequest, ContextOverflow, UnsupportedParameter
from app.routing.backend import Backends
from app.routing.router import AUTO


class CompletionRoutes(ChatRoutes):
    """Handlers of `/v1/completions`."""

    format = TEXT_FORMAT

    def __init__(self, *arguments: Any, backends: Backends, **named: Any) -> None:
        """Those of ChatRoutes, and the models, whose tokenizers read the prompts of token ids."""
        super().__init__(*arguments, **named)
        self._backends = backends

    async def _parsed(
        self,
        request: Request,
        body: Mapping[str, Any],
        caller: Caller,
        key: IdempotencyKey | None,
        *,
        socket_wait_s: float,
    ) -> Sequence[ChatRequest]:
        """See ChatRoutes."""
        sent = parse_completion(
            body,
            caller.owner,
            strict=self._settings.strict_parameters,
            idempotency=key,
            socket_wait_s=socket_wait_s,
        )
        self._check_model(sent.model, caller.models)
        engine = self._backends.of(sent.model).engine
        prompts = [await self._raw(engine, sent.model, caller.owner, prompt) for prompt in sent.prompts]
        return [sent.as_chat(prompt, self._new_id()) for prompt in prompts]

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
            raise BadRequest(error.message, param="prompt") from None
