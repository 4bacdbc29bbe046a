"""An answer that goes on is charged for what it has yet to make, and never refused."""

from __future__ import annotations

from app.core import Counts, Key, KeyTerms, Prompt
from app.metering.continued_lease import ContinuedLease
from app.metering.limits import UNLIMITED, Limiter


def key(**terms: int) -> Key:
    """A key with these limits."""
    return Key("tr-a", "ann", KeyTerms("ann", **terms), 0)  # type: ignore[arg-type]


def test_only_new_tokens_are_charged():
    """Neither the prompt, which was charged, nor the tokens that the engine hands over again."""
    limiter, limited = Limiter(lambda: 1000.0), key(tpm=1000)
    lease = ContinuedLease(limiter.resume(limited, "chatcmpl-1", 2), {0: Counts(500, 40), 1: Counts(500, 10)})
    assert lease.metered
    lease.correct(Prompt(range(900), 1000, None))
    for count in range(1, 101):
        assert not lease.on_delta(0, count)
    assert not lease.on_delta(1, 10)
    lease.settle({0: Counts(500, 100), 1: Counts(500, 10)})
    assert limiter.headers(limited)["x-ratelimit-remaining-tokens"] == "940"


def test_a_full_key_goes_on_with_what_was_let_in():
    """Its generations count against those that are to come."""
    limiter, limited = Limiter(lambda: 1000.0), key(max_streams=2, rpm=1)
    limiter.begin(limited).settle({})
    lease = ContinuedLease(limiter.resume(limited, "chatcmpl-1", 2), {})
    assert not limiter.has_room(limited)
    lease.withdraw()
    assert limiter.resume(None, "chatcmpl-1", 1) is UNLIMITED
    assert limiter.resume(key(), "chatcmpl-1", 1) is UNLIMITED


def test_an_answer_ends_where_it_has_used_a_whole_window():
    """With the notice of any other one."""
    lease = ContinuedLease(Limiter(lambda: 1000.0).resume(key(tpm=50), "chatcmpl-1", 1), {0: Counts(10, 100)})
    ends = [count for count in range(1, 200) if lease.on_delta(0, count)]
    assert ends[0] == 150
    assert lease.as_notice()["code"] == "rate_limit_exceeded"
