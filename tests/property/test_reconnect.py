"""The promise of the stream: cut it anywhere, come back with the last id, and nothing is lost or twice.

Each seed is one generation over a real socket with one to five readers. Every reader reads in
pieces of random size, is cut at random bytes, by close or by reset, and returns with the id of
the last event it understood.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from app.core import ChatRequest
from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import Serve, ServerProcess, chat
from tests.support.sse_client import Connection, SSEParser, Transcript, fetch

SEEDS = 1000
SEEDS_AT_ONCE = 100
PATH = "/api/chat/completions"
READ_SIZES = (1, 7, 60, 500, 4096, 65536)

Tracks = Mapping[tuple[int, str], str]


@dataclass(frozen=True)
class Case:
    """One generation and how it is read."""

    port: int
    body: Mapping[str, Any]
    tracks: Tracks
    finish_reason: str
    rng: random.Random
    key: str | None

    @property
    def key_header(self) -> dict[str, str]:
        """With a key every connection is a POST; without one, all but the first are a GET."""
        return {} if self.key is None else {"idempotency-key": self.key}


def script_of(seed: int) -> Script:
    """What the scripted engine says, and how fast."""
    rng = random.Random(f"script {seed}")
    return Script(
        seed=seed,
        tokens=rng.randint(1, 150),
        rate=rng.choice((0, 0, 300, 1000, 5000)),
        prefill_s=rng.choice((0, 0, 0.02)),
        reasoning=rng.choice((0, 0, 5, 20)),
        tool=rng.choice(("", "", "weather")),
    )


def scripted_tracks(script: Script, n: int) -> Tracks:
    """What a client must have understood at the end, from the script alone."""
    tracks = {}
    for choice in range(n):
        pieces = scripted_text(script.seed, choice, script.tokens)
        tracks[choice, "reasoning"] = "".join(pieces[: script.reasoning])
        tracks[choice, "text"] = "".join(pieces[script.reasoning :])
        if script.tool:
            tracks[choice, "name0"] = script.tool
            tracks[choice, "tool0"] = '{"city": "Paris"}'
    return {track: text for track, text in tracks.items() if text}


class CutReader:
    """One client that is cut again and again until it has read the end."""

    def __init__(self, case: Case, rng: random.Random, stream_id: str | None) -> None:
        self._case = case
        self._rng = rng
        self._stream_id = stream_id
        self._cuts_left = rng.randint(0, 6)
        self.transcript = Transcript()

    async def read_to_end(self, opened: asyncio.Future[str] | None = None) -> Transcript:
        """Connect, read, be cut, return, until [DONE]; `opened` gets the stream's id."""
        while not self.transcript.done:
            async with await Connection.to(self._case.port) as connection:
                await self._once(connection, opened)
            await asyncio.sleep(self._rng.choice((0, 0, 0.005, 0.03)))
        return self.transcript

    async def _once(self, connection: Connection, opened: asyncio.Future[str] | None) -> None:
        cut_after = self._rng.choice((0, 300, 3000, 20_000)) if self._cuts_left else None
        self._cuts_left -= 1
        await connection.request(*self._request())
        if cut_after == 0 and self._case.key is not None:  # before a header has come: the id is lost
            return self._cut(connection)
        head = await connection.head()
        assert head.status == 200
        self._stream_id = head.headers["x-request-id"]
        if opened is not None and not opened.done():
            opened.set_result(self._stream_id)
        parser, seen_bytes = SSEParser(), 0
        left = None if cut_after is None else self._rng.randint(0, cut_after)
        async for piece in connection.pieces(head, lambda: self._rng.choice(READ_SIZES)):
            seen_bytes += len(piece)
            for event in parser.feed(piece):
                self.transcript.add(event)
            if left is not None and seen_bytes >= left:
                return self._cut(connection)
        assert self.transcript.done, "the response ended before [DONE]"
        assert parser.blank_without_data == 0
        return None

    def _cut(self, connection: Connection) -> None:
        self._rng.choice((connection.close, connection.reset))()

    def _request(self) -> tuple[str, str, Mapping[str, Any] | None, Mapping[str, str]]:
        last_id = self.transcript.last_id
        place = {"last-event-id": str(last_id)} if last_id else {}
        if self._stream_id is None or self._case.key is not None:
            return "POST", PATH, self._case.body, {**place, **self._case.key_header}
        path = f"{PATH}/{self._stream_id}"
        if last_id and self._rng.random() < 0.3:  # as EventSource polyfills and browsers' first request do
            return "GET", f"{path}?last_event_id={last_id}", None, {}
        return "GET", path, None, place


