"""The limits of each key: requests a minute, tokens a minute, generations at once.

    begin ──(a request)──▶ charge ──(estimate)──▶ correct ──(after rendering)──▶ on_delta … ──▶ release

`begin` precedes reading the body, `charge` any other expensive work. Both are synchronous:
between looking and charging nothing else runs. What a request did not use it gives back. What its answer
makes beyond its estimate is charged as it is made, and is its key's debt where the window has no room
(app.metering.rates). An answer ends when its request has used one minute's tokens, or its key's debt is one
minute's tokens. Nothing here outlives the process.

`Intake` (app.intake.open_stream) begins and charges a lease, and returns it if the request fails before its
generation. From then on `Pipeline.serve` corrects it, `EngineRun` calls `on_delta`, and `Finalizer`
(app.pipeline.finalize) releases or withdraws it, however the request ends.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn, get_args

from app.core import TIERS, ChatRequest, Counts, Key, KeyTerms, Prompt
from app.errors import RateLimited, TokensLimited
from app.metering.estimate import ChoiceTokens, CountText, bytes_estimate, expected_answer, prompt_estimate
from app.metering.rates import Charge, Window

Reason = Literal["requests", "tokens", "tokens_rendered", "too_large", "streams", "budget", "reads"]
REASONS: tuple[Reason, ...] = get_args(Reason)
FIRST_COMPLETION_TOKENS = 256.0
"""Tokens that a key's answers are expected to have until it has had one."""
MAX_NAMED = 5
"""Running requests that a refusal names."""
RELEASE_S = 0.2
"""Seconds that a generation counts at most after it was stopped."""
GROWTH_TOKENS = 64
"""Tokens charged at once for an answer beyond its estimate: not each token is a charge."""
MAX_RETRY_S = 120
JITTER = 0.1
_WEIGHT = 0.2
_FIRST_DURATION_S = 5.0


class _Usage:
    """One key's windows, its running generations, and the mean of its answers."""

    __slots__ = ("completion_tokens", "duration_s", "requests", "running", "streams", "tokens")

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()
        self.streams = 0
        self.running: dict[str, KeyLease] = {}
        """Its generations by request id, oldest first; a request whose body is being read is none yet."""
        self.completion_tokens = FIRST_COMPLETION_TOKENS
        """Moving average of the tokens of a choice."""
        self.duration_s = _FIRST_DURATION_S
        """Moving average of a request's seconds."""

    def change_streams(self, change: int) -> None:
        self.streams += change

    def learn(self, duration_s: float, completion_tokens: float) -> None:
        """Take a request's seconds into the average, and the mean tokens of its choices if they had any."""
        self.duration_s += _WEIGHT * (duration_s - self.duration_s)
        if completion_tokens:
            self.completion_tokens += _WEIGHT * (completion_tokens - self.completion_tokens)


class Lease:
    """The charges of a request, and the generations that it counts as. Of a key without limits: nothing."""

    metered = False
    """True if `on_delta` must be called with each delta of the engine."""

    def charge(self, request: ChatRequest) -> None:
        """Charge the estimate, or nothing more. Raises RateLimited, TokensLimited."""

    def charge_tokens(self, tokens: int) -> None:
        """Charge so many tokens, for texts that are read and not answered. Raises TokensLimited."""

    def correct(self, prompt: Prompt) -> None:
        """Charge the prompt as it was rendered. Raises TokensLimited when it no longer fits."""

    def on_delta(self, choice: int, completion_tokens: int) -> bool:
        """Charge what the engine has made of a choice; returns whether the answer has to end here."""
        del choice, completion_tokens
        return False

    def as_notice(self) -> dict[str, str]:
        """The notice of an answer that ended because of `on_delta`."""
        raise NotImplementedError

    def release(self, counts: Mapping[int, Counts]) -> None:
        """Charge what was used, by choice, and release the rest; a second call does nothing."""

    def withdraw(self, counts: Mapping[int, Counts] | None = None) -> None:
        """End the lease of a request that is refused with 503: as `release`, and it counts as no request."""


