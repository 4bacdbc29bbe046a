"""Who may wait, and what those are told who may not, without an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from app.admission.estimates import Throughput
from app.admission.load_shedder import LoadShedder, RetrySlots
from app.admission.queue import AdmissionRequest, FairQueue, Tenant
from app.core import ChatRequest, Tier
from app.errors import Overloaded
from app.settings import Settings
from tests.support.admissions import TUNING, key_of

RATE = 100.0
"""Tokens per second."""


@dataclass
class StubScheduler:
    """The scheduler behind the load shedder."""

    free: int = 0
    ends_s: float = 0.0
    half_full: bool = True
    queue: FairQueue = field(default_factory=lambda: FairQueue(TUNING))
    kv_pools: Any = field(default_factory=lambda: SimpleNamespace(capacity_tokens=10_000))
    over_share: frozenset[Tenant] = frozenset()

    def fits_beside_waiting(self, _tenant: Tenant, tokens: int, age_s: float, _now_s: float) -> bool:
        return tokens <= (self.free if age_s < 1 else 0) - self.queue.tokens

    def steady_after_s(self, _now_s: float, _tokens_per_s: float) -> float:
        return self.ends_s


@dataclass
class World:
    """A load shedder whose queue nobody leaves."""

    max_expected_s: float = 1.0
    max_queued_tokens: int = 10**6
    measured_s: float = TUNING.throughput_memory_s
    """Seconds of measuring that the rate rests on; 1 is a guess."""
    now_s: float = 1000.0
    tenants: dict[str, Tenant] = field(default_factory=dict)
    number: int = 0
    scheduler: Any = field(default_factory=StubScheduler)

    def __post_init__(self) -> None:
        self.queue = self.scheduler.queue
        settings = Settings(max_queued_tokens=self.max_queued_tokens, ttft_target_s=self.max_expected_s / 0.4)
        throughput = Throughput(RATE, self.now_s, TUNING, self.measured_s)
        self.load_shedder = LoadShedder(settings, self.queue, self.scheduler, throughput, lambda: 0.0, TUNING)

    def ask(
        self,
        name: str,
        tokens: int = 10,
        tier: Tier = "standard",
        weight: float = 1.0,
        *,
        age_s: float = 0.0,
    ) -> int:
        """One more request; 0 if it may wait, or when it is told to come back."""
        request = ChatRequest("r", name, "m", {}, 0)
        tenant = self.tenants[name] = self.queue.touch(request, key_of(name, tier, weight), self.now_s, 0)
        self.number += 1
        fingerprint = tokens if tokens == 11 else -self.number  # those of eleven tokens are one client's
        ticket = AdmissionRequest(tenant, tokens, self.now_s, age_s, fingerprint)
        try:
            self.load_shedder.enter(ticket, self.now_s)
        except Overloaded as error:
            return 999 if error.should_retry is False else error.retry_after_s or -1
        self.queue.enter(ticket)
        return 0

    def come_twice(self, name: str, tokens: int) -> int:
        """Two requests; what the second is told."""
        self.ask(name, tokens)
        return self.ask(name, tokens)


def test_a_line_is_as_long_as_is_served_soon() -> None:
    """100 tokens a second and one second: ten requests of ten before it, and it may wait itself."""
    world = World()
    retries_s = [world.ask("a") for _ in range(12)]
    assert retries_s[:11] == [0] * 11
    assert retries_s[11]


def test_the_first_requests_are_not_refused_before_throughput_was_measured() -> None:
    """As many as a team sends at once, however long, and whether they come back or not; a herd is."""
    world = World(measured_s=1.0, scheduler=StubScheduler(ends_s=30.0))
    retries_s = [world.ask("a", 20_000) for _ in range(TUNING.unmeasured_waiting + 1)]
    assert retries_s[:-1] == [0] * TUNING.unmeasured_waiting
    assert retries_s[-1]
    assert World(measured_s=TUNING.throughput_measured_s).come_twice("a", 20_000) > 0


def test_where_degraded_mode_refuses_the_first_requests_are_refused_too() -> None:
    """Its step rests on a pressure that was observed; a wait that nobody has measured is given up for it."""
    world = World(measured_s=1.0)
    world.load_shedder.degraded(refuses=True)
    assert world.come_twice("a", 20_000) > 0


def test_what_cannot_fit_is_refused_before_throughput_was_measured_too() -> None:
    """The queue has an end, and one key alone has half of what is free of it."""
    world = World(measured_s=1.0, max_queued_tokens=100_000)
    assert [bool(world.ask("a", 20_000)) for _ in range(5)] == [False, False, False, True, True]
    assert [bool(world.ask(name, 30_000)) for name in "bc"] == [False, True]


def test_a_few_of_many_keys_wait_for_the_first_token_in_time_too() -> None:
    """Each has none waiting but the one: the eleventh key finds eleven tokens' worth of others before it."""
    world = World()
    retries_s = [world.ask(f"key {number}") for number in range(30)]
    assert retries_s[:11] == [0] * 11
    assert all(retries_s[11:])


