"""The engine's KV memory as allocations: prompts that share a beginning, answers that grow, replicas.

`KVBudget` is one pool, where a `PrefixTree` counts shared prompts once. `KVPools` are the pools of an engine
that is several replicas of its model (data parallel): a request is in one of them, and a conversation goes
back to the replica that has its past cached.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

from app.admission.estimates import LengthEstimate
from app.admission.tuning import AdmissionTuning
from app.core import EngineLoad

HASH_STEP_TOKENS = 512
"""Tokens between two remembered beginnings of a prompt; the first ones are 16, 32, 64 … tokens long."""
MAX_HASHES = 1 << 17
"""Beginnings that are remembered, the latest used: about 20 MB, and 60 million tokens of long prompts."""


class PromptNode:
    """The ids `ids[start:stop]` of a prompt, after those of the parent; `holders` prompts go through it."""

    __slots__ = ("children", "holders", "ids", "key", "parent", "start", "stop")

    def __init__(
        self, parent: PromptNode | None, key: Hashable, ids: Sequence[int] = (), start: int = 0, stop: int = 0
    ) -> None:
        self.parent = parent
        self.key = key
        """The parent's name for this node: the first id, or the space of a root."""
        self.ids, self.start, self.stop = ids, start, stop
        self.children: dict[Hashable, PromptNode] = {}
        self.holders = 0
        if parent is not None:
            parent.children[key] = self

    def split(self, length: int) -> PromptNode:
        """Cut after the first `length` ids; returns a new node of these, which takes this node's place."""
        assert self.parent is not None
        cut = self.start + length
        head = PromptNode(self.parent, self.key, self.ids, self.start, cut)
        head.holders = self.holders
        self.parent, self.key, self.start = head, self.ids[cut], cut
        head.children[self.key] = self
        return head


class PrefixTree:
    """The prompts in flight as a tree of token ids: the engine holds once what prompts share.

    A node is a run of ids that no prompt in flight leaves in the middle. Prompts of different spaces share
    nothing. A prompt costs a comparison of what it shares, at the speed of list slices, and one node.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all prompts, each shared run counted once."""
        self.root = PromptNode(None, None)

    def shared_tokens(self, ids: Sequence[int], space: Hashable) -> int:
        """The number of the first ids that the tree holds already."""
        node, at = self.root.children.get(space), 0
        while node is not None and at < len(ids):
            node = node.children.get(ids[at])
            if node is not None:
                same = _common(node.ids, ids, at, min(node.stop, len(ids)))
                at += same
                if same < node.stop - node.start:
                    break
        return at

    def insert(self, ids: Sequence[int], space: Hashable) -> PromptNode:
        """Add a prompt; returns its last node, to be released. `ids` must not change until then."""
        node, at = self.root.children.get(space) or PromptNode(self.root, space), 0
        node.holders += 1
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                child = PromptNode(node, ids[at], ids, at, len(ids))
                self.tokens += len(ids) - at
            else:
                same = _common(child.ids, ids, at, min(child.stop, len(ids)))
                if same < child.stop - child.start:
                    child = child.split(same)
            child.holders += 1
            node, at = child, child.stop
        return node

    def release(self, leaf: PromptNode) -> None:
        """Remove a prompt, once."""
        node = leaf
        while node.parent is not None:
            node.holders -= 1
            if not node.holders:
                self.tokens -= node.stop - node.start
                del node.parent.children[node.key]
            node = node.parent


def _common(left: Sequence[int], right: Sequence[int], start: int, stop: int) -> int:
    """The number of ids from `start` up to `stop` until the first that differs."""
    at, step, growing = start, 32, True
    while at < stop and step:
        end = min(at + step, stop)
        if left[at:end] == right[at:end]:
            at, step = end, step * 2 if growing else step
        else:
            step, growing = (end - at) // 2, False
    return at - start


class KVAllocation:
    """KV tokens of one request. Without a `space` its prompt is shared with no other."""

    def __init__(
        self, ids: Sequence[int], space: str | None, n: int, max_tokens: int, growth: LengthEstimate
    ) -> None:
        self.ids: Sequence[int] = ids if type(ids) is list else list(ids)
        self.space: Hashable = self if space is None else space
        self.n = n
        self.max_growth = n * max_tokens
        self.replica: int | None = None
        """The replica whose pool it is in; None where there is one pool, and before."""
        self.expect(growth)

    def expect(self, growth: LengthEstimate, generated: int = 0) -> None:
        """Set a new estimate of a choice's length. Choices are alike: their deviations add up."""
        self.generated = generated
        self.mean = min(self.n * growth.mean, self.max_growth)
        self.variance = self.n * self.n * growth.variance

    def choose(self, replica: int) -> None:
        self.replica = replica

    @cached_property
    def prefix_hashes(self) -> Sequence[tuple[int, bytes]]:
        """Lengths and hashes of the prompt's beginnings; none of a prompt that shares nothing."""
        hashes: list[tuple[int, bytes]] = []
        if self.space is self:
            return hashes
        start, end = 0, 16
        state = hashlib.blake2b(str(self.space).encode(), digest_size=8)
        while end <= len(self.ids):
            state.update(array("I", self.ids[start:end]).tobytes())
            hashes.append((end, state.copy().digest()))
            start, end = end, end + min(end, HASH_STEP_TOKENS)
        return hashes