UNLIMITED = Lease()


class KeyLease(Lease):
    """The charges of a request of a limited key."""

    def __init__(self, limiter: Limiter, key: Key, usage: _Usage) -> None:
        self._limiter = limiter
        self._key = key
        self._usage = usage
        self._limit = key.terms.tpm
        self.metered = self._limit is not None
        self._n = 0
        """Choices; 0 until the body was read."""
        self._streams = 0
        """Streams of the key that it counts as: one for a body, then one for each choice."""
        self._answer = ChoiceTokens(0, 0)
        self._charges: list[Charge] = []
        self.tokens = 0
        """Tokens charged now."""
        self._prompt_tokens = 0
        self._made: dict[int, int] = {}
        """Tokens of each choice."""
        self._charged_before: Mapping[int, Counts] | None = None
        """Of a continued answer: the counts up to which the process before has charged it, by choice."""
        self._made_tokens = 0
        """Tokens of all choices."""
        self._owed_tokens = 0
        """Tokens beyond the charges that became the key's debt."""
        self.began_s = limiter.clock_s()
        self._request_id = ""
        self._request: Charge | None = None
        self._released = False

    def begin(self, *, generates: bool) -> None:
        """Charge a request, and count it as a stream if it generates. Raises RateLimited."""
        terms, usage, limiter = self._key.terms, self._usage, self._limiter
        if generates:
            self._check_streams(1)
        if terms.rpm is not None:
            if not usage.requests.room(terms.rpm):
                limiter.refuse_request(self._key, usage)
            self._request = usage.requests.charge(self.began_s, 1)
        if generates:
            self._set_streams(1)

    def charge(self, request: ChatRequest) -> None:
        """Count a stream for each choice and charge the estimate. Raises RateLimited, TokensLimited."""
        self._limiter.advance(self._key.terms, self._usage)
        self._check_streams(request.n)
        self._n = request.n
        self._answer = expected_answer(request, self._usage.completion_tokens)
        if self._limit is not None:
            self._charge_prompt(prompt_estimate(request, self._limiter.count_text), "tokens")
        self.take_streams(request.request_id, request.n)

    def resume(self, request_id: str, n: int, counts: Mapping[int, Counts]) -> None:
        """Count the streams of a continued answer; its prompt and `counts` were charged before."""
        self._charged_before = counts
        self.take_streams(request_id, n)

    def _new_tokens(self, choice: int, completion_tokens: int) -> int:
        """Tokens of a choice that were not charged before."""
        charged = (self._charged_before or {}).get(choice, Counts())
        return max(completion_tokens - charged.completion_tokens, 0)

    def take_streams(self, request_id: str, n: int) -> None:
        """Count a stream for each of `n` choices of a request, over the limit too."""
        self._n, self._request_id = n, request_id
        self._usage.running[request_id] = self
        self._set_streams(n)

    @property
    def num_streams(self) -> int:
        """The streams that it counts as."""
        return self._streams

    def charge_tokens(self, tokens: int) -> None:
        if self._limit is not None:
            self._limiter.advance(self._key.terms, self._usage)
            self._charge(tokens, "tokens")

    def _check_streams(self, wanted: int) -> None:
        terms, usage = self._key.terms, self._usage
        others = usage.streams - self._streams
        if terms.max_streams is not None and others + wanted > terms.max_streams:
            self._limiter.refuse_streams(self._key, usage, others, wanted)

    def _set_streams(self, num: int) -> None:
        self._usage.change_streams(num - self._streams)
        self._streams = num

    def _charge_prompt(self, prompt_tokens: int, reason: Reason) -> None:
        """Have a prompt and its answer charged. Raises TokensLimited, and then nothing has changed."""
        assert self._limit is not None
        least, expected = (tokens * self._n for tokens in self._answer)
        # What answers mostly are like makes no request too large for ever: it is taken for a whole window.
        self._charge(prompt_tokens + max(least, min(expected, self._limit - prompt_tokens)), reason)

    def _charge(self, wanted: int, reason: Reason) -> None:
        """Have so many tokens charged. Raises TokensLimited, and then nothing has changed."""
        assert self._limit is not None
        window, more = self._usage.tokens, wanted - self.tokens
        if more <= 0:
            self._give_back(-more)
            return
        if wanted > self._limit or more > window.room(self._limit):
            self._limiter.refuse_tokens(self._key, self._usage, wanted, more, reason=reason)
        self._add_charge(more)

    def _add_charge(self, tokens: int) -> None:
        self._charges.append(self._usage.tokens.charge(self._limiter.clock_s(), tokens))
        self.tokens += tokens

    def _give_back(self, tokens: int) -> None:
        for charge in reversed(self._charges):
            returned = min(tokens, charge.amount)
            self._usage.tokens.give_back(charge, returned)
            self.tokens -= returned
            tokens -= returned

    def correct(self, prompt: Prompt) -> None:
        if self._limit is None or self._charged_before is not None:
            return
        self._limiter.advance(self._key.terms, self._usage)
        least, expected = self._answer
        self._answer = ChoiceTokens(min(least, prompt.max_tokens), min(expected, prompt.max_tokens))
        self._charge_prompt(prompt.billed_tokens, "tokens_rendered")
        self._prompt_tokens = prompt.billed_tokens

    def on_delta(self, choice: int, completion_tokens: int) -> bool:
        if self._limit is None:
            return False
        if self._charged_before is not None:
            completion_tokens = self._new_tokens(choice, completion_tokens)
        self._made_tokens += completion_tokens - self._made.get(choice, 0)
        self._made[choice] = completion_tokens
        used = self._prompt_tokens + self._made_tokens
        beyond = used - self.tokens - self._owed_tokens
        if beyond > 0:
            self._grow(beyond, self._limit)
        return used >= self._limit or (self._owed_tokens > 0 and self._usage.tokens.debt >= self._limit)

    def _grow(self, beyond: int, limit: int) -> None:
        """Charge what was made beyond the charges, and some in advance; what has no room is debt."""
        window = self._usage.tokens
        self._limiter.advance(self._key.terms, self._usage)
        fits = min(window.room(limit), max(beyond, GROWTH_TOKENS))
        if fits:
            self._add_charge(fits)
        if beyond > fits:
            window.add_debt(beyond - fits)
            self._owed_tokens += beyond - fits

    def as_notice(self) -> dict[str, str]:
        """The notice of an answer that reached a request's limit, or its key's limit of debt."""
        if self._prompt_tokens + self._made_tokens >= (self._limit or 0):
            why = f"a request may use {self._limit} tokens, prompt and all choices together"
        else:
            why = f"the key owes {self._limit} tokens beyond those of this minute"
        message = f"The answer ends here: {why}, which is the key's limit of tokens per minute (TPM)."
        return {"code": RateLimited.default_code, "message": message}

    def release(self, counts: Mapping[int, Counts]) -> None:
        if self._released:
            return
        self._released = True
        usage = self._usage
        self._set_streams(0)
        if usage.running.get(self._request_id) is self:  # a continued answer may have taken its place
            del usage.running[self._request_id]
        completion_tokens = sum(self._new_tokens(i, made.completion_tokens) for i, made in counts.items())
        if self._n and counts:  # else the engine never had it, and its time says nothing of an answer's
            usage.learn(self._limiter.clock_s() - self.began_s, completion_tokens / self._n)
        if self._limit is None:
            return
        prompt_tokens = max((made.prompt_tokens for made in counts.values()), default=0)
        used = max(completion_tokens, self._made_tokens)
        used += prompt_tokens if self._charged_before is None else 0
        beyond = used - self.tokens - self._owed_tokens
        if beyond > 0:
            usage.tokens.add_debt(beyond)
        else:
            self._give_back(-beyond)

    def withdraw(self, counts: Mapping[int, Counts] | None = None) -> None:
        if not self._released and self._request is not None:
            self._usage.requests.give_back(self._request, 1)
        self.release(counts or {})


