"""A model's backend: which one serves a name, and what its engine lets in."""

from __future__ import annotations

from typing import Any, cast

import pytest

from app.core import Health, Key, KeyTerms, ModelCard
from app.errors import EngineNotReady, Overloaded
from app.routing.backend import PRIORITIES, Backend, Backends, with_priority_and_salt
from tests.support.generations import HandAdmission, HandEngine, asked


def backend(name: str = "", model: str = "large") -> Backend:
    """A backend whose engine serves that model."""
    engine = HandEngine()
    engine.model = ModelCard(model, 1000, 1000, 900, frozenset())
    return Backend(cast("Any", engine), cast("Any", HandAdmission()), name)


def test_request_has_the_priority_of_its_keys_tier():
    """Without a stored key that of the standard tier; only batch is set aside for interactive."""
    assert with_priority_and_salt(asked(), None, isolated=False).placement.priority == PRIORITIES["standard"]
    for tier, priority in PRIORITIES.items():
        key = Key("key_1", "ann", KeyTerms("k", tier=tier), 0)
        assert with_priority_and_salt(asked(), key, isolated=False).placement.priority == priority
    assert PRIORITIES["interactive"] - PRIORITIES["batch"] > 10
    assert PRIORITIES["interactive"] - PRIORITIES["standard"] <= 10


def test_isolated_owners_share_no_cached_prompt():
    """The salt is the owner's, and empty where prompts may be shared."""
    assert with_priority_and_salt(asked(), None, isolated=True).placement.cache_salt == "owner:local"
    assert with_priority_and_salt(asked(), None, isolated=False).placement.cache_salt == ""


@pytest.mark.parametrize("health", [Health.STARTING, Health.DEAD])
def test_engine_that_is_not_ready_refuses_and_says_how_it_is(health: Health):
    """Admission is not asked; the client is told when to come back."""
    made = backend()
    cast("HandEngine", made.engine).health_now = health
    assert not made.ready
    with pytest.raises(EngineNotReady, match=health.value) as refused:
        made.precheck(asked(), None)
    assert refused.value.retry_after_s == 5


def test_engine_that_is_ready_asks_admission():
    """Which may refuse."""
    made = backend()
    made.precheck(asked(), None)
    cast("HandAdmission", made.admission).precheck_error = Overloaded("full", retry_after_s=1)
    with pytest.raises(Overloaded):
        made.precheck(asked(), None)


def test_name_that_is_configured_is_known_before_the_engine_tells_it():
    """The small model's; the large one's is its engine's."""
    assert backend("small", model="/weights/small").id == "small"
    assert backend(model="large").id == "large"


def test_request_goes_to_the_model_that_it_names():
    """Any other name is the large model's, which refuses it or is `auto` made up by then."""
    large, small = backend(), backend("small")
    both = Backends(large, small)
    assert [both.of(name) for name in ("small", "large", "other")] == [small, large, large]
    assert list(both) == [large, small]


def test_server_of_one_model_has_one_backend():
    """Whatever is asked for."""
    large = backend()
    alone = Backends(large)
    assert (alone.of("small"), list(alone)) == (large, [large])


def test_key_is_served_by_the_models_that_it_may_use():
    """None is any."""
    large, small = backend(), backend("small")
    both = Backends(large, small)
    assert both.allowed(None) == [large, small]
    assert both.allowed(("small", "gone")) == [small]
    assert both.allowed(()) == []
