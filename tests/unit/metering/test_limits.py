"""A key's limits: what is reserved, refused, corrected, settled, and told."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.schema.chat_request import parse_chat_request
from app.core import ChatRequest, Counts, Key, KeyTerms, Prompt
from app.errors import BadRequest, RateLimited, TokensLimited
from app.metering.limits import UNLIMITED, KeyLease, Lease, Limiter, duration_text


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """The limiter's clock."""
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> Limiter:
    """A limiter that counts a token a word and never jitters."""
    return Limiter(clock, lambda: 0.0, lambda text: len(text.split()))


def key(**terms: Any) -> Key:
    """A key with these limits."""
    return Key("tr-a", "ann", KeyTerms("ann", **terms), 0)


def asked(words: int = 2, **parameters: Any) -> ChatRequest:
    """A request that came over the wire, of `words` + 8 prompt tokens by the estimate."""
    messages = [{"role": "user", "content": "w " * words}]
    return parse_chat_request({"model": "m", "messages": messages, **parameters}, "r", "ann")


def reserved(limiter: Limiter, key: Key, request: ChatRequest) -> KeyLease:
    """The lease of a limited key."""
    lease = taken(limiter, key, request)
    assert isinstance(lease, KeyLease)
    return lease


def taken(limiter: Limiter, key: Key | None, request: ChatRequest) -> Lease:
    """A lease as a request takes it: begun, and reserved once the body was read."""
    lease = limiter.begin(key)
    try:
        lease.charge(request)
    except BaseException:
        lease.release({})
        raise
    return lease


def prompt(tokens: int, max_tokens: int = 10_000) -> Prompt:
    """A rendered prompt."""
    return Prompt(range(tokens), max_tokens, None)


def remaining(limiter: Limiter, key: Key, of: str = "tokens") -> int:
    """What the headers say is left."""
    return int(limiter.headers(key)[f"x-ratelimit-remaining-{of}"])


def refusal(limiter: Limiter, key: Key, request: ChatRequest) -> RateLimited:
    """The error of a request that is refused."""
    with pytest.raises(RateLimited) as caught:
        taken(limiter, key, request)
    return caught.value


def test_a_key_without_limits_has_no_lease(limiter: Limiter) -> None:
    """Nothing is kept of it, and no header told."""
    assert taken(limiter, key(), asked()) is UNLIMITED
    assert taken(limiter, None, asked()) is UNLIMITED
    assert not limiter._keys
    assert limiter.headers(key(max_streams=3)) == {}


def test_prompt_and_expected_answer_are_reserved(limiter: Limiter) -> None:
    """256 for the answer of a key that has had none, or its max_tokens, by every choice."""
    assert reserved(limiter, key(tpm=10_000), asked()).tokens == 10 + 256
    assert reserved(limiter, key(tpm=10_000), asked(max_tokens=50, n=3)).tokens == 10 + 150
    assert reserved(limiter, key(tpm=10_000), asked(max_tokens=5000)).tokens == 10 + 256
    assert remaining(limiter, key(tpm=10_000)) == 10_000 - 266 - 160 - 266


def test_max_tokens_and_max_completion_tokens_are_one_limit(limiter: Limiter) -> None:
    """Either spelling reserves the same, both are one, and two that differ are refused."""
    for spelled in ({"max_tokens": 50}, {"max_completion_tokens": 50}):
        assert reserved(limiter, key(tpm=10_000), asked(**spelled)).tokens == 60
    both = asked(max_tokens=50, max_completion_tokens=50)
    assert (both.max_tokens, reserved(limiter, key(tpm=10_000), both).tokens) == (50, 60)
    with pytest.raises(BadRequest):
        asked(max_tokens=5000, max_completion_tokens=1)


