"""A flood of refusals is a few lines and a sum."""

from typing import Any

import pytest

from app.api.http import errors
from app.api.http.errors import LOG_LINES, ThrottledLog


class Lines:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        """Keep a line."""
        self.lines.append((event, fields))

    warning = info


async def test_the_first_lines_are_written_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the window the sum says how many of which error."""
    monkeypatch.setattr(errors, "LOG_WINDOW_S", 3600.0)
    lines = Lines()
    log = ThrottledLog(lines)  # type: ignore[arg-type]  # the two methods that it calls
    for number in range(LOG_LINES + 5):
        log.info("refused", error="not_found" if number % 2 else "invalid_api_key")
    assert [event for event, _ in lines.lines] == ["refused"] * LOG_LINES
    log._end_window("refused")
    assert lines.lines[-1] == (
        "refused_more",
        {"requests": 5, "errors": {"invalid_api_key": 3, "not_found": 2}},
    )


async def test_the_next_window_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet window has no sum, and lines are written again."""
    monkeypatch.setattr(errors, "LOG_WINDOW_S", 3600.0)
    lines = Lines()
    log = ThrottledLog(lines)  # type: ignore[arg-type]  # the two methods that it calls
    log.info("refused", error="not_found")
    log._end_window("refused")
    log.info("refused", error="not_found")
    assert [event for event, _ in lines.lines] == ["refused", "refused"]
