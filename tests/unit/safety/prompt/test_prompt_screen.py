"""The prompt screen: what it reads and where, what it remembers, and that it fails closed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from app.metering.traffic import Histogram
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.prompt.prompt_screen import (
    FAST_CHARS,
    FAST_EARLIER,
    PromptScreen,
)
from app.safety.text.turns import SLICE_CHARS, read_request
from app.safety.thresholds import ENCODED_SLICES, ENCODED_TEXTS, ENCODER_CHARS_PER_S, FAST_SENTENCES
from app.safety.verdict import NgramResult, Scores, ScreenBusy, ScreenFailed
from tests.support.policies import WordClassifier, policy
from tests.support.sse_client import until

STUCK_S = 10.0
"""Seconds after which what a test holds up goes on: a test that fails is not to hang."""
BAD = {"bad": {"S2": 0.95}}
POLICY = policy()


def say(*texts: str) -> list[dict[str, str]]:
    """A conversation of users' turns."""
    return [{"role": "user", "content": text} for text in texts]


class Diluting(WordClassifier):
    """In a text of several sentences it finds nothing."""

    def _scores(self, words: Mapping[str, Scores], text: str) -> Scores:
        return super()._scores({} if text.count(".") > 1 else words, text)


@pytest.fixture
def counters() -> SafetyCounters:
    """Counters at zero."""
    return SafetyCounters(Histogram(HOLD_BACK_S))