def test_a_key_with_little_passes_a_long_line_of_another() -> None:
    """Before it are only as many tokens of the other as it wants itself."""
    world = World()
    while not world.ask("heavy"):
        pass
    assert world.ask("light") == 0


def test_batch_waits_as_long_as_its_deadline_bears() -> None:
    """A quarter of 300 s at 100 tokens a second."""
    world = World()
    assert [world.ask("a", 100, "batch") for _ in range(80)].index(0) == 0
    assert world.tenants["a"].waiting_tokens == 7600


def test_who_comes_too_early_is_told_the_same_time_and_expected_once() -> None:
    """A client that insists takes no more of the time to come than one that obeys."""
    world = World()
    while not world.ask("a"):
        pass
    retries_s = world.ask("a", 11)
    expected = world.load_shedder.slots_of(world.tenants["a"]).tokens
    world.now_s += 1.0
    assert [world.ask("a", 11) for _ in range(5)] == [retries_s - 1] * 5
    assert world.load_shedder.slots_of(world.tenants["a"]).tokens == expected


def test_seconds_are_given_away_once() -> None:
    """Three quarters of the throughput to those who are told to come: 8 requests of ten tokens at most."""
    world = World()
    retries_s = [world.ask("a") for _ in range(400)]
    seconds = Counter(at for at in retries_s if at)
    assert max(seconds.values()) <= 8
    assert sum(seconds.values()) > 300
    assert max(seconds) == pytest.approx(sum(seconds.values()) / 7.5, abs=3)


def test_nobody_is_told_to_come_while_the_first_ones_run() -> None:
    """After a start nothing ends for a while; later room comes free at once."""
    world = World(scheduler=StubScheduler(ends_s=5.0))
    assert min(at for at in (world.ask("a") for _ in range(30)) if at) >= 5
    later = World()
    assert min(at for at in (later.ask("a") for _ in range(30)) if at) < 5


def test_who_has_room_waits_for_the_prefill_alone() -> None:
    """A burst that the free memory holds is let wait, however slowly requests end."""
    world = World(scheduler=StubScheduler(free=500))
    retries_s = [world.ask("a") for _ in range(60)]
    assert retries_s[:50] == [0] * 50
    assert any(retries_s[50:])


def test_what_was_not_read_for_long_is_not_let_wait() -> None:
    """Its client has waited for all that it may, and would have its first token late."""
    assert World().ask("a", age_s=1.1) > 0
    assert World().ask("a", age_s=0.9) == 0
    assert World(scheduler=StubScheduler(half_full=False)).ask("a", age_s=9.0) == 0, (
        "the engine has little to do"
    )


def test_the_time_before_it_was_read_counts_as_waiting() -> None:
    """100 tokens a second and one second, half of it gone: five requests of ten before it."""
    world = World()
    retries_s = [world.ask("a", age_s=0.5) for _ in range(8)]
    assert retries_s[:6] == [0] * 6
    assert all(retries_s[6:])


