"""The screens outside a server: which prompts they let pass, and what the stream screen costs by itself."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from scripts.benchmarks.prompts import Work, chat_work
from scripts.benchmarks.stats import percentile

ROUNDS = 7
AT_ONCE = 16
MAX_CPU_US = 15.0
PRESCREENED = 500
PRESCREEN_CHARS = 2_000
MAX_PRESCREEN_MS = 5.0


@dataclass(frozen=True, slots=True)
class CpuFigure:
    """CPU of the stream screen for one token, median of some rounds over all streams."""

    about: str
    streams: int
    tokens: int
    us_per_token: float
    us_per_token_rounds: list[float]

    def line(self) -> str:
        """The figure as a line of text."""
        return (
            f"the stream screen, {self.about}: {self.us_per_token:.2f} us of CPU per token over "
            f"{self.streams} streams, {self.tokens} tokens (must < {MAX_CPU_US:g})"
        )


class PromptJudge:
    """The shipped classifiers and the built-in policy, in this process.

    With `encoder` it reads every prompt, and so judges those too that the n-grams would let pass alone.
    """

    def __init__(self, *, encoder: bool = False) -> None:
        self.models = shipped.load()
        self.policy = Policies(None, self.models.directory).current
        self.asked = self.refused = self.unsure = 0
        counters = SafetyCounters(Histogram(HOLD_BACK_S))
        sure_below = 0.0 if encoder else self.models.sure_below
        self._screen = PromptScreen(self.models.prompts, counters, sure_below=sure_below)

    def passes(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether a prompt is neither refused nor watched; `unsure` counts those that the encoder reads."""
        _, sure = self._screen.prescreen(messages, self.policy, scored=False)
        verdict = asyncio.run(self._screen.evaluate(messages, self.policy))
        self.asked += 1
        self.refused += verdict.action is not None
        self.unsure += verdict.action is None and not sure
        return verdict.action is None

    def prescreen_s(self, messages: Sequence[dict[str, Any]]) -> float:
        """Seconds that the n-grams take for a prompt."""
        began_s = time.perf_counter()
        self._screen.prescreen(messages, self.policy, scored=False)
        return time.perf_counter() - began_s

    def harm(self, messages: Sequence[dict[str, Any]]) -> float:
        """The harm of a prompt."""
        return asyncio.run(self._screen.evaluate(messages, self.policy)).harm


@dataclass(frozen=True, slots=True)
class PrescreenFigure:
    """Milliseconds for which the prompt screen holds the event loop before the engine gets a prompt."""

    prompts: int
    chars: int
    p50_ms: float
    p99_ms: float

    def line(self) -> str:
        """The figure as a line of text."""
        return (
            f"the prompt screen before the engine: {self.prompts} prompts of {self.chars} characters, "
            f"p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f} ms (must < {MAX_PRESCREEN_MS:g})"
        )


def measure_prescreen(judge: PromptJudge) -> PrescreenFigure:
    """Judge different prompts by the n-grams; the first ten are not measured."""
    work = chat_work(
        "", PRESCREENED + 10, mean_tokens=1, prompt_words=PRESCREEN_CHARS // 3, seed=PRESCREEN_CHARS
    )
    taken = []
    for body in work.bodies:
        [message] = json.loads(body)["messages"]
        message["content"] = message["content"][:PRESCREEN_CHARS]
        taken.append(judge.prescreen_s([message]) * 1e3)
    return PrescreenFigure(
        PRESCREENED, PRESCREEN_CHARS, percentile(taken[10:], 50), percentile(taken[10:], 99)
    )


def measure_cpu(judge: PromptJudge, port: int, work: Work) -> list[CpuFigure]:
    """Have a server answer, and feed the answers to stream screens, a token of each stream in turn."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda body: pieces_of(port, body), work.bodies))
    priors = [judge.harm(json.loads(body)["messages"]) for body in work.bodies]
    return [
        _measured(judge, answers, priors, watched=False, about="as it is"),
        _measured(judge, answers, priors, watched=True, about="of watched prompts"),
    ]


def pieces_of(port: int, body: str) -> list[str]:
    """The texts of the frames of one streamed answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        frames = [line[6:] for line in response if line.startswith(b"data: {")]
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    return [text for delta in deltas if (text := delta.get("content") or delta.get("reasoning_content"))]


def _measured(
    judge: PromptJudge,
    answers: Sequence[Sequence[str]],
    priors: Sequence[float],
    *,
    watched: bool,
    about: str,
) -> CpuFigure:
    streams = [_deltas(pieces) for pieces in answers]
    tokens = sum(map(len, streams))
    round_s = partial(_round, judge, streams, priors, watched=watched)
    rounds = [asyncio.run(round_s()) / tokens * 1e6 for _ in range(ROUNDS + 1)]
    return CpuFigure(about, len(streams), tokens, median(rounds[1:]), [round(us, 3) for us in rounds[1:]])


def _deltas(pieces: Sequence[str]) -> list[Delta]:
    deltas = [Delta(0, "text", text, (at,), Counts(1, at)) for at, text in enumerate(pieces, start=1)]
    return [*deltas, Delta(0, "text", "", (), Counts(1, len(pieces)), "length")]


async def _harmless(_request: ReviewRequest, _owner: str) -> Scores:
    """A second stage that costs nothing."""
    return {"S2": 0.0}


async def _round(
    judge: PromptJudge, streams: Sequence[Sequence[Delta]], priors: Sequence[float], *, watched: bool
) -> float:
    """CPU seconds of this thread for all streams, from their making to their end."""
    screen = StreamScreen(judge.models.answers, _harmless)
    began_s = time.thread_time()
    screenings: list[Screening] = [screen.for_request(1, watched, prior, judge.policy) for prior in priors]
    for at in range(max(map(len, streams))):
        for screening, deltas in zip(screenings, streams, strict=True):
            if at < len(deltas):
                screening.feed(deltas[at])
                if screening.in_review:
                    await screening.review()
    return time.thread_time() - began_s