@pytest.mark.parametrize(
    ("parameters", "answer"),
    [
        ({"min_tokens": 700}, 700),
        ({"min_tokens": 700, "max_tokens": 100}, 100),
        ({"ignore_eos": True, "max_tokens": 900}, 900),
        ({"ignore_eos": True}, 256),
    ],
)
def test_an_answer_that_must_be_long_is_reserved_so(
    limiter: Limiter, parameters: dict[str, Any], answer: int
) -> None:
    """min_tokens and ignore_eos tell how long it will be."""
    assert reserved(limiter, key(tpm=10_000), asked(**parameters)).tokens == 10 + answer


def test_the_expected_answer_follows_the_keys_own(limiter: Limiter) -> None:
    """A key with short answers reserves little for the next, another key is not touched by it."""
    for _ in range(40):
        taken(limiter, key(tpm=10_000), asked()).release({0: Counts(10, 20)})
    assert reserved(limiter, key(tpm=10_000), asked()).tokens == 10 + 21
    other = Key("tr-b", "bob", KeyTerms("bob", tpm=10_000), 0)
    assert reserved(limiter, other, asked()).tokens == 10 + 256


def test_tokens_beyond_the_limit_are_refused_until_the_window_has_room(
    limiter: Limiter, clock: Clock
) -> None:
    """The refusal says how long, in OpenAI's words, and waiting that long is enough."""
    limited = key(tpm=300)
    taken(limiter, limited, asked(90, max_tokens=100))
    clock.now_s += 10
    taken(limiter, limited, asked(max_tokens=40))
    error = refusal(limiter, limited, asked(max_tokens=60))
    assert (error.status, error.type, error.code) == (429, "tokens", "rate_limit_exceeded")
    assert error.retry_after_s == 50
    assert "limit 300, used 248, requested about 70" in error.message
    clock.now_s += 50
    taken(limiter, limited, asked(max_tokens=60))
    assert limiter.refused["standard"]["tokens"] == 1


def test_requests_are_limited_too(limiter: Limiter, clock: Clock) -> None:
    """The third of two a minute waits until the first is a minute old; its tokens are not even counted."""
    limited = key(rpm=2, tier="batch")
    taken(limiter, limited, asked())
    clock.now_s += 15.5
    taken(limiter, limited, asked())
    limiter.count_text = lambda _text: pytest.fail("a refused request was looked at")
    error = refusal(limiter, limited, asked())
    assert (error.type, error.retry_after_s) == ("requests", 45)
    assert limiter.refused["batch"]["requests"] == 1
    clock.now_s += 45
    taken(limiter, limited, asked())


def test_retry_after_is_jittered_by_a_tenth_and_at_most_two_minutes(clock: Clock) -> None:
    """So that those who were refused together do not come back together."""
    told = []
    for chance in (0.0, 1.0):
        limiter = Limiter(clock, lambda chance=chance: chance)
        taken(limiter, key(rpm=1), asked())
        told.append(refusal(limiter, key(rpm=1), asked()).retry_after_s)
        lease = taken(limiter, key(tpm=100), asked())
        lease.release({0: Counts(10, 10_000)})
        assert refusal(limiter, key(tpm=100), asked()).retry_after_s == 120
    assert told == [60, 66]


def test_generations_at_once_are_limited(limiter: Limiter) -> None:
    """One that ends, however it does, makes place for the next."""
    limited = key(max_streams=2)
    first = taken(limiter, limited, asked())
    taken(limiter, limited, asked())
    error = refusal(limiter, limited, asked())
    assert (error.type, error.code) == ("requests", "rate_limit_exceeded")
    assert error.retry_after_s is not None
    first.release({})
    first.release({})
    taken(limiter, limited, asked())
    assert refusal(limiter, limited, asked()).code == "rate_limit_exceeded"
    assert limiter.refused["standard"]["streams"] == 2


def test_refusals_are_no_generations_of_no_time(limiter: Limiter) -> None:
    """The next refusal still waits for as long as answers take."""
    limited = key(tpm=1000, max_streams=1)
    for _ in range(20):
        refusal(limiter, limited, asked(max_tokens=2000, ignore_eos=True))
    taken(limiter, limited, asked())
    assert refusal(limiter, limited, asked()).retry_after_s == 5