@pytest.fixture
def screen(counters: SafetyCounters) -> Iterator[Callable[..., PromptScreen]]:
    """Makes screens over a classifier; their threads end with the test."""
    made: list[PromptScreen] = []

    def make(classifier: Any, **options: Any) -> PromptScreen:
        made.append(PromptScreen(classifier, counters, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_fast_asks_the_ngrams_and_full_asks_both(screen):
    """The one on the loop, the other in a thread of its own, always the same."""
    classifier = WordClassifier(full=BAD)
    prompts = screen(classifier)
    assert prompts.ngram_verdict(say("so bad"), POLICY).action is None
    assert classifier.read_full == []
    verdict = await prompts.full_verdict(say("so bad"), POLICY)
    await prompts.full_verdict(say("and good"), POLICY)
    assert (verdict.action, verdict.category, verdict.stage) == ("block", "S2", "encoder")
    assert classifier.read_full == ["so bad", "and good"]
    assert len(classifier.threads) == 1
    assert threading.current_thread().name not in classifier.threads


async def test_both_is_the_stricter_with_the_scores_of_full(screen):
    """What the n-grams are sure of is watched, though the encoder would let it pass."""
    prompts = screen(WordClassifier(full={"bad": {"S2": 0.2}}, fast={"bad": {"S3": 0.99}}))
    verdict = await prompts.evaluate(say("bad"), POLICY)
    assert (verdict.action, verdict.category, verdict.stage) == ("watch", "S3", "ngrams")
    assert (verdict.scores["S2"], verdict.scores["S3"]) == (0.2, 0.01)


async def test_the_ngrams_alone_let_pass_what_they_are_sure_of(screen):
    """Where they have read all, found little, and nothing was blocked before."""
    prompts = screen(WordClassifier(fast={"odd": {"S2": 0.3}}), sure_below=0.2)
    assert prompts.prescreen(say("good"), POLICY)[1]
    assert not prompts.prescreen(say("odd"), POLICY)[1]
    assert not prompts.prescreen(say("good"), POLICY, strikes=1)[1]
    assert not prompts.prescreen(say("good " * FAST_CHARS), POLICY)[1]
    assert not screen(WordClassifier()).prescreen(say("good"), POLICY)[1]


async def test_most_prompts_are_let_pass_by_their_harm_alone(screen):
    """No scores by category are worked out, unless they are asked for, or a category may do something."""
    classifier = WordClassifier(fast={"odd": {"S2": 0.9}})
    prompts = screen(classifier, sure_below=0.2)
    verdict, sure = prompts.prescreen(say("good"), POLICY, scored=False)
    assert (sure, verdict.action, verdict.harm, verdict.scores) == (True, None, 0.01, {})
    assert (classifier.read_fast, classifier.scored) == (["good"], [])
    whole, _ = prompts.prescreen(say("good"), POLICY)
    assert (whole.action, whole.harm) == (verdict.action, verdict.harm)
    for messages, rules, strikes in (
        (say("odd"), POLICY, 0),
        (say("good"), POLICY, 1),
        (say("good"), POLICY.after(1), 0),
        (say("good " * FAST_CHARS), POLICY, 0),
    ):
        asked, scored = (prompts.prescreen(messages, rules, strikes, scored=s) for s in (False, True))
        assert asked == scored
        assert asked[0].scores


async def test_what_the_encoder_is_to_read_needs_no_scores_before(screen):
    """Where the n-grams are not sure, and no category does anything at what they found."""
    classifier = WordClassifier(fast={"odd": {"S2": 0.3}})
    prompts = screen(classifier, sure_below=0.2)
    verdict, sure = prompts.prescreen(say("odd"), POLICY, scored=False)
    assert (sure, verdict.action, verdict.harm, verdict.scores) == (False, None, 0.3, {})
    whole, _ = prompts.prescreen(say("odd"), POLICY)
    assert (whole.action, whole.harm, whole.scores["S2"]) == (None, 0.3, 0.3)
    assert classifier.scored == ["odd"]
    assert screen(WordClassifier()).prescreen(say("good"), POLICY, scored=False)[0].scores == {}


async def test_a_category_that_acts_early_is_asked(screen):
    """What the n-grams are sure of may still be enough for a policy's threshold."""
    prompts = screen(WordClassifier(fast={"odd": {"S2": 0.75}}), sure_below=0.8)
    for rules, action in ((POLICY, None), (policy({"watch_fpr": 0.1}), "watch")):
        verdict, _ = prompts.prescreen(say("odd"), rules, scored=False)
        assert (verdict.action, verdict.category) == (action, "S2")
        assert verdict.scores["S2"] == 0.75, "the full verdict's threshold is lower, so scores are wanted"


async def test_a_past_of_little_harm_is_read_once(screen):
    """Of a conversation's next turn its own text and the joined one."""
    classifier = WordClassifier()
    prompts = screen(classifier, sure_below=0.2)
    for n in range(1, 4):
        prompts.prescreen(say(*("one", "two", "three")[:n]), POLICY, scored=False)
    assert classifier.read_fast == ["one", "two", "one\ntwo", "three", "one\ntwo\nthree"]
    assert classifier.scored == []


async def test_what_is_not_clear_is_read_no_second_time(screen):
    """Its scores come of the first look, and what is clear beside it is not scored before."""
    classifier = WordClassifier(fast={"odd": {"S2": 0.9}})
    prompts = screen(classifier, sure_below=0.2)
    assert prompts.prescreen(say("odd"), POLICY, scored=False)[0].scores["S2"] == 0.9
    assert (classifier.read_fast, classifier.scored) == (["odd"], ["odd"])


async def test_what_the_ngrams_let_pass_is_not_blocked_but_scored(screen):
    """`both` says what a request would meet, and what the encoder thinks of it."""
    prompts = screen(WordClassifier(full=BAD), sure_below=0.2)
    verdict = await prompts.evaluate(say("so bad"), POLICY)
    assert (verdict.action, verdict.scores["S2"] > 0.5) == (None, True)


async def test_a_request_split_over_turns_is_found_joined(screen):
    """None of the turns is harmful alone."""
    prompts = screen(WordClassifier(full={"make\na\nthing": {"S2": 0.95}}))
    for turn in ("make", "a", "thing"):
        assert (await prompts.full_verdict(say(turn), POLICY)).action is None
    assert (await prompts.full_verdict(say("hello", "make", "a", "thing"), POLICY)).action == "block"


@pytest.mark.parametrize("of", ["{harm} {calm}", "{calm} {harm}", "{calm} {harm} {calm}"])
async def test_a_harmful_sentence_is_found_among_harmless_ones(screen, of: str):
    """The encoder reads it by itself; the n-grams that are sure of the whole text, and not of it, let it."""
    calm = "It takes place in the leaves of plants, and needs light. Farmers study it to raise yields."
    harmful = "Tell me how to make a bad thing at home."
    text = of.format(harm=harmful, calm=calm)
    classifier = Diluting(fast={harmful: {"S2": 0.7}}, full={harmful: {"S2": 0.999}})
    prompts = screen(classifier, sure_below=0.2)
    first, sure = prompts.prescreen(say(text), POLICY)
    assert (first.action, sure) == (None, False)
    assert (await prompts.full_verdict(say(text), POLICY)).action == "block"
    assert classifier.read_full == [harmful], "what the n-grams are sure of is not read"


async def test_the_ends_of_a_text_in_another_language_are_read_by_themselves(screen):
    """Of it the n-grams cannot tell the worst sentence."""
    prompts = screen(Diluting(full={"Böses": {"S2": 0.999}}), sure_below=0.2)
    calm = "Die Pflanzen wachsen im Licht. " * 3
    for text in (f"Du tust Böses. {calm}", f"{calm}Du tust Böses."):
        assert (await prompts.full_verdict(say(text), POLICY)).action == "block"


async def test_many_sentences_are_not_read_on_the_loop(screen):
    """Sixteen at most; a longer text is left to the thread."""
    classifier = WordClassifier(fast={})
    prompts = screen(classifier, sure_below=0.2)
    for count, sure in ((FAST_SENTENCES, True), (FAST_SENTENCES + 1, False)):
        text = " ".join(f"Sentence number {n} says nothing." for n in range(count))
        assert prompts.prescreen(say(text), POLICY)[1] is sure


async def test_a_long_answer_is_watched_where_a_users_turn_would_be_refused(screen):
    """The encoder decides, however sure it is; a doubt that would watch a user's turn does nothing."""
    long = "word " * 100
    prompts = screen(WordClassifier(full={"bad": {"S2": 0.999}, "odd": {"S2": 0.5}}))
    for word, action in (("bad", "watch"), ("odd", None), ("good", None)):
        said = [*say("hello"), {"role": "assistant", "content": f"{long} {word}"}, *say("go on")]
        assert (await prompts.full_verdict(said, POLICY)).action == action
    assert (await prompts.evaluate(say(f"{long} bad"), POLICY)).action == "block"


async def test_the_encoder_reads_what_the_ngrams_doubt_before_the_newest_turns(screen):
    """It would let the others pass as a user's turn, too; after a blocked turn it reads all."""
    classifier = WordClassifier(fast={"odd": {"S2": 0.3}})
    prompts = screen(classifier, sure_below=0.2)
    said = [{"role": "system", "content": "calm"}, {"role": "tool", "content": "odd"}, *say("hello")]
    await prompts.full_verdict(said, POLICY)
    assert classifier.read_full == ["odd"]
    await prompts.full_verdict(said, POLICY, strikes=1)
    assert classifier.read_full == ["odd", "hello", "calm"]


async def test_of_very_many_texts_the_encoder_reads_the_worst(screen):
    """The n-grams read all of them."""
    classifier = WordClassifier(fast={"odd": {"S2": 0.3}}, full=BAD)
    said = [{"role": ("system", "tool")[i % 2], "content": f"calm {i}"} for i in range(2 * ENCODED_TEXTS)]
    verdict = await screen(classifier).full_verdict(
        [*said, {"role": "system", "content": "bad, odd"}, *say("hi")], POLICY
    )
    assert verdict.blocked
    assert len(classifier.read_full) == ENCODED_TEXTS + 2  # the newest turn, and a sentence
    assert {message["content"] for message in said} < set(classifier.read_fast)


async def test_an_earlier_turn_fades(screen):
    """The score of a judged one falls with every turn after it, once it is no longer among the three."""
    prompts = screen(WordClassifier(full=BAD))
    ours = {"role": "assistant", "content": "ours"}
    said = say("bad")
    turns = []
    for later in range(6):
        turns.append(read_request({"messages": said}, None, [False, True] * later))
        said = [*said, ours, *say("x")]
    found = [(await prompts.full_verdict(said, POLICY)).scores["S2"] for said in turns]
    assert found[:3] == [0.95, 0.95, 0.95]
    assert found[3:] == [pytest.approx(0.95 * 0.8**age) for age in (3, 4, 5)]


async def test_strikes_reach_the_policy(screen):
    """With a blocked turn behind it, what would pass is watched, by both looks."""
    prompts = screen(WordClassifier())
    assert prompts.ngram_verdict(say("x"), POLICY, strikes=1).action == "watch"
    assert (await prompts.full_verdict(say("x"), POLICY, strikes=1)).action == "watch"


async def test_a_past_is_scored_once(screen):
    """The next turn of a conversation costs its own text and the joined one."""
    classifier = WordClassifier()
    prompts = screen(classifier)
    turns = ["one", "two", "three", "four"]
    for n in range(1, 5):
        prompts.ngram_verdict(say(*turns[:n]), POLICY)
        await prompts.full_verdict(say(*turns[:n]), POLICY)
    alone = [text for text in classifier.read_full if "\n" not in text]
    assert alone == turns
    assert [text for text in classifier.read_fast if "\n" not in text] == turns


async def test_the_loop_is_not_held_up_by_a_long_past(screen):
    """At most FAST_EARLIER turns that it does not know are scored on the loop; the thread scores all."""
    classifier = WordClassifier(full=BAD)
    prompts = screen(classifier)
    conversation = say(*(f"turn {i}" for i in range(9)))
    prompts.ngram_verdict(conversation, POLICY)
    assert len(classifier.read_fast) == 2 + FAST_EARLIER
    await prompts.full_verdict(conversation, POLICY)
    assert len(classifier.read_full) == 2 + 8


async def test_the_loop_reads_the_ends_of_a_long_text(screen):
    """Its first and last slice; what is up to FAST_CHARS long is read whole."""
    classifier = WordClassifier()
    prompts = screen(classifier)
    prompts.ngram_verdict(say("x" * FAST_CHARS), POLICY)
    assert [len(text) for text in classifier.read_fast] == [FAST_CHARS]
    prompts.ngram_verdict(say("a" + "x" * FAST_CHARS + "b"), POLICY)
    assert [(text[0], text[-1], len(text)) for text in classifier.read_fast[1:]] == [
        ("a", "x", SLICE_CHARS),
        ("x", "b", SLICE_CHARS),
    ]


def long_text(word: str, where: int, length: int = 40) -> str:
    """A text of so many slices with a word in one of them."""
    parts = [f"{i:04d} " * (SLICE_CHARS // 5) for i in range(length)]
    parts[where] = f"{word} " + parts[where][len(word) + 1 :]
    return "".join(parts)


@pytest.mark.parametrize("where", [0, 7, 20, 39])
async def test_every_character_of_a_long_text_is_read(screen, where):
    """What one slice says is found wherever it stands."""
    classifier = WordClassifier(full=BAD, fast={"bad": {"S2": 0.3}})
    prompts = screen(classifier)
    text = long_text("bad", where)
    assert (await prompts.full_verdict(say(text), POLICY)).action == "block"
    read = set(" ".join(classifier.read_fast + classifier.read_full).split())
    assert set(text.split()) <= read


async def test_the_encoder_reads_the_worst_slices(screen):
    """The ends, and ENCODED_SLICES of those between: those that the n-grams find worst."""
    classifier = WordClassifier(fast={"0013": {"S1": 0.4}, "0027": {"S1": 0.3}})
    await screen(classifier).full_verdict(say(long_text("good", 5)), POLICY)
    assert len(classifier.read_full) == 2 + ENCODED_SLICES + 1  # and a sentence
    assert any("0013" in text for text in classifier.read_full)
    assert any("0027" in text for text in classifier.read_full)


async def test_a_slice_between_has_to_be_worse(screen):
    """What would block in a short prompt is watched amid forty slices, and blocks at their end."""
    classifier = WordClassifier(full={"bad": {"S2": 0.7}}, fast={"bad": {"S2": 0.3}})
    prompts = screen(classifier)
    found = [
        (await prompts.full_verdict(say(text), POLICY)).action
        for text in ("bad", long_text("bad", 20), long_text("x", 0) + "bad")
    ]
    assert found == ["block", "watch", "block"]


async def test_long_prompts_do_not_keep_the_thread(screen):
    """A short prompt that came after a long one is judged before it."""
    ended: list[str] = []
    prompts = screen(WordClassifier())

    async def judge(name: str, text: str) -> None:
        await prompts.full_verdict(say(text), POLICY)
        ended.append(name)

    await asyncio.gather(judge("long", long_text("x", 3)), judge("short", "hello"))
    assert ended == ["short", "long"]


class Broken(WordClassifier):
    """Raises, or says what is no probability."""

    def __init__(self, scores: Any) -> None:
        super().__init__()
        self.given = scores

    def fast(self, text: str) -> NgramResult:
        """As `given`."""
        scores = self.full(text)
        return NgramResult(max(scores.values()), lambda: scores)

    def full(self, _text: str) -> Any:
        """As `given`."""
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


BROKEN = [
    RuntimeError("out of memory"),
    {},
    None,
    {"S1": float("nan")},
    {"S1": 1.5},
    {"S1": -0.1, "S2": 0.9},
    {"S1": "0.1"},
]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("scores", BROKEN, ids=repr)
async def test_whatever_goes_wrong_refuses(screen, counters, scores, scored):
    """A throw, or scores that are none, end the request with `safety_unavailable`, and are counted."""
    prompts = screen(Broken(scores), sure_below=0.2)
    with pytest.raises(ScreenFailed) as caught:
        prompts.prescreen(say("x"), POLICY, scored=scored)
    assert (caught.value.code, caught.value.status) == ("safety_unavailable", 503)
    with pytest.raises(ScreenFailed):
        await prompts.full_verdict(say("x"), POLICY)
    assert counters.failures["ngrams"]["error"]["refused"] == 1
    assert counters.failures["encoder"]["error"]["refused"] == 1


async def test_scores_that_a_glance_does_not_ask_for_are_refused_by_the_full_look(screen):
    """It is never the last word on them: it is not sure, and asked for scores it refuses, too."""
    prompts = screen(Broken({"S1": -0.1, "S2": 0.3}), sure_below=0.2)
    assert not prompts.prescreen(say("x"), POLICY, scored=False)[1]
    with pytest.raises(ScreenFailed):
        await prompts.full_verdict(say("x"), POLICY)
    with pytest.raises(ScreenFailed):
        prompts.prescreen(say("x"), POLICY, scored=True)


async def test_fail_open_lets_pass_and_counts(screen, counters):
    """With the setting, the request goes on as if nothing had been found."""
    prompts = screen(Broken(ValueError("x")), fail_open=True)
    assert prompts.ngram_verdict(say("x"), POLICY).action is None
    assert (await prompts.full_verdict(say("x"), POLICY)).action is None
    assert counters.failures["ngrams"]["error"]["passed"] == 1
    assert counters.failures["encoder"]["error"]["passed"] == 1


async def test_a_screen_that_takes_too_long_refuses(screen, counters):
    """The request ends, whatever the thread does; so does one that waits behind it."""
    release = threading.Event()
    prompts = screen(WordClassifier(before=lambda _text: release.wait(STUCK_S) and None), timeout_s=0.05)
    judged = await asyncio.gather(
        prompts.full_verdict(say("x"), POLICY), prompts.full_verdict(say("y"), POLICY), return_exceptions=True
    )
    release.set()
    assert [type(outcome) for outcome in judged] == [ScreenFailed, ScreenFailed]
    assert counters.failures["encoder"]["timeout"]["refused"] == 2


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_text_that_takes_too_long_to_find_is_refused(screen, counters, fail_open: bool):
    """What overran in the thread is not begun anew on the loop, and is counted, whatever the setting says."""
    release, ran_in = threading.Event(), list[str]()

    def find() -> None:
        ran_in.append(threading.current_thread().name)
        release.wait(STUCK_S)

    prompts = screen(WordClassifier(), timeout_s=0.05, fail_open=fail_open)
    with pytest.raises(ScreenFailed):
        await prompts.in_thread("ada", 1, find)
    release.set()
    await until(lambda: ran_in)  # its time may be over before the thread begins
    assert len(ran_in) == 1
    assert threading.current_thread().name not in ran_in
    assert counters.failures["ngrams"]["timeout"]["refused"] == 1


async def test_a_cancelled_request_is_no_failure(screen, counters):
    """Who stops waits no longer, and nothing is counted."""
    release, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(_text: str) -> None:
        loop.call_soon_threadsafe(entered.set)
        release.wait(STUCK_S)

    prompts = screen(WordClassifier(before=hold))
    task = asyncio.create_task(prompts.full_verdict(say("x"), POLICY))
    async with asyncio.timeout(STUCK_S):
        await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert not any(map(Counter.total, counters.failures["encoder"].values()))


async def test_a_failure_is_not_remembered(screen):
    """The next request finds the classifier mended."""
    classifier = Broken(RuntimeError("x"))
    prompts = screen(classifier)
    with pytest.raises(ScreenFailed):
        await prompts.full_verdict(say("x"), POLICY)
    classifier.given = {"S1": 0.7}
    assert (await prompts.full_verdict(say("x"), POLICY)).action == "block"


async def test_a_prompt_without_text_passes(screen):
    """There is nothing to read; images are no text."""
    classifier = WordClassifier()
    prompts = screen(classifier)
    assert prompts.ngram_verdict([], POLICY).action is None
    assert (
        await prompts.full_verdict([{"role": "user", "content": [{"type": "image_url"}]}], POLICY)
    ).action is None
    assert classifier.read_fast == classifier.read_full == []


async def test_what_is_remembered_is_bounded_and_holds_no_text(screen, monkeypatch):
    """The oldest goes; the memory's keys are hashes."""
    monkeypatch.setattr("app.safety.prompt.text_scores.REMEMBERED", 4)
    prompts = screen(WordClassifier(), sure_below=0.2)
    for i in range(9):
        prompts.ngram_verdict(say(f"secret {i}"), POLICY)
        prompts.prescreen(say(f"secret {i}"), POLICY, scored=False)
    for memory in (prompts._texts._ngrams, prompts._texts._glances):
        assert len(memory._values) == 4
        assert all(len(key) == 16 for key in memory._values)


class Slow:
    """Reads a text in `takes_s`, and keeps the beginnings of what it has read."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self.read: list[str] = []

    def fast(self, _text: str) -> NgramResult:
        """Nothing at all."""
        return NgramResult(0.01, lambda: {"S2": 0.01})

    def full(self, text: str) -> Any:
        """The same, later."""
        self.read.append(text.split(maxsplit=1)[0])
        threading.Event().wait(self._takes_s)
        return {"S2": 0.01}


async def test_many_long_prompts_of_one_owner_are_all_read(screen):
    """Each may take as long as one alone, however long all of them do; the first ones are done first."""
    classifier = Slow(0.01)
    prompts = screen(classifier, timeout_s=0.5)
    texts = [f"{name} " * (SLICE_CHARS // 3) for name in range(10, 90)]
    ended: list[str] = []

    async def judge(text: str) -> None:
        await prompts.full_verdict(say(text), POLICY, owner="ada")
        ended.append(text[:2])

    await asyncio.gather(*map(judge, texts))
    assert ended == [text[:2] for text in texts]
    assert len(classifier.read) * 0.01 > 0.5 + len(texts[0]) / ENCODER_CHARS_PER_S


async def test_an_owners_long_prompts_do_not_delay_those_of_others(screen):
    """A short one of somebody else waits for a slice, not for the prompts before it."""
    classifier = Slow(0.005)
    prompts = screen(classifier)
    long = [
        asyncio.create_task(prompts.full_verdict(say(f"{name} " * (4 * SLICE_CHARS)), POLICY, owner="ada"))
        for name in "abcd"
    ]
    await asyncio.sleep(0)
    await prompts.full_verdict(say("hello"), POLICY, owner="bob")
    assert not any(task.done() for task in long)
    assert classifier.read[-1] == "hello"
    assert len(classifier.read) <= 3
    await asyncio.gather(*long)


@pytest.mark.parametrize("fail_open", [False, True])
async def test_who_would_wait_too_long_is_to_come_later(screen, counters, fail_open: bool):
    """A screen that is overloaded says so, and when to come; a flood opens no screen."""
    release = threading.Event()
    classifier = WordClassifier(before=lambda _text: release.wait(STUCK_S) and None)
    prompts = screen(classifier, wait_s=0.05, fail_open=fail_open)
    first = asyncio.create_task(prompts.full_verdict(say("x"), POLICY, owner="ada"))
    await asyncio.sleep(0)
    with pytest.raises(ScreenBusy) as caught:
        await prompts.full_verdict(say("y"), POLICY, owner="bob")
    release.set()
    assert (caught.value.code, caught.value.retry_after_s) == ("safety_unavailable", 30)
    assert counters.failures["encoder"]["timeout"]["refused"] == 1
    assert (await first).action is None
