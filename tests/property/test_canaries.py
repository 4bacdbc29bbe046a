"""Harm that the engine says, at any place and in any pieces, is nowhere to be found afterwards.

Each seed is one request over a real socket: up to four choices, each with reasoning, an answer and a
tool's arguments, into one of which a canary is put: a hard-listed span, or a word that the model of
answers knows. Readers come and go, requests are cancelled, and the screen breaks, in the midst of it.
Then everything that was told or kept is searched.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.api.server import GC_THRESHOLDS
from app.core import ChatRequest, Delta, ToolCall
from app.engine.scripted.engine import Script
from app.safety.classifiers.bundled_models import Models
from app.store import indexing
from app.stream.ring import Ring
from tests.support.clocks import unhindered_s
from tests.support.policies import WordClassifier, write_models
from tests.support.screens import (
    HARM,
    WATCHED,
    WATCHED_LATE,
    Piece,
    SpeakingEngine,
    WordAnswer,
    WordReviewer,
    policy_file,
)
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Transcript, fetch, open_stream

SEEDS = int(os.environ.get("CANARY_SEEDS", "2000"))
TIMED_SEEDS = 200
AT_ONCE = 20
SPANS = ("qzxj-vkqz xzqv", "kzvx qqjz-zx", "xjqkvz")
"""Hard-listed; of letters that nothing else here is made of."""
LETTERS = set("qzxjvk")
FINE = ("and", "the", "engine", "reads", "rather", "slow", "in", "snow", "but", "he", "told", "us", "more")
CRASH = "crash"
AFTER = "after"
"""What every token that comes after a trigger begins with."""


class Answer(WordAnswer):
    """Knows harm, and breaks where it is told to."""

    def feed(self, text: str) -> float:
        """See app.safety.stream.answer_review.ScoredAnswer."""
        if CRASH in text:
            raise RuntimeError(text)
        return super().feed(text)


class Answers:
    """Starts each `Answer`."""

    review_at = 0.5

    def start(self, prompt_harm: float) -> Answer:
        """See app.safety.stream.answer_review.AnswerClassifier."""
        return Answer(prompt_harm)


@dataclass
class Plan:
    """What one seed does; `speech` is each choice's tokens."""

    seed: int
    speech: list[list[Piece]] = field(default_factory=list)
    triggers: dict[int, int] = field(default_factory=dict)
    """Choice → the token, from 1, with which its canary is complete."""

    def __post_init__(self) -> None:
        rng = self.rng("speech")
        self.n = rng.choice((1, 1, 2, 3, 4))
        kinds = [rng.choice(("hard", "hard", "scored", "none", "crash")) for _ in range(self.n)]
        for choice, kind in enumerate(kinds):
            self.speech.append(list(self._choice(choice, kind, rng)))

    def rng(self, purpose: str) -> random.Random:
        """A source of chance of its own."""
        return random.Random(f"{purpose} {self.seed}")

    def _choice(self, choice: int, kind: str, rng: random.Random) -> Iterator[Piece]:
        lengths = {
            "reasoning": rng.choice((0, 0, 9, 40)),
            "text": rng.randint(3, 90),
            "tool": rng.choice((0, 30)),
        }
        channel = rng.choice([name for name, length in lengths.items() if length])
        at = rng.randrange(lengths[channel])
        number, said = 0, False
        for name, length in lengths.items():
            for index in range(length):
                if (name, index) == (channel, at) and kind != "none":
                    pieces = self._canary(kind, rng)
                    for text in pieces:
                        number += 1
                        yield _piece(text, name, first=index == 0 and text is pieces[0])
                    if kind != "crash":
                        # Two hits halt: the token after a scored one is the trigger.
                        self.triggers[choice] = number + (kind == "scored")
                    said = True
                number += 1
                word = f"{AFTER}{number}" if said else rng.choice(FINE)
                yield _piece(
                    f"{word} ",
                    name,
                    first=index == 0 and not (at == 0 and name == channel and kind != "none"),
                )

    def _canary(self, kind: str, rng: random.Random) -> list[str]:
        if kind == "crash":
            return [f"{CRASH} "]
        text = HARM + " " if kind == "scored" else _disguised(rng.choice(SPANS), rng)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        pieces = [piece for piece in pieces if piece]
        if rng.random() < 0.3:
            pieces[0] = rng.choice(FINE) + " " + pieces[0]
        return pieces

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        rng = self.rng("body")
        mood = rng.choice(("", "", "", WATCHED, WATCHED_LATE))
        return chat(
            f"seed {self.seed} {mood}",
            n=self.n,
            stream=rng.random() < 0.8,
            store=rng.random() < 0.7,
            logprobs=False,
            **({"moderation": {"model": "omni-moderation-latest"}} if rng.random() < 0.2 else {}),
        )


