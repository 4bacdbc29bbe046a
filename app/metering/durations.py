"""Durations as OpenAI's headers have them."""

from __future__ import annotations

import math


def duration_text(duration_s: float) -> str:
    """A duration as OpenAI writes it: `20ms`, `1.2s`, `6m0s`."""
    ms = math.ceil(round(duration_s * 1000, 3))
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
