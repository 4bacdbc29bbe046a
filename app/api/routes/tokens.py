"""`/tokenize` and `/detokenize`: text to token ids and back, in the shape of vLLM's and SGLang's routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import json_response
from app.api.schema.chat_request import parse_chat_request
from app.api.schema.tokens import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize
from app.core import ChatRequest, Engine
from app.engine.request_limits import check_text_only
from app.errors import BadRequest
from app.intake.bodies import BodyReader
from app.intake.caller import Caller
from app.intake.client import Client
from app.intake.endpoint import new_id
from app.routing.router import AUTO
from app.runtime import Runtime

T = TypeVar("T")


class TokenRoutes:
    """The handlers of both routes. A request counts as one in its key's limits, and no token of it does."""

    def __init__(self, runtime: Runtime, bodies: BodyReader) -> None:
        self._backends = runtime.backends
        self._limiter = runtime.limiter
        self._check_ready = runtime.check_ready
        self._check_model = runtime.check_model
        self._bodies = bodies

    async def tokenize(self, request: Request, caller: Caller) -> Response:
        """The ids of texts, or of a rendered conversation. Raises BadRequest, ContextOverflow."""
        sent, chat = await self._read(request, caller, partial(_tokenize_request, owner=caller.owner))
        engine = self._engine(sent.model, caller)
        ids = await Client(request).until_disconnect(self._ids(engine, caller.owner, sent, chat), "tokenize")
        several = not isinstance(sent.prompt, str) and sent.messages is None
        return json_response(
            {
                "tokens": ids if several else ids[0],
                "count": [len(one_ids) for one_ids in ids] if several else len(ids[0]),
                "max_model_len": engine.model.context_length,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request, caller: Caller) -> Response:
        """The text of ids, or of several lists of them. Raises BadRequest."""
        sent = await self._read(request, caller, parse_detokenize)
        texts = await Client(request).until_disconnect(
            self._texts(self._engine(sent.model, caller), caller.owner, sent), "detokenize"
        )
        text = texts if sent.several else texts[0]
        return json_response({"prompt": text, "text": text, "content": text})

    async def _read(self, request: Request, caller: Caller, make: Callable[[dict[str, Any]], T]) -> T:
        """The result of `make` for the body of a charged request. Raises RateLimited, and as `make`."""
        self._check_ready()
        self._limiter.begin(caller.key, generates=False)
        body = await self._bodies.read(request, caller.owner, self._bodies.limit_bytes)
        return await body.parse_as(make)

    def _engine(self, model: str | None, caller: Caller) -> Engine:
        """The engine of a model that the caller may use; of the first one where they name none."""
        if model is None:
            allowed = self._backends.allowed(caller.models)
            model = allowed[0].id if allowed else AUTO
        self._check_model(model, caller.models)
        backend = self._backends.of(model)
        backend.check_ready()
        return backend.engine

    async def _ids(
        self, engine: Engine, owner: str, sent: TokenizeRequest, chat: ChatRequest | None
    ) -> list[Sequence[int]]:
        if chat is not None:
            chat = replace(chat, model=engine.model.id, body={**chat.body, "model": engine.model.id})
            check_text_only(chat)
            return [(await engine.render(chat)).token_ids]
        texts = [sent.prompt] if isinstance(sent.prompt, str) else sent.prompt
        add = sent.add_special_tokens
        return [await engine.tokenize(owner, text, add_special_tokens=add) for text in texts]

    async def _texts(self, engine: Engine, owner: str, sent: DetokenizeRequest) -> list[str]:
        skip = sent.skip_special_tokens
        try:
            return [await engine.detokenize(owner, ids, skip_special_tokens=skip) for ids in sent.tokens]
        except BadRequest as error:
            raise BadRequest(error.message, param="tokens") from None


def _tokenize_request(body: Mapping[str, Any], owner: str) -> tuple[TokenizeRequest, ChatRequest | None]:
    """The texts to tokenize, or their conversation, for a model that is not known yet."""
    sent = parse_tokenize(body)
    if sent.messages is None:
        return sent, None
    conversation = {"model": "", "messages": sent.messages, **sent.template}
    return sent, parse_chat_request(conversation, new_id("tok-"), owner)
