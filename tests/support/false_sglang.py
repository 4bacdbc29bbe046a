"""A false SGLang: its HTTP routes, an answer of numbered tokens, and faults on cue; and a model for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from app.core import ChatRequest, Counts, Delta, Engine, ModelCard, Prompt
from app.engine.child_server import reserve_port
from app.engine.continuation import TextRules
from app.engine.http.engine import RemoteEngine
from app.engine.http.model import Facts
from app.errors import BadRequest, EngineFailed, EngineOverloaded, ServingError

TOKENS = 12
PROMPT_TOKENS = 3
Fault = Callable[["FalseServer", web.StreamResponse, web.Request], Awaitable[None]]


class FalseServer:
    """An HTTP server with SGLang's routes; `fault` replaces what it answers to `/generate`."""

    def __init__(self, port: int = 0) -> None:
        self.fault: Fault | None = None
        self.asked: list[dict[str, Any]] = []
        self.aborted: set[str] = set()
        self.name = "model"
        self.well = True
        self.generates = True
        self.num_health = 0
        self.used_tokens, self.advances = 30, 0
        self.tokens = TOKENS
        self.pause_s = 0.0
        self.num_left = 0
        self.num_answering = 0
        self._running: list[str] = []
        self._runner: web.AppRunner | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FalseServer:
        """Listen, on the same port as before if there was one."""
        if not self.port:  # kept while it is stopped: nobody else gets the port
            reserved = reserve_port()
            weakref.finalize(self, reserved.close)
            self.port = reserved.getsockname()[1]
        app = web.Application()
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/health", self._health)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        return self

    async def stop(self) -> None:
        """Break off everything."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"served_model_name": self.name})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _loads(self, _: web.Request) -> web.Response:
        if not self.well:
            await asyncio.sleep(60)
        self.used_tokens += self.advances
        load: dict[str, float] = {"num_running_reqs": 2, "num_waiting_reqs": 1}
        load |= {"num_used_tokens": self.used_tokens}
        load |= {"max_total_num_tokens": 1000, "gen_throughput": 5.5}
        return web.json_response({"loads": [load]})

    async def _health(self, _: web.Request) -> web.Response:
        self.num_health += 1
        return web.Response(status=200 if self.well and self.generates else 503)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        self.num_answering += 1
        is_running = body["rid"] in self._running
        self._running.append(body["rid"])
        try:
            if is_running:
                await response.prepare(request)
                await response.write(b'data: {"error": {"message": "Duplicate request ID detected"}}\n\n')
            elif self.fault is not None:
                await self.fault(self, response, request)
            else:
                await self.answer(response, request, body)
        except (ConnectionError, asyncio.CancelledError):
            self.num_left += 1
            raise
        finally:
            self.num_answering -= 1
            self._running.remove(body["rid"])
        return response

    async def answer(self, response: web.StreamResponse, request: web.Request, body: dict[str, Any]) -> None:
        """A whole answer, or the rest of one whose first tokens are in the prompt; shorter when aborted."""
        rid = body["rid"]
        before = len(body["input_ids"]) - PROMPT_TOKENS
        carried = len((body["sampling_params"].get("custom_params") or {}).get("continued_ids", ()))
        await response.prepare(request)
        for number in range(before + carried + 1, self.tokens + 1):
            await asyncio.sleep(self.pause_s)
            finish = {"type": "length"} if number == self.tokens else None
            finish = {"type": "abort", "message": ""} if rid in self.aborted else finish
            await response.write(frame(number, finish, before, repeated=carried))
            carried = 0
            if finish:
                break
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


def frame(number: int, finish: object = None, before: int = 0, repeated: int = 0, **changes: object) -> bytes:
    """The event of token `number` of an answer; `before` of its tokens were in the prompt.

    As many as are `repeated` before it come with it.
    """
    meta = {"finish_reason": finish, "prompt_tokens": PROMPT_TOKENS + before, "cached_tokens": 2}
    meta |= {"completion_tokens": number - before, **changes}
    ids = list(range(number - repeated, number + 1))
    event = {"text": words(ids), "output_ids": ids, "meta_info": meta}
    return b"data: " + orjson.dumps(event) + b"\n\n"


def words(token_ids: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(f"w{token_id} " for token_id in token_ids)


class PlainSink:
    """What parses a choice without reasoning, tools or logprobs."""

    def __init__(self, index: int, out: Any) -> None:
        self._index = index
        self._out = out
        self.counts = Counts(PROMPT_TOKENS)

    def take(self, text: str, token_ids: Any, finish: Any, counts: Counts, batch: Any, row: int) -> None:
        del batch, row
        if finish is None:
            self._out.put(Delta(self._index, "text", text, token_ids, counts))
        elif (status := finish.get("status_code")) is not None:
            kinds: dict[int, type[ServingError]] = {400: BadRequest, 503: EngineOverloaded}
            self._out.fail(kinds.get(status, EngineFailed)(finish["message"]))
        else:
            self._out.put_final(Delta(self._index, "text", text, token_ids, counts, finish["type"]))

    def fail(self, error: ServingError) -> None:
        self._out.fail(error)


class PlainModel:
    """A model whose prompts are three tokens; the text of token 7 is `w7 `."""

    sampling: Mapping[str, Any] = {}

    def __init__(self, facts: Facts) -> None:
        self.card = ModelCard(str(facts.model["served_model_name"]), 100, 1000, 99, frozenset())

    async def start(self) -> None:
        """It needs nothing."""

    async def aclose(self) -> None:
        """It has nothing."""

    async def check_grammar(self, owner: str, prompt: Prompt) -> None:
        """It knows no grammars."""

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        return [len(word) for word in text.split()]

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return " ".join("x" * token_id for token_id in token_ids)

    def render(self, request: ChatRequest) -> Prompt:
        return Prompt([1, 2, 3], request.max_tokens or TOKENS, request.n)

    def choices(self, prompt: Prompt) -> int:
        return int(prompt.handle)

    def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": prompt.max_tokens, **self.sampling}
        return {"input_ids": list(prompt.token_ids), "index": index, "sampling_params": sampling}

    def rules(self, prompt: Prompt) -> TextRules:
        return TextRules(words, words, prompt.max_tokens)

    def sink(self, prompt: Prompt, index: int, out: Any) -> PlainSink:
        del prompt
        return PlainSink(index, out)

    def tokenizer_json(self) -> None:
        return None


async def all_read() -> None:
    """Have a client that shares the loop read all that was sent: turns of the loop, however slow."""
    for _ in range(20):
        await asyncio.sleep(0)


def once(fault: Fault) -> Fault:
    """A fault of the first request alone, whichever server it meets."""
    met: list[bool] = []

    async def act(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        if not met:
            met.append(True)
            await fault(server, response, request)
        else:
            await server.answer(response, request, await request.json())

    return act


async def ask(engine: RemoteEngine, rid: str = "r", n: int = 1, max_tokens: int | None = None) -> list[Delta]:
    """Every delta of an answer."""
    request = ChatRequest(rid, "owner", "model", {"messages": []}, 0, n=n, max_tokens=max_tokens)
    return [delta async for delta in engine.generate(rid, await engine.render(request))]


def faults(engine: Engine) -> dict[str, int]:
    """What its servers did wrong, by kind."""
    return {kind: number for kind, number in engine.load().faults.items() if number}


def moved(engine: Engine) -> dict[str, int]:
    """What became of the choices whose server was lost."""
    return {outcome: number for outcome, number in engine.load().moved.items() if number}


@contextmanager
def ends_restarted() -> Iterator[None]:
    """Whoever reads learns that the answer cannot go on."""
    with pytest.raises(EngineFailed) as failed:
        yield
    assert failed.value.code == "engine_restarted"
