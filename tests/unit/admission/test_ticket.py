"""What a request is recognised by when it comes again."""

from __future__ import annotations

from typing import Any

from app.admission.ticket import fingerprint_of
from app.core import ChatRequest


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
