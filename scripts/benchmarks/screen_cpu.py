"""The screens of `bench path` outside of a server: what each costs by itself."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from app.core import Counts, Delta
from app.metering.traffic import Histogram
from app.safety.classifiers import bundled_models as shipped
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.policies.policy import Policies
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.stream.answer_review import ReviewRequest
from app.safety.stream.stream_screen import Screening, StreamScreen
from app.safety.verdict import Scores
from scripts.benchmarks.findings import Finding, unjudged, within
from scripts.benchmarks.prompts import Work, chat_work
from scripts.benchmarks.stats import percentile

ROUNDS = 7
AT_ONCE = 16
MAX_CPU_US = 15.0
PRESCREENED = 500
PRESCREEN_CHARS = 2_000
MAX_PRESCREEN_MS = 5.0


class Screens:
    """The shipped classifiers and the built-in policy, in this process."""

    def __init__(self) -> None:
        self.models = shipped.load()
        self.policy = Policies(None, self.models.directory).current
        counters = SafetyCounters(Histogram(HOLD_BACK_S))
        self._screen = PromptScreen(self.models.prompts, counters, sure_below=self.models.sure_below)

    def prescreen_s(self, messages: Sequence[dict[str, Any]]) -> float:
        """Seconds that the n-grams take for a prompt."""
        began_s = time.perf_counter()
        self._screen.prescreen(messages, self.policy, scored=False)
        return time.perf_counter() - began_s

    def harm(self, messages: Sequence[dict[str, Any]]) -> float:
        """The harm of a prompt."""
        return asyncio.run(self._screen.evaluate(messages, self.policy)).harm


def measure(port: int, work: Work) -> list[Finding]:
    """The screens in this process; the stream screen reads what a server at `port` answers to `work`."""
    screens = Screens()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda body: pieces_of(port, body), work.bodies))
    priors = [screens.harm(json.loads(body)["messages"]) for body in work.bodies]
    taken_ms = _prescreen_ms(screens)
    return [
        within("prompt screen p99, 2,000 characters, ms", percentile(taken_ms, 99), MAX_PRESCREEN_MS),
        unjudged("prompt screen p50, 2,000 characters, ms", percentile(taken_ms, 50), "{:.3g}"),
        within("stream screen per token, us", _token_us(screens, answers, priors, watched=False), MAX_CPU_US),
        within(
            "stream screen per token of watched prompts, us",
            _token_us(screens, answers, priors, watched=True),
            MAX_CPU_US,
        ),
    ]


def _prescreen_ms(screens: Screens) -> list[float]:
    """Milliseconds for which the n-grams hold the loop, over prompts of which none was read before."""
    work = chat_work(
        "", PRESCREENED + 10, mean_tokens=1, prompt_words=PRESCREEN_CHARS // 3, seed=PRESCREEN_CHARS
    )
    taken_ms = []
    for body in work.bodies:
        [message] = json.loads(body)["messages"]
        message["content"] = message["content"][:PRESCREEN_CHARS]
        taken_ms.append(screens.prescreen_s([message]) * 1e3)
    return taken_ms[10:]  # the first are not measured


def pieces_of(port: int, body: str) -> list[str]:
    """The texts of the frames of one streamed answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        frames = [line[6:] for line in response if line.startswith(b"data: {")]
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    return [text for delta in deltas if (text := delta.get("content") or delta.get("reasoning_content"))]


def _token_us(
    screens: Screens, answers: Sequence[Sequence[str]], priors: Sequence[float], *, watched: bool
) -> float:
    """CPU of the stream screen for one token, median of some rounds over all streams."""
    streams = [_deltas(pieces) for pieces in answers]
    tokens = sum(map(len, streams))
    round_s = partial(_round, screens, streams, priors, watched=watched)
    return median([asyncio.run(round_s()) / tokens * 1e6 for _ in range(ROUNDS + 1)][1:])


def _deltas(pieces: Sequence[str]) -> list[Delta]:
    deltas = [Delta(0, "text", text, (at,), Counts(1, at)) for at, text in enumerate(pieces, start=1)]
    return [*deltas, Delta(0, "text", "", (), Counts(1, len(pieces)), "length")]


async def _harmless(_request: ReviewRequest, _owner: str) -> Scores:
    """A second stage that costs nothing."""
    return {"S2": 0.0}


async def _round(
    screens: Screens, streams: Sequence[Sequence[Delta]], priors: Sequence[float], *, watched: bool
) -> float:
    """CPU seconds of this thread for all streams, from their making to their end."""
    screen = StreamScreen(screens.models.answers, _harmless)
    began_s = time.thread_time()
    screenings: list[Screening] = [screen.for_request(1, watched, prior, screens.policy) for prior in priors]
    for at in range(max(map(len, streams))):
        for screening, deltas in zip(screenings, streams, strict=True):
            if at < len(deltas):
                screening.feed(deltas[at])
                if screening.in_review:
                    await screening.review()
    return time.thread_time() - began_s
