"""Degraded mode: when it changes, that it does not swing, what it does to a request and what it tells."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core import ChatRequest, ModelCard
from app.routing.degraded_mode import BOUNDS, DegradedMode, Step, degrade_of
from app.settings import Settings
from app.store.conversations import BranchSummary

SMALL = ModelCard("small-1b", 8192, 100_000, 8000, frozenset({"tools"}))


class World:
    """The mode, and the clock that it goes by."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.mode = DegradedMode(clock_s=lambda: self.now_s)

    def hold(self, value: float, duration_s: float, every_s: float = 0.5) -> Step:
        """This pressure for so long, observed twice a second."""
        for _ in range(round(duration_s / every_s) + 1):
            self.mode.observe(value)
            self.now_s += every_s
        return self.mode.step


@pytest.fixture
def world() -> World:
    """A node without pressure."""
    return World()


def asked(max_tokens: int | None = None, **body: Any) -> ChatRequest:
    """A request to the large model."""
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest("r", "ann", "large-70b", {"messages": messages, **body}, 0, max_tokens=max_tokens)


def test_each_step_comes_after_its_time(world: World) -> None:
    """Under full pressure: short after 2 s, small after 4, refusal after 6; not sooner."""
    seen = []
    for _ in range(16):
        world.mode.observe(5)
        seen.append(world.mode.step)
        world.now_s += 0.5
    assert seen == [0] * 4 + [1] * 5 + [2] * 5 + [3] * 2


def test_it_goes_back_step_by_step(world: World) -> None:
    """Each step down needs 10 s below its own bound."""
    world.hold(5, 10)
    assert world.hold(0.6, 9) is Step.REFUSE
    assert world.hold(0.6, 12) is Step.SMALL
    assert world.hold(0.6, 60) is Step.SMALL
    assert world.hold(0.0, 11) is Step.SHORT
    assert world.hold(0.0, 12) is Step.NORMAL


def test_a_short_peak_changes_nothing(world: World) -> None:
    """Less than `rise_s` above the bound, however often."""
    for _ in range(20):
        assert world.hold(9, 1) is Step.NORMAL
        assert world.hold(0.4, 0.5) is Step.NORMAL
    assert not world.mode.changes


@settings(deadline=None)
@given(
    values=st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 5)), min_size=1, max_size=200),
    rise_s=st.floats(0.5, 5),
    fall_s=st.floats(0.5, 20),
)
def test_it_never_jumps_and_never_swings(
    values: list[tuple[float, float]], rise_s: float, fall_s: float
) -> None:
    """Whatever the pressure does: one step at a time, up only after `rise_s`, down only after `fall_s`."""
    now_s = 0.0
    mode = DegradedMode(rise_s=rise_s, fall_s=fall_s, clock_s=lambda: now_s)
    changed_s, before = 0.0, Step.NORMAL
    for value, passes_s in values:
        now_s += passes_s
        step = mode.observe(value)
        assert abs(step - before) <= 1
        if step != before:
            least = rise_s if step > before else fall_s
            assert now_s - changed_s >= least or changed_s == 0.0
            bounds = BOUNDS[max(step, before)]
            assert value >= bounds.enter if step > before else value < bounds.leave
            changed_s = now_s
        before = step
    assert mode.changes.total() <= now_s / min(rise_s, fall_s) + 1


@settings(deadline=None)
@given(start=st.sampled_from(Step), value=st.floats(0, 2), more=st.floats(0, 1))
def test_where_a_steady_pressure_leads(start: Step, value: float, more: float) -> None:
    """It settles within three changes, and more pressure never settles lower."""
    settled = []
    for pressure in (value, value + more):
        world = World()
        world.mode.step = start
        settled.append(world.hold(pressure, 40))
        assert world.hold(pressure, 100) is settled[-1]
    assert settled[0] <= settled[1]
    if value >= 1.0:
        assert settled[0] is Step.REFUSE
    if value + more < 0.3:
        assert settled[1] is Step.NORMAL


@settings(deadline=None)
@given(st.floats(0.3, 0.49), st.floats(0.3, 0.49))
def test_between_its_bounds_a_step_stays(one: float, other: float) -> None:
    """Hysteresis: pressure anywhere between leave and enter changes nothing, from either side."""
    for step in (Step.NORMAL, Step.SHORT):
        world = World()
        world.mode.step = step
        for _ in range(10):
            world.hold(one, 5)
            assert world.hold(other, 5) is step


