"""Who may wait, and what those are told who may not.

A key's requests may wait as long as they are expected to have their turn in time, and while they
take no more of the queue than is left free: one key alone fills half of it, and a key that comes
new always finds room. Whoever is refused is told when the line of its key, with those who were told
before it, will have moved on so far (app.engine.appointments).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from app.engine.admission_counts import AdmissionCounts
from app.engine.appointments import Shows
from app.engine.backlog import Throughput
from app.engine.fair_queue import AGED_SHARE, FairQueue, Lane
from app.engine.ticket import Ticket
from app.errors import KeyOverloaded, Overloaded, ServingError
from app.settings import Settings
from app.store.keys import TIERS, Tier

MAX_RETRY_S = 120
JITTER = 0.1
USABLE = 0.25
"""Part of a tier's deadline that its queue may take by expectation."""
RETURN_AT = 0.2
"""How full of what it may have a key's line is to be when those come back who were sent away."""
PROMISED = 0.6
"""Part of the throughput that is given away in advance; what comes unannounced fills up the rest."""
AHEAD_S = (0, 1, 2, 4, 8)
"""For when the room is kept that was promised, in seconds from now."""
POOLS = 4
"""Tokens that may wait, in pools, where the setting does not say."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait, and how long. Times in seconds; 0 queued tokens stands for `POOLS` pools."""

    max_queued_requests: int = 2048
    max_queued_tokens: int = 0
    deadline_s: Mapping[Tier, float] = field(
        default_factory=lambda: {"interactive": 5.0, "standard": 10.0, "batch": 300.0}
    )

    @classmethod
    def of(cls, settings: Settings) -> Bounds:
        """What the settings say."""
        return cls(
            settings.max_queued_requests,
            settings.max_queued_tokens,
            {
                "interactive": settings.queue_interactive_s,
                "standard": settings.queue_standard_s,
                "batch": settings.queue_batch_s,
            },
        )