def test_a_request_that_can_never_fit_is_told_so(limiter: Limiter) -> None:
    """No Retry-After: it would be too large then, too."""
    error = refusal(limiter, key(tpm=300), asked(400))
    assert (error.status, error.type, error.retry_after_s) == (429, "tokens", None)
    assert "too large" in error.message
    assert refusal(limiter, key(tpm=300), asked(n=2, min_tokens=200)).retry_after_s is None
    assert limiter.refused["standard"]["too_large"] == 2


def test_a_guess_makes_no_request_too_large(limiter: Limiter) -> None:
    """Long answers before, or none yet, reserve the whole window at most: a key is never locked out."""
    limited = key(tpm=200)
    lease = reserved(limiter, limited, asked())
    assert lease.tokens == 200
    lease.correct(prompt(30))
    assert lease.tokens == 200
    for choice in range(30):
        lease._usage.completion_tokens += choice * 1000
    lease.release({0: Counts(30, 5)})
    assert remaining(limiter, limited) == 165


def test_the_rendered_prompt_corrects_the_estimate(limiter: Limiter) -> None:
    """Down gives back, up is reserved in addition, and the context's room caps the answer."""
    limited = key(tpm=1000)
    lease = reserved(limiter, limited, asked())
    lease.correct(prompt(4))
    assert (lease.tokens, remaining(limiter, limited)) == (260, 740)
    lease.correct(prompt(500, max_tokens=100))
    assert (lease.tokens, remaining(limiter, limited)) == (600, 400)


def test_a_rendered_prompt_that_no_longer_fits_is_refused(limiter: Limiter) -> None:
    """It gives its tokens back, but was rendered, and counts as a request."""
    limited = key(tpm=1000, rpm=10)
    taken(limiter, limited, asked(max_tokens=590))
    lease = taken(limiter, limited, asked(max_tokens=100))
    with pytest.raises(TokensLimited) as caught:
        lease.correct(prompt(700))
    assert caught.value.retry_after_s == 60
    lease.release({})
    assert (remaining(limiter, limited), remaining(limiter, limited, "requests")) == (1000 - 266, 8)
    lease = taken(limiter, limited, asked())
    with pytest.raises(TokensLimited, match="too large"):
        lease.correct(prompt(1001))
    assert limiter.refused["standard"]["tokens_rendered"] == 1


def test_what_was_not_used_is_given_back(limiter: Limiter) -> None:
    """Settled is what was used; a request that failed before the engine used nothing."""
    limited = key(tpm=1000)
    taken(limiter, limited, asked()).release({0: Counts(12, 30), 1: Counts(12, 8)})
    assert remaining(limiter, limited) == 950
    taken(limiter, limited, asked()).release({})
    assert remaining(limiter, limited) == 950


def test_a_request_that_never_began_counts_as_none(limiter: Limiter) -> None:
    """As one that the server had no room for."""
    limited = key(rpm=5, tpm=1000, max_streams=1)
    lease = taken(limiter, limited, asked())
    lease.withdraw()
    lease.withdraw()
    assert (remaining(limiter, limited), remaining(limiter, limited, "requests")) == (1000, 5)
    taken(limiter, limited, asked())


def test_what_was_used_beyond_the_reservation_is_debt(limiter: Limiter, clock: Clock) -> None:
    """2,500 tokens on a limit of 1,000 keep the key out for two windows, and half of one is left then."""
    limited = key(tpm=1000)
    taken(limiter, limited, asked(max_tokens=90)).release({0: Counts(100, 2400)})
    assert remaining(limiter, limited) == 0
    clock.now_s += 59
    assert refusal(limiter, limited, asked()).retry_after_s is not None
    clock.now_s += 1
    assert refusal(limiter, limited, asked(max_tokens=400)).retry_after_s == 60
    clock.now_s += 60
    assert remaining(limiter, limited) == 500
    taken(limiter, limited, asked(max_tokens=400))


