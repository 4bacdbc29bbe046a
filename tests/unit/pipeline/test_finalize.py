"""Whatever the way out of a request: its stream ends truthfully, and lease and ledger are settled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from app.core import ChatRequest
from app.errors import BadRequest, Cancelled, Draining, InternalError, Overloaded, ServingError
from app.pipeline.engine_run import Suspended
from app.pipeline.finalize import Finalizer
from app.pipeline.trace import Trace
from app.resume.continue_answer import AnswerStart, ByChoice
from app.stream.token_stream import TokenStream

SECRET = "a secret in an exception"


class World:
    """What a request's end acts on, and what became of it, in order."""

    def __init__(self, start: Any = None) -> None:
        self.done: list[Any] = []
        self.request = ChatRequest("chatcmpl-1", "local", "llama", {}, 0)
        self.trace = Trace(self.request)
        self.stream: Any = SimpleNamespace(
            request=self.request,
            request_id="chatcmpl-1",
            cancelled=None,
            suspending=False,
            status_unsent=False,
            unseen=False,
            error=None,
            fail=self._fail,
            suspend=lambda error: self.done.append(f"suspended: {error.code}"),
        )
        lease: Any = SimpleNamespace(
            release=lambda _counts: self.done.append("lease"),
            withdraw=lambda _counts: self.done.append("withdrawn"),
        )
        journal: Any = SimpleNamespace(settle_later=lambda _entry, finish: self.done.append(finish))
        suspensions: Any = SimpleNamespace(
            suspend_later=lambda entry, state, error: self.done.append((entry, state, error.code)),
        )
        self.start: Any = start or AnswerStart(cast("Any", None), journal)
        traffic: Any = SimpleNamespace(ended=lambda _model, finish, _timings: self.done.append(finish))
        self.check: Any = SimpleNamespace(
            rid="rid", state=lambda: {"strict": False}, close=lambda _stream: self.done.append("closed")
        )
        log = structlog.get_logger()
        self.end = Finalizer(journal, suspensions, traffic, log, self.trace, lease, self.start)

    def _fail(self, error: ServingError) -> None:
        self.stream.error = error
        self.done.append(type(error))

    def run(self, error: BaseException | None = None, *, reserved: bool = False) -> list[Any]:
        """A request that ends so; what was done about it."""
        with self.end.settle_on_exit(self.stream, self.check):
            if reserved:
                self.end.attach_reservation(cast("Any", "entry"))
            if error is not None:
                raise error
        return self.done


def test_an_answered_request_is_settled():
    """The journal's call does nothing where it is settled already."""
    assert World().run(reserved=True) == ["lease", "abort", "abort", "closed"]


def test_a_refusal_ends_the_stream_with_its_code():
    """There is no reservation to settle."""
    assert World().run(BadRequest("no")) == [BadRequest, "lease", "invalid_value", "closed"]


@pytest.mark.parametrize(
    ("reserved", "status_unsent", "unseen", "withdrawn"),
    [
        (False, True, False, True),
        (True, True, False, True),
        (True, False, True, True),  # a client that waits for the whole answer
        (True, False, False, False),
    ],
)
def test_a_503_costs_the_key_no_request(reserved: bool, status_unsent: bool, unseen: bool, withdrawn: bool):
    """An error event behind a 200 does: its request has begun."""
    world = World()
    world.stream.status_unsent, world.stream.unseen = status_unsent, unseen
    done = world.run(Overloaded("full", retry_after_s=1), reserved=reserved)
    assert ("withdrawn" in done) is withdrawn
    assert done[-1] == "closed"


def test_a_defect_is_an_internal_error_that_quotes_nothing():
    """The client gets a truthful end."""
    with structlog.testing.capture_logs() as log:
        done = World().run(ValueError(SECRET), reserved=True)
    assert done == [InternalError, "lease", "internal_error", "internal_error", "closed"]
    assert SECRET not in repr(log)


def test_a_cancelled_task_stays_cancelled():
    """Its stream says that the server stopped."""
    world = World()
    with pytest.raises(asyncio.CancelledError):
        world.run(asyncio.CancelledError())
    assert world.done == [Draining, "lease", "cancelled", "closed"]


SUSPENSION = ("entry", {"strict": False}, "draining")


def test_a_suspended_answer_is_not_settled():
    """Its row stays open, with what safety knows of the prompt; the log has how it ended."""
    assert World().run(Suspended(), reserved=True) == [SUSPENSION, "lease", "suspended", "closed"]


@pytest.mark.parametrize(
    ("suspending", "status_unsent", "end"),
    [(True, False, SUSPENSION), (True, True, Draining), (False, False, Draining)],
)
def test_a_cut_off_task_is_suspended_where_its_status_line_is_out(
    suspending: bool, status_unsent: bool, end: Any
):
    """An engine that does not let go of a request in time loses nothing of it."""
    world = World()
    world.stream.suspending, world.stream.status_unsent = suspending, status_unsent
    with pytest.raises(asyncio.CancelledError):
        world.run(asyncio.CancelledError(), reserved=True)
    assert world.done[0] == end


class Continued(AnswerStart):
    """An answer that goes on, and stays suspended as long as there is no room."""

    def __init__(self) -> None:
        self.failed_with: list[ServingError] = []

    def should_suspend(self, stream: TokenStream, error: ServingError) -> bool:
        del stream
        return isinstance(error, Overloaded)

    def fail(self, stream: TokenStream, error: ServingError, counts: ByChoice) -> Any:
        del counts
        self.failed_with.append(error)
        stream.error = None if isinstance(error, Cancelled) else error
        return "continued"


def test_an_answer_that_finds_no_room_stays_suspended():
    """Where it was taken up already, it is suspended once more."""
    full = Overloaded("full", retry_after_s=1)
    done = World(Continued()).run(full)
    assert done == ["withdrawn", "suspended: overloaded", "lease", "suspended", "closed"]
    done = World(Continued()).run(full, reserved=True)
    assert done == [("entry", {"strict": False}, "overloaded"), "lease", "suspended", "closed"]


def test_an_answer_that_cannot_go_on_is_settled():
    """Its row is taken up for that."""
    start = Continued()
    assert World(start).run(BadRequest("no")) == ["lease", "invalid_value", "invalid_value", "closed"]
    assert [type(error) for error in start.failed_with] == [BadRequest]


def test_a_suspended_answer_that_is_cancelled_has_no_error_in_the_ledger():
    """It is an answer that was stopped, as a live one is."""
    assert World(Continued()).run(Cancelled("no")) == ["lease", "abort", "abort", "closed"]
