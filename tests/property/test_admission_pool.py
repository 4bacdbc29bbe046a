"""Reservations against a model of the pool: never over it, and what is shared counted once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission.budget import KVAllocation, KVBudget, PrefixTree, PromptNode
from app.admission.estimates import LengthEstimate, LengthHistogram, expected
from tests.support.admissions import TUNING

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=90), min_size=1, max_size=12)
SPACES = st.sampled_from(["", "ann", "ben"])


def distinct(prompts: list[tuple[str, list[int]]]) -> int:
    """Different prefixes of all prompts: each is one token of the pool."""
    return len({(space, tuple(ids[: i + 1])) for space, ids in prompts for i in range(len(ids))})


@given(
    st.lists(st.tuples(SPACES, st.lists(st.integers(0, 2), min_size=1, max_size=90)), max_size=14), st.data()
)
@settings(max_examples=150, deadline=None)
def test_a_shared_prefix_is_counted_once(prompts: list[tuple[str, list[int]]], data: st.DataObject) -> None:
    """The tree holds as many tokens as there are different prefixes, whoever comes and goes."""
    tree = PrefixTree()
    held: list[tuple[PromptNode, tuple[str, list[int]]]] = []
    for space, ids in prompts:
        earlier = tree.tokens
        shared = tree.shared_tokens(ids, space)
        held.append((tree.insert(ids, space), (space, ids)))
        assert tree.tokens - earlier == len(ids) - shared
        assert tree.tokens == distinct([prompt for _, prompt in held])
        if held and data.draw(st.booleans()):
            gone, _ = held.pop(data.draw(st.integers(0, len(held) - 1)))
            tree.release(gone)
            assert tree.tokens == distinct([prompt for _, prompt in held])
    for leaf, _ in held:
        tree.release(leaf)
    assert tree.tokens == 0
    assert not tree.root.children


def test_a_long_prompt_is_compared_where_it_differs() -> None:
    """Wherever two long prompts part, exactly what is before is shared."""
    long = list(range(5000))
    for at in (1, 31, 32, 33, 95, 96, 97, 2047, 4999):
        tree = PrefixTree()
        tree.insert(long, "")
        assert tree.shared_tokens([*long[:at], -1, *long[at + 1 :]], "") == at
        assert tree.shared_tokens(long[:at], "") == at


class World:
    """A pool, and the tokens that an engine would really use."""

    def __init__(self, capacity: int) -> None:
        self.kv_budget = KVBudget(capacity, TUNING)
        self.flying: list[tuple[KVAllocation, int, int]] = []  # claim, tokens made, tokens it will make

    @property
    def used(self) -> int:
        prompts = [(str(c.space), list(c.ids)) for c, _, _ in self.flying]
        return distinct(prompts) + sum(made for _, made, _ in self.flying)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_reservations_never_exceed_the_pool(data: st.DataObject) -> None:
    """With answers as long as they may be: what the engine uses is reserved, and that is in the pool."""
    capacity = data.draw(st.integers(100, 600))
    world = World(capacity)
    for _ in range(data.draw(st.integers(1, 40))):
        if world.flying and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(world.flying) - 1))
            allocation, made, limit = world.flying.pop(at)
            if data.draw(st.booleans()) and made < limit:
                made = data.draw(st.integers(made, limit))
                world.kv_budget.correct(allocation, LengthEstimate(limit, 0), made)
                world.flying.append((allocation, made, limit))
            else:
                world.kv_budget.give_back(allocation)
        else:
            ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=60))
            limit = data.draw(st.integers(1, 80))
            allocation = KVAllocation(
                ids, data.draw(st.sampled_from(["", "ann", None])), 1, limit, LengthEstimate(limit, 0)
            )
            if world.kv_budget.fits(allocation):
                alone = not world.flying
                world.kv_budget.take(allocation)
                world.flying.append((allocation, 0, limit))
                assert alone or world.kv_budget.committed_tokens <= world.kv_budget.limit_tokens
        assert world.used <= world.kv_budget.committed_tokens
        assert world.used <= capacity or len(world.flying) == 1
    for allocation, _, _ in world.flying:
        world.kv_budget.give_back(allocation)
    assert world.kv_budget.committed_tokens == 0
    assert world.kv_budget.used_tokens == 0


@given(
    st.lists(st.integers(1, 5000), max_size=300),
    st.lists(st.integers(1, 5000), max_size=300),
    st.integers(0, 6000),
    st.integers(1, 6000),
)
@settings(max_examples=150, deadline=None)
def test_an_estimate_is_between_what_is_there_and_what_may_be(
    own: list[int], others: list[int], so_far: int, limit: int
) -> None:
    """No less than there is already, no more than the limit; the deviation no more than the limit either."""
    key, model = LengthHistogram(TUNING), LengthHistogram(TUNING)
    for tokens in own:
        key.add(tokens)
    for tokens in others:
        model.add(tokens)
    so_far = min(so_far, limit)
    growth = expected(key, model, so_far, limit, TUNING)
    assert so_far <= growth.mean <= limit
    assert growth.variance <= limit * limit + 1


def test_a_key_with_a_past_is_expected_to_do_as_before() -> None:
    """A hundred answers of about 200 tokens weigh more than the guess for strangers."""
    key, model = LengthHistogram(TUNING), LengthHistogram(TUNING)
    for _ in range(100):
        key.add(200)
        model.add(900)
    assert 190 <= expected(key, model, 0, 4096, TUNING).mean <= 260
    assert expected(key, model, 1000, 4096, TUNING).mean > 1000


def test_what_the_engine_uses_beyond_is_kept_free() -> None:
    """Only what it says again and again counts: a single look may be old."""
    pool = KVBudget(1000, TUNING)
    pool.take(KVAllocation([1, 2, 3], "", 1, 10, LengthEstimate(10, 0)))
    pool.observe(503)
    assert pool.limit_tokens == 980
    for _ in range(6):
        pool.observe(203)
    assert pool.limit_tokens == 780
    pool.observe(3)
    assert pool.limit_tokens == 980