class Limiter:
    """All keys' limits, and how often each tier was refused for which reason."""

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        count_text: CountText = bytes_estimate,
        grace_left_s: Callable[[str], float | None] = lambda _request_id: None,
    ) -> None:
        """`grace_left_s` gives the seconds until a generation without a reader is stopped; else None."""
        self.clock_s = clock_s
        self._grace_left_s = grace_left_s
        self.count_text = count_text
        self.refused: dict[str, Counter[str]] = {tier: Counter(dict.fromkeys(REASONS, 0)) for tier in TIERS}
        self._chance = chance
        self._keys: defaultdict[str, _Usage] = defaultdict(_Usage)

    def begin(self, key: Key | None, *, generates: bool = True) -> Lease:
        """Charge a request of which nothing but its head was read. Raises RateLimited.

        One that `generates` counts as a stream while its body is read.
        """
        if key is None or not _limited(key.terms):
            return UNLIMITED
        lease = KeyLease(self, key, self._usage_of(key))
        lease.begin(generates=generates)
        return lease

    def resume(self, key: Key | None, request_id: str, n: int, counts: Mapping[int, Counts]) -> Lease:
        """The lease of `n` choices that were admitted before and continue behind their `counts`, by choice.

        They count as streams, and nothing refuses them.
        """
        if key is None or not _limited(key.terms):
            return UNLIMITED
        lease = KeyLease(self, key, self._usage_of(key))
        lease.resume(request_id, n, counts)
        return lease

    def _usage_of(self, key: Key) -> _Usage:
        usage = self._keys[key.id]
        self.advance(key.terms, usage)
        return usage

    def has_room(self, key: Key | None) -> bool:
        """True if `begin` would admit a request."""
        usage = None if key is None else self._keys.get(key.id)
        if key is None or usage is None:
            return True
        terms = key.terms
        self.advance(terms, usage)
        return (terms.rpm is None or usage.requests.room(terms.rpm) > 0) and (
            terms.max_streams is None or usage.streams < terms.max_streams
        )

    def advance(self, terms: KeyTerms, usage: _Usage) -> None:
        """Bring a key's windows up to now."""
        now_s = self.clock_s()
        if terms.rpm is not None:
            usage.requests.advance(now_s, terms.rpm)
        if terms.tpm is not None:
            usage.tokens.advance(now_s, terms.tpm)

    def headers(self, key: Key) -> dict[str, str]:
        """OpenAI's headers for a key, as of now; none for limits that it does not have."""
        terms, usage = key.terms, self._keys.get(key.id) or _Usage()
        self.advance(terms, usage)
        now_s = self.clock_s()
        headers = {}
        kinds = (("requests", terms.rpm, usage.requests), ("tokens", terms.tpm, usage.tokens))
        for name, limit, window in kinds:
            if limit is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(window.room(limit))
                headers[f"x-ratelimit-reset-{name}"] = duration_text(window.reset_s(now_s, limit))
        return headers

    # Refusals

    def refuse_streams(self, key: Key, usage: _Usage, running: int, wanted: int) -> NoReturn:
        """Refuse for the generations that the key has running, or for the request's choices alone."""
        limit = key.terms.max_streams
        assert limit is not None
        self.count_refusal(key, "streams")
        if wanted > limit:
            raise RateLimited(
                f"This key may have {limit} generations at once, and n asks for {wanted}: each choice is"
                f" a generation. Send n of at most {limit}, or several requests one after the other."
            )
        retry_s = self._retry_s(self._streams_free_s(usage, running, running + wanted - limit))
        raise RateLimited(
            f"This key may have {limit} generations at once and has {running}{_named(usage.running)}"
            f" or try again in {retry_s} s.",
            retry_after_s=retry_s,
        )

    def _streams_free_s(self, usage: _Usage, running: int, wanted: int) -> float:
        """Seconds until so many streams are likely to have ended, or to be abandoned."""
        now_s, leases = self.clock_s(), usage.running
        expected_s = [max(usage.duration_s, now_s - lease.began_s) for lease in leases.values()]
        typical_s = sum(expected_s) / len(expected_s) if expected_s else usage.duration_s
        wait_s = typical_s * wanted / max(running, 1)
        lefts = ((self._grace_left_s(request_id), lease.num_streams) for request_id, lease in leases.items())
        for left_s, num in sorted((left_s, num) for left_s, num in lefts if left_s is not None):
            wanted -= num
            if wanted <= 0:
                return min(wait_s, left_s + RELEASE_S)
        return wait_s

    def refuse_request(self, key: Key, usage: _Usage) -> NoReturn:
        """Refuse for the requests of the last minute."""
        assert key.terms.rpm is not None
        self.count_refusal(key, "requests")
        retry_s = self._retry_s(usage.requests.wait_s(self.clock_s(), 1, key.terms.rpm))
        raise RateLimited(
            f"Rate limit reached for requests per minute (RPM): limit {key.terms.rpm},"
            f" used {usage.requests.used}. Try again in {retry_s} s.",
            retry_after_s=retry_s,
        )

    def refuse_tokens(self, key: Key, usage: _Usage, wanted: int, more: int, *, reason: Reason) -> NoReturn:
        """Refuse for the tokens of the last minute, or for those of the request alone."""
        limit, window = key.terms.tpm, usage.tokens
        assert limit is not None
        if wanted > limit:
            self.count_refusal(key, "too_large")
            raise TokensLimited(
                f"The request is too large for this key's tokens per minute (TPM): limit {limit},"
                f" requested about {wanted}. It cannot succeed later either: shorten the messages,"
                " or ask for a shorter answer.",
            )
        self.count_refusal(key, reason)
        # Refused after rendering, it returns its charges, and needs all of them again.
        own = wanted - more
        retry_s = self._retry_s(window.wait_s(self.clock_s(), more, limit))
        raise TokensLimited(
            f"Rate limit reached for tokens per minute (TPM): limit {limit},"
            f" used {window.used + window.debt - own}, requested about {wanted}. Try again in {retry_s} s.",
            retry_after_s=retry_s,
        )

    def count_refusal(self, key: Key, reason: Reason) -> None:
        """Count a refusal, by the key's tier: keys are no labels."""
        self.refused[key.terms.tier][reason] += 1

    def _retry_s(self, wait_s: float) -> int:
        """Whole seconds, up to 10% more at random so that not all return together."""
        return max(1, min(math.ceil(wait_s * (1 + JITTER * self._chance())), MAX_RETRY_S))


def _named(running: Mapping[str, KeyLease]) -> str:
    """The requests that a key has running, and how to stop one, within a sentence."""
    if not running:
        return "; wait for one to end,"
    ids = list(running)
    more = ", …" if len(ids) > MAX_NAMED else ""
    path = "/v1/completions" if ids[0].startswith("cmpl-") else "/v1/chat/completions"
    return f": {', '.join(ids[:MAX_NAMED])}{more}. Stop one, as with POST {path}/{ids[0]}/cancel,"


def _limited(terms: KeyTerms) -> bool:
    return not (terms.rpm is None and terms.tpm is None and terms.max_streams is None)


def duration_text(duration_s: float) -> str:
    """A duration as OpenAI writes it: `20ms`, `1.2s`, `6m0s`."""
    ms = math.ceil(round(duration_s * 1000, 3))
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
