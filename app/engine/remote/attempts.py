"""How often one choice may be sent, and moved, before it ends with an error. Pure: times are passed in.

| a server | no server has died under it | one has |
|---|---|---|
| cannot be reached | `UNREACHED` times, then EngineNotReady | for `resume_s`, then EngineFailed |
| dies under it | it moves | `DEATHS` without a token in between, or `MOVES` in all: `engine_restarted` |
"""

from __future__ import annotations

from app.engine.remote.continuation import restarted
from app.engine.remote.server import RemoteServer
from app.errors import EngineFailed, EngineNotReady, ServingError

UNREACHED = 3
DEATHS = 2
"""Servers that may die under a choice without a token in between; a request that kills meets no third."""
MOVES = 8
"""Servers that may die under a choice in all; a pool that loses so many has other troubles."""


class Attempts:
    """One choice's. `tried` are the servers that it was sent to since its last token."""

    def __init__(self, resume_s: float) -> None:
        self.tried: list[RemoteServer] = []
        self.number = 0
        """Requests sent so far; part of each one's id."""
        self._resume_s = resume_s
        self._deaths = 0
        self._moves = 0
        self._lost_s: float | None = None
        """When its server was lost, until the next token."""
        self._wanting_s: float | None = None
        """Since when it wants another one."""
        self._why = "no server can be reached"

    @property
    def has_moved(self) -> bool:
        """Whether a server has died under it."""
        return self._moves > 0

    def sent(self, server: RemoteServer) -> None:
        """Note that it goes to a server."""
        self.tried.append(server)
        self.number += 1

    def accepted(self) -> None:
        """Note that the server has begun to answer."""
        self._wanting_s = None

    def advanced(self) -> float | None:
        """Note a token; returns the time of the loss where it is the first one after it."""
        lost_s, self._lost_s, self._deaths = self._lost_s, None, 0
        self.tried.clear()
        return lost_s

    def missed(self, why: str, now_s: float) -> None:
        """Note that a server could not take it."""
        self._why = why
        if self.has_moved and self._wanting_s is None:
            self._wanting_s = now_s

    def died(self, server: RemoteServer, why: str, now_s: float) -> None:
        """Note that the server was lost which had accepted it."""
        self.tried.append(server)
        self._deaths += 1
        self._moves += 1
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self.missed(why, now_s)

    def left_s(self, now_s: float) -> float:
        """The seconds for which it may wait for a server; none before one has died under it."""
        return 0.0 if self._wanting_s is None else self._wanting_s + self._resume_s - now_s

    def queued(self, waited_s: float) -> None:
        """Note a wait for the others before it, which does not count."""
        if self._wanting_s is not None:
            self._wanting_s += waited_s

    def verdict(self, now_s: float, *, begun: bool) -> ServingError | None:
        """The error that ends it; None where it may be sent again."""
        if self._deaths >= DEATHS or self._moves >= MOVES:
            return restarted(f"The model's servers were lost under this request: {self._why}.")
        if self.left_s(now_s) > 0 or (not self.has_moved and self.number < UNREACHED):
            return None
        return self.exhausted(begun=begun)

    def exhausted(self, *, begun: bool) -> ServingError:
        """The error where no server takes it."""
        if begun:
            return EngineFailed(f"The model's server was lost in mid-answer: {self._why}.")
        return EngineNotReady(f"The model's server cannot be reached: {self._why}.", retry_after_s=5)
