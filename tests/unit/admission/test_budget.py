"""The pools of data parallel replicas: where a request fits, and where a conversation goes."""

from __future__ import annotations

import pytest

from app.admission import budget
from app.admission.budget import KVAllocation, KVPools, PrefixLocations
from app.admission.estimates import LengthEstimate
from app.core import EngineLoad
from tests.support.admissions import TUNING

POOL = 10_000


def request(first: int, prompt: int, answer: int = 10, space: str | None = "") -> KVAllocation:
    """A prompt of ids that begin at `first`, and an answer of exactly that many tokens."""
    ids = list(range(first, first + prompt))
    return KVAllocation(ids, space, 1, answer, LengthEstimate(answer, 0))


def pools(number: int = 2) -> KVPools:
    """Empty ones."""
    made = KVPools(TUNING)
    made.restart(number * POOL, number)
    return made


def let_in(made: KVPools, allocation: KVAllocation) -> int | None:
    """The replica that a request is let in to; it fits."""
    assert made.fits(allocation)
    made.take(allocation)
    return allocation.replica


def test_one_replica_is_not_chosen() -> None:
    """The engine has no other, and is told of none."""
    made = pools(1)
    assert let_in(made, request(0, 100)) is None
    assert made.committed_tokens == 110


def test_a_request_fits_where_one_pool_has_room_for_it() -> None:
    """Half of the room in each of two pools is room for neither."""
    made = pools()
    others = [request(10_000 * number, 5000) for number in range(2)]
    assert [let_in(made, other) for other in others] == [0, 1]
    wide = request(50_000, 6000)
    assert made.free_tokens() > 6010
    assert not made.fits(wide)
    made.give_back(others[1])
    assert let_in(made, wide) == 1
    assert (made.capacity_tokens, made.pool_tokens) == (2 * POOL, POOL)


def test_a_conversation_goes_back_to_its_replica() -> None:
    """Although nothing of it is in flight between its turns, and the other replica has less to do."""
    made = pools()
    turns = [request(0, 600 + 200 * number) for number in range(5)]
    seen = set()
    for turn in turns:
        seen.add(let_in(made, turn))
        let_in(made, request(100_000, 64))
        made.give_back(turn)
    assert len(seen) == 1


def test_a_replica_that_is_much_busier_loses_its_conversations() -> None:
    """Where it has more than four times in its pool what the other one would have to read anew."""
    made = pools()
    first = request(0, 600)
    assert let_in(made, first) == 0
    made.give_back(first)
    busy, stays = request(50_000, 2000), request(0, 640)
    busy.choose(0)
    made.take(busy)
    assert let_in(made, stays) == 0
    made.give_back(stays)
    more = request(60_000, 800)
    more.choose(0)
    made.take(more)
    assert let_in(made, request(0, 650)) == 1


def test_a_full_replica_is_no_reason_to_wait() -> None:
    """A conversation whose replica has no room goes on at another one."""
    made = pools()
    first, filling = request(0, 4000), request(50_000, 7000)
    home = let_in(made, first)
    made.give_back(first)
    filling.choose(home)
    made.take(filling)
    assert {home, let_in(made, request(0, 4200))} == {0, 1}


def test_new_conversations_spread() -> None:
    """Those that share nothing, and those that share a system prompt, which each replica reads once."""
    made = pools()
    placed = [let_in(made, request(1000 * number, 200)) for number in range(20)]
    assert placed.count(0) == placed.count(1) == 10
    made = pools()
    system = list(range(512))
    placed = []
    for number in range(40):
        ids = [*system, *range(10_000 * number, 10_000 * number + 90)]
        allocation = KVAllocation(ids, "", 1, 10, LengthEstimate(10, 0))
        placed.append(let_in(made, allocation))
    assert 12 <= placed.count(1) <= 20


def test_spaces_share_no_location_and_images_have_none() -> None:
    """What one group's prompts have been read for says nothing of another's."""
    locations = PrefixLocations()
    locations.read(request(0, 100, space="a"), 1)
    assert locations.known_tokens(request(0, 100, space="a"), 1) == 64
    assert locations.known_tokens(request(0, 100, space="a"), 0) == 0
    assert locations.known_tokens(request(0, 100, space="b"), 1) == 0
    locations.read(request(0, 100, space=None), 1)
    assert locations.known_tokens(request(0, 100, space=None), 1) == 0


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginnings that were not used for longest are forgotten."""
    monkeypatch.setattr(budget, "MAX_HASHES", 8)
    locations = PrefixLocations()
    for number in range(100):
        locations.read(request(1000 * number, 40), 0)
    assert len(locations._replicas) == 8
    assert locations.known_tokens(request(99_000, 40), 0) == 32
    assert locations.known_tokens(request(0, 40), 0) == 0


def test_a_long_prompt_is_known_by_the_steps_of_its_beginning() -> None:
    """16, 32 … 512 tokens, then each 512 more."""
    locations = PrefixLocations()
    locations.read(request(0, 5000), 0)
    assert [locations.known_tokens(request(0, n), 0) for n in (15, 16, 700, 1024, 1500, 9000)] == [
        0,
        16,
        512,
        1024,
        1024,
        4608,
    ]


def test_each_pool_is_compared_with_its_own_count() -> None:
    """What one replica uses without our knowing is missing there."""
    made = pools()
    made.take(request(0, 100))
    for _ in range(TUNING.drift_samples):
        made.observe(EngineLoad(1, 0, 2100, 2 * POOL, 0.0, replica_used_tokens=(100, 2000)))
    assert made.limit_tokens == 2 * int(POOL * (1 - TUNING.kv_headroom)) - 2000
    assert let_in(made, request(50_000, 9000)) == 0


def test_after_a_restart_nothing_is_known() -> None:
    """Its caches are empty."""
    made = pools()
    first = request(0, 600)
    made.take(first)
    made.restart(2 * POOL, 2)
    assert first.replica is not None
    made.give_back(first)
    assert made.committed_tokens == 0
    assert made._locations.known_tokens(request(0, 600), first.replica) == 0
