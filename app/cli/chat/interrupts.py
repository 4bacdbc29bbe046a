"""Ctrl-C while an answer arrives: it interrupts a wait, never the work between two waits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class Interrupts:
    """Raises KeyboardInterrupt at the next wait, so that text is shown and counted whole, or not at all."""

    def __init__(self) -> None:
        self._is_waiting = False
        self._is_pending = False
        self._previous = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait, which Ctrl-C ends. Raises KeyboardInterrupt, also if it was pressed since the last wait."""
        self._is_waiting = True
        try:
            if self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_waiting = False

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._is_waiting:
            raise KeyboardInterrupt
        self._is_pending = True