def _piece(text: str, channel: str, *, first: bool = False) -> Piece:
    if channel != "tool":
        return Piece(text, channel)
    return Piece(text, channel, ToolCall(0, "call_0", "weather") if first else ToolCall(0))


def _disguised(span: str, rng: random.Random) -> str:
    """The span, in a spelling that makes no difference."""
    spelling = "".join(rng.choice((c, c.upper(), c + "\u200b", c + "\u0301", c + "\u3164")) for c in span)
    return spelling.replace(" ", rng.choice((" ", "  ", "\n", "\u2800")))


class Engine(SpeakingEngine):
    """Notes when a canary was complete, and when it was told to stop."""

    def __init__(self, script: Any, plans: Sequence[Plan], on_death: Any) -> None:
        super().__init__(script, lambda request, choice: plans[seed_of(request)].speech[choice], on_death)
        self.plans = plans
        self.triggered_s: dict[str, float] = {}
        self.stopped_s: dict[str, float] = {}
        self.counted: dict[str, int] = {}

    def _deltas(self, answer: Any, choice: int) -> Iterator[Delta]:
        rid, trigger = answer.request.request_id, self.plans[seed_of(answer.request)].triggers.get(choice)
        for delta in super()._deltas(answer, choice):
            self.counted[rid] = self.counted.get(rid, 0) + len(delta.token_ids)
            if delta.counts.completion_tokens == trigger and delta.token_ids:
                self.triggered_s.setdefault(rid, unhindered_s())
            yield delta

    def abort(self, rid: str) -> None:
        self.stopped_s.setdefault(rid, unhindered_s())
        super().abort(rid)


def seed_of(request: ChatRequest) -> int:
    """Which seed a request is of."""
    return int(request.body["messages"][-1]["content"].split()[1])


async def run(served: Served, plan: Plan) -> str:
    """One seed, to the end of its stream; returns the request's id."""
    rng = plan.rng("client")
    if not plan.body["stream"]:
        answer = await fetch(served.port, "POST", "/api/chat/completions", plan.body)
        check_text(answer.body.decode(), plan)
        return answer.headers["x-request-id"]
    stream = await open_stream(served.port, plan.body)
    stopping = asyncio.create_task(stop(served, stream.id, rng)) if rng.random() < 0.25 else None
    transcript = Transcript()
    while not transcript.done:
        stream.transcript = transcript
        left = rng.choice((1, 5, 20, 10_000))
        async for event in stream.events():
            check_text(event.data, plan)
            left -= 1
            if not left:
                break
        rng.choice((stream.connection.close, stream.connection.reset))()
        if not transcript.done:
            stream = await open_stream(served.port, stream_id=stream.id, after=transcript.last_id)
    if stopping is not None:
        await stopping
    check_end(transcript, plan)
    return stream.id


async def stop(served: Served, stream_id: str, rng: random.Random) -> None:
    """Cancel a request, early or late."""
    await asyncio.sleep(rng.choice((0, 0.002, 0.01)))
    await served.call("POST", f"/api/chat/completions/{stream_id}/cancel")


