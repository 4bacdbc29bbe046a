"""Output that cannot be true, or comes too late, ends its own choice and no other; SGLang is not started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.core import Counts
from app.engine.sglang.live_choices import LiveChoice, LiveChoices
from app.engine.sglang.platform import prepare_process
from app.engine.sink import TokenTally
from tests.support.live_choices import NotingSink, choice

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

Row = tuple[str, str, list[int], dict[str, Any] | None, int]


class Desk:
    """A hand-over without sockets: what it aborts and reports is noted."""

    def __init__(self) -> None:
        prepare_process()
        from app.engine.sglang.patches.handover import HandoverTokenizerManager

        self.live = LiveChoices()
        self.reports: list[tuple[str, str]] = []
        self.aborted: list[str] = []
        self.manager = HandoverTokenizerManager.__new__(HandoverTokenizerManager)
        self.manager.__dict__.update(
            _live=self.live,
            _cut_off=set(),
            rid_to_state={"sglangs-own": object()},
            num_retractions=0,
            _on_mismatch=lambda rid, what: self.reports.append((rid, what)),
            abort_all_of=self.aborted.append,
        )

    def run(self, *names: str) -> list[LiveChoice]:
        """Choices that the engine has."""
        choices = [choice(name) for name in names]
        self.live.running |= {live.rid: live for live in choices}
        return choices

    def take(self, *rows: Row) -> list[int]:
        """Hand a batch over; returns the rows that are SGLang's."""
        rids, texts, ids, finishes, completions = (list(column) for column in zip(*rows, strict=True))
        batch: Any = SimpleNamespace(
            rids=rids,
            output_strs=texts,
            output_ids=ids,
            finished_reasons=finishes,
            completion_tokens=completions,
            prompt_tokens=[5] * len(rows),
            cached_tokens=[0] * len(rows),
            reasoning_tokens=[0] * len(rows),
            retraction_counts=[2] * len(rows),
        )
        others: list[int] = self.manager._hand_over(batch)
        return others


def sinks(choices: list[LiveChoice]) -> list[NotingSink]:
    """Their sinks, as the tests read them."""
    return [live.sink for live in choices if isinstance(live.sink, NotingSink)]


@pytest.mark.parametrize("count", [0, 1, 3, -1])
def test_a_count_that_is_not_the_number_of_ids_ends_its_own_choice(count: int) -> None:
    """The engine is told to stop it, its last step is expected, and its neighbour goes on."""
    desk = Desk()
    choices = desk.run("liar", "honest")
    desk.take(("liar-000", "ab", [1, 2], None, count), ("honest-000", "c", [3], None, 1))
    liar, honest = sinks(choices)
    assert liar.error is not None
    assert liar.error.code == "engine_failed"
    assert liar.text == ""
    assert (honest.text, honest.token_ids, honest.error) == ("c", [3], None)
    assert desk.aborted == ["liar-000"]
    assert desk.reports == [("liar-000", f"2 token ids, and a count of {count}")]
    desk.take(("liar-000", "", [], {"type": "abort"}, 2))
    assert len(desk.reports) == 1


def test_a_count_that_goes_backwards_ends_its_choice() -> None:
    """What was counted once is not taken back."""
    desk = Desk()
    [sink] = sinks(desk.run("a"))
    desk.take(("a-000", "a", [1], None, 1))
    desk.take(("a-000", "b", [2], None, 2))
    desk.take(("a-000", "c", [3], None, 2))
    assert sink.error is not None
    assert sink.text == "ab"
    assert sink.counts == Counts(5, 2)


def test_output_after_the_end_is_dropped_and_reported() -> None:
    """Whether the choice has ended by itself, or nobody ever asked for it."""
    desk = Desk()
    [sink] = sinks(desk.run("a"))
    desk.take(("a-000", "a", [1], {"type": "stop"}, 1))
    desk.take(("a-000", "b", [2], None, 2), ("nobodys-000", "c", [3], None, 1))
    assert (sink.text, sink.finish) == ("a", {"type": "stop"})
    assert desk.reports == [
        ("a-000", "output after the final delta"),
        ("nobodys-000", "output after the final delta"),
    ]


@pytest.mark.parametrize(
    ("finish", "emitted_tokens"),
    [
        (None, 2),
        ({"type": "stop"}, 2),
        ({"type": "abort"}, 2),
        ({"type": "abort", "status_code": 400, "message": "too long"}, 0),
    ],
    ids=["running", "stop", "abort", "refused"],
)
def test_ids_are_counted_unless_they_are_refused(finish: dict[str, Any] | None, emitted_tokens: int) -> None:
    """The tally counts the ids that were handed over; retractions are counted at the end."""
    desk, sink, tally = Desk(), NotingSink(), TokenTally()
    desk.live.running["a-000"] = choice = LiveChoice("a-000", None, sink, tally)
    if finish == {"type": "abort"}:
        choice.abort()
    desk.take(("a-000", "ab", [5, 6], finish, 2))
    assert desk.manager.num_retractions == (0 if finish is None else 2)
    assert tally.token_ids == len(sink.token_ids) == emitted_tokens
    assert sink.finish == finish


@pytest.mark.parametrize("aborts", [True, False])
async def test_a_choice_that_is_aborted_while_it_is_sent_is_stopped_behind_it(aborts: bool) -> None:
    """The scheduler did not know it when the request was aborted."""
    desk, sent = Desk(), []
    request = SimpleNamespace(input_ids=[1], mm_inputs=None)
    live = LiveChoice("a-000", request, NotingSink(), TokenTally())

    async def send(request: Any) -> None:
        if aborts:
            desk.live.abort("a-")
        sent.append((request.rid, list(desk.aborted)))

    desk.manager.__dict__.update(_send_one_request=send, disaggregation_mode=None)
    await desk.manager.submit(live)
    assert sent == [("a-000", [])]
    assert desk.aborted == (["a-000"] if aborts else [])


def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    """An answer that SGLang breaks off fails, with what came before; nobody takes it for a whole one."""
    desk = Desk()
    [sink] = sinks(desk.run("a"))
    desk.take(("a-000", "a", [1], None, 1))
    desk.take(("a-000", "b", [2], {"type": "abort", "message": "Aborted"}, 2))
    assert (sink.text, sink.token_ids) == ("a", [1])
    assert (sink.finish or {})["status_code"] == 500


def test_a_request_that_is_aborted_while_it_is_refused_ends_as_aborted() -> None:
    """While a grammar compiles, SGLang answers an abort with a refusal."""
    desk = Desk()
    [sink] = sinks(desk.run("a"))
    desk.live.abort("a-")
    desk.take(("a-000", "", [], {"type": "abort", "status_code": 400, "message": "Aborted"}, 0))
    assert sink.finish == {"type": "abort"}


def test_sglangs_own_requests_are_left_to_it() -> None:
    """Rows of requests that SGLang knows go the way of SGLang."""
    desk = Desk()
    desk.run("a")
    assert desk.take(("sglangs-own", "x", [9], None, 1), ("a-000", "a", [1], None, 1)) == [0]
    assert desk.reports == []
