"""What follows the loss of an engine: pauses, the old order, suspects, and the end after too many."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from app.core import Counts
from app.engine.sglang.live_choices import LiveChoice, LiveChoices
from app.engine.sglang.recovery import MAX_PREFILL_TOKENS, PREFILL_WAIT_S, Recovery
from app.engine.supervise import RestartHistory, RestartLimits
from tests.support.live_choices import FakeEngine, NotingSink, VirtualTime, choice
from tests.support.sse_client import until


class Scene:
    """An engine with choices, its recovery, and time that passes at once."""

    def __init__(self, *names: str, restarts: int = 3) -> None:
        self.time = VirtualTime()
        self.live = LiveChoices()
        self.engine = FakeEngine(self.live)
        self.history = RestartHistory(self.time)
        self.captured = structlog.testing.LogCapture()
        self.history.attach(structlog.wrap_logger(None, processors=[self.captured]), lambda: None)
        limits = RestartLimits(restarts=restarts, window_s=600)
        self.recovery = Recovery(
            self.engine, self.live, limits, self.history, clock_s=self.time, sleep=self.time.sleep
        )
        self.lost_starts = 0
        self.choices = {name: choice(name) for name in names}
        for sent in self.choices.values():
            self.live.running[sent.rid] = sent

    def ended(self) -> list[tuple[str, str]]:
        """The requests that were ended, and the hashes of their prompts."""
        lines = [line for line in self.captured.entries if line["event"] == "request_quarantined"]
        return [(line["request_id"], line["prompt_hmac"]) for line in lines]

    def lose(self, reason: str = "killed") -> None:
        """The engine goes."""
        self.engine.is_back = False
        self.recovery.lose("exited", reason)

    async def back(self) -> None:
        """Wait until it is back."""
        await until(lambda: self.engine.is_back)

    def dies_under(self, *names: str) -> None:
        """Have the engine be lost whenever it is sent one of these requests."""

        def die(start: int, name: str) -> None:
            if self.lost_starts != start:  # an engine is lost once
                self.lost_starts = start
                self.lose(f"died under {name}")

        def submit(sent: LiveChoice) -> None:
            if sent.request_id in names:
                asyncio.get_running_loop().call_soon(die, self.engine.restarts, sent.request_id)
            else:
                self.engine.generate(sent)

        self.engine.on_submit = submit

    def sink(self, name: str) -> NotingSink:
        sink = self.choices[name].sink
        assert isinstance(sink, NotingSink)
        return sink


async def test_choices_go_on_in_their_old_order() -> None:
    """Each is sent once, behind the ids it has, and those that begin meanwhile come last."""
    scene = Scene("a", "b", "c")
    scene.choices["b"].take("xy", [65, 65], None, Counts(5, 2), (None, 0))
    scene.lose()
    scene.live.wait(late := choice("d"))
    assert not scene.engine.is_back
    await scene.back()
    assert scene.engine.submitted == ["a-000", "b-000", "c-000", late.rid]
    assert len(scene.choices["b"].ids) == 22
    lost, restarted = scene.captured.entries
    assert (lost["event"], lost["cause"], lost["reason"], lost["live_choices"]) == (
        "engine_lost",
        "exited",
        "killed",
        3,
    )
    assert (restarted["event"], restarted["resumed_choices"]) == ("engine_restarted", 4)
    assert (
        scene.history.num_restarts,
        scene.history.num_choices_continued,
        scene.history.num_choices_lost,
    ) == (1, 4, 0)
    assert scene.history.reason is None


async def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    """A start that fails is tried again after 1, 2, 4 … seconds."""
    scene = Scene("a", restarts=4)
    scene.engine.failing_starts = 3
    scene.lose()
    await scene.back()
    assert scene.engine.restarts == 4
    assert scene.time.now_s == pytest.approx(1 + 2 + 4)
    assert scene.history.losses == {"exited": 1, "hung": 0, "failed": 3}


async def test_too_many_losses_within_the_window_are_the_end() -> None:
    """The fourth loss in ten minutes is not made good."""
    scene = Scene("a")
    for _ in range(3):
        scene.lose()
        await scene.back()
        scene.time.now_s += 100
    scene.lose("once more")
    await until(lambda: scene.engine.reason)
    assert scene.engine.reason == "once more"
    assert scene.engine.restarts == 3


async def test_starts_that_fail_slowly_are_too_many_as_well() -> None:
    """Each hangs for longer than the window."""
    scene = Scene("a")
    scene.engine.failing_starts = 99
    scene.engine.start_s = 1800.0
    scene.engine.time = scene.time
    scene.lose()
    await until(lambda: scene.engine.reason)
    assert scene.engine.restarts == 3
    assert scene.engine.reason == "SGLang did not start: RuntimeError: no GPU"


async def test_losses_that_are_long_ago_do_not_count() -> None:
    """An engine that is lost now and then is always started again."""
    scene = Scene("a")
    for _ in range(9):
        scene.lose()
        await scene.back()
        scene.time.now_s += 301
    assert scene.engine.reason is None


async def test_no_restart_at_all_is_a_setting() -> None:
    """With 0 the first loss is the end."""
    scene = Scene("a", restarts=0)
    scene.lose()
    await until(lambda: scene.engine.reason)
    assert scene.engine.restarts == 0


async def test_a_request_that_engines_die_under_is_found_and_ends() -> None:
    """After two losses without progress each suspect is tried alone; the others go on, and lose nothing."""
    scene = Scene("a", "poison", "b")
    scene.dies_under("poison")
    scene.lose()
    await scene.back()
    poisoned = scene.sink("poison").error
    assert poisoned is not None
    assert poisoned.code == "engine_restarted"
    hashes = [prompt_hmac for rid, prompt_hmac in scene.ended() if rid == "poison"]
    assert [len(bytes.fromhex(each)) for each in hashes] == [16]
    for name in "ab":
        assert scene.sink(name).error is None
        assert len(scene.choices[name].ids) >= 20
    assert scene.history.num_choices_lost == 1
    assert scene.engine.reason is None


async def test_several_poisons_are_all_found() -> None:
    """The losses that a found request explains do not bring the server's end nearer."""
    scene = Scene("p1", "a", "p2", "p3", "p4")
    scene.dies_under("p1", "p2", "p3", "p4")
    scene.lose()
    await scene.back()
    assert sorted(rid for rid, _ in scene.ended()) == ["p1", "p2", "p3", "p4"]
    assert scene.sink("a").error is None


