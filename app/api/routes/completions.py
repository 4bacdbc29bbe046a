"""`/v1/completions`: prompts without a template, on the same way as a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from app.api.http.answer_format import TEXT_FORMAT
from app.api.http.auth import Caller
from app.api.routes.chat import ChatRoutes
from app.api.schema.completions import CompletionRequest, parse_completion
from app.core import ChatRequest, Engine, IdempotencyKey, Placement, RawPrompt
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
        self, request: Request, raw: bytes, caller: Caller, key: IdempotencyKey | None, placement: Placement
    ) -> tuple[Sequence[ChatRequest], bool]:
        """See ChatRoutes."""

        def checked(body: Mapping[str, Any]) -> tuple[CompletionRequest, bool]:
            sent = parse_completion(
                self._selector.with_model(body),
                caller.owner,
                strict=self._settings.strict_parameters,
                idempotency=key,
                placement=placement,
            )
            return sent, bool(body.get("stream"))

        sent, streaming = await self._bodies.parse_as(request, raw, checked)
        self._check_model(sent.model, caller.models)
        engine = self._backends.of(sent.model).engine
        return [
            sent.as_chat(i, await self._raw(engine, caller.owner, sent, i), self._new_id())
            for i in range(len(sent.prompts))
        ], streaming

    async def _raw(self, engine: Engine, owner: str, sent: CompletionRequest, index: int) -> RawPrompt:
        """A prompt and its text, which the screens read. Raises BadRequest, ContextOverflow."""
        prompt, place = sent.prompts[index], sent.place(index)
        if isinstance(prompt, str):
            return RawPrompt(prompt)
        if sent.model == AUTO:
            raise UnsupportedParameter(
                f"{place}: token ids belong to one model's vocabulary; name the model, or send text.",
                param=place,
            )
        limit = engine.model.max_prompt_tokens
        if len(prompt) > limit:
            raise ContextOverflow(
                f"A prompt of this model has at most {limit:,} tokens, got {len(prompt):,}.", param=place
            )
        try:
            return RawPrompt(await engine.detokenize(owner, prompt), prompt)
        except BadRequest as error:
            raise BadRequest(f"{place}: {error.message}", param=place) from None
