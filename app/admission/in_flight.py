"""The requests that are in the engine now: how many places they take, and for how long they have run."""

from __future__ import annotations

from app.admission.decode_window import DecodeWindow
from app.admission.ticket import Ticket

YOUNG = 3.0
"""How many times their mean age requests are taken to run, at least."""


class InFlight:
    """What has been let in and not given back. Times are seconds of the same clock."""

    def __init__(self, window: DecodeWindow | None = None, shared: DecodeWindow | None = None) -> None:
        self.most_choices = 0
        """How many choices the engine runs at once; 0 where it does not say."""
        self.window = window or DecodeWindow()
        """How many of them keep the time per output token within its target."""
        self.shared_window = shared or DecodeWindow()
        """How many may run of a key that has more than its share, while others are about."""
        self.reclaimed_tokens = 0
        """Of those that were aborted so that others have room."""
        self._tickets: dict[str, Ticket] = {}
        self.num_choices = self._tokens = 0
        self._admitted_sum_s = 0.0

    def add(self, ticket: Ticket, now_s: float) -> None:
        """A request was let in."""
        ticket.admitted_s = now_s
        self._tickets[ticket.rid] = ticket
        self.num_choices += ticket.reservation.n
        self._tokens += ticket.tokens
        self._admitted_sum_s += now_s

    def remove(self, ticket: Ticket) -> None:
        """It has ended."""
        assert ticket.admitted_s is not None
        del self._tickets[ticket.rid]
        self.num_choices -= ticket.reservation.n
        self._tokens -= ticket.tokens
        self._admitted_sum_s -= ticket.admitted_s
        if ticket.reclaimed:
            self.reclaimed_tokens -= ticket.tokens

    def reclaim(self, rid: str) -> None:
        """It was aborted so that others have room; unknown ids are ignored."""
        ticket = self._tickets.get(rid)
        if ticket is not None and not ticket.reclaimed:
            ticket.reclaimed = True
            self.reclaimed_tokens += ticket.tokens

    @property
    def half_full(self) -> bool:
        """Whether half of the engine's places are taken, where it says how many it has."""
        return 0 < self.most_choices <= 2 * self.num_choices

    def has_place(self, n: int, spare: float, *, within: bool = False) -> bool:
        """Whether so many choices more would run at once, a part of the places kept; one request may.

        A key `within` its share of the decode window does not wait for that: what others hold of it
        beyond theirs is theirs to give back.
        """
        if not self.num_choices:
            return True
        choices, most = self.num_choices + n, self.most_choices
        if most and choices > most - int(spare * most):
            return False
        return within or self.window.has_place(choices, spare)

    def ends_after_s(self, now_s: float, tokens_per_s: float) -> float:
        """Until requests end as fast as they come, at this throughput: after a burst none has run for long.

        What is in flight over the throughput is how long they run (Little's law); in a steady flow
        they have run for half of that on average.
        """
        if not self._tickets:
            return 0.0
        age_s = now_s - self._admitted_sum_s / len(self._tickets)
        return max(self._tokens / tokens_per_s - YOUNG * age_s, 0.0)
