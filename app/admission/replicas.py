"""The KV memory of an engine that is several replicas of its model (data parallel), each with its own pool.

A request is in one pool, and fits the engine where it fits one. `PrefixLocations` remembers which replicas
have read which beginnings of prompts, so that a conversation goes back to the one that has its past cached.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from app.admission.capacity import KVBudget, KVReservation
from app.admission.estimates import LengthEstimate
from app.admission.tuning import AdmissionTuning
from app.core import EngineLoad

HASH_STEP_TOKENS = 512
"""Tokens between two remembered beginnings of a prompt; the first ones are 16, 32, 64 … tokens long."""
MAX_HASHES = 1 << 17
"""Beginnings that are remembered, the latest used: about 20 MB, and 60 million tokens of long prompts."""


class PrefixLocations:
    """The replicas that have read a prompt's beginning, by its hash; the latest `MAX_HASHES` of them."""

    def __init__(self) -> None:
        self._replicas: dict[bytes, int] = {}
        """Bits of replicas by hash, the least recently used first."""

    def known_tokens(self, reservation: KVReservation, replica: int) -> int:
        """How many of a prompt's first tokens a replica has read before, as far as is remembered."""
        bit, tokens = 1 << replica, 0
        for length, prefix_hash in reservation.prefix_hashes(_prefix_hashes):
            if not self._replicas.get(prefix_hash, 0) & bit:
                break
            tokens = length
        return tokens

    def read(self, reservation: KVReservation, replica: int) -> None:
        """Note that a replica reads a prompt."""
        replicas = self._replicas
        for _, prefix_hash in reservation.prefix_hashes(_prefix_hashes):
            replicas[prefix_hash] = replicas.pop(prefix_hash, 0) | 1 << replica
        while len(replicas) > MAX_HASHES:
            del replicas[next(iter(replicas))]


def _prefix_hashes(reservation: KVReservation) -> Iterator[tuple[int, bytes]]:
    """Lengths and hashes of a prompt's beginnings; none of a prompt that shares nothing."""
    if reservation.space is reservation:
        return
    ids, start, end = reservation.ids, 0, 16
    state = hashlib.blake2b(str(reservation.space).encode(), digest_size=8)
    while end <= len(ids):
        state.update(array("I", ids[start:end]).tobytes())
        yield end, state.copy().digest()
        start, end = end, end + min(end, HASH_STEP_TOKENS)


class KVPools:
    """The budgets of all pools; see `KVBudget`, whose place they take."""

    def __init__(self, tuning: AdmissionTuning) -> None:
        self._tuning = tuning
        self._pools = [KVBudget(0, tuning)]
        self._locations = PrefixLocations()

    def restart(self, capacity_tokens: int, replicas: int = 1) -> None:
        """Begin with an engine that has just started; reservations stay until they are given back."""
        self._locations = PrefixLocations()
        if len(self._pools) != replicas:  # at the first start: nothing is reserved yet
            self._pools = [KVBudget(0, self._tuning) for _ in range(replicas)]
        for pool in self._pools:
            pool.restart(capacity_tokens // replicas)

    @property
    def capacity_tokens(self) -> int:
        """The capacity of all pools."""
        return sum(pool.capacity_tokens for pool in self._pools)

    @property
    def pool_tokens(self) -> int:
        """What one request can have: the capacity of one pool."""
        return self._pools[0].capacity_tokens

    @property
    def num_reservations(self) -> int:
        """Reservations in all pools."""
        return sum(pool.num_reservations for pool in self._pools)

    @property
    def committed_tokens(self) -> int:
        """What is reserved now."""
        return sum(pool.committed_tokens for pool in self._pools)

    @property
    def limit_tokens(self) -> int:
        """What may be reserved."""
        return sum(pool.limit_tokens for pool in self._pools)

    def free_tokens(self, spare: float) -> int:
        """What may still be reserved, of all pools; below 0 if none."""
        return sum(pool.free_tokens(spare) for pool in self._pools)

    def unshared_tokens(self, reservation: KVReservation) -> int:
        """Tokens of the prompt that no other request in flight holds in the pool that it would be in."""
        replica = self._preferred(reservation)[0] if reservation.replica is None else reservation.replica
        return self._pools[replica].unshared_tokens(reservation)

    def fits(self, reservation: KVReservation, spare: float = 0.0) -> bool:
        """Whether a pool has room; it is chosen then, the one first that has read the prompt's beginning."""
        for replica in self._preferred(reservation):
            if self._pools[replica].fits(reservation, spare):
                reservation.choose(replica if len(self._pools) > 1 else None)
                return True
        return False

    def take(self, reservation: KVReservation) -> None:
        """Reserve in the pool that was chosen."""
        if len(self._pools) > 1:
            replica = self._preferred(reservation)[0] if reservation.replica is None else reservation.replica
            reservation.choose(replica)
            self._locations.read(reservation, replica)
        self._pool_of(reservation).take(reservation)

    def correct(self, reservation: KVReservation, growth: LengthEstimate, generated: int) -> None:
        """Take on a new estimate of a request in flight, and the tokens that it has generated."""
        self._pool_of(reservation).correct(reservation, growth, generated)

    def give_back(self, reservation: KVReservation) -> None:
        """End a reservation, once."""
        self._pool_of(reservation).give_back(reservation)

    def observe(self, load: EngineLoad) -> None:
        """Compare with the engine's own counts; see KVBudget.observe."""
        used = [load.used_tokens] if len(self._pools) == 1 else load.replica_used_tokens
        for pool, used_tokens in zip(self._pools, used, strict=False):
            pool.observe(used_tokens)

    def _pool_of(self, reservation: KVReservation) -> KVBudget:
        return self._pools[reservation.replica or 0]

    def _preferred(self, reservation: KVReservation) -> Sequence[int]:
        """The replicas, the best for a prompt first.

        That is the one with the most room in its pool, where a token that it would have to read anew counts
        as `replica_stay` tokens: a conversation moves once its own replica has that much less room.
        """
        if len(self._pools) == 1:
            return (0,)
        costs = []
        for replica, pool in enumerate(self._pools):
            held = len(reservation.ids) - pool.unshared_tokens(reservation)
            unread = len(reservation.ids) - max(held, self._locations.known_tokens(reservation, replica))
            costs.append((self._tuning.replica_stay * unread - pool.free_tokens(0.0), replica))
        return [replica for _, replica in sorted(costs)]
