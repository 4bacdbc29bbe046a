"""The keys that have come lately: a lane each, and what all that are active weigh together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from app.admission.fair_queue import FairQueue, Lane
from app.core import ChatRequest, Key, Tier

CREDIT = 1.0
"""Pools of tokens that a key may be served less than others, and make up for, while it is sent away."""
WANTED_S = 5.0
"""For how long after a refusal a key is taken to want more, where it has no appointment."""
RECENT_S = 60.0
"""For how long after a request its key is taken to be in use: who reads an answer comes again."""
FORGOTTEN_S = 600.0
"""After how long without a request a key's counters are dropped."""


class Lanes(Collection[Lane]):
    """Every key's lane. A request without a key is its owner's."""

    def __init__(self, queue: FairQueue) -> None:
        self.active_weight = 0.0
        """Of the keys of which anything waits or runs."""
        self._queue = queue
        self._by_name: dict[str, Lane] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._by_name.values())

    def __contains__(self, lane: object) -> bool:
        return lane in self._by_name.values()

    def come(self, request: ChatRequest, key: Key | None, now_s: float, pool_tokens: int) -> Lane:
        """The lane of a request that comes now: on its key's present terms, and no more saved than it may."""
        name = request.owner if key is None else key.id
        tier: Tier = "standard" if key is None else key.terms.tier
        weight = 1.0 if key is None else key.terms.weight
        lane = self._by_name.get(name)
        if lane is None:
            lane = self._by_name[name] = Lane(name, tier, weight)
            lane.keyed = key is not None
        elif (lane.tier, lane.weight) != (tier, weight):  # the key's terms were changed
            if lane.active:
                self.active_weight += weight - lane.weight
            lane = self._by_name[name] = lane.with_terms(tier, weight)
        lane.used_at_s = now_s
        wanted = bool(lane.appointments.num) or now_s - lane.refused_at_s < WANTED_S
        self._queue.lift(lane, CREDIT * pool_tokens if wanted else 0.0)  # who was sent away was not idle
        return lane

    def busier(self, lane: Lane) -> None:
        """To be called before something of a lane begins to wait or to run."""
        if not lane.active:
            self.active_weight += lane.weight

    def idler(self, lane: Lane) -> None:
        """To be called after something of a lane has ended to wait or to run."""
        if not lane.active:
            self.active_weight -= lane.weight

    def recent_weight(self, now_s: float, *, besides: Lane) -> float:
        """What the other keys weigh that are in use: active, or so lately that they may be again."""
        return sum(
            lane.weight
            for lane in self
            if lane is not besides and (lane.active or now_s - lane.used_at_s < RECENT_S)
        )

    def forget_idle(self, now_s: float) -> None:
        """Drop those that have not come for long."""
        idle = [
            name
            for name, lane in self._by_name.items()
            if now_s - lane.used_at_s > FORGOTTEN_S and not lane.active and not lane.appointments.num
        ]
        for name in idle:
            del self._by_name[name]