def check_text(text: str, plan: Plan) -> None:
    """Nothing of a canary, nor of what came after its trigger."""
    assert AFTER not in text or not plan.triggers, plan
    said = "".join(re.findall(r'"(?:content|reasoning_content|arguments)":"((?:[^"\\]|\\.)*)"', text))
    assert not LETTERS & set(said.lower().replace("\\u", "")), (plan.seed, said)


def check_end(transcript: Transcript, plan: Plan) -> None:
    """Each choice ends once, and says why; one whose screen broke ends in an error."""
    if transcript.errors:
        assert [error["code"] for error in transcript.errors] == ["safety_unavailable"]
        assert not any(CRASH in text for text in transcript.text.values())
    else:
        assert sorted(transcript.finish_reasons) == list(range(plan.n))


@dataclass
class Kept:
    """Everything that is kept of all requests."""

    told: dict[str, dict[tuple[int, str], str]]
    """By request: what its stored events say, by choice and channel."""
    ledger: dict[str, tuple[str, str, int, int]]
    messages: list[tuple[str, int, str, bytes | None, bytes | None, str]]
    words: list[str]
    events: list[str]


def read_store(path: Path) -> Kept:
    """What the file says, beside the server that has it."""
    with sqlite3.connect(path) as c:
        c.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, search, 'row')")
        told = {}
        for seq, request_id in c.execute("SELECT seq, id FROM requests").fetchall():
            slices = c.execute("SELECT slice FROM events WHERE request_seq = ? ORDER BY first_id", (seq,))
            parts, _ = Ring.restore((piece for (piece,) in slices), 10**9).contents()
            told[request_id] = {
                (track.choice, track.channel): part.text.decode() for track, part in parts.items()
            }
        ledger = {
            request_id: tuple(row)
            for request_id, *row in c.execute(
                "SELECT id, state, outcome, completion_tokens, withheld_tokens FROM requests"
            )
        }
        messages = c.execute(
            "SELECT r.id, m.choice, m.text, m.body, m.answer_ids, m.status FROM messages AS m"
            " JOIN requests AS r ON r.seq = m.request_seq"
        ).fetchall()
        words = [word for (word,) in c.execute("SELECT term FROM temp.words")]
        events = [repr(row) for row in c.execute("SELECT * FROM safety_events")]
    c.close()
    return Kept(told, ledger, messages, words, events)


def tokens_of(plan: Plan, choice: int, tracks: dict[tuple[int, str], str]) -> int:
    """How many of a choice's tokens make up what was told of it: its first ones, each whole."""
    pieces = plan.speech[choice]
    for number in range(len(pieces) + 1):
        told: dict[str, str] = {}
        for piece in pieces[:number]:
            told[piece.channel] = told.get(piece.channel, "") + piece.text
        if told == {channel: text for (its, channel), text in tracks.items() if its == choice}:
            return number
    raise AssertionError(f"seed {plan.seed}, choice {choice}: told is no beginning of what was said")


def check_kept(kept: Kept, plans: dict[str, Plan], engine: Engine) -> None:
    """Ring, store, index and ledger, request by request."""
    for request_id, plan in plans.items():
        state, outcome, completion_tokens, withheld_tokens = kept.ledger[request_id]
        tracks = kept.told[request_id]
        assert state == "settled"
        released = sum(tokens_of(plan, choice, tracks) for choice in range(plan.n))
        assert completion_tokens - withheld_tokens == released, (plan.seed, outcome)
        assert completion_tokens == engine.counted.get(request_id, 0), plan.seed
        for text in tracks.values():
            assert not LETTERS & set(text), plan.seed
            assert AFTER not in text or not plan.triggers, plan.seed
    for request_id, choice, text, body, answer_ids, status in kept.messages:
        assert not LETTERS & set(text + (body or b"").decode().replace("\\u", "")), plans[request_id].seed
        assert status in ("blocked", "complete", "cancelled", "failed"), status
        told = tokens_of(plans[request_id], choice, kept.told[request_id])
        released = 0 if status == "blocked" else told
        assert len(array("I", answer_ids or b"")) == released


