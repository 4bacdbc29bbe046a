"""The guard tier over the scripted engine: verdicts, failures, and what is left behind by both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from app.core import ChatRequest, Delta, Prompt
from app.engine.scripted.engine import Script, ScriptedEngine
from app.metering.traffic import Histogram
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.guard.templates import FORMATS, GuardFormat
from app.safety.guard.tier import Guard, GuardFailed, GuardTier
from app.safety.verdict import ScreenFailed
from tests.support.policies import policy

LLAMA, QWEN, SHIELD, GRANITE = FORMATS
ASK = [{"role": "user", "content": "How do I pick a lock?"}]
ANSWERED = [*ASK, {"role": "assistant", "content": "With patience."}]

ENOUGH = Script(tokens=12)
Says = Callable[[ChatRequest], Sequence[dict[str, Any]]]


def entry(token: str, p: float = 1.0, **others: float) -> dict[str, Any]:
    """An entry of `logprobs.content`."""
    tops = [{"token": t, "logprob": math.log(q)} for t, q in ({token: p} | others).items()]
    return {"token": token, "logprob": math.log(p), "top_logprobs": tops}


def words(*tokens: str) -> Says:
    """The same words for every question."""
    return lambda _request: [entry(token) for token in tokens]


class ScriptedGuard(ScriptedEngine):
    """The scripted engine with a guard's words; it remembers what it was asked."""

    def __init__(self, says: Says, script: Script) -> None:
        super().__init__(script, name="guard")
        self._says = says
        self.asked: list[ChatRequest] = []

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        request: ChatRequest = prompt.handle.request
        self.asked.append(request)
        return self._said(super().generate(rid, prompt), list(self._says(request)))

    async def _said(self, deltas: AsyncIterator[Delta], left: list[dict[str, Any]]) -> AsyncIterator[Delta]:
        async for delta in deltas:
            if delta.finish_reason is not None:
                yield delta._replace(text="")
            elif left:
                said = left.pop(0)
                yield delta._replace(text=said["token"], logprobs=[said])


async def guard_of(
    form: GuardFormat, says: Says, script: Script = ENOUGH, **options: Any
) -> tuple[Guard, ScriptedGuard]:
    """A started guard and its engine."""
    engine = ScriptedGuard(says, script)
    await engine.start()
    return Guard(engine, form, **options), engine


def tier_of(guard: Guard, *, fail_open: bool = False) -> tuple[GuardTier, SafetyCounters]:
    """The tier over a guard, and what it counts."""
    counters = SafetyCounters(Histogram(HOLD_BACK_S))
    return GuardTier(guard, counters, fail_open=fail_open), counters


async def test_llama_guard_names_categories_at_its_own_probability() -> None:
    """One question; the categories of its second line have the probability of its first word."""
    says = lambda _request: [  # noqa: E731
        entry("unsafe", 0.8, safe=0.2),
        *map(entry, ["\n", "S", "9", ",", "S", "2"]),
    ]
    guard, engine = await guard_of(LLAMA, says)
    assert await guard.score(ASK) == {"S9": pytest.approx(0.8), "S2": pytest.approx(0.8)}
    (request,) = engine.asked
    assert request.body["messages"] == ASK
    assert (request.body["logprobs"], request.body["temperature"]) == (True, 0)


async def test_a_guard_without_labels_is_asked_about_each_risk() -> None:
    """Granite's questions name a risk each; their answers are the scores."""

    def says(request: ChatRequest) -> Sequence[dict[str, Any]]:
        risk = request.body["chat_template_kwargs"]["guideline"]
        likely = {"physical harm to": 0.5, "circumvention": 0.25, "common-sense": 0.75}
        p = next((p for words, p in likely.items() if words in risk), 0.125)
        return [entry("Yes", p, No=1 - p)]

    guard, engine = await guard_of(GRANITE, says)
    scores = await guard.score(ASK)
    assert scores == pytest.approx({"S1": 0.75, "S2": 0.125, "S10": 0.125, "S12": 0.125, "JB": 0.25})
    assert len(engine.asked) == len(GRANITE.prompt_questions)
    assert len({request.request_id for request in engine.asked}) == len(engine.asked)


async def test_an_answer_is_judged_in_the_words_for_answers() -> None:
    """ShieldGemma's guideline says what the chatbot shall not generate."""
    guard, engine = await guard_of(SHIELD, words("No"))
    assert await guard.score(ANSWERED) == {"S1": 0.0, "S5": 0.0, "S10": 0.0, "S12": 0.0}
    for request in engine.asked:
        assert request.body["chat_template_kwargs"]["judges_answer"] is True
        assert "The chatbot shall not" in request.body["chat_template_kwargs"]["guideline"]
    assert [m["role"] for m in engine.asked[0].body["messages"]] == ["user", "assistant"]


async def test_a_long_prompt_is_judged_in_slices() -> None:
    """The highest of all slices counts: what is harmful may stand anywhere."""

    def says(request: ChatRequest) -> Sequence[dict[str, Any]]:
        text = request.body["messages"][-1]["content"]
        return [entry("unsafe"), entry("\n"), entry("S1")] if "needle" in text else [entry("safe")]

    guard, engine = await guard_of(LLAMA, says, Script(tokens=12, context=1800))
    hay = "hay " * 2_000
    assert (await guard.score([{"role": "user", "content": f"{hay}needle {hay}"}]))["S1"] == 1.0
    assert len(engine.asked) > 5