def test_headers_are_openais(limiter: Limiter, clock: Clock) -> None:
    """Limit, what is left, and how long until nothing is used."""
    limited = key(rpm=60, tpm=1000)
    taken(limiter, limited, asked(max_tokens=90))
    clock.now_s += 58.8
    assert limiter.headers(limited) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.2s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1.2s",
    }
    assert set(limiter.headers(key(rpm=60))) == {
        f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")
    }


def test_a_limit_that_was_lowered_holds_at_once(limiter: Limiter) -> None:
    """What is used already counts against the new one."""
    taken(limiter, key(tpm=1000), asked(max_tokens=490))
    assert remaining(limiter, key(tpm=200)) == 0
    assert refusal(limiter, key(tpm=200), asked(max_tokens=1)).retry_after_s == 60


# Before the body


def test_a_request_is_charged_before_its_body(limiter: Limiter) -> None:
    """Whatever becomes of it: a refused one is paid for, and the second is 429 before anything was read."""
    limited = key(rpm=1)
    limiter.begin(limited).release({})
    with pytest.raises(RateLimited, match="RPM"):
        limiter.begin(limited)
    assert not limiter.has_room(limited)


def test_a_body_that_is_read_has_a_place_among_the_generations(limiter: Limiter) -> None:
    """As one, until it is known how many choices it asks for."""
    limited = key(max_streams=3)
    reading = limiter.begin(limited)
    limiter.begin(limited).charge(asked(n=2))
    with pytest.raises(RateLimited, match="3 generations at once and has 3"):
        limiter.begin(limited)
    reading.release({})
    limiter.begin(limited)


def test_a_refusal_names_the_keys_answers_and_the_route_that_stops_one(limiter: Limiter) -> None:
    """Five of them, the oldest first; none of another key, and none that has ended."""
    other, limited = Key("tr-b", "ann", KeyTerms("b", max_streams=9), 0), key(max_streams=6)
    limiter.resume(other, "chatcmpl-b", 1, {})
    leases = [limiter.resume(limited, f"cmpl-{number}", 1, {}) for number in range(7)]
    leases[0].release({})
    with pytest.raises(RateLimited) as refused:
        limiter.begin(limited)
    assert refused.value.message == (
        "This key may have 6 generations at once and has 6: cmpl-1, cmpl-2, cmpl-3, cmpl-4, cmpl-5, …."
        " Stop one, as with POST /v1/completions/cmpl-1/cancel, or try again in 1 s."
    )


@pytest.mark.parametrize(
    ("lefts", "n", "retry_s"),
    [
        ({}, 1, 40),  # both have run for longer than any before: so long again, by two
        ({"r1": 2.5}, 1, 3),
        ({"r1": 2.5, "r2": 9.0}, 2, 10),
        ({"r1": 2.5}, 2, 80),  # one place is not enough
        ({"r1": 29.0, "r2": 3.0}, 1, 4),
        ({"r1": 90.0}, 1, 40),  # it may end before it is stopped
    ],
)
def test_a_place_is_free_when_answers_end_or_are_left_for_good(
    clock: Clock, lefts: dict[str, float], n: int, retry_s: int
) -> None:
    """`Retry-After` knows when those that nobody reads are stopped."""
    limiter, limited = Limiter(clock, lambda: 0.0, grace_left_s=lefts.get), key(max_streams=2)
    for request_id in ("r1", "r2"):
        limiter.resume(limited, request_id, 1, {})
    clock.now_s += 80
    assert refusal_of_places(limiter, limited, asked(n=n)).retry_after_s == retry_s


def refusal_of_places(limiter: Limiter, limited: Key, request: ChatRequest) -> RateLimited:
    """The refusal of a request whose body has been read meanwhile."""
    lease = KeyLease(limiter, limited, limiter._usage_of(limited))
    with pytest.raises(RateLimited) as refused:
        lease.charge(request)
    return refused.value