def leaks(text: str, plans: Sequence[Plan]) -> list[str]:
    """Parts of canaries in a text that is not an answer's."""
    parts = {span[i : i + 4] for span in SPANS for i in range(len(span) - 3)}
    found = [part for part in parts if part in text.lower()]
    after = any(not plan.triggers for plan in plans)
    return found + ([] if after else re.findall(AFTER + r"\d+", text))


async def server(serve: Serve, tmp_path: Path, plans: Sequence[Plan]) -> Served:
    """A server that says what was planned, screened by words."""
    doubtful, likely = {"S2": 0.5}, {"S2": 0.7}
    prompts = WordClassifier(fast={WATCHED: likely}, full={WATCHED: doubtful, WATCHED_LATE: doubtful})
    models = Models(prompts, Answers(), WordReviewer(), write_models(tmp_path / "models"))
    return await serve(
        Script(rate=5000),
        engine_type=lambda script, on_death: Engine(script, plans, on_death),
        load_models=lambda: models,
        safety="on",
        safety_policy=policy_file(tmp_path, hard_list=list(SPANS)),
    )


async def run_all(served: Served, plans: Sequence[Plan]) -> dict[str, Plan]:
    """All seeds, some at once, until nothing is left to do; the plans by the ids of their requests."""
    by_id: dict[str, Plan] = {}
    for start in range(0, len(plans), AT_ONCE):
        batch = plans[start : start + AT_ONCE]
        ids = await asyncio.gather(*(run(served, plan) for plan in batch))
        by_id |= zip(ids, batch, strict=True)
    await served.settled()
    return by_id


@pytest.mark.timeout(60 + SEEDS)
async def test_no_canary_is_told_or_kept(serve: Serve, tmp_path: Path):
    """Not to any client, in ring, store, index, log, metrics or events; and the bill is of what was told."""
    plans = [Plan(seed) for seed in range(SEEDS)]
    served = await server(serve, tmp_path, plans)
    engine = served.engine
    assert isinstance(engine, Engine)
    by_id = await run_all(served, plans)
    while not await served.runtime.database.write(indexing.index):
        pass
    kept = read_store(served.runtime.database.path)
    check_kept(kept, by_id, engine)
    metrics = (await served.call("GET", "/metrics")).body.decode()
    admin = (await served.call("GET", "/api/admin/safety?limit=100")).body.decode()
    for text in (repr(served.log), metrics, admin, " ".join(kept.words), " ".join(kept.events)):
        assert leaks(text, plans) == []
    assert len(engine.triggered_s) > SEEDS / 10
    assert engine.triggered_s.keys() <= engine.stopped_s.keys()
    assert not served.runtime.balance.differs


@pytest.mark.timed
async def test_a_canary_stops_the_engine_within_50_ms(serve: Serve, tmp_path: Path):
    """From the token that completes it to the engine's abort, with twenty requests at once.

    A prompt in doubt is read by the encoder meanwhile, and no token before its verdict: those do not count.
    """
    plans = [Plan(seed) for seed in range(TIMED_SEEDS)]
    served = await server(serve, tmp_path, plans)
    engine = served.engine
    assert isinstance(engine, Engine)
    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)  # as a server does: a full collection takes 75 ms here
    try:
        by_id = await run_all(served, plans)
    finally:
        gc.set_threshold(*thresholds)
    assert engine.triggered_s.keys() <= engine.stopped_s.keys()
    late_s = [
        engine.stopped_s[rid] - at_s
        for rid, at_s in engine.triggered_s.items()
        if WATCHED_LATE not in by_id[rid].body["messages"][0]["content"]
    ]
    assert len(late_s) > TIMED_SEEDS / 10
    assert max(late_s) < 0.05
