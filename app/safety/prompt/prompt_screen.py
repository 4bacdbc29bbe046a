"""The prompt screen: a fast look on the loop, a thorough one in threads of its own.

Every character is read. A long text is read in slices; its ends, where the request stands as a rule,
are held to the policy's targets as they are, and the slices between them, the more there are the more
strictly, so that a long document is no likelier to be refused than a short one. The encoder reads the
ends and the slices that the n-grams find worst; the n-grams read all. Of what stands before the newest
turn it reads the texts that the n-grams are in doubt of.

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
from app.safety.prompt.text_scores import MERGED, PromptClassifier, TextScores
from app.safety.text.turns import SLICE_CHARS, Message, Read, Turns, slices, turns_of
from app.safety.thresholds import (
    ENCODED_SLICES,
    ENCODED_TEXTS,
    ENCODER_CHARS_PER_S,
    ENCODER_TIMEOUT_S,
    ENCODER_WAIT_S,
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


class _SlicedScores(NamedTuple):
    """The scores of a text: of its ends, and of so many slices between."""

    ends: Scores
    between: Scores
    num_between: int


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
            sure = not strikes and least_doubt and _is_read_whole(turns) and self._knows(turns, looked)
            return policy.judge([Reading("ngrams", scores)]), sure
        except Exception as exc:  # noqa: BLE001  # any error: nothing passes unscreened
            return self._failed("ngrams", "error", policy, exc), False

    async def full_verdict(
        self, conversation: Conversation, policy: Policy, strikes: int = 0, *, owner: str = ""
    ) -> Verdict:
        """The verdict of n-grams and encoder, in the thread; of every character.

        Owners alternate, slice by slice; of an owner's prompts short ones go before long ones.
        Raises ScreenFailed.
        """
        policy = policy.after(strikes)
        try:
            turns = _turns(conversation)
            num_chars = sum(len(read.text) for read in (*turns.newest, *turns.earlier))
            work_s = self._timeout_s + num_chars / ENCODER_CHARS_PER_S
            work = Work(owner, num_chars, work_s=work_s, wait_s=self._wait_s)
            skip_below = 0.0 if strikes else self._sure_below
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
        second = await self.full_verdict(conversation, policy, strikes, owner=owner)
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
        return verdict, highest_harm < self._sure_below and self._knows(turns, looked)

    def _knows(self, turns: Turns, looked: dict[str, NgramResult]) -> bool:
        """True if the n-grams know the language: of others, and of noise, they are sure of nothing."""
        texts = [read.text for read in (*turns.newest, *turns.earlier)]
        return all(text.isascii() and self._texts.glance(text, looked).is_language for text in texts)

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
        between: list[Reading] = []
        watched: list[Reading] = []
        passed_over = await self._passed_over(work, turns.earlier, skip_below)
        for number, read in enumerate((*turns.newest, *turns.earlier), start=-len(turns.newest)):
            text = passed_over.get(number) or await self._read_one(work, read)
            at_ends = highest(at_ends, _faded(text.ends, read.weight))
            if text.num_between:
                between.append(Reading("encoder", _faded(text.between, read.weight), text.num_between))
            if read.watch:
                doubted = highest(doubted, text.ends)
                if text.num_between:
                    watched.append(Reading("encoder", text.between, text.num_between, watch_only=True))
        if doubted:
            watched.insert(0, Reading("encoder", doubted, watch_only=True))
        return policy.judge([Reading("encoder", at_ends), *between, *watched])

    async def _passed_over(
        self, work: Work, earlier: Sequence[Read], skip_below: float
    ) -> dict[int, _SlicedScores]:
        """The texts before the newest turns, by number, that the encoder has not to read, and their scores.

        These are the texts that pass by the n-grams alone, and those beyond the worst ENCODED_TEXTS.
        """
        if not skip_below and len(earlier) <= ENCODED_TEXTS:
            return {}
        chunks = [slices(read.text) for read in earlier]
        scores = iter(
            await self._texts.all_by_ngrams(work, [chunk for of_text in chunks for chunk in of_text])
        )
        fast: dict[int, _SlicedScores] = {}
        for number, of_text in enumerate(chunks):
            if number % MERGED == 0:
                await asyncio.sleep(0)
            fast[number] = _SlicedScores(highest(*islice(scores, len(of_text))), {}, 0)
        worst = sorted(fast, key=lambda number: -harm(fast[number].ends))[:ENCODED_TEXTS]
        for number in worst:
            sure = harm(fast[number].ends) < skip_below and earlier[number].text.isascii()
            if not (sure and await self._texts.is_language(work, chunks[number])):
                del fast[number]
        return fast

    async def _read_one(self, work: Work, read: Read) -> _SlicedScores:
        chunks = slices(read.text)
        between = chunks[1:-1]
        at_ends: Scores = {}
        for chunk in (chunks[0], chunks[-1])[: len(chunks)]:
            at_ends = highest(at_ends, await self._texts.by_encoder(work, chunk))
        fast = await self._texts.all_by_ngrams(work, between)
        worst = sorted(range(len(between)), key=lambda i: -harm(fast[i]))[:ENCODED_SLICES]
        for i in worst:
            fast[i] = await self._texts.by_encoder(work, between[i])
        merged: Scores = {}
        for start in range(0, len(fast), MERGED):
            merged = highest(merged, *fast[start : start + MERGED])
            await asyncio.sleep(0)
        return _SlicedScores(at_ends, merged, len(between))

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


def _turns(conversation: Conversation) -> Turns:
    return conversation if isinstance(conversation, Turns) else turns_of(conversation)


def _is_read_whole(turns: Turns) -> bool:
    """True if `ngram_verdict` reads all of it."""
    if len(turns.earlier) > FAST_EARLIER:
        return False
    return max((len(read.text) for read in (*turns.newest, *turns.earlier)), default=0) <= FAST_CHARS


def _faded(scores: Scores, weight: float) -> Scores:
    return scores if weight == 1.0 else {category: p * weight for category, p in scores.items()}
