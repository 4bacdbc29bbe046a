"""What a request is recognised by when it comes again, and when admission hears of its tokens."""

from __future__ import annotations

from typing import Any

from app.admission.estimates import LengthEstimate
from app.admission.gap_sampler import GapSampler
from app.admission.queue import Tenant
from app.admission.ticket import Ticket, fingerprint_of
from app.core import ChatRequest, Counts, Delta, Prompt
from app.metering.traffic import Histogram
from tests.support.admissions import TUNING


def test_a_request_is_known_by_what_it_says_last_whatever_else_it_holds() -> None:
    """Parts that are no text are not looked at: nothing has checked them yet."""
    strange = {"type": "video_url", "text": [{}], "video_url": {}}
    content = [{"type": "text", "text": "look"}, strange]

    def asked(*messages: Any, n: int = 1) -> ChatRequest:
        return ChatRequest(
            "r", "a", "m", {"messages": [{"content": content} for content in messages]}, 0, n=n
        )

    assert fingerprint_of(asked("before", content)) == fingerprint_of(asked("look"))
    assert fingerprint_of(asked("look")) != fingerprint_of(asked("look", n=2))
    assert fingerprint_of(asked(None)) == fingerprint_of(asked(None))


def test_progress_is_heard_of_in_steps() -> None:
    """At the first token of each choice, every 32 tokens and at the end, with the new tokens."""
    heard: list[tuple[int, int, int]] = []
    ticket = Ticket(
        Tenant("a", "standard", 1.0, TUNING),
        ChatRequest("r", "a", "m", {"messages": []}, 0, n=2),
        Prompt([1], 200, None),
        LengthEstimate(100, 0),
        0.0,
        step_tokens=32,
        gaps=GapSampler(Histogram(()), lambda: 0.0, lambda: 0.5),
        on_progress=lambda t, delta: heard.append(
            (delta.choice, delta.counts.completion_tokens, t.new_tokens)
        ),
        on_release=lambda _ticket: None,
    )
    for tokens in range(1, 41):
        ticket.on_delta(Delta(0, "text", "a", (1,), Counts(1, tokens)))
        ticket.on_delta(Delta(1, "text", "a", (1,), Counts(1, tokens)))
    ticket.on_delta(Delta(0, "text", "", (), Counts(1, 40), "stop"))
    assert heard == [(0, 1, 0), (1, 1, 0), (0, 33, 32), (1, 33, 32), (0, 40, 7)]