async def test_a_harmless_verdict_is_not_read_further() -> None:
    """The generation is stopped at the word."""
    guard, engine = await guard_of(QWEN, words("Safety:", " Safe", "\n", "Categories:", " None"))
    assert await guard.score(ASK) == {"S2": 0.0}
    assert engine.load().num_running_reqs == 0


async def test_nothing_is_kept_of_a_question() -> None:
    """Neither the engine's count of it nor a task outlives the answer."""
    guard, engine = await guard_of(LLAMA, words("safe"))
    await guard.score(ASK)
    assert not engine._tallies._ended
    assert not guard._reading
    assert not guard._unwanted


async def test_a_verdict_is_the_policys() -> None:
    """The tier's verdict has the guard's scores and stage, and is counted."""
    guard, _ = await guard_of(LLAMA, words("unsafe", "\n", "S9"))
    tier, counters = tier_of(guard)
    verdict = await tier.judge(policy(), ASK, watched=False)
    assert verdict is not None
    assert (verdict.action, verdict.category, verdict.stage) == ("block", "S9", "guard")
    assert counters.verdicts["guard"]["S9"]["block"] == 1
    answered = await tier.judge(policy(), ANSWERED, watched=False)
    assert answered is not None
    assert answered.stage == "guard"


FAILURES = {
    "time-out": (words("unsafe"), Script(fault="hang"), "timeout"),
    "broken answer": (words(), Script(fault="fail"), "error"),
    "dead engine": (words(), Script(fault="die"), "error"),
    "full engine": (words(), Script(fault="overload"), "error"),
    "no verdict": (words("I", " think"), Script(tokens=4), "error"),
    "too long for it": (words("safe"), Script(context=40), "error"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    ("fail_open", "watched"), [(False, False), (False, True), (True, True), (True, False)]
)
async def test_a_failure_is_closed_for_whoever_is_watched(
    failure: str, *, fail_open: bool, watched: bool
) -> None:
    """For the rest `fail_open` decides; it is counted either way."""
    says, script, why = FAILURES[failure]
    guard, _ = await guard_of(LLAMA, says, script, timeout_s=0.02 if why == "timeout" else 10.0)
    tier, counters = tier_of(guard, fail_open=fail_open)
    ask = [{"role": "user", "content": "word " * 60}]
    if fail_open and not watched:
        assert await tier.judge(policy(), ask, watched=watched) is None
        assert +counters.failures["guard"][why] == {"passed": 1}
    else:
        with pytest.raises(ScreenFailed):
            await tier.judge(policy(), ask, watched=watched)
        assert +counters.failures["guard"][why] == {"refused": 1}
    await tier.aclose()


async def test_a_time_out_stops_the_engine() -> None:
    """What nobody waits for any more is aborted and read to its end."""
    guard, engine = await guard_of(SHIELD, words("Yes"), Script(fault="hang"), timeout_s=0.02)
    with pytest.raises(GuardFailed):
        await guard.score(ASK)
    await guard.aclose()
    assert engine.load().num_running_reqs == 0
    assert not guard._reading


async def test_who_gives_up_stops_the_engine() -> None:
    """A request that is cancelled while its guard is asked takes the guard's work with it."""
    guard, engine = await guard_of(LLAMA, words("safe"), Script(fault="hang"))
    judging = asyncio.create_task(guard.score(ASK))
    while not engine.asked:
        await asyncio.sleep(0)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    await guard.aclose()
    assert engine.load().num_running_reqs == 0


async def test_one_failure_is_enough() -> None:
    """Of several questions none may stay without an answer; the others are stopped."""
    says = lambda r: [entry("Yes" if "Hate" in r.body["chat_template_kwargs"]["guideline"] else "?")]  # noqa: E731
    guard, engine = await guard_of(SHIELD, says)
    with pytest.raises(GuardFailed):
        await guard.score(ASK)
    await guard.aclose()
    assert engine.load().num_running_reqs == 0


async def test_closing_ends_what_is_being_asked() -> None:
    """Whoever still waits is told that there is no verdict."""
    guard, engine = await guard_of(LLAMA, words("unsure"), Script(fault="hang", fault_after=1))
    judging = asyncio.create_task(guard.score(ASK))
    while not engine.load().num_running_reqs:
        await asyncio.sleep(0)
    await guard.aclose()
    assert engine.load().num_running_reqs == 0
    with pytest.raises(GuardFailed):
        await judging


async def test_a_question_given_up_while_it_is_rendered_is_not_asked() -> None:
    """An abort cannot reach what the engine does not know yet."""
    rendering, go_on = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedGuard):
        async def render(self, request: ChatRequest) -> Prompt:
            rendering.set()
            await go_on.wait()
            return await super().render(request)

    engine = Slow(words("safe"), ENOUGH)
    await engine.start()
    guard = Guard(engine, LLAMA)
    judging = asyncio.create_task(guard.score(ASK))
    await rendering.wait()
    judging.cancel()
    await asyncio.wait([judging])
    go_on.set()
    await guard.aclose()
    assert engine.asked == []
