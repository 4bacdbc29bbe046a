"""`RemoteEngine`: any SGLang server, several of them, or a cluster behind SGLang's router, over HTTP.

Requests are rendered here, for the remote model, and sent as token ids over SGLang's native streaming
API; each choice is a request of its own there. A choice whose server dies continues at another one, or at the
same one once it is back. `child` is a server that this process runs: it lives as long as the engine, and is
started again when it dies or hangs. Nothing of SGLang is imported before `start()`, and then in a thread of
the engine's own.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.core import ChatRequest, Delta, EngineLoad, Health, ModelCard, Prompt
from app.engine.child_server import ChildServer
from app.engine.http.events import Refusal, ServerGone
from app.engine.http.generation import Choice, RemoteGeneration
from app.engine.http.model import Facts, LoadModel, RemoteModel
from app.engine.http.pool import RemoteOptions, ServerPool
from app.engine.http.server import RemoteServer
from app.engine.render_queues import NODE_BYTES, UTF8_BYTES, RenderQueues
from app.engine.sink import GenerationStream, Tallies, TokenTally
from app.errors import EngineFailed, EngineNotReady
from app.settings import SettingsError

START_RETRY_S = 0.25
MAX_CONNECTIONS = 0
"""Connections of the pool; 0 is no limit, as each running choice holds one."""


class RemoteEngine:
    """One model served elsewhere; see the module. `health` is STARTING while no server can be reached."""

    def __init__(
        self, options: RemoteOptions, load_model: LoadModel, child: ChildServer | None = None
    ) -> None:
        self._options = options
        self._load_model = load_model
        self._child = child
        self._health = Health.STARTING
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote")
        self._render_queues = RenderQueues()
        self._process = secrets.token_hex(4)
        self._session: aiohttp.ClientSession | None = None
        self._pool = ServerPool(options, on_hung=self._kill_hung_child)
        self._model: RemoteModel | None = None
        self._running: dict[str, _Request] = {}
        self._tallies = Tallies()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life

    @property
    def model(self) -> ModelCard:
        return self._ready_model().card

    async def start(self) -> None:
        """Reach a server, learn its model, load the tokenizer. Raises EngineFailed with the reason.

        What was started is stopped again where this fails or is given up; another start may follow.
        """
        try:
            await self._start()
        except BaseException as exc:
            await self._stop()
            if not isinstance(exc, Exception) or isinstance(exc, EngineFailed):
                raise
            raise EngineFailed(f"the remote model could not be loaded: {type(exc).__name__}: {exc}") from exc
        # As in SGLangEngine: SGLang's import leaves objects that a full collection stops the loop for.
        gc.collect()
        gc.freeze()
        self._health = Health.READY

    async def _start(self) -> None:
        if self._child is not None:
            await self._child.start()
        key = self._options.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ttl_dns_cache=10),
            headers={"authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._options.timeouts.connect_s),
            # A redirect would take prompts and the key elsewhere; proxies and cookies are not for servers.
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        urls = [self._child.url] if self._child is not None else self._options.urls
        self._pool.connect([RemoteServer(url, self._session, self._options.timeouts) for url in urls])
        facts = await self._first_facts()
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._thread, self._load_model, facts)
        await self._model.start()
        if self._child is not None:
            self._child.mark_up()
        self._pool.watch(facts)

    def child_ended(self) -> None:
        """The child has died: what is open on it is cut off, and nothing is sent there before a probe."""
        for server in self._pool.servers:
            server.breaker.trip()
            server.cut()

    def _kill_hung_child(self) -> None:
        """Kill a child that lives and does nothing: the next one takes its place."""
        if self._child is not None:
            self._child.kill()

    async def aclose(self) -> None:
        """End generations, connections and the child; a second call does nothing."""
        self._health = Health.DEAD
        for request in list(self._running.values()):
            request.stream.fail(EngineFailed("The engine was stopped."))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop()
        self._thread.shutdown(wait=False)
        self._render_queues.close()

    async def _stop(self) -> None:
        """Close the model, connections and the child."""
        model, self._model = self._model, None
        if model is not None:
            await model.aclose()
        await self._pool.aclose()
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._child is not None:
            await self._child.aclose()

    # --- requests

    def tokenizer_json(self) -> str | None:
        return self._ready_model().tokenizer_json()

    async def tokenize(self, owner: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        work = partial(self._ready_model().tokenize, text, add_special_tokens=add_special_tokens)
        return await self._render_queues.run_sized(owner, UTF8_BYTES * len(text), work)

    async def detokenize(
        self, owner: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        work = partial(self._ready_model().detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._render_queues.run_sized(owner, NODE_BYTES * len(token_ids), work)

    async def render(self, request: ChatRequest) -> Prompt:
        """Template, tokenize and check a request, here. Raises BadRequest naming it, ContextOverflow."""
        model = self._ready_model()
        prompt = await self._render_queues.run(model.render, request)
        await model.check_grammar(request.owner, prompt)
        return prompt

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """Generate all choices of `prompt`, interleaved as they arrive; begins at the first read."""
        if rid in self._running:
            raise ValueError(f"request id {rid} is in use")
        choices = self._ready_model().choices(prompt)
        stream = GenerationStream(choices, lambda: self._begin(rid, prompt), lambda: self._ended(rid))
        self._running[rid] = _Request(stream, self._tallies.begin(rid))
        return stream

    def abort(self, rid: str) -> None:
        """Stop all choices of `rid` at once; unknown and finished ids are ignored."""
        request = self._running.get(rid)
        if request is not None:
            request.stream.abort()
            for choice in request.choices:
                choice.abort()

    def pop_emitted_tokens(self, rid: str) -> int:
        """Token ids handed over for `rid` so far; forgets it once its stream has ended."""
        return self._tallies.pop(rid)

    def load(self) -> EngineLoad:
        """The load last reported, at most a poll ago; our own streams where servers report none."""
        load = self._pool.load
        if load is None:
            running = sum(len(request.choices) for request in self._running.values())
            load = EngineLoad(running, 0, 0, self.model.kv_capacity_tokens, 0.0)
        return replace(load, faults=self._pool.faults.faults, moved=self._pool.faults.moved)

    def health(self) -> Health:
        if self._health is Health.READY and not self._pool.is_healthy:
            return Health.STARTING
        return self._health

    # --- inside

    def _ready_model(self) -> RemoteModel:
        if self._model is None or self._health is Health.DEAD:
            raise EngineNotReady(f"The engine is {self._health.value}.", retry_after_s=5)
        return self._model

    async def _first_facts(self) -> Facts:
        """The facts of the first server that answers. The others may answer later."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._options.start_s
        while True:
            reasons = []
            for server in self._pool.servers:
                try:
                    facts = await server.facts()
                except (ServerGone, Refusal) as exc:
                    reasons.append(f"{server.url}: {exc}")
                else:
                    for other in self._pool.servers:
                        if other is not server:
                            other.breaker.trip()  # until a probe has seen that it has the same model
                    return facts
            if self._child is not None and self._child.failure is not None:
                raise EngineFailed(f"SGLang did not start: {self._child.failure}")
            if loop.time() >= give_up_s:
                raise EngineFailed(f"no SGLang server could be reached: {'; '.join(reasons)}")
            await asyncio.sleep(START_RETRY_S)

    async def _begin(self, rid: str, prompt: Prompt) -> None:
        """Send every choice as a request of its own: the prefix cache shares their prompt."""
        request = self._running[rid]
        try:
            model = self._ready_model()
            # A server may not have noticed yet that the process before is gone: an id runs once in it.
            name = f"{rid}-{self._process}" if prompt.continued else rid
            request.choices.extend(
                RemoteGeneration(
                    self._pool,
                    self._spawn,
                    Choice(
                        f"{name}-{index:03d}",
                        model.body(prompt, index),
                        partial(model.rules, prompt),
                        prompt.continued[index] if prompt.continued else (),
                    ),
                    model.sink(prompt, index, request.stream),
                    request.tally,
                )
                for index in range(model.choices(prompt))
            )
        except BaseException:
            self._ended(rid)
            raise
        for choice in request.choices:
            choice.start(aborted=request.stream.aborted)

    def _ended(self, rid: str) -> None:
        request = self._running.pop(rid, None)
        self._tallies.end(rid)
        if request is not None:
            for choice in request.choices:
                choice.leave()  # where one choice failed the others have no reader any more

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def parse_urls(text: str) -> tuple[str, ...]:
    """The base URLs in `remote_url`, commas between them. Raises SettingsError."""
    urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
    if not urls:
        raise SettingsError("remote_url: the remote engine needs the URL of an SGLang server")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
            raise SettingsError("remote_url: expected URLs as http://host:port, without a user or a query")
    return urls


@dataclass(slots=True)
class _Request:
    """A request that runs; its choices are sent once it has begun."""

    stream: GenerationStream
    tally: TokenTally
    choices: list[RemoteGeneration] = field(default_factory=list)
