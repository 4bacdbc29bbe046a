"""What is in the engine: places, and until requests end as they come."""

from __future__ import annotations

from typing import Any

from app.admission.estimates import LengthEstimate
from app.admission.gap_sampler import GapSampler
from app.admission.queue import FairQueue, Tenant
from app.admission.scheduler import AdmissionScheduler, Obstacle
from app.admission.ticket import Ticket
from app.admission.windows import DecodeWindow, PrefillWindow
from app.core import ChatRequest, Prompt
from app.metering.traffic import Histogram
from tests.support.admissions import TUNING, key_of


def scheduler(
    max_choices: int = 0, tpot_target_s: float = 0.0, *, queue: FairQueue | None = None, slowdown: float = 0.0
) -> AdmissionScheduler:
    """One of an engine with much memory."""
    made = AdmissionScheduler(
        FairQueue(TUNING) if queue is None else queue,
        PrefillWindow(2.0, 16_384, TUNING),
        DecodeWindow(TUNING, tpot_target_s),
        DecodeWindow(TUNING, slowdown=slowdown),
        TUNING,
    )
    made.restart(1_000_000)
    made.limit_choices(max_choices)
    return made


def request(name: str, rid: str = "r", n: int = 1) -> ChatRequest:
    """One of so many choices."""
    return ChatRequest(rid, name, "m", {"messages": []}, 0, n=n)


def ticket(rid: str, n: int = 1, tokens: int = 100, name: str = "a", tenant: Tenant | None = None) -> Ticket:
    """A request of a key of its own, of so many choices and tokens."""

    def unused(*_: Any) -> None: ...

    made = Ticket(
        tenant or Tenant(name, "standard", 1.0, TUNING),
        request(name, rid, n),
        Prompt([1], tokens, None),
        LengthEstimate((tokens - 1) // n, 0),
        0.0,
        step_tokens=32,
        gaps=GapSampler(Histogram(()), lambda: 0.0),
        on_progress=unused,
        on_release=unused,
    )
    made.set_claim(tokens - made.allocation.mean, 1_000_000)
    return made


def test_choices_take_places() -> None:
    """Two of two choices each leave none of four, and one that ends leaves two."""
    places = scheduler(max_choices=4)
    first, second = ticket("1", n=2, name="a"), ticket("2", n=2, name="b")
    places.begin(first, 0.0)
    places.begin(second, 0.0)
    assert places.obstacle(ticket("3", name="c"), 0.0) is Obstacle.CHOICES
    places.end(first, 0.0)
    assert places.obstacle(ticket("3", n=2, name="c"), 0.0) is None
    assert places.obstacle(ticket("3", n=3, name="c"), 0.0) is Obstacle.CHOICES


def test_a_part_of_the_places_is_kept_for_other_keys() -> None:
    """An eighth of eight: a key with more than its share leaves the last one to another."""
    places = scheduler(max_choices=8)
    tenant = Tenant("heavy", "standard", 1.0, TUNING)
    for number in range(7):
        places.begin(ticket(str(number), tokens=100_000, tenant=tenant), 0.0)
    assert places.obstacle(ticket("next", tokens=100_000, tenant=tenant), 0.0) is Obstacle.CHOICES
    assert places.obstacle(ticket("other", name="light"), 0.0) is None


def test_one_request_always_has_a_place() -> None:
    """Though it has more choices than the engine runs at once."""
    assert scheduler(max_choices=2).obstacle(ticket("1", n=5), 0.0) is None


def test_more_choices_than_one_key_may_have_wait_until_the_engine_was_idle() -> None:
    """128 at once, on a node that another key uses: not between two of its answers, but a second later."""
    queue = FairQueue(TUNING)
    other, many = (queue.touch(request(name), key_of(name), 0.0, 0) for name in ("other", "many"))
    engine = scheduler(queue=queue, slowdown=3.0)
    asks = ticket("many", n=128, tokens=1000, tenant=many)
    assert engine.obstacle(asks, 0.0) is None
    runs = ticket("other", tenant=other)
    engine.begin(runs, 0.0)
    assert engine.obstacle(asks, 5.0) is Obstacle.SHARE
    engine.end(runs, 10.0)
    assert engine.obstacle(asks, 10.0) is Obstacle.SHARE
    assert engine.obstacle(asks, 10.0 + TUNING.idle_s) is None


def test_the_decode_window_takes_places_too() -> None:
    """Eight after a start: no ninth, but of a key within its share of them."""
    places = scheduler(tpot_target_s=0.02)
    tenant = Tenant("a", "standard", 1.0, TUNING)
    for number in range(8):
        asks = ticket(str(number), tenant=tenant)
        assert places.obstacle(asks, 0.0) is None
        places.begin(asks, 0.0)
    assert places.obstacle(ticket("ninth", tenant=tenant), 0.0) is Obstacle.DECODE
    assert places.obstacle(ticket("other", name="b"), 0.0) is None
    places.limit_choices(8)
    assert places.obstacle(ticket("other", name="b"), 0.0) is Obstacle.CHOICES


def test_memory_and_prefill_are_obstacles_and_asking_changes_nothing() -> None:
    """A pool that is full, and a prompt behind another one; one alone always goes."""
    engine = scheduler()
    full, long = ticket("1", tokens=900_000), ticket("2", tokens=200_000, name="b")
    assert engine.obstacle(full, 0.0) is None
    engine.begin(full, 0.0)
    assert engine.obstacle(long, 0.0) is Obstacle.MEMORY
    engine.end(full, 0.0)
    first, second = ticket("3", name="c"), ticket("4", name="d")
    for each in (first, second):
        each.set_claim(TUNING.prefill_step_tokens, 1_000_000)
    engine.begin(first, 0.0)
    assert [engine.obstacle(second, 0.0) for _ in range(3)] == [Obstacle.PREFILL] * 3
    engine.end(first, 0.0)
    assert engine.obstacle(second, 0.0) is None


def test_what_may_not_pass_waits_for_the_order() -> None:
    """A request of the same key, once as many tokens went before the blocked one as that needs itself."""
    engine, tenant = scheduler(), Tenant("a", "standard", 1.0, TUNING)
    blocked, later = ticket("1", tokens=500, tenant=tenant), ticket("2", tenant=tenant)
    assert engine.obstacle(later, 0.0, [blocked]) is None
    blocked.record_bypass(500)
    assert engine.obstacle(later, 0.0, [blocked]) is Obstacle.ORDER


def test_after_a_burst_nothing_ends_for_a_while() -> None:
    """1,000 tokens at 100 a second run for ten; a third of that on, some end."""
    places = scheduler()
    for number in range(10):
        places.begin(ticket(str(number)), 50.0)
    assert places.steady_after_s(50.0, 100.0) == 10.0
    assert places.steady_after_s(52.0, 100.0) == 10.0 - TUNING.min_run_ages * 2.0
    assert places.steady_after_s(60.0, 100.0) == 0.0


def test_what_was_taken_back_counts_until_it_ends() -> None:
    """Once for each request."""
    places = scheduler()
    asks = ticket("1")
    places.begin(asks, 0.0)
    places.reclaim("1")
    places.reclaim("1")
    places.reclaim("unknown")
    assert places.reclaimed_tokens == 100
    places.end(asks, 0.0)
    assert places.reclaimed_tokens == 0