def test_an_attached_request_is_given_back(limiter: Limiter) -> None:
    """It counts neither as a request nor as a generation."""
    limited = key(rpm=1, max_streams=1)
    limiter.begin(limited).withdraw()
    assert limiter.has_room(limited)
    assert remaining(limiter, limited, "requests") == 1
    limiter.begin(limited)


def test_end_of_a_lease_leaves_a_later_one_of_the_same_request(limiter: Limiter) -> None:
    """Two servers' worth of one answer may overlap: the refusal names it as long as one of them runs."""
    limited = key(max_streams=1)
    earlier, later = (limiter.resume(limited, "chatcmpl-1", 1, {}) for _ in range(2))
    earlier.release({})
    assert "has 1: chatcmpl-1." in refusal(limiter, limited, asked()).message
    later.release({})
    assert limiter.has_room(limited)
    assert not limiter._usage_of(limited).running


def test_a_request_for_no_answer_takes_no_place(limiter: Limiter) -> None:
    """Texts are moderated beside the only stream that a key may have, and their tokens count."""
    limited = key(max_streams=1, tpm=100)
    taken(limiter, limited, asked(max_tokens=20))
    lease = limiter.begin(limited, generates=False)
    lease.charge_tokens(50)
    assert remaining(limiter, limited) == 20
    with pytest.raises(TokensLimited):
        limiter.begin(limited, generates=False).charge_tokens(50)
    with pytest.raises(TokensLimited, match="too large"):
        limiter.begin(limited, generates=False).charge_tokens(101)
    lease.withdraw()
    assert remaining(limiter, limited) == 70


# Choices


def test_every_choice_is_a_generation(limiter: Limiter) -> None:
    """n fits beside what runs, or the request is 429; alone over the limit it is so for ever, and names n."""
    limited = key(max_streams=4)
    lease = taken(limiter, limited, asked(n=2))
    taken(limiter, limited, asked(n=2))
    assert refusal(limiter, limited, asked(n=1)).retry_after_s is not None
    lease.release({})
    assert refusal(limiter, limited, asked(n=3)).retry_after_s is not None
    error = refusal(limiter, limited, asked(n=128))
    assert (error.status, error.retry_after_s) == (429, None)
    assert "n asks for 128" in error.message
    taken(limiter, limited, asked(n=2))


def made(lease: Lease, choices: range, tokens: int) -> int:
    """How many tokens the engine makes until the answer ends; the choices take turns."""
    num = 0
    for count in range(1, tokens + 1):
        for choice in choices:
            num += 1
            if lease.on_delta(choice, count):
                return num
    return num


def test_one_request_uses_a_window_at_most(limiter: Limiter) -> None:
    """128 choices of 50 tokens on a limit of 1,000 end at the thousandth token, the prompt's included."""
    limited = key(tpm=1000)
    lease = reserved(limiter, limited, asked(n=128, max_tokens=50))
    lease.correct(prompt(40, max_tokens=50))
    assert made(lease, range(128), 50) == 960
    assert "1000 tokens" in lease.as_notice()["message"]
    lease.release({choice: Counts(40, 8 if choice < 64 else 7) for choice in range(128)})
    assert remaining(limiter, limited) == 0
    assert lease._usage.tokens.debt == 0


def test_choices_that_must_be_too_long_together_are_refused(limiter: Limiter) -> None:
    """A token each at least, min_tokens each, and all of max_tokens where nothing ends an answer sooner."""
    for parameters in (
        {"n": 128},
        {"n": 2, "min_tokens": 60},
        {"n": 2, "max_tokens": 60, "ignore_eos": True},
        {"n": 1, "min_tokens": 10**9},
    ):
        assert refusal(limiter, key(tpm=100), asked(**parameters)).retry_after_s is None


