"""Whatever the way out of a request: its stream ends truthfully, and lease and ledger are settled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from app.core import ChatRequest
from app.errors import BadRequest, Draining, InternalError, Overloaded
from app.generation.request_end import RequestEnd
from app.generation.trace import Trace

SECRET = "a secret in an exception"


class World:
    """What a request's end acts on, and what became of it, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.request = ChatRequest("chatcmpl-1", "local", "llama", {}, 0)
        self.trace = Trace(self.request)
        self.stream: Any = SimpleNamespace(
            request=self.request,
            request_id="chatcmpl-1",
            cancelled=None,
            fail=lambda error: self.done.append(type(error)),
        )
        lease: Any = SimpleNamespace(
            settle=lambda _counts: self.done.append("lease"), withdraw=lambda: self.done.append("withdrawn")
        )
        journal: Any = SimpleNamespace(settle_later=lambda _entry, finish: self.done.append(finish))
        traffic: Any = SimpleNamespace(ended=lambda _model, finish, _timings: self.done.append(finish))
        self.engine: Any = SimpleNamespace(abort=lambda rid: self.done.append(f"abort {rid}"))
        self.check: Any = SimpleNamespace(rid="rid", close=lambda _stream: self.done.append("closed"))
        self.end = RequestEnd(journal, traffic, structlog.get_logger(), self.trace, lease=lease)

    def run(self, error: BaseException | None = None, *, reserved: bool = False) -> list[Any]:
        """A request that ends so; what was done about it."""
        with self.end.of(self.stream, self.check, self.engine):
            if reserved:
                self.end.settles(cast("Any", "entry"))
            if error is not None:
                raise error
        return self.done


def test_an_answered_request_is_settled():
    """The journal's call does nothing where it is settled already."""
    assert World().run(reserved=True) == ["lease", "abort", "abort", "closed"]


def test_a_refusal_ends_the_stream_with_its_code():
    """There is no reservation to settle."""
    assert World().run(BadRequest("no")) == [BadRequest, "lease", "invalid_value", "closed"]


@pytest.mark.parametrize("reserved", [False, True])
def test_lack_of_room_costs_the_key_no_request_unless_it_began(reserved: bool):
    """A refused one may be sent again at once."""
    done = World().run(Overloaded("full", retry_after_s=1), reserved=reserved)
    assert ("withdrawn" in done) is not reserved
    assert done[-1] == "closed"


def test_a_defect_is_an_internal_error_that_quotes_nothing():
    """The engine is stopped."""
    with structlog.testing.capture_logs() as log:
        done = World().run(ValueError(SECRET), reserved=True)
    assert done == ["abort rid", InternalError, "lease", "internal_error", "internal_error", "closed"]
    assert SECRET not in repr(log)


def test_a_cancelled_task_stays_cancelled():
    """Its stream says that the server stopped."""
    world = World()
    with pytest.raises(asyncio.CancelledError):
        world.run(asyncio.CancelledError())
    assert world.done == ["abort rid", Draining, "lease", "cancelled", "closed"]
