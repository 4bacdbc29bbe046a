"""The way out of one answer: what its deltas go through, and what becomes of them when the screen fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.core import Delta
from app.safety.screens.stream_screen import Screening
from app.safety.verdict import ScreenFailed, Verdict


class WayOut:
    """What the deltas of one answer go through. A screen that throws ends the answer, or is let pass."""

    def __init__(
        self, begin: Callable[[], Screening], on_broken: Callable[[Exception], None], *, fail_open: bool
    ) -> None:
        """`begin` makes the screening, `on_broken` is told of one that threw. Raises ScreenFailed."""
        self.broken = False
        self._on_broken = on_broken
        self._fail_open = fail_open
        self.screening = Screening()
        try:
            self.screening = begin()
        except Exception as exc:  # noqa: BLE001  # whatever it is, nothing goes on unscreened
            self._broke(exc)

    @property
    def halted(self) -> Verdict | None:
        """The verdict that ended the answer."""
        return self.screening.halted

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """What may be released now that `delta` has come. Raises ScreenFailed."""
        if self.broken:
            return (delta,)
        try:
            return self.screening.feed(delta)
        except Exception as exc:  # noqa: BLE001  # same
            held = self._broke(exc)
            return held if delta in held else [*held, delta]

    def _broke(self, exc: Exception) -> Sequence[Delta]:
        """Give up: what is held is let pass, or released to no one. Raises ScreenFailed."""
        self.broken = True
        self._on_broken(exc)
        held = self.screening.give_up()
        if not self._fail_open:
            raise ScreenFailed from None
        return held

    def drain(self) -> Sequence[Delta]:
        """What may be released of an answer that broke off."""
        if self.broken:
            return ()
        try:
            return self.screening.drain()
        except Exception as exc:  # noqa: BLE001  # same; and the answer has another error already
            self.broken = True
            self._on_broken(exc)
            return ()

    def verdicts(self, *, scored: bool) -> list[Verdict]:
        """How each choice stands, with its scores if `scored`; none where the screen broke."""
        if self.broken:
            return []
        try:
            return self.screening.verdicts(scored=scored)
        except Exception as exc:  # noqa: BLE001  # every delta was screened
            self.broken = True
            self._on_broken(exc)
            return []
