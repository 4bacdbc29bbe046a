"""`/tokenize` and `/detokenize`: text to token ids and back, in the shape of vLLM's and SGLang's routes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from app.api.http.auth import Caller, Gatekeeper
from app.api.http.bodies import BodyReader
from app.api.http.client import Client
from app.api.schema.tokens import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize
from app.api.schema.wire import parse_chat_request
from app.core import ChatRequest, Engine
from app.engine.request_limits import check_text_only
from app.errors import BadRequest
from app.metering.limiter import Limiter
from app.routing.backend import Backends
from app.routing.router import AUTO

T = TypeVar("T")


class TokenRoutes:
    """The handlers of both routes. A request counts as one in its key's limits, and no token of it does."""

    def __init__(
        self,
        backends: Backends,
        limiter: Limiter,
        bodies: BodyReader,
        gatekeeper: Gatekeeper,
        *,
        check_ready: Callable[[], None],
        check_model: Callable[[str, Collection[str] | None], None],
    ) -> None:
        """`check_ready` raises EngineNotReady while nothing is served, `check_model` UnknownModel."""
        self._backends = backends
        self._limiter = limiter
        self._bodies = bodies
        self._gatekeeper = gatekeeper
        self._check_ready = check_ready
        self._check_model = check_model

    async def tokenize(self, request: Request) -> Response:
        """The ids of texts, or of a rendered conversation. Raises BadRequest, ContextOverflow."""
        caller = self._gatekeeper.caller(request)
        client = Client(request.receive)
        sent, chat = await self._read(request, client, caller, partial(_tokenize_request, owner=caller.owner))
        engine = self._engine(sent.model, caller)
        ids = await client.while_here(self._ids(engine, caller.owner, sent, chat), "tokenize")
        several = not isinstance(sent.prompt, str) and sent.messages is None
        return _json(
            {
                "tokens": ids if several else ids[0],
                "count": [len(one_ids) for one_ids in ids] if several else len(ids[0]),
                "max_model_len": engine.model.context_length,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of ids, or of several lists of them. Raises BadRequest."""
        caller = self._gatekeeper.caller(request)
        client = Client(request.receive)
        sent = await self._read(request, client, caller, parse_detokenize)
        texts = await client.while_here(
            self._texts(self._engine(sent.model, caller), caller.owner, sent), "detokenize"
        )
        text = texts if sent.several else texts[0]
        return _json({"prompt": text, "text": text, "content": text})

    async def _read(
        self, request: Request, client: Client, caller: Caller, make: Callable[[dict[str, Any]], T]
    ) -> T:
        """What is made of the body, once the request is charged. Raises RateLimited, and what `make` does."""
        self._check_ready()
        self._limiter.begin(caller.key, generates=False)
        raw = await self._bodies.read(request, client, caller.owner, self._bodies.limit_bytes)
        return await self._bodies.parse_as(request, raw, make)

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
    """What is to be tokenized, and its conversation, if it is one, for a model that is not known yet."""
    sent = parse_tokenize(body)
    if sent.messages is None:
        return sent, None
    conversation = {"model": "", "messages": sent.messages, **sent.template}
    return sent, parse_chat_request(conversation, f"tok-{secrets.token_hex(14)}", owner)


def _json(body: dict[str, Any]) -> Response:
    """The body by orjson: half a million ids take it 5 ms, and the standard library 50."""
    return Response(orjson.dumps(body, default=list), media_type="application/json")