async def run_case(case: Case) -> None:
    """All readers of one generation, each checked against the engine's text."""
    rng = case.rng
    opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def join_later() -> Transcript:
        stream_id = await opened
        await asyncio.sleep(rng.choice((0, 0.01, 0.05, 0.2)))
        return await CutReader(case, random.Random(rng.random()), stream_id).read_to_end()

    async with asyncio.TaskGroup() as group:
        first = CutReader(case, random.Random(rng.random()), None)
        tasks = [group.create_task(first.read_to_end(opened))]
        tasks += [group.create_task(join_later()) for _ in range(rng.randint(0, 4))]
    for task in tasks:
        check(task.result(), case)
    await check_nothing_follows(case, tasks[0].result())


def check(transcript: Transcript, case: Case) -> None:
    """Nothing lost, nothing twice, in order, to the end."""
    transcript.check_ids()
    assert {track: text for track, text in transcript.text.items() if text} == case.tracks
    assert transcript.finish_reasons == dict.fromkeys(range(case.body.get("n", 1)), case.finish_reason)
    assert not transcript.errors
    assert transcript.done


async def check_nothing_follows(case: Case, transcript: Transcript) -> None:
    """A client that has read [DONE] is told that nothing follows."""
    headers = {"last-event-id": str(transcript.last_id)}
    answer = await fetch(case.port, "GET", f"{PATH}/{transcript.stream_id}", None, headers)
    assert answer.status == 204


async def run_seeds(cases: Mapping[int, Case]) -> None:
    """Run cases at once; a failure names the seeds."""
    results = await asyncio.gather(*map(run_case, cases.values()), return_exceptions=True)
    failed = {s: r for s, r in zip(cases, results, strict=True) if r is not None}
    for error in failed.values():
        error.add_note(f"failing seeds: {sorted(failed)}")
        raise error


def scripted_case(port: int, seed: int) -> Case:
    """A case on the scripted engine."""
    rng = random.Random(f"case {seed}")
    n = rng.choice((1, 1, 2, 3))
    script = script_of(seed)
    return Case(
        port=port,
        body=chat(f"seed {seed}", n=n),
        tracks=scripted_tracks(script, n),
        finish_reason="tool_calls" if script.tool else "stop",
        rng=rng,
        key=f"key {seed}" if rng.random() < 0.4 else None,
    )


@pytest.mark.parametrize("start", range(0, SEEDS, SEEDS_AT_ONCE))
async def test_cut_streams_lose_nothing(serve: Serve, start: int):
    """Every reader's text equals the engine's, however it was cut; ids strictly increase."""

    def script(request: ChatRequest) -> Script:
        return script_of(int(request.body["messages"][0]["content"].split()[1]))

    served = await serve(script)
    await run_seeds({seed: scripted_case(served.port, seed) for seed in range(start, start + SEEDS_AT_ONCE)})
    assert served.running == 0
    assert not served.live()


QUESTIONS = ("What is Tokenring?", "How do I start the server?", "Hello!", "Which port does it use?")
"""Short and different, so that real batches are mixed."""


@pytest.mark.sglang
@pytest.mark.timeout(300)
async def test_cut_streams_of_sglang_lose_nothing(sglang_server: ServerProcess):
    """The same with real SGLang: every reader's text equals an undisturbed answer."""
    port = await sglang_server.ready()
    model = (await fetch(port, "GET", "/v1/models")).json()["data"][0]["id"]
    bodies = [
        chat(question, model=model, temperature=0, max_tokens=max_tokens)
        for question in QUESTIONS
        for max_tokens in (20, 40, 60)
    ]
    answers = [await fetch(port, "POST", PATH, {**body, "stream": False}) for body in bodies]
    cases = {}
    for seed in range(50):
        rng = random.Random(f"sglang {seed}")
        number = rng.randrange(len(bodies))
        choice = answers[number].json()["choices"][0]
        tracks = {(0, "text"): choice["message"]["content"]}
        key = f"sglang {seed}" if rng.random() < 0.4 else None
        cases[seed] = Case(port, bodies[number], tracks, choice["finish_reason"], rng, key)
    await run_seeds(cases)