class KVBudget:
    """One pool of KV memory as allocations, in tokens.

        committed = distinct prompt tokens + mean growth + margin * deviation of all growth together

    Answers are independent, so the deviation of many is small against their mean: the margin is wide for one
    long answer and narrow for a thousand. It is never more than all answers' limits.
    """

    def __init__(self, capacity_tokens: int, tuning: AdmissionTuning) -> None:
        self._tuning = tuning
        self._tree = PrefixTree()
        self._leaves: dict[KVAllocation, PromptNode] = {}
        self.used_tokens = 0
        """Generated tokens of requests in flight, as last seen."""
        self._mean = self._variance = self._max_growth = 0
        self.restart(capacity_tokens)

    def restart(self, capacity_tokens: int) -> None:
        """Begin with an engine that has just started; allocations stay until they are given back."""
        self.capacity_tokens = capacity_tokens
        self._drifts = deque[int](maxlen=self._tuning.drift_samples)
        self._drift_tokens = 0

    @property
    def num_allocations(self) -> int:
        return len(self._leaves)

    @property
    def prompt_tokens(self) -> int:
        """Distinct prompt tokens of the requests in flight."""
        return self._tree.tokens

    @property
    def committed_tokens(self) -> int:
        """Tokens allocated now."""
        return self._tree.tokens + self._growth(0, 0, 0)

    @property
    def limit_tokens(self) -> int:
        """Tokens that may be allocated: the capacity without headroom and without unaccounted use."""
        return int(self.capacity_tokens * (1 - self._tuning.kv_headroom)) - self._drift_tokens

    def free_tokens(self, spare: float = 0.0) -> int:
        """Tokens that may still be allocated while a share `spare` is kept free; below 0 if none."""
        return self.limit_tokens - int(spare * self.capacity_tokens) - self.committed_tokens

    def unshared_tokens(self, allocation: KVAllocation) -> int:
        """Tokens of the prompt that no other request in flight holds."""
        return len(allocation.ids) - self._tree.shared_tokens(allocation.ids, allocation.space)

    def fits(self, allocation: KVAllocation, spare: float = 0.0) -> bool:
        """True if there is room with a share `spare` left free; into an empty pool everything fits."""
        if not self._leaves:
            return True
        growth = self._growth(allocation.mean, allocation.variance, allocation.max_growth)
        room = self.limit_tokens - int(spare * self.capacity_tokens) - self.prompt_tokens - growth
        if room >= len(allocation.ids) or room < 0:
            return room >= 0
        return room >= self.unshared_tokens(allocation)

    def take(self, allocation: KVAllocation) -> None:
        self._leaves[allocation] = self._tree.insert(allocation.ids, allocation.space)
        self._count(allocation, 1)

    def correct(self, allocation: KVAllocation, growth: LengthEstimate, generated: int) -> None:
        """Set a new estimate of a request in flight, and the tokens that it has generated."""
        self._count(allocation, -1)
        allocation.expect(growth, generated)
        self._count(allocation, 1)

    def give_back(self, allocation: KVAllocation) -> None:
        """End an allocation, once."""
        self._tree.release(self._leaves.pop(allocation))
        self._count(allocation, -1)

    def observe(self, used_tokens: int) -> None:
        """Compare with the engine's own count, which is some steps old: the least of the last ones counts."""
        self._drifts.append(max(used_tokens - self.prompt_tokens - self.used_tokens, 0))
        least = min(self._drifts) if len(self._drifts) == self._drifts.maxlen else 0
        self._drift_tokens = min(least, self.capacity_tokens // 2)

    def _count(self, allocation: KVAllocation, sign: int) -> None:
        self._mean += sign * allocation.mean
        self._variance += sign * allocation.variance
        self._max_growth += sign * allocation.max_growth
        self.used_tokens += sign * allocation.generated

    def _growth(self, mean: int, variance: int, max_growth: int) -> int:
        deviation = self._tuning.kv_margin_deviations * math.sqrt(self._variance + variance)
        return min(self._mean + mean + math.ceil(deviation), self._max_growth + max_growth)


class PrefixLocations:
    """The replicas that have read a prompt's beginning, by its hash; the latest `MAX_HASHES` of them."""

    def __init__(self) -> None:
        self._replicas: dict[bytes, int] = {}
        """Bits of replicas by hash, the least recently used first."""

    def known_tokens(self, allocation: KVAllocation, replica: int) -> int:
        """The number of a prompt's first tokens that a replica has read before, as far as is remembered."""
        bit, tokens = 1 << replica, 0
        for length, prefix_hash in allocation.prefix_hashes:
            if not self._replicas.get(prefix_hash, 0) & bit:
                break
            tokens = length
        return tokens

    def read(self, allocation: KVAllocation, replica: int) -> None:
        """Note that a replica reads a prompt."""
        replicas = self._replicas
        for _, prefix_hash in allocation.prefix_hashes:
            replicas[prefix_hash] = replicas.pop(prefix_hash, 0) | 1 << replica
        while len(replicas) > MAX_HASHES:
            del replicas[next(iter(replicas))]


class KVPools:
    """The budgets of all replicas, as KVBudget has them. A request fits the engine where it fits one pool."""

    def __init__(self, tuning: AdmissionTuning) -> None:
        self._tuning = tuning
        self._pools = [KVBudget(0, tuning)]
        self._locations = PrefixLocations()

    def restart(self, capacity_tokens: int, replicas: int = 1) -> None:
        self._locations = PrefixLocations()
        if len(self._pools) != replicas:  # at the first start: nothing is allocated yet
            self._pools = [KVBudget(0, self._tuning) for _ in range(replicas)]
        for pool in self._pools:
            pool.restart(capacity_tokens // replicas)

    @property
    def capacity_tokens(self) -> int:
        return sum(pool.capacity_tokens for pool in self._pools)

    @property
    def pool_tokens(self) -> int:
        """The most that one request can have: the capacity of one pool."""
        return self._pools[0].capacity_tokens

    @property
    def num_allocations(self) -> int:
        return sum(pool.num_allocations for pool in self._pools)

    @property
    def committed_tokens(self) -> int:
        return sum(pool.committed_tokens for pool in self._pools)

    @property
    def limit_tokens(self) -> int:
        return sum(pool.limit_tokens for pool in self._pools)

    def free_tokens(self, spare: float = 0.0) -> int:
        return sum(pool.free_tokens(spare) for pool in self._pools)

    def unshared_tokens(self, allocation: KVAllocation, spare: float = 0.0) -> int:
        """Tokens of the prompt that no other request holds in the pool that it is in, or would be in."""
        return self._pools[self._replica(allocation, spare)].unshared_tokens(allocation)

    def fits(self, allocation: KVAllocation, spare: float = 0.0) -> bool:
        """True if a pool has room with a share `spare` left free."""
        return any(pool.fits(allocation, spare) for pool in self._pools)

    def take(self, allocation: KVAllocation, spare: float = 0.0) -> None:
        """Allocate in the best pool that has room, or the best one."""
        replica = self._replica(allocation, spare)
        if len(self._pools) > 1:
            allocation.choose(replica)
            self._locations.read(allocation, replica)
        self._pools[replica].take(allocation)

    def correct(self, allocation: KVAllocation, growth: LengthEstimate, generated: int) -> None:
        self._pools[allocation.replica or 0].correct(allocation, growth, generated)

    def give_back(self, allocation: KVAllocation) -> None:
        self._pools[allocation.replica or 0].give_back(allocation)

    def observe(self, load: EngineLoad) -> None:
        used = [load.used_tokens] if len(self._pools) == 1 else load.replica_used_tokens
        for pool, used_tokens in zip(self._pools, used, strict=False):
            pool.observe(used_tokens)

    def _replica(self, allocation: KVAllocation, spare: float) -> int:
        if len(self._pools) == 1:
            return 0
        if allocation.replica is not None:
            return allocation.replica
        replicas = list(self._by_preference(allocation))
        fitting = (replica for replica in replicas if self._pools[replica].fits(allocation, spare))
        return next(fitting, replicas[0])

    def _by_preference(self, allocation: KVAllocation) -> Iterator[int]:
        """The replicas, the best for a prompt first.

        That is the one with the most room in its pool, where a token to be computed again counts
        as `replica_stay` tokens: a conversation moves once its own replica has that much less room.
        """
        costs = []
        for replica, pool in enumerate(self._pools):
            held = len(allocation.ids) - pool.unshared_tokens(allocation)
            unread = len(allocation.ids) - max(held, self._locations.known_tokens(allocation, replica))
            costs.append((self._tuning.replica_stay * unread - pool.free_tokens(), replica))
        return (replica for _, replica in sorted(costs))
