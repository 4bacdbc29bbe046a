"""The prompt screen: a fast look on the loop, a thorough one in threads of its own.

Every character is read. A long text is read in slices; its ends, where the request stands as a rule,
are held to the policy's targets as they are, and the slices between them, the more there are the more
strictly, so that a long document is no likelier to be refused than a short one. The encoder reads the
ends and the slices that the n-grams find worst; the n-grams read all. Of what stands before the newest
turn it reads the texts that the n-grams are in doubt of.

A harmful sentence among harmless ones hardly shows in the score of a text. So the sentence that the n-grams
find worst is read by itself, too, and where they do not know the language the first and the last; the more
sentences there are, the more strictly. Of a text of over FAST_CHARS characters those of its ends count.

Fails closed: any failure raises ScreenFailed, unless the server is set to fail open. A prompt that
waited too long for its slots raises ScreenBusy in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeVar

from app.concurrency.owner_threads import OwnerThreads, WaitedTooLong, Work
from app.safety import moderation
from app.safety.counters import Failure, SafetyCounters
from app.safety.policies.policy import Policy
from app.safety.prompt.remembered import Remembered
from app.safety.prompt.text_scores import MERGED, REMEMBERED, PromptClassifier, TextScores
from app.safety.text.turns import SLICE_CHARS, Message, Read, Turns, sentences, slices, turns_of
from app.safety.thresholds import (
    COUNTED_SENTENCES,
    DOUBTED_SENTENCE,
    ENCODED_SLICES,
    ENCODED_TEXTS,
    ENCODER_CHARS_PER_S,
    ENCODER_TIMEOUT_S,
    ENCODER_WAIT_S,
    FAST_SENTENCES,
)
from app.safety.verdict import (
    NgramResult,
    Reading,
    Scores,
    ScreenBusy,
    ScreenFailed,
    Stage,
    Verdict,
    harm,
    highest,
    stricter,
)

T = TypeVar("T")

FAST_CHARS = 2 * SLICE_CHARS
"""Characters of a text that `ngram_verdict` reads whole; of a longer one, the first and last slice."""
FAST_EARLIER = 3
"""Earlier turns without remembered scores that `ngram_verdict` scores; `full_verdict` scores all."""
MIN_CORES_OF_TWO = 8
"""Cores from which on two threads read prompts; on two cores the second takes time from tokens."""
MAX_REMEMBERED_TURNS = 512
"""Earlier turns of which `ngram_verdict` looks up the remembered scores."""


Conversation = Turns | Sequence[Message]


class _TextReadings(NamedTuple):
    """The scores of a text: of its ends; and of each set of its parts the highest, and how many they are."""

    ends: Scores
    parts: Sequence[tuple[Scores, int]] = ()


class PromptScreen:
    """Judges conversations. Construct once; `close()` ends its threads.

    A conversation is the messages that the model will see, or what was taken from a request to be read.
    Blocked turns are not in it: they are `strikes`, a number, and make the policy stricter. Failures are
    counted here, verdicts by who acts on them.
    """

    def __init__(
        self,
        classifier: PromptClassifier,
        counters: SafetyCounters,
        *,
        sure_below: float = 0.0,
        threads: int = 1,
        timeout_s: float = ENCODER_TIMEOUT_S,
        wait_s: float = ENCODER_WAIT_S,
        fail_open: bool = False,
    ) -> None:
        """Below a harm of `sure_below` the n-grams alone let a prompt pass; 0 has the encoder read all."""
        self._counters = counters
        self._sure_below = sure_below
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._fail_open = fail_open
        self._thread = OwnerThreads("prompt-screen", threads, hangs_after_s=timeout_s)
        self._texts = TextScores(classifier, self._thread)
        self._passing = Remembered[bool](REMEMBERED)

    def ngram_verdict(self, conversation: Conversation, policy: Policy, strikes: int = 0) -> Verdict:
        """The verdict of the n-grams, on the loop. It needs stronger evidence to block than `full_verdict`.

        Raises ScreenFailed.
        """
        return self.prescreen(conversation, policy, strikes)[0]

    def prescreen(
        self, conversation: Conversation, policy: Policy, strikes: int = 0, *, scored: bool = True
    ) -> tuple[Verdict, bool]:
        """The verdict of the n-grams, and whether it is the last: all was read, and little harm found.

        Not `scored`, one on little harm has no scores by category, which most prompts need not.
        Raises ScreenFailed.
        """
        policy = policy.after(strikes)
        try:
            turns = _turns(conversation)
            looked: dict[str, NgramResult] = {}
            clear = None if scored or strikes else self._clear(turns, policy, looked)
            if clear is not None:
                return clear
            scores, doubted = self._look(turns, looked)
            least_doubt = max(harm(scores), harm(doubted)) < self._sure_below
            sure = not strikes and least_doubt and _is_read_whole(turns) and self._is_sure(turns, looked)
            return policy.judge([Reading("ngrams", scores)]), sure
        except Exception as exc:  # noqa: BLE001  # any error: nothing passes unscreened
            return self._failed("ngrams", "error", policy, exc), False

    async def full_verdict(
        self,
        conversation: Conversation,
        policy: Policy,
        strikes: int = 0,
        *,
        owner: str = "",
        thorough: bool = False,
    ) -> Verdict:
        """The verdict of n-grams and encoder, in the thread; of every character.

        With `thorough` the encoder also reads the newest texts that the n-grams are sure of.
        Owners alternate, slice by slice; of an owner's prompts short ones go before long ones.
        Raises ScreenFailed.
        """
        policy = policy.after(strikes)
        try:
            turns = _turns(conversation)
            num_chars = sum(len(read.text) for read in (*turns.newest, *turns.earlier))
            work_s = self._timeout_s + num_chars / ENCODER_CHARS_PER_S
            work = Work(owner, num_chars, work_s=work_s, wait_s=self._wait_s)
            skip_below = 0.0 if strikes or thorough else self._sure_below
            verdict = await self._read(work, turns, policy, skip_below=skip_below)
        except TimeoutError as exc:
            return self._failed("encoder", "timeout", policy, exc)
        except Exception as exc:  # noqa: BLE001  # same
            return self._failed("encoder", "error", policy, exc)
        return await self._lifted(work, turns, policy, verdict) if verdict.enforced == "block" else verdict

    async def _lifted(self, work: Work, turns: Turns, policy: Policy, refused: Verdict) -> Verdict:
        """The verdict without what the operator allows; where that cannot be had, the refusal stands."""
        try:
            rest = await self._thread.run(work, turns.edited, policy.unallowed)
            if rest is None:
                return refused
            verdict = policy.lifted(refused, await self._read(work, rest, policy, skip_below=0.0))
        except Exception:  # noqa: BLE001  # any error: nothing passes by it
            self._counters.failed("encoder", "error", passed=False)
            return refused
        if verdict.lifted is not None:
            self._counters.lifted[verdict.lifted] += 1
        return verdict

    async def in_thread(self, owner: str, size: int, function: Callable[[], T]) -> T:
        """`function()`, which would hold up the loop, in the thread. Raises ScreenFailed.

        A server that fails open does so too: `function` was to find what would pass.
        """
        work = Work(owner, size, work_s=self._timeout_s + size / ENCODER_CHARS_PER_S, wait_s=self._wait_s)
        try:
            return await self._thread.run(work, function)
        except TimeoutError as exc:
            self._counters.failed("ngrams", "timeout", passed=False)
            raise (ScreenBusy if isinstance(exc, WaitedTooLong) else ScreenFailed) from exc

    async def evaluate(
        self, conversation: Conversation, policy: Policy, strikes: int = 0, *, owner: str = ""
    ) -> Verdict:
        """The verdict on a request, with the scores of `full_verdict` in any case. Raises ScreenFailed."""
        first, sure = self.prescreen(conversation, policy, strikes)
        second = await self.full_verdict(conversation, policy, strikes, owner=owner, thorough=True)
        return replace(first if sure else stricter(first, second), scores=second.scores)

    async def moderate(self, text: str, policy: Policy, *, owner: str = "") -> moderation.Result:
        """One entry of OpenAI's `results`: a text as it would be in a conversation of its own.

        Counted as verdicts are, stored nowhere. Raises ScreenFailed.
        """
        verdict = await self.evaluate([{"role": "user", "content": text}], policy, owner=owner)
        blocked = policy.blocked(verdict.scores, "encoder") if verdict.blocked else ()
        return moderation.result(verdict, blocked)

    def close(self) -> None:
        """End the thread once it is done with what it is at; a second call does nothing."""
        self._thread.close()

    def _clear(
        self, turns: Turns, policy: Policy, looked: dict[str, NgramResult]
    ) -> tuple[Verdict, bool] | None:
        """The verdict on a prompt of so little harm that no category can do anything; None for others.

        `looked` collects the read texts.
        """
        if not _is_read_whole(turns):
            return None
        highest_harm = 0.0
        for text, weight, watch in (*turns.newest, *turns.earlier):
            highest_harm = max(
                highest_harm, self._texts.glance(text, looked).harm * (1.0 if watch else weight)
            )
        verdict = policy.clear_prompt(highest_harm, "ngrams")
        if verdict is None or policy.clear_prompt(highest_harm, "encoder") is None:
            return None  # whose scores say whether the model is to be strict
        return verdict, highest_harm < self._sure_below and self._is_sure(turns, looked)

    def _is_sure(self, turns: Turns, looked: dict[str, NgramResult]) -> bool:
        """True if the n-grams know the language, and doubt no sentence of a text that they pass."""
        texts = [read.text for read in (*turns.newest, *turns.earlier)]
        return all(self._knows(text, looked) and self._passes_sentences(text) for text in texts)

    def _knows(self, text: str, looked: dict[str, NgramResult]) -> bool:
        """True if the n-grams know the language: of others, and of noise, they are sure of nothing."""
        return text.isascii() and self._texts.glance(text, looked).is_language

    def _passes_sentences(self, text: str) -> bool:
        key = self._passing.key(text)
        remembered = self._passing.get(key)
        if remembered is not None:
            return remembered
        of_text = _sentences(text)
        passes = len(of_text) <= FAST_SENTENCES and all(
            self._texts.glance(sentence, {}).harm < DOUBTED_SENTENCE for sentence in of_text
        )
        return self._passing.put(key, passes)

    def _look(self, turns: Turns, looked: Mapping[str, NgramResult]) -> tuple[Scores, Scores]:
        """The scores by weight, and those of the texts that are to be watched, as they are."""
        scores: Scores = {}
        doubted: Scores = {}
        for text, weight, _ in turns.newest:
            for chunk in ends(text):
                scores = highest(scores, _faded(self._texts.by_ngrams(chunk, looked), weight))
        new = 0
        for text, weight, watch in turns.earlier[:MAX_REMEMBERED_TURNS]:
            for chunk in ends(text):
                remembered = self._texts.remembered(chunk)
                if remembered is None and new < FAST_EARLIER:
                    new += 1
                    remembered = self._texts.by_ngrams(chunk, looked)
                scores = highest(scores, _faded(remembered or {}, weight))
                doubted = highest(doubted, remembered or {}) if watch else doubted
        return scores, doubted

    async def _read(self, work: Work, turns: Turns, policy: Policy, *, skip_below: float) -> Verdict:
        at_ends: Scores = {}
        doubted: Scores = {}
        parts: list[Reading] = []
        watched: list[Reading] = []
        passed_over = await self._passed_over(work, turns.earlier, skip_below)
        for number, read in enumerate((*turns.newest, *turns.earlier), start=-len(turns.newest)):
            text = passed_over.get(number) or await self._read_one(
                work, read, skip_below if number < 0 else 0.0
            )
            at_ends = highest(at_ends, _faded(text.ends, read.weight))
            parts += (Reading("encoder", _faded(scores, read.weight), count) for scores, count in text.parts)
            if read.watch:
                doubted = highest(doubted, text.ends)
                watched += (Reading("encoder", *scored, watch_only=True) for scored in text.parts)
        if doubted:
            watched.insert(0, Reading("encoder", doubted, watch_only=True))
        return policy.judge([Reading("encoder", at_ends), *parts, *watched])

    async def _passed_over(
        self, work: Work, earlier: Sequence[Read], skip_below: float
    ) -> dict[int, _TextReadings]:
        """The texts before the newest turns, by number, that the encoder has not to read, and their scores.

        These are the texts that pass by the n-grams alone, and those beyond the worst ENCODED_TEXTS.
        """
        if not skip_below and len(earlier) <= ENCODED_TEXTS:
            return {}
        chunks = [slices(read.text) for read in earlier]
        scores = iter(
            await self._texts.all_by_ngrams(work, [chunk for of_text in chunks for chunk in of_text])
        )
        fast: dict[int, _TextReadings] = {}
        for number, of_text in enumerate(chunks):
            if number % MERGED == 0:
                await asyncio.sleep(0)
            fast[number] = _TextReadings(highest(*islice(scores, len(of_text))))
        worst = sorted(fast, key=lambda number: -harm(fast[number].ends))[:ENCODED_TEXTS]
        for number in worst:
            text = earlier[number].text
            sure = harm(fast[number].ends) < skip_below and text.isascii()
            if not (sure and await self._texts.passes(work, chunks[number], _sentences(text))):
                del fast[number]
        return fast

    async def _read_one(self, work: Work, read: Read, skip_below: float) -> _TextReadings:
        chunks = slices(read.text)
        between = chunks[1:-1]
        at_ends: Scores = {}
        for chunk in (chunks[0], chunks[-1])[: len(chunks)]:
            if skip_below and self._knows(chunk, {}) and self._texts.glance(chunk, {}).harm < skip_below:
                at_ends = highest(at_ends, self._texts.by_ngrams(chunk, {}))
            else:
                at_ends = highest(at_ends, await self._texts.by_encoder(work, chunk))
        fast = await self._texts.all_by_ngrams(work, between)
        worst = sorted(range(len(between)), key=lambda i: -harm(fast[i]))[:ENCODED_SLICES]
        for i in worst:
            fast[i] = await self._texts.by_encoder(work, between[i])
        merged: Scores = {}
        for start in range(0, len(fast), MERGED):
            merged = highest(merged, *fast[start : start + MERGED])
            await asyncio.sleep(0)
        parts = ((merged, len(between)), await self._read_sentences(work, read.text))
        return _TextReadings(at_ends, [(scores, count) for scores, count in parts if count])

    async def _read_sentences(self, work: Work, text: str) -> tuple[Scores, int]:
        """The highest scores of single sentences, and how many there are; none of a text that is one."""
        of_text = _sentences(text)
        if not of_text:
            return {}, 0
        fast = await self._texts.all_by_ngrams(work, of_text)
        chosen = {max(range(len(of_text)), key=lambda i: harm(fast[i]))}
        if not (text.isascii() and await self._texts.passes(work, list(ends(text)), ())):
            chosen |= {0, len(of_text) - 1}  # the n-grams know little of other languages
        scores: Scores = {}
        for i in chosen:
            scores = highest(scores, await self._texts.by_encoder(work, of_text[i]))
        return scores, min(len(of_text), COUNTED_SENTENCES)

    def _failed(self, stage: Stage, why: Failure, policy: Policy, exc: Exception) -> Verdict:
        busy = isinstance(exc, WaitedTooLong)  # no failure: a flood must not be a way past the screen
        passed = self._fail_open and not busy
        self._counters.failed(stage, why, passed=passed)
        if not passed:
            raise (ScreenBusy if busy else ScreenFailed) from exc
        return replace(policy.judge_prompt({}, stage), unread=True)


def prompt_threads(cores: int) -> int:
    """Threads that read prompts: two halve the wait in a burst, where there are cores beside the engine's."""
    return 2 if cores >= MIN_CORES_OF_TWO else 1


def ends(text: str) -> Iterator[str]:
    """The parts of a text that `ngram_verdict` reads: all of it, or its first and its last slice."""
    if len(text) <= FAST_CHARS:
        yield text
    else:
        yield text[:SLICE_CHARS]
        yield text[-SLICE_CHARS:]


def _sentences(text: str) -> list[str]:
    """The sentences of what `ends` has of a text; none of a text that is one."""
    of_text = [sentence for chunk in ends(text) for sentence in sentences(chunk)]
    return of_text if len(of_text) > 1 else []


def _turns(conversation: Conversation) -> Turns:
    return conversation if isinstance(conversation, Turns) else turns_of(conversation)


def _is_read_whole(turns: Turns) -> bool:
    """True if `ngram_verdict` reads all of it."""
    if len(turns.earlier) > FAST_EARLIER:
        return False
    return max((len(read.text) for read in (*turns.newest, *turns.earlier)), default=0) <= FAST_CHARS


def _faded(scores: Scores, weight: float) -> Scores:
    return scores if weight == 1.0 else {category: p * weight for category, p in scores.items()}