class Door:
    """The bounds of the queue, and the refusals."""

    def __init__(
        self,
        bounds: Bounds,
        queue: FairQueue,
        lanes: Collection[Lane],
        throughput: Throughput,
        pool_tokens: int,
        chance: Callable[[], float],
        counts: AdmissionCounts,
    ) -> None:
        self._bounds = bounds
        self._deadline_s = tuple(bounds.deadline_s[tier] for tier in TIERS)
        self._most_tokens = bounds.max_queued_tokens or POOLS * pool_tokens
        self._queue = queue
        self._lanes = lanes
        self._throughput = throughput
        self._pool_tokens = pool_tokens
        self._chance = chance
        self.shows = Shows()
        self._counts = counts

    def enter(self, ticket: Ticket, now_s: float) -> None:
        """Give a request its deadline, and let it wait. Raises KeyOverloaded, Overloaded."""
        lane = ticket.lane
        if not self._may_wait(ticket, now_s):
            raise self._refusal(ticket, now_s)
        ticket.deadline_s = now_s + self._deadline_s[lane.rank]

    def came(self, ticket: Ticket, now_s: float) -> bool:
        """Whether a request comes to an appointment, which it has kept then."""
        appointments = ticket.lane.appointments
        if not appointments.num or not appointments.keep(ticket.fingerprint, now_s):
            return False
        self.shows.count(came=True)
        self._counts.appointments["kept"] += 1
        return True

    def overdue(self, ticket: Ticket, now_s: float) -> ServingError:
        """The refusal of one that has waited for its whole deadline."""
        retry_s, sure = self._appoint(ticket, now_s)
        return self._counted(
            ticket,
            Overloaded(
                f"The request waited {now_s - ticket.entered_s:.0f} s for room on this server, which is as"
                f" long as its tier may. Try again in {retry_s} s.",
                code="queue_timeout",
                retry_after_s=retry_s,
                should_retry=None if sure else False,
            ),
        )

    def look(self, now_s: float) -> None:
        """Give up on those who have not come back."""
        for lane in self._lanes:
            if lane.appointments.num:
                for _ in range(lane.appointments.miss(now_s)):
                    self.shows.count(came=False)
                    self._counts.appointments["missed"] += 1

    def rate(self, lane: Lane) -> float:
        """Tokens per second that a key's line moves on by, as things stand."""
        weight = self._queue.weight_before(lane) + sum(
            other.weight
            for other in self._lanes
            if other.appointments.num and not other.waiting and other.rank == lane.rank and other is not lane
        )
        part = AGED_SHARE if self._queue.waits_above(lane) else 1.0
        return self._throughput.tokens_per_s * part * lane.weight / weight

    def _may_wait(self, ticket: Ticket, now_s: float) -> bool:
        lane, queue = ticket.lane, self._queue
        room, places = self._most_tokens - queue.tokens, self._bounds.max_queued_requests - len(queue)
        appointed = self.came(ticket, now_s)
        if places < 1 or (ticket.tokens > room and queue.tokens):
            return False
        if appointed or not lane.waiting:
            return True
        if len(lane.waiting) + 1 > places:
            return False
        rate, deadline_s = self.rate(lane), self._deadline_s[lane.rank]
        most = min(room, USABLE * deadline_s * rate)
        line, coming = lane.waiting_tokens + ticket.tokens, self.shows.part
        return all(
            line + coming * lane.appointments.due_tokens(now_s + ahead_s) - rate * ahead_s <= most
            for ahead_s in AHEAD_S
        )

    def _refusal(self, ticket: Ticket, now_s: float) -> ServingError:
        retry_s, sure = self._appoint(ticket, now_s)
        when = f"Try again in {retry_s} s." if sure else "It is not sure to find room within two minutes."
        again = None if sure else False
        lane = ticket.lane
        if self._over_share(lane):
            error: ServingError = KeyOverloaded(
                f"This key has more than its share of this server (requests running: {lane.num_in_flight},"
                f" waiting: {len(lane.waiting)}). {when}",
                retry_after_s=retry_s,
                should_retry=again,
            )
        else:
            error = Overloaded(
                f"The server is full (requests waiting: {len(self._queue)}). {when}",
                retry_after_s=retry_s,
                should_retry=again,
            )
        return self._counted(ticket, error)

    def _counted(self, ticket: Ticket, error: ServingError) -> ServingError:
        self._counts.refused[ticket.lane.tier][error.code] += 1
        return error

    def _over_share(self, lane: Lane) -> bool:
        """Whether others are here, and the key has more than its weight of all that waits and runs."""
        active = [other for other in self._lanes if other.active]
        weight = sum(other.weight for other in active)
        tokens = sum(other.in_flight_tokens + other.waiting_tokens for other in active)
        own = lane.in_flight_tokens + lane.waiting_tokens
        return len(active) > 1 and lane.active and own > tokens * lane.weight / weight

    def _appoint(self, ticket: Ticket, now_s: float) -> tuple[int, bool]:
        """Seconds until its key's line has moved on so far, and whether it is expected then."""
        lane, rate = ticket.lane, self.rate(ticket.lane)
        room = max(self._most_tokens - self._queue.tokens, 0)
        most = min(room + lane.waiting_tokens, USABLE * self._deadline_s[lane.rank] * rate)
        ahead = lane.waiting_tokens + lane.appointments.tokens * self.shows.part + ticket.tokens
        wait_s = max((ahead - RETURN_AT * most) / (PROMISED * rate), 0.0) * (1 + JITTER * self._chance())
        if wait_s > MAX_RETRY_S:
            return math.ceil(MAX_RETRY_S * (1 - JITTER * self._chance())), False
        retry_s = max(math.ceil(wait_s), 1)
        lane.appointments.make(ticket.fingerprint, now_s + retry_s, ticket.tokens)
        return retry_s, True
