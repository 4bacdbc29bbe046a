"""The keys that have come lately: a tenant each, and the weight of all that are active."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from app.admission.fair_queue import FairQueue, Tenant
from app.core import ChatRequest, Key, Tier

CREDIT = 1.0
"""Pools of tokens that a key may be served less than others, and make up for, while it is sent away."""
WANTED_S = 5.0
"""For how long after a refusal a key is taken to want more, where it has no appointment."""
RECENT_S = 60.0
"""For how long after a request its key is taken to be in use: who reads an answer comes again."""
FORGOTTEN_S = 600.0
"""After how long without a request a key's counters are dropped."""


class Tenants(Collection[Tenant]):
    """Every key's tenant. A request without a key belongs to its owner's."""

    def __init__(self, queue: FairQueue) -> None:
        self.active_weight = 0.0
        """Of the keys of which anything waits or runs."""
        self._queue = queue
        self._by_name: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._by_name.values()

    def come(self, request: ChatRequest, key: Key | None, now_s: float, pool_tokens: int) -> Tenant:
        """The tenant of a new request, on its key's present terms, with no more saved than it may."""
        name = request.owner if key is None else key.id
        tier: Tier = "standard" if key is None else key.terms.tier
        weight = 1.0 if key is None else key.terms.weight
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = self._by_name[name] = Tenant(name, tier, weight)
            tenant.keyed = key is not None
        elif (tenant.tier, tenant.weight) != (tier, weight):  # the key's terms were changed
            if tenant.active:
                self.active_weight += weight - tenant.weight
            tenant = self._by_name[name] = tenant.with_terms(tier, weight)
        tenant.used_at_s = now_s
        wanted = bool(tenant.retry_slots.num) or now_s - tenant.refused_at_s < WANTED_S
        self._queue.lift(tenant, CREDIT * pool_tokens if wanted else 0.0)  # who was sent away was not idle
        return tenant

    def busier(self, tenant: Tenant) -> None:
        """To be called before something of a tenant begins to wait or to run."""
        if not tenant.active:
            self.active_weight += tenant.weight

    def idler(self, tenant: Tenant) -> None:
        """To be called after something of a tenant has ended to wait or to run."""
        if not tenant.active:
            self.active_weight -= tenant.weight

    def recent_weight(self, now_s: float, *, besides: Tenant) -> float:
        """What the other keys weigh that are in use: active, or so lately that they may be again."""
        return sum(
            tenant.weight
            for tenant in self
            if tenant is not besides and (tenant.active or now_s - tenant.used_at_s < RECENT_S)
        )

    def forget_idle(self, now_s: float) -> None:
        """Drop those that have not come for long."""
        idle = [
            name
            for name, tenant in self._by_name.items()
            if now_s - tenant.used_at_s > FORGOTTEN_S and not tenant.active and not tenant.retry_slots.num
        ]
        for name in idle:
            del self._by_name[name]