def test_many_keys_that_come_at_once_are_not_promised_more_than_there_is() -> None:
    """A key's share of a second may be less than a request: then it is one of several seconds."""
    world = World()
    retries_s = [world.ask(f"key {number % 20}", 60) for number in range(600)]
    seconds = Counter(at for at in retries_s if 0 < at < 999)
    late = [60 * sum(seconds[at] for at in range(start, start + 20)) for start in range(20, 100, 20)]
    assert max(late) <= 1.1 * 20 * RATE
    assert sum(seconds.values()) * 60 > 0.6 * 115 * RATE


def test_nobody_waits_for_room_while_all_that_run_are_young() -> None:
    """After a burst none ends for a while: who came then would have its first token late."""
    world = World(scheduler=StubScheduler(ends_s=3.0))
    retries_s = [world.ask("a") for _ in range(12)]
    assert retries_s[0] == 0  # the first in line may always wait
    assert min(retries_s[1:]) >= 3


def test_what_is_too_far_away_is_not_promised() -> None:
    """Beyond two minutes there is no retry slot."""
    world = World()
    retries_s = [world.ask("a", 100) for _ in range(200)]
    assert retries_s[-1] == 999
    assert world.load_shedder.slots_of(world.tenants["a"]).tokens <= 120 * RATE


def test_a_key_that_comes_late_has_its_share_of_every_second() -> None:
    """Another has filled the two minutes: it is told a time as if they had been shared."""
    world = World()
    while world.ask("first", 20) != 999:
        pass
    retries_s = [world.ask(f"other {number % 10}", 20) for number in range(60)]
    assert 0 < max(retries_s) < 30


def test_the_bounds_come_from_the_settings() -> None:
    """One setting for each tier's deadline; waiting is to take no more than a part of the TTFT target."""
    settings = Settings(queue_batch_s=8.0, queue_standard_s=1.0, ttft_target_s=1.0)
    scheduler: Any = StubScheduler()
    throughput = Throughput(RATE, 0.0, TUNING)
    shedder = LoadShedder(settings, scheduler.queue, scheduler, throughput, lambda: 0.0, TUNING)
    tiers: tuple[Tier, ...] = ("interactive", "standard", "batch")
    tenants = [Tenant(tier, tier, 1.0, TUNING) for tier in tiers]
    assert [shedder.max_wait_s(tenant) for tenant in tenants] == [0.4, 0.25, 2.0]


def test_a_slot_is_kept_once_and_not_early() -> None:
    """At its time or within the grace; a second request with the same body needs a slot of its own."""
    slots = RetrySlots(10)
    slots.make(7, 20.0, 100)
    assert not slots.use(7, 19.9)
    assert not slots.use(8, 20.0)
    assert slots.use(7, 21.5)
    assert not slots.use(7, 21.5)
    assert (bool(slots), slots.tokens) == (False, 0)


def test_a_slot_that_nobody_used_ends_after_the_grace() -> None:
    """One of three came: two are missed, once their time is over."""
    slots = RetrySlots(10)
    for fingerprint in range(3):
        slots.make(fingerprint, 20.0, 100)
    assert slots.use(1, 20.0)
    assert slots.expire(20.0 + 10) == 0
    assert slots
    assert slots.expire(20.1 + 10) == 2
    assert not slots


def test_slots_are_counted_by_when_they_come() -> None:
    """Late ones, those of this second, and those ahead, as far as is asked."""
    slots = RetrySlots(10)
    for at_s, tokens in ((15.0, 1), (20.5, 10), (21.2, 100), (28.9, 1000), (29.0, 10_000)):
        slots.make(tokens, at_s, tokens)
    assert [slots.due_tokens(20.7 + ahead_s) for ahead_s in (0, 1, 2, 8)] == [11, 111, 111, 1111]
    assert slots.later(10_000, 20.7) == 29
    assert RetrySlots(10).due_tokens(20.7) == 0
