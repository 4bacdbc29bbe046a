"""Who may wait, and what those are told who may not.

A request may wait if it is expected to have its turn soon, and while its key takes no more of the
queue than is left free: one key alone fills half of it. When it has its turn follows from fair shares:
before the end of a key's line each other key is served as many tokens, by weight, unless it has less.
Whoever is refused is told when the line of its key, with those who were told before it, will have
moved on so far (app.admission.fair_queue); no second is given away more than once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from app.admission.estimates import Throughput
from app.admission.fair_queue import AGED_SHARE, FairQueue, ReturnRate, Tenant
from app.admission.scheduler import AdmissionScheduler
from app.admission.ticket import PreAdmission, Ticket
from app.core import TIERS, Tier
from app.errors import KeyOverloaded, Overloaded, ServingError
from app.settings import Settings

CODES = (KeyOverloaded.default_code, Overloaded.default_code, "queue_timeout")


class AdmissionCounts:
    """Every label is there from the start, at zero. An engine that starts again does not end the counting."""

    def __init__(self) -> None:
        self.admitted: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self.refused: dict[Tier, Counter[str]] = {tier: Counter(dict.fromkeys(CODES, 0)) for tier in TIERS}
        """By code; what was refused for other reasons, as a client that left, is not here."""
        self.retry_slots = {"kept": 0, "missed": 0}
        self.unread_aborted = 0
        """Streams without a reader that ended so that others have room."""


MAX_RETRY_S = 120
JITTER = 0.1
USABLE = 0.25
"""Part of a tier's deadline that its queue may take by expectation."""
WAIT = 0.4
"""Part of the TTFT target that waiting may take by expectation, in the tiers where somebody waits for it."""
RETURN_AT = 0.2
"""How full of what it may have a key's line is to be when those come back who were sent away."""
WARM_UP = 0.4
WARM_UP_S = 5.0
"""After a start nobody is told to come before such a part of what a full pool takes, or that long."""
LATE = 2.5
"""How many times as long as others those may wait who come when told."""
PROMISED = 0.75
"""Part of the throughput that is given away in advance; what comes unannounced fills up the rest."""
AHEAD_S = (0, 1, 2, 4, 8)
"""For when the room is kept that was promised, in seconds from now."""
POOLS = 4
"""Tokens that may wait, in pools, where the setting does not say."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What may wait, and how long. Times in seconds; 0 queued tokens stands for `POOLS` pools.

    `soon_s` is what waiting may take by expectation, in tiers other than batch.
    """

    max_queued_requests: int = 2048
    max_queued_tokens: int = 0
    deadline_s: Mapping[Tier, float] = field(
        default_factory=lambda: {"interactive": 5.0, "standard": 10.0, "batch": 300.0}
    )
    soon_s: float = math.inf

    @classmethod
    def of(cls, settings: Settings) -> QueueBounds:
        """What the settings say."""
        return cls(
            settings.max_queued_requests,
            settings.max_queued_tokens,
            {
                "interactive": settings.queue_interactive_s,
                "standard": settings.queue_standard_s,
                "batch": settings.queue_batch_s,
            },
            WAIT * settings.ttft_target_s,
        )


