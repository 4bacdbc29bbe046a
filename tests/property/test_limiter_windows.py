"""500 concurrent requests against a key's tokens per minute: 200 seeds, an injected clock."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, field

import pytest

from app.core import ChatRequest, Counts, Key, KeyTerms, Prompt
from app.errors import RateLimited
from app.metering import limits
from app.metering.limits import KeyLease, Lease, Limiter
from app.metering.rates import Charge, Window

TPM = 10_000
REQUESTS = 500
SEEDS = range(200)


@dataclass
class World:
    """A limiter whose clock the test turns, and everything it was ever charged."""

    now_s: float = 0.0
    charged: list[Charge] = field(default_factory=list)

    def clock_s(self) -> float:
        """The time."""
        return self.now_s

    def most_in_a_window(self) -> int:
        """The most that was charged in any 60 s; windows that end with a charge are the fullest."""
        at = [charge.at_s for charge in self.charged]
        assert at == sorted(at)
        sums = [0]
        for charge in self.charged:
            sums.append(sums[-1] + charge.amount)
        # Half open: what was charged exactly 60 s ago is out.
        first = [bisect_left(at, t - 60 + 1e-9) for t in at]
        return max((sums[i + 1] - sums[start] for i, start in enumerate(first)), default=0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which every charge of a window is written down."""
    made = World()
    charge = Window.charge

    def written_down(window: Window, at_s: float, amount: int) -> Charge:
        one = charge(window, at_s, amount)
        made.charged.append(one)
        return one

    monkeypatch.setattr(Window, "charge", written_down)
    return made


def request_of(rng: random.Random) -> ChatRequest:
    """A request with max_tokens."""
    text = "word " * rng.randint(1, 300)
    body = {"messages": [{"role": "user", "content": text}]}
    return ChatRequest(
        "r", "ann", "m", body, 0, n=rng.choice((1, 1, 1, 2)), max_tokens=rng.choice((16, 64, 500, 4000))
    )


def prompt_of(rng: random.Random, request: ChatRequest, *, wrong: bool) -> Prompt:
    """What rendering makes of it: about what was estimated, or on purpose up to four times as much."""
    words = len(request.body["messages"][0]["content"]) // 5
    tokens = round(words * rng.uniform(0.3, 4.0 if wrong else 1.2)) + 4
    assert request.max_tokens is not None
    return Prompt(range(tokens), request.max_tokens, None)


def counts_of(rng: random.Random, request: ChatRequest, prompt: Prompt, *, wrong: bool) -> dict[int, Counts]:
    """How it ended: not at all, cancelled on the way, or with up to its max_tokens."""
    if rng.random() < 0.1:
        return {}
    most = prompt.max_tokens if wrong else min(prompt.max_tokens, 200)
    return {choice: Counts(len(prompt.token_ids), rng.randint(0, most)) for choice in range(request.n)}


def used(counts: dict[int, Counts]) -> int:
    """Tokens of an ended request."""
    return sum(c.completion_tokens for c in counts.values()) + max(
        (c.prompt_tokens for c in counts.values()), default=0
    )


def reserved(limiter: Limiter, key: Key, request: ChatRequest) -> Lease:
    """A request's lease, or nothing."""
    lease = limiter.begin(key)
    try:
        lease.charge(request)
    except RateLimited:
        lease.withdraw()
        raise
    return lease


@pytest.mark.parametrize("wrong", [False, True], ids=["estimates near", "estimates wrong"])
def test_never_more_than_the_limit_is_reserved_in_any_window(world: World, wrong: bool) -> None:
    """Whatever comes, ends and turns out, no 60 s have more than 10,000 tokens; in-flight ones included."""
    admitted_ever = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        world.now_s, world.charged = 0.0, []
        limiter = Limiter(world.clock_s, rng.random)
        key = Key("tr-a", "ann", KeyTerms("ann", tpm=TPM), 0)
        waiting = [(rng.uniform(0, 2), request_of(rng)) for _ in range(REQUESTS)]
        waiting.sort(key=lambda item: item[0])
        live: list[tuple[float, Lease, ChatRequest, Prompt]] = []
        peak = 0
        for at_s, request in waiting:
            # Every tenth comes a minute later, and so meets what the others left.
            world.now_s = max(world.now_s, at_s + rng.choice((0, 0, 0, 0.5)) + 61 * (rng.random() < 0.01))
            while live and rng.random() < 0.4:
                _, lease, ended, prompt = live.pop(rng.randrange(len(live)))
                lease.release(counts_of(rng, ended, prompt, wrong=wrong))
            try:
                lease = reserved(limiter, key, request)
            except RateLimited:
                continue
            prompt = prompt_of(rng, request, wrong=wrong)
            try:
                lease.correct(prompt)
            except RateLimited:
                lease.release({})
                continue
            admitted_ever += 1
            live.append((at_s, lease, request, prompt))
            peak = max(peak, world.most_in_a_window())
        for _, lease, ended, prompt in live:
            lease.release(counts_of(rng, ended, prompt, wrong=wrong))
        assert max(peak, world.most_in_a_window()) <= TPM, f"seed {seed}"
    assert admitted_ever > 10 * len(SEEDS)