def test_an_answer_is_charged_as_it_grows(limiter: Limiter) -> None:
    """What an answer makes beyond its reservation is taken from what others could have had."""
    limited = key(tpm=1000)
    lease = reserved(limiter, limited, asked())
    lease.correct(prompt(10))
    assert made(lease, range(1), 500) == 500
    assert 1000 - 510 - 64 <= remaining(limiter, limited) <= 1000 - 510
    assert refusal(limiter, limited, asked(480)).retry_after_s is not None
    lease.release({0: Counts(10, 500)})
    assert remaining(limiter, limited) == 490


def test_answers_together_owe_a_window_at_most(limiter: Limiter) -> None:
    """Those beyond their reservations end once their key owes the limit; one within its own goes on."""
    limited = key(tpm=1000)
    growing = [reserved(limiter, limited, asked(max_tokens=5000)) for _ in range(3)]
    for lease in growing:
        lease.correct(prompt(10, max_tokens=5000))
    first, second, within = growing
    assert made(first, range(1), 950) == 950
    # Of the window 202 were left, which the first has: it owes 492, and the second the rest of 1,000.
    assert made(second, range(1), 950) == 256 + 508
    assert "owes 1000 tokens" in second.as_notice()["message"]
    assert made(within, range(1), 200) == 200
    assert within._usage.tokens.debt == 1000


def test_key_without_tokens_a_minute_ends_no_answer_and_reserves_no_tokens(limiter: Limiter):
    """Its other limits hold."""
    lease = reserved(limiter, key(rpm=5), asked())
    assert not lease.metered
    lease.charge_tokens(1_000_000)
    assert lease.tokens == 0
    assert not lease.on_delta(0, 1_000_000)
    lease.correct(Prompt(range(1_000_000), 10, None))
    assert lease.tokens == 0


def test_request_of_a_key_without_limits_is_never_ended():
    """Nobody asks it for its reason."""
    assert not UNLIMITED.on_delta(0, 1_000_000)
    UNLIMITED.charge_tokens(1_000_000)
    UNLIMITED.release({})
    UNLIMITED.withdraw()
    with pytest.raises(NotImplementedError):
        UNLIMITED.as_notice()


def test_only_new_tokens_of_a_continued_answer_are_charged():
    """Neither the prompt, which was charged, nor the tokens that the engine hands over again."""
    limiter, limited = Limiter(lambda: 1000.0), key(tpm=1000)
    lease = limiter.resume(limited, "chatcmpl-1", 2, {0: Counts(500, 40), 1: Counts(500, 10)})
    assert lease.metered
    lease.correct(Prompt(range(900), 1000, None))
    for count in range(1, 101):
        assert not lease.on_delta(0, count)
    assert not lease.on_delta(1, 10)
    lease.release({0: Counts(500, 100), 1: Counts(500, 10)})
    assert limiter.headers(limited)["x-ratelimit-remaining-tokens"] == "940"


def test_a_full_key_continues_what_was_admitted():
    """Its generations count against those that are to come."""
    limiter, limited = Limiter(lambda: 1000.0), key(max_streams=2, rpm=1)
    limiter.begin(limited).release({})
    lease = limiter.resume(limited, "chatcmpl-1", 2, {})
    assert not limiter.has_room(limited)
    lease.withdraw()
    assert limiter.resume(None, "chatcmpl-1", 1, {}) is UNLIMITED
    assert limiter.resume(key(), "chatcmpl-1", 1, {}) is UNLIMITED


def test_a_continued_answer_ends_where_it_has_used_a_whole_window():
    """With the notice of any other one."""
    lease = Limiter(lambda: 1000.0).resume(key(tpm=50), "chatcmpl-1", 1, {0: Counts(10, 100)})
    ends = [count for count in range(1, 200) if lease.on_delta(0, count)]
    assert ends[0] == 150
    assert lease.as_notice()["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0ms"),
        (0.017, "17ms"),
        (1, "1s"),
        (1.2, "1.2s"),
        (59.999, "59.999s"),
        (60, "1m0s"),
        (372.5, "6m12.5s"),
    ],
)
def test_durations_are_written_as_openai_does(duration_s: float, text: str) -> None:
    """Go's format."""
    assert duration_text(duration_s) == text