class LoadShedder:
    """The bounds of the queue, and the refusals."""

    def __init__(
        self,
        bounds: QueueBounds,
        queue: FairQueue,
        tenants: Collection[Tenant],
        throughput: Throughput,
        pool_tokens: int,
        chance: Callable[[], float],
        counts: AdmissionCounts,
        scheduler: AdmissionScheduler,
    ) -> None:
        self._bounds = bounds
        self._deadline_s = tuple(bounds.deadline_s[tier] for tier in TIERS)
        self._most_tokens = bounds.max_queued_tokens or POOLS * pool_tokens
        self._queue = queue
        self._tenants = tenants
        self._throughput = throughput
        self._pool_tokens = pool_tokens
        self._chance = chance
        self.return_rate = ReturnRate()
        self._counts = counts
        self._scheduler = scheduler

    def enter(self, ticket: Ticket, now_s: float) -> None:
        """Give a request its deadline, and let it wait. Raises KeyOverloaded, Overloaded."""
        tenant = ticket.tenant
        if not self._may_wait(ticket, now_s, appointed=self.came(ticket, now_s)):
            raise self._refusal(ticket, now_s)
        ticket.deadline_s = now_s + self._deadline_s[tenant.rank]

    def precheck(self, precheck: PreAdmission, now_s: float) -> None:
        """Refuse what would have to be refused once it is rendered. Raises KeyOverloaded, Overloaded."""
        if precheck.tenant.retry_slots.has(precheck.fingerprint, now_s):
            return
        if not self._may_wait(precheck, now_s, appointed=False):
            raise self._refusal(precheck, now_s)

    def came(self, ticket: Ticket, now_s: float) -> bool:
        """Whether a request comes to an appointment, which it has kept then."""
        retry_slots = ticket.tenant.retry_slots
        if not retry_slots.num or not retry_slots.keep(ticket.fingerprint, now_s):
            return False
        self._counts.retry_slots["kept"] += 1
        return True

    def overdue(self, ticket: Ticket, now_s: float) -> ServingError:
        """The refusal of one that has waited for its whole deadline."""
        ticket.tenant.refused_at_s = now_s
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
        for tenant in self._tenants:
            if tenant.retry_slots.open:
                came, missed = tenant.retry_slots.close(now_s)
                self.return_rate.count(came, missed)
                self._counts.retry_slots["missed"] += missed

    def most_wait_s(self, tenant: Tenant) -> float:
        """How long a key's next request may wait by expectation."""
        usable_s = USABLE * self._deadline_s[tenant.rank]
        return usable_s if tenant.tier == "batch" else min(usable_s, self._bounds.soon_s)

    def waits_s(self, tenants: Iterable[Tenant], now_s: float) -> list[float]:
        """How long each key's next request would wait by expectation, if it is as its others are."""
        coming = self.return_rate.part
        lines = [
            (other, other.waiting_tokens + coming * other.retry_slots.due_within(now_s, (0,))[0])
            for other in self._tenants
            if other.waiting or other.retry_slots.num
        ]
        own = dict(lines)
        waits_s = []
        for tenant in tenants:
            line = own.get(tenant, 0.0)
            end = line + tenant.mean_tokens
            before = sum(
                _before(tenant, end, other, others_line)
                for other, others_line in lines
                if other is not tenant and other.rank <= tenant.rank
            )
            waits_s.append((line + before) / self._rate(tenant))
        return waits_s

    def too_old(self, ticket: Ticket | PreAdmission, *, appointed: bool = False) -> bool:
        """Whether a request has waited before it was read for as long as it may wait at all.

        Who sent it waits in vain then, and it would keep others waiting. It is let in all the same
        where the engine has little to do: a server that is always late is still one.
        """
        most_s = self.most_wait_s(ticket.tenant) * (LATE if appointed else 1)
        return ticket.age_s > most_s and self._scheduler.half_full

    def _may_wait(self, ticket: Ticket | PreAdmission, now_s: float, *, appointed: bool) -> bool:
        tenant, queue = ticket.tenant, self._queue
        room, places = self._most_tokens - queue.tokens, self._bounds.max_queued_requests - len(queue)
        full = places < 1 or (ticket.tokens > room and queue.tokens)
        if full or self.too_old(ticket, appointed=appointed):
            return False
        if not queue or ticket.tokens <= self._scheduler.free_tokens(tenant, ticket.age_s):
            return True  # in the last case it waits for the prefill of others alone
        if self._scheduler.has_room(tenant, ticket.tokens, ticket.age_s, now_s):
            return True
        if appointed:
            return self._in_line(ticket) <= LATE * self.most_wait_s(tenant) * self._rate(tenant)
        if tenant.waiting and len(tenant.waiting) + 1 > places:
            return False
        return self._soon(ticket, room, now_s)

    def _in_line(self, ticket: Ticket | PreAdmission) -> float:
        """Tokens of those that wait that are served until it has its turn, and its own."""
        tenant, line = ticket.tenant, ticket.tenant.waiting_tokens + ticket.tokens
        return line + sum(
            _before(tenant, line, other, other.waiting_tokens) for other in self._in_line_with(tenant)
        )

    def _soon(self, ticket: Ticket | PreAdmission, room: int, now_s: float) -> bool:
        """Whether it has its turn in time, and those who are to come in the next seconds have theirs."""
        tenant, coming, rate = ticket.tenant, self.return_rate.part, self._rate(ticket.tenant)
        left_s = self.most_wait_s(tenant) - ticket.age_s - self._scheduler.ends_after_s(now_s, rate)
        most = min(room, max(left_s, 0.0) * rate)
        if tenant.waiting_tokens > most:
            return False
        others = [
            (other, other.retry_slots.due_within(now_s, AHEAD_S)) for other in self._in_line_with(tenant)
        ]
        for at, (ahead_s, due) in enumerate(
            zip(AHEAD_S, tenant.retry_slots.due_within(now_s, AHEAD_S), strict=True)
        ):
            own = tenant.waiting_tokens + coming * due
            line = own + ticket.tokens
            before = sum(_before(tenant, line, o, o.waiting_tokens + coming * dues[at]) for o, dues in others)
            if own + before - rate * ahead_s > most:
                return False
        return True

    def _in_line_with(self, tenant: Tenant) -> list[Tenant]:
        """The other keys of its tier and above that wait, or are to come."""
        return [
            other
            for other in self._tenants
            if (other.waiting or other.retry_slots.num) and other is not tenant and other.rank <= tenant.rank
        ]

    def _rate(self, tenant: Tenant) -> float:
        """Tokens per second that its tier moves on by."""
        part = AGED_SHARE if self._queue.waits_above(tenant) else 1.0
        return self._throughput.tokens_per_s * part

    def _refusal(self, ticket: Ticket | PreAdmission, now_s: float) -> ServingError:
        ticket.tenant.refused_at_s = now_s
        retry_s, sure = self._appoint(ticket, now_s)
        when = f"Try again in {retry_s} s." if sure else "It is not sure to find room within two minutes."
        again = None if sure else False
        tenant = ticket.tenant
        if self._over_share(tenant):
            error: ServingError = KeyOverloaded(
                f"This key has more than its share of this server (requests running: {tenant.num_in_flight},"
                f" waiting: {len(tenant.waiting)}). {when}",
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

    def _counted(self, ticket: Ticket | PreAdmission, error: ServingError) -> ServingError:
        self._counts.refused[ticket.tenant.tier][error.code] += 1
        return error

    def _over_share(self, tenant: Tenant) -> bool:
        """Whether others are here, and the key has more than its weight of all that waits and runs."""
        active = [other for other in self._tenants if other.active]
        weight = sum(other.weight for other in active)
        tokens = sum(other.in_flight_tokens + other.waiting_tokens for other in active)
        own = tenant.in_flight_tokens + tenant.waiting_tokens
        return len(active) > 1 and tenant.active and own > tokens * tenant.weight / weight

    def _appoint(self, ticket: Ticket | PreAdmission, now_s: float) -> tuple[int, bool]:
        """Seconds until its key's line has moved on so far, and whether it is expected then.

        Who comes before its time is told the same time again: one place is kept for it, not several.
        """
        expected_s = ticket.tenant.retry_slots.later(ticket.fingerprint, now_s)
        if expected_s is not None:
            return math.ceil(expected_s - now_s), True
        tenant, coming, rate = ticket.tenant, self.return_rate.part, self._rate(ticket.tenant)
        room = max(self._most_tokens - self._queue.tokens, 0)
        most = min(room + tenant.waiting_tokens, self.most_wait_s(tenant) * rate)
        line = tenant.waiting_tokens + coming * tenant.retry_slots.tokens + ticket.tokens
        ahead = line + sum(
            _before(tenant, line, other, other.waiting_tokens + coming * other.retry_slots.tokens)
            for other in self._in_line_with(tenant)
        )
        wait_s = (ahead - RETURN_AT * most) / (PROMISED * rate)
        wait_s *= 1 - JITTER * self._chance()  # no second is given away twice: who is told less fills one up
        wait_s = max(wait_s, self._warms_up_s(now_s), self._scheduler.ends_after_s(now_s, rate))
        retry_s = self._free_s(ticket, now_s, max(math.ceil(wait_s), 1))
        if retry_s > MAX_RETRY_S:
            return math.ceil(MAX_RETRY_S * (1 - JITTER * self._chance())), False
        tenant.retry_slots.make(ticket.fingerprint, now_s + retry_s, ticket.tokens)
        return retry_s, True

    def _warms_up_s(self, now_s: float) -> float:
        """How long it will still take until requests end as they come: after a start none has run long."""
        takes_s = min(WARM_UP * self._pool_tokens / self._throughput.tokens_per_s, WARM_UP_S)
        return max(takes_s - (now_s - self._throughput.begun_s), 0.0)

    def _free_s(self, ticket: Ticket | PreAdmission, now_s: float, retry_s: int) -> int:
        """The first such time that is not given away yet; over `MAX_RETRY_S` where there is none.

        A key may always have its share, though others were there before it: of a second, or of as many as it
        takes for the share to be one request.
        """
        tenant, tokens = ticket.tenant, ticket.tokens
        told = [other for other in self._tenants if other.retry_slots.num]
        most = PROMISED * self._throughput.tokens_per_s / self.return_rate.part
        share = most * tenant.weight / (sum(o.weight for o in told if o is not tenant) + tenant.weight)
        span = min(math.ceil(tokens / share), MAX_RETRY_S)
        second = math.floor(now_s + retry_s)
        due = sum(map(tenant.retry_slots.due_at, range(second - span, second)))
        while retry_s <= MAX_RETRY_S:
            second = math.floor(now_s + retry_s)
            due += tenant.retry_slots.due_at(second) - tenant.retry_slots.due_at(second - span)
            if not due or due + tokens <= share * span:
                return retry_s
            if sum(other.retry_slots.due_at(second) for other in told) < most:
                return retry_s
            retry_s += 1
        return retry_s


def _before(tenant: Tenant, line: float, other: Tenant, others_line: float) -> float:
    """Tokens of another key's line that are served before the end of a key's own, both in tokens.

    Of a key that was served less, so much more; but nobody counts on going first.
    """
    if other.rank < tenant.rank:
        return others_line
    ahead = max(tenant.served - other.served, 0.0) if other.rank == tenant.rank else 0.0
    return min(others_line, (ahead + line / tenant.weight) * other.weight)