def test_what_was_underestimated_is_paid_before_the_next_request(world: World) -> None:
    """Over a long time the tokens used are at most the limit's, however wrong every estimate was."""
    for seed in SEEDS:
        rng = random.Random(seed)
        world.now_s, world.charged = 0.0, []
        limiter = Limiter(world.clock_s, rng.random)
        key = Key("tr-a", "ann", KeyTerms("ann", tpm=TPM), 0)
        total, latest = 0, 0
        while world.now_s < 3600:
            world.now_s += rng.uniform(0, 5)
            body = {"messages": [{"role": "user", "content": "go"}]}
            try:
                lease = reserved(limiter, key, ChatRequest("r", "ann", "m", body, 0))
            except RateLimited:
                continue
            assert isinstance(lease, KeyLease)
            assert lease._usage.tokens.debt == 0
            latest = rng.randint(0, 3 * TPM)
            total += latest + 10
            lease.release({0: Counts(10, latest)})
        # One window's worth may be used at the start, and the last request's debt is still owed.
        assert total - latest <= TPM * (3600 / 60 + 1) + 1, f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_as_long_as_told_gets_in(world: World, seed: int) -> None:
    """Retry-After is when the window has room, with debt too: alone, the first retry succeeds."""
    rng = random.Random(seed)
    limiter = Limiter(world.clock_s, rng.random)
    key = Key("tr-a", "ann", KeyTerms("ann", tpm=TPM, rpm=50), 0)
    retried = 0
    for _ in range(300):
        world.now_s += rng.uniform(0, 1)
        request = request_of(rng)
        try:
            lease = reserved(limiter, key, request)
        except RateLimited as error:
            wait_s = error.retry_after_s
        else:
            wait_s = 0
        if wait_s is None:
            continue
        if wait_s:
            world.now_s += wait_s
            if wait_s >= limits.MAX_RETRY_S:
                continue
            lease = reserved(limiter, key, request)
            retried += 1
        prompt = prompt_of(rng, request, wrong=False)
        lease.release(counts_of(rng, request, prompt, wrong=True))
    assert retried > 3


STREAMS = 12


@dataclass
class Answering:
    """A request whose answer is made token by token."""

    lease: KeyLease
    n: int
    max_tokens: int
    prompt_tokens: int
    made: int = 0
    over: bool = False

    def step(self) -> int:
        """The engine makes a token of each choice; how many, until the answer is to end."""
        count = self.made // self.n + 1
        for choice in range(self.n):
            self.made += 1
            if self.lease.on_delta(choice, count):
                self.over = True
                return choice + 1
        self.over = count >= self.max_tokens
        return self.n

    def unused(self) -> int:
        """What of its reservation it has not made yet."""
        return max(self.lease.tokens - self.prompt_tokens - self.made, 0)

    def end(self) -> None:
        """It ends, for whatever reason."""
        each, more = divmod(self.made, self.n)
        self.lease.release({c: Counts(self.prompt_tokens, each + (c < more)) for c in range(self.n)})


@pytest.mark.parametrize("seed", range(60))
def test_no_minute_has_more_than_the_stated_bound(world: World, seed: int) -> None:
    """A request uses one limit, a key owes one, and 60 s have two beside what was reserved before."""
    rng = random.Random(seed)
    tpm = rng.choice((300, 1000, 5000))
    limiter = Limiter(world.clock_s, rng.random)
    key = Key("tr-a", "ann", KeyTerms("ann", tpm=tpm), 0)
    running: list[Answering] = []
    used_at: list[tuple[float, int]] = []
    unused_at: list[tuple[float, int]] = []
    debt = 0
    for _ in range(1500):
        world.now_s += rng.choice((0.01, 0.1, 1.0, 1.0, 20.0 if rng.random() < 0.05 else 0.5))
        unused_at.append((world.now_s, sum(answer.unused() for answer in running)))
        if len(running) < STREAMS and rng.random() < 0.5:
            body = {"messages": [{"role": "user", "content": "go"}]}
            if rng.random() < 0.2:
                body |= {"min_tokens": rng.choice((-5, 3, 100))}  # type: ignore[dict-item]  # of any JSON
            n, max_tokens = rng.choice((1, 1, 2, 8, 128)), rng.choice((1, 16, 50, 500, 4000))
            request = ChatRequest("r", "ann", "m", body, 0, n=n, max_tokens=max_tokens)
            prompt_tokens = rng.choice((2, 20, 200))
            lease = limiter.begin(key)
            assert isinstance(lease, KeyLease)
            try:
                lease.charge(request)
                lease.correct(Prompt(range(prompt_tokens), max_tokens, None))
            except RateLimited:
                lease.release({})
            else:
                running.append(Answering(lease, n, max_tokens, prompt_tokens))
                used_at.append((world.now_s, prompt_tokens))
        for answer in list(running):
            if rng.random() < 0.7:
                used_at.append((world.now_s, answer.step()))
            assert answer.prompt_tokens + answer.made <= tpm, f"seed {seed}"
            if answer.over or rng.random() < 0.01:
                answer.end()
                running.remove(answer)
        debt = max(debt, limiter._keys[key.id].tokens.debt if limiter._keys else 0)
    assert debt <= tpm + STREAMS, f"seed {seed}"
    for start_s, unused in unused_at[::10]:
        used = sum(tokens for at_s, tokens in used_at if start_s <= at_s < start_s + 60)
        assert used <= 2 * tpm + unused + STREAMS, f"seed {seed} at {start_s}"
    assert sum(tokens for _, tokens in used_at) > tpm
