"""The limits of each key: requests a minute, tokens a minute, generations at once.

    reserve ──(estimate)──▶ correct ──(after rendering)──▶ settle ──(the truth)

`reserve` is synchronous: between looking and charging nothing else runs. It comes before any
expensive work. What a request did not use it gives back, what it used beyond its reservation is
its key's debt (app.metering.window). Nothing here outlives the process.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, NoReturn, get_args

from app.core import ChatRequest, Counts, Prompt
from app.errors import RateLimited, TokensLimited
from app.metering.estimate import CountText, bytes_estimate, prompt_estimate
from app.metering.window import Charge, Window
from app.store.keys import TIERS, Key, Terms

Reason = Literal["requests", "tokens", "tokens_rendered", "too_large", "streams", "budget"]
REASONS: tuple[Reason, ...] = get_args(Reason)
FIRST_COMPLETION_TOKENS = 256.0
"""What a key's answers are taken to be before it has had any."""
MAX_RETRY_S = 120
JITTER = 0.1
_WEIGHT = 0.2
_FIRST_DURATION_S = 5.0


class _Usage:
    """One key's windows, what it has in hand, and what its answers have been like."""

    __slots__ = ("completion_tokens", "duration_s", "requests", "streams", "tokens")

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()
        self.streams = 0
        self.completion_tokens = FIRST_COMPLETION_TOKENS
        self.duration_s = _FIRST_DURATION_S


class Answer(NamedTuple):
    """Tokens of a choice."""

    least: int
    """What it will have in any case."""
    expected: int


class Lease:
    """What one request has reserved. This one is of a key without limits: nothing."""

    def correct(self, prompt: Prompt) -> None:
        """Reserve for the prompt as it was rendered. Raises TokensLimited when it no longer fits."""

    def settle(self, counts: Mapping[int, Counts]) -> None:
        """Charge what was used, by choice, and let go of the rest; a second call does nothing."""

    def withdraw(self) -> None:
        """The same for a request that never began: it counts as none."""


UNLIMITED = Lease()


class KeyLease(Lease):
    """What one request of a limited key has reserved."""

    def __init__(self, limiter: Limiter, key: Key, usage: _Usage, request: ChatRequest) -> None:
        self._limiter = limiter
        self._key = key
        self._usage = usage
        self._n = request.n
        self._answer = expected_answer(request, usage.completion_tokens)
        self._charges: list[Charge] = []
        self._began_s = limiter.clock_s()
        self._request: Charge | None = None
        self._settled = False

    @property
    def tokens(self) -> int:
        """Tokens reserved now."""
        return sum(charge.amount for charge in self._charges)

    def reserve(self, request: ChatRequest) -> None:
        """Reserve the estimate, or nothing at all. Raises RateLimited."""
        terms, usage, limiter = self._key.terms, self._usage, self._limiter
        if terms.max_streams is not None and usage.streams >= terms.max_streams:
            limiter.refuse_stream(self._key, usage)
        if terms.rpm is not None and not usage.requests.room(terms.rpm):
            limiter.refuse_request(self._key, usage)
        if terms.tpm is not None:
            self._charge(prompt_estimate(request, limiter.count_text), "tokens")
        if terms.rpm is not None:
            self._request = usage.requests.charge(self._began_s, 1)
        usage.streams += 1

    def _charge(self, prompt_tokens: int, reason: Reason) -> None:
        """Have a prompt and its answer reserved. Raises TokensLimited, and then nothing has changed."""
        limit = self._key.terms.tpm
        assert limit is not None
        least, expected = (tokens * self._n for tokens in self._answer)
        # What answers mostly are like makes no request too large for ever: it is taken for a whole window.
        wanted = prompt_tokens + max(least, min(expected, limit - prompt_tokens))
        window, more = self._usage.tokens, wanted - self.tokens
        if more <= 0:
            self._give_back(-more)
            return
        if wanted > limit or more > window.room(limit):
            self._limiter.refuse_tokens(self._key, self._usage, wanted, more, reason)
        self._charges.append(window.charge(self._limiter.clock_s(), more))

    def _give_back(self, tokens: int) -> None:
        for charge in reversed(self._charges):
            part = min(tokens, charge.amount)
            self._usage.tokens.give_back(charge, part)
            tokens -= part

    def correct(self, prompt: Prompt) -> None:
        if self._key.terms.tpm is None:
            return
        self._limiter.advance(self._key.terms, self._usage)
        least, expected = self._answer
        self._answer = Answer(min(least, prompt.max_tokens), min(expected, prompt.max_tokens))
        self._charge(prompt.billed_tokens, "tokens_rendered")

    def settle(self, counts: Mapping[int, Counts]) -> None:
        if self._settled:
            return
        self._settled = True
        usage = self._usage
        usage.streams -= 1
        usage.duration_s += _WEIGHT * (self._limiter.clock_s() - self._began_s - usage.duration_s)
        completion_tokens = sum(choice.completion_tokens for choice in counts.values())
        if completion_tokens:
            usage.completion_tokens += _WEIGHT * (completion_tokens / self._n - usage.completion_tokens)
        if self._key.terms.tpm is None:
            return
        used = completion_tokens + max((choice.prompt_tokens for choice in counts.values()), default=0)
        beyond = used - self.tokens
        if beyond > 0:
            usage.tokens.debt += beyond
        else:
            self._give_back(-beyond)

    def withdraw(self) -> None:
        if not self._settled and self._request is not None:
            self._usage.requests.give_back(self._request, 1)
        self.settle({})