def test_bounds_do_not_let_the_mode_swing() -> None:
    """Each step is left below where it is entered, and its bounds are above those of the one before."""
    bounds = [BOUNDS[step] for step in Step if step is not Step.NORMAL]
    assert all(each.leave < each.enter for each in bounds)
    assert all(a.enter < b.enter and a.leave < b.leave for a, b in pairwise(bounds))


def test_normally_nothing_is_done(world: World) -> None:
    """And nothing is told."""
    decision = world.mode.apply(asked(4000), 100, small=SMALL)
    assert (decision.model, decision.max_tokens, decision.headers) == ("large-70b", 4000, {})


def test_short_answers(world: World) -> None:
    """Long ones are cut to 512 tokens and say so; short ones are as they were, and say nothing."""
    world.mode.step = Step.SHORT
    decision = world.mode.apply(asked(4000), 100, small=SMALL)
    assert (decision.model, decision.max_tokens) == ("large-70b", 512)
    assert decision.headers == {"x-degraded": "short-output", "x-served-model": "large-70b"}
    assert world.mode.apply(asked(), 100).max_tokens == 512
    untouched = world.mode.apply(asked(100), 100, small=SMALL)
    assert (untouched.max_tokens, untouched.headers) == (100, {})


def test_answers_that_are_short_by_default_are_not_made_longer() -> None:
    """By `default_max_tokens`, where a request does not say how long; one that says more is cut."""
    mode = degrade_of(Settings(default_max_tokens=256))
    assert mode is not None
    mode.step = Step.SHORT
    decision = mode.apply(asked(), 100)
    assert (decision.max_tokens, decision.headers) == (None, {})
    assert mode.apply(asked(4000), 100).max_tokens == 512


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
        {"min_tokens": 800},
        {"ignore_eos": True},
    ],
)
def test_answers_that_are_no_use_when_cut_keep_their_length(world: World, body: dict[str, Any]) -> None:
    """Half a JSON object is none."""
    world.mode.step = Step.SHORT
    assert world.mode.apply(asked(4000, **body), 100).max_tokens == 4000


@pytest.mark.parametrize("step", [Step.SMALL, Step.REFUSE])
def test_the_small_model_takes_what_it_can(world: World, step: Step) -> None:
    """With short answers too; what it cannot serve stays with the large one."""
    world.mode.step = step
    decision = world.mode.apply(asked(), 100, small=SMALL)
    assert decision.headers == {"x-degraded": "short-output, small-model", "x-served-model": "small-1b"}
    assert world.mode.apply(asked(), 9000, small=SMALL).model == "large-70b"
    assert world.mode.apply(asked(reasoning_effort="high"), 100, small=SMALL).model == "large-70b"
    assert world.mode.apply(asked(), 100, small=None).model == "large-70b"
    assert world.mode.requests_by_measure == {"short-output": 4, "small-model": 1, "refused": 0}


def test_the_small_model_takes_no_conversation_with_images_that_it_cannot_read(world: World) -> None:
    """They are in its history, not in the request."""
    world.mode.step = Step.SMALL
    assert world.mode.apply(asked(), 100, small=SMALL, branch=BranchSummary(images=True)).model == "large-70b"
    assert (
        world.mode.apply(asked(), 100, small=SMALL, branch=BranchSummary("large-70b", 9, 1)).model
        == "small-1b"
    )


def test_who_insists_is_served_in_full_or_refused(world: World) -> None:
    """`x-no-degrade`: no shorter answer, no other model."""
    for step in Step:
        world.mode.step = step
        decision = world.mode.apply(asked(4000), 100, small=SMALL, no_degrade=True)
        assert (decision.model, decision.max_tokens, decision.headers) == ("large-70b", 4000, {})


def test_a_refusal_by_the_full_queue_says_so(world: World) -> None:
    """And is counted; one in the steps before was for another reason."""
    for step in (Step.NORMAL, Step.SHORT, Step.SMALL):
        world.mode.step = step
        assert world.mode.note_refusal() == {}
    world.mode.step = Step.REFUSE
    assert world.mode.note_refusal() == {"x-degraded": "refused"}
    assert world.mode.requests_by_measure["refused"] == 1
    assert Step.REFUSE.label == "refuse"


def test_the_settings_say_when_and_how_much() -> None:
    """Or that there is no such mode."""
    mode = degrade_of(Settings(degrade_rise_s=1.0, degrade_fall_s=3.0, degrade_short_tokens=99))
    assert mode is not None
    assert (mode._rise_s, mode._fall_s, mode._short_tokens) == (1.0, 3.0, 99)
    assert degrade_of(Settings(degrade="off")) is None
