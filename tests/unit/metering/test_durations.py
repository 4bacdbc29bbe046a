"""Durations in headers."""

from __future__ import annotations

import pytest

from app.metering.durations import duration_text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0ms"),
        (0.017, "17ms"),
        (1, "1s"),
        (1.2, "1.2s"),
        (59.999, "59.999s"),
        (60, "1m0s"),
        (372.5, "6m12.5s"),
    ],
)
def test_durations_are_written_as_openai_does(duration_s: float, text: str) -> None:
    """Go's format."""
    assert duration_text(duration_s) == text