class Limiter:
    """All keys' limits, and how often each tier was refused for which reason."""

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.clock_s = clock_s
        self.count_text: CountText = bytes_estimate
        """Counts the tokens of a text; the model's own merges once they are known."""
        self.refused: dict[str, Counter[str]] = {tier: Counter(dict.fromkeys(REASONS, 0)) for tier in TIERS}
        self._chance = chance
        self._keys: dict[str, _Usage] = {}

    def reserve(self, key: Key | None, request: ChatRequest) -> Lease:
        """Reserve what a request is expected to use, at once. Raises RateLimited, TokensLimited."""
        if key is None or not _limited(key.terms):
            return UNLIMITED
        usage = self._keys.setdefault(key.id, _Usage())
        self.advance(key.terms, usage)
        lease = KeyLease(self, key, usage, request)
        lease.reserve(request)
        return lease

    def advance(self, terms: Terms, usage: _Usage) -> None:
        """Bring a key's windows up to now."""
        now_s = self.clock_s()
        if terms.rpm is not None:
            usage.requests.advance(now_s, terms.rpm)
        if terms.tpm is not None:
            usage.tokens.advance(now_s, terms.tpm)

    def headers(self, key: Key) -> dict[str, str]:
        """OpenAI's headers for a key, as things stand; none for limits that it does not have."""
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

    def refuse_stream(self, key: Key, usage: _Usage) -> NoReturn:
        """Refuse for the generations that the key has running."""
        self.count_refusal(key, "streams")
        retry_s = self._retry_s(usage.duration_s / usage.streams)
        raise RateLimited(
            f"This key may have {key.terms.max_streams} generations at once and has {usage.streams};"
            f" wait for one to end, or try again in {retry_s} s.",
            retry_after_s=retry_s,
        )

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

    def refuse_tokens(self, key: Key, usage: _Usage, wanted: int, more: int, reason: Reason) -> NoReturn:
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
        # Refused after rendering, it gives back what it has, and comes again for all of it.
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
        """Whole seconds, up to 10% more at random so that not all come back together."""
        return max(1, min(math.ceil(wait_s * (1 + JITTER * self._chance())), MAX_RETRY_S))


def expected_answer(request: ChatRequest, mean: float) -> Answer:
    """What each choice is expected to have: as the key's answers had, as far as this one may."""
    limit = math.inf if request.max_tokens is None else request.max_tokens
    least = min(max(request.body.get("min_tokens") or 0, 1), limit)
    if request.body.get("ignore_eos") and request.max_tokens is not None:
        least = request.max_tokens
    return Answer(int(least), int(min(max(math.ceil(mean), least), limit)))


def duration_text(duration_s: float) -> str:
    """A duration as OpenAI writes it: `20ms`, `1.2s`, `6m0s`."""
    ms = math.ceil(round(duration_s * 1000, 3))
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _limited(terms: Terms) -> bool:
    return not (terms.rpm is None and terms.tpm is None and terms.max_streams is None)
