"""An engine's losses and restarts in the log."""

from __future__ import annotations

from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from app.engine.supervise import LossCause


class RestartLog:
    """Listens to one engine; `on_restart` is called when it is back, with nothing cached."""

    def __init__(self, log: FilteringBoundLogger, on_restart: Callable[[], None]) -> None:
        self._log = log
        self._on_restart = on_restart

    def engine_lost(self, cause: LossCause, reason: str, live: int) -> None:
        """See RestartListener."""
        hint = "it is started again; streams wait for it"
        self._log.error("engine_lost", cause=cause, reason=reason, live_choices=live, hint=hint)

    def engine_restarted(self, took_s: float, resumed: int) -> None:
        """See RestartListener."""
        self._log.warning("engine_restarted", took_s=round(took_s, 2), resumed_choices=resumed)
        self._on_restart()

    def request_ended(self, rid: str, fingerprint: str) -> None:
        """See RestartListener."""
        hint = "the engine ended each time that it was generated"
        self._log.error("request_quarantined", request_id=rid, prompt_hmac=fingerprint, hint=hint)

    def output_refused(self, rid: str, what: str) -> None:
        """See RestartListener."""
        self._log.error("engine_contradiction", choice_id=rid, what=what)