async def test_all_choices_of_a_suspect_are_tried_together_and_end_together() -> None:
    """What kills the engine is a request's prompt, which its choices share."""
    scene = Scene("a")
    pair = [choice("poison", index=index) for index in range(2)]
    for sent in pair:
        scene.live.running[sent.rid] = sent
    scene.dies_under("poison")
    scene.lose()
    await scene.back()
    assert all(isinstance(sent.sink, NotingSink) and sent.sink.error for sent in pair)
    assert scene.history.num_choices_lost == 2


async def test_a_suspect_that_gets_on_is_none_any_more() -> None:
    """Two kills from outside end no request."""
    scene = Scene("a", "b")
    scene.engine.on_submit = lambda _sent: None  # nothing comes before the next loss
    scene.lose()
    await until(lambda: len(scene.engine.submitted) == 2)
    scene.engine.on_submit = scene.engine.generate
    scene.lose()
    await scene.back()
    assert scene.captured.entries[-1]["event"] == "engine_restarted"
    assert scene.captured.entries[-1]["resumed_choices"] == 2
    assert not any(sent.is_suspect for sent in scene.choices.values() if sent.made_progress is False)
    assert scene.history.num_choices_lost == 0


@pytest.mark.parametrize(
    ("begins", "waits"),
    [(True, [0, 0, 0, 0]), (False, [0, 0, PREFILL_WAIT_S, PREFILL_WAIT_S])],
    ids=["begun at once", "not begun"],
)
async def test_a_few_at_a_time_are_sent(begins: bool, waits: list[float]) -> None:
    """The next is sent once those before it have begun, or when they take too long."""
    scene = Scene()
    for number in range(4):
        sent = choice(f"r{number}", prompt_tokens=MAX_PREFILL_TOKENS // 2)
        scene.live.running[sent.rid] = sent
    sent_s: list[float] = []

    def submit(sent: LiveChoice) -> None:
        sent_s.append(scene.time.now_s)
        if begins:
            scene.engine.generate(sent)

    scene.engine.on_submit = submit
    scene.lose()
    await scene.back()
    assert sent_s == pytest.approx(waits, abs=0.1)


async def test_a_choice_whose_sending_fails_is_not_forgotten() -> None:
    """It is sent to the next engine, in its old place."""
    scene = Scene("a", "b")

    def fail_once(_sent: LiveChoice) -> None:
        scene.engine.on_submit = scene.engine.generate
        scene.live.running.clear()
        raise ConnectionError

    scene.engine.on_submit = fail_once
    scene.lose()
    await scene.back()
    assert scene.engine.submitted == ["a-000", "a-000", "b-000"]
    assert scene.history.losses == {"exited": 1, "hung": 0, "failed": 1}
    assert all(len(sent.ids) >= 20 for sent in scene.choices.values())


async def test_a_choice_that_is_aborted_meanwhile_is_not_sent() -> None:
    """It has ended, and its room is free."""
    scene = Scene("a", "b")
    scene.lose()
    scene.live.abort("a-")
    await scene.back()
    assert scene.engine.submitted == ["b-000"]
    assert scene.sink("a").finish == {"type": "abort"}


@pytest.mark.parametrize("lost", [False, True], ids=["here", "lost"])
@pytest.mark.parametrize("lost_first", [False, True], ids=["abort first", "loss first"])
async def test_a_choice_aborted_while_its_failing_submit_is_awaited_ends_once(
    lost: bool, lost_first: bool
) -> None:
    """No engine generates it again, whether the engine is lost before, after or not at all."""
    scene = Scene("a", "b")

    def fail_once(_sent: LiveChoice) -> None:
        scene.engine.on_submit = scene.engine.generate
        if lost and lost_first:
            scene.lose()
        scene.live.abort("a-")
        if lost and not lost_first:
            scene.lose()
        scene.live.pop("a-000")
        raise ConnectionError

    scene.engine.on_submit = fail_once
    scene.lose()
    await scene.back()
    assert scene.engine.submitted == ["a-000", "b-000"]
    assert [text for text, *_ in scene.sink("a").steps] == [""]
    assert scene.sink("a").finish == {"type": "abort"}


async def test_closing_brings_nothing_back() -> None:
    """A server that stops starts no engine."""
    scene = Scene("a")
    scene.lose()
    await scene.recovery.aclose()
    await scene.recovery.aclose()
    assert not scene.engine.is_back
    assert list(scene.live.waiting) == ["a-000"]
