"""What the engine has room for: KV memory, prompts to compute, answers that decode at once.

`KVBudget` reserves KV memory, where a `PrefixTree` counts shared prompts once. `PrefillWindow` bounds the
prompt tokens before the engine. `DecodeWindow` bounds the answers that run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from app.admission.estimates import LengthEstimate, Throughput
from app.admission.tuning import AdmissionTuning


class PromptNode:
    """The ids `ids[start:stop]` of a prompt, after those of the parent; `holders` prompts go through it."""

    __slots__ = ("children", "holders", "ids", "key", "parent", "start", "stop")

    def __init__(
        self, parent: PromptNode | None, key: Hashable, ids: Sequence[int] = (), start: int = 0, stop: int = 0
    ) -> None:
        self.parent = parent
        self.key = key
        """What the parent knows this node by: the first id, or the space of a root."""
        self.ids, self.start, self.stop = ids, start, stop
        self.children: dict[Hashable, PromptNode] = {}
        self.holders = 0
        if parent is not None:
            parent.children[key] = self

    def split(self, length: int) -> PromptNode:
        """Cut after the first `length` ids; a new node of these takes this node's place and comes back."""
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
        """How many of the first ids the tree holds already."""
        node, at = self.root.children.get(space), 0
        while node is not None and at < len(ids):
            node = node.children.get(ids[at])
            if node is not None:
                same = _common(node.ids, ids, at, min(node.stop, len(ids)))
                at += same
                if same < node.stop - node.start:
                    break
        return at

    def hold(self, ids: Sequence[int], space: Hashable) -> PromptNode:
        """Take a prompt in; returns its last node. `ids` must not change until that is let go."""
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

    def let_go(self, leaf: PromptNode) -> None:
        """Take a prompt out, once."""
        node = leaf
        while node.parent is not None:
            node.holders -= 1
            if not node.holders:
                self.tokens -= node.stop - node.start
                del node.parent.children[node.key]
            node = node.parent


def _common(left: Sequence[int], right: Sequence[int], start: int, stop: int) -> int:
    """How many ids from `start` up to `stop` are the same in both."""
    at, step, growing = start, 32, True
    while at < stop and step:
        end = min(at + step, stop)
        if left[at:end] == right[at:end]:
            at, step = end, step * 2 if growing else step
        else:
            step, growing = (end - at) // 2, False
    return at - start


class KVReservation:
    """KV tokens of one request. Without a `space` its prompt is shared with no other."""

    __slots__ = (
        "_leaf",
        "_prefix_hashes",
        "generated",
        "ids",
        "max_growth",
        "mean",
        "n",
        "replica",
        "space",
        "variance",
    )

    def __init__(
        self, ids: Sequence[int], space: str | None, n: int, max_tokens: int, growth: LengthEstimate
    ) -> None:
        self.ids: Sequence[int] = ids if type(ids) is list else list(ids)
        self.space: Hashable = self if space is None else space
        self.n = n
        self.max_growth = n * max_tokens
        self.replica: int | None = None
        """The replica whose pool it is in; None where there is one pool."""
        self._prefix_hashes: Sequence[tuple[int, bytes]] | None = None
        self._leaf: PromptNode | None = None
        self.expect(growth)

    def expect(self, growth: LengthEstimate, generated: int = 0) -> None:
        """Take on a new estimate of a choice's length. Choices are alike: their deviations add up."""
        self.generated = generated
        self.mean = min(self.n * growth.mean, self.max_growth)
        self.variance = self.n * self.n * growth.variance

    def choose(self, replica: int | None) -> None:
        """Take on the replica whose pool it is to be in."""
        self.replica = replica

    def prefix_hashes(
        self, hashes_of: Callable[[KVReservation], Iterable[tuple[int, bytes]]]
    ) -> Sequence[tuple[int, bytes]]:
        """What app.admission.replicas knows its prompt by, made once."""
        if self._prefix_hashes is None:
            self._prefix_hashes = list(hashes_of(self))
        return self._prefix_hashes

    def hold(self, tree: PrefixTree) -> None:
        """Put the prompt into the tree."""
        self._leaf = tree.hold(self.ids, self.space)

    def let_go(self, tree: PrefixTree) -> None:
        """Take the prompt out of the tree, once."""
        assert self._leaf is not None
        leaf, self._leaf = self._leaf, None
        tree.let_go(leaf)


class KVBudget:
    """The engine's KV memory as reservations, in tokens.

        committed = distinct prompt tokens + mean growth + margin * deviation of all growth together

    Answers are independent, so the deviation of many is small against their mean: the margin is wide for one
    long answer and narrow for a thousand. It is never more than all answers' limits.
    """

    def __init__(self, capacity_tokens: int, tuning: AdmissionTuning) -> None:
        self._tuning = tuning
        self._tree = PrefixTree()
        self.num_reservations = 0
        self.used_tokens = 0
        """Generated tokens of requests in flight, as last seen."""
        self._mean = self._variance = self._max_growth = 0
        self.restart(capacity_tokens)

    def restart(self, capacity_tokens: int) -> None:
        """Begin with an engine that has just started; reservations stay until they are given back."""
        self.capacity_tokens = capacity_tokens
        self._drifts = deque[int](maxlen=self._tuning.drift_samples)
        self._drift_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        """Distinct prompt tokens of the requests in flight."""
        return self._tree.tokens

    @property
    def committed_tokens(self) -> int:
        """What is reserved now."""
        return self._tree.tokens + self._growth(0, 0, 0)

    @property
    def limit_tokens(self) -> int:
        """What may be reserved: the capacity without headroom and without unaccounted use."""
        return int(self.capacity_tokens * (1 - self._tuning.kv_headroom)) - self._drift_tokens

    def free_tokens(self, spare: float) -> int:
        """What may still be reserved while a part `spare` of the capacity is kept free; below 0 if none."""
        return self.limit_tokens - int(spare * self.capacity_tokens) - self.committed_tokens

    def unshared_tokens(self, reservation: KVReservation) -> int:
        """Tokens of the prompt that no other request in flight holds."""
        return len(reservation.ids) - self._tree.shared_tokens(reservation.ids, reservation.space)

    def fits(self, reservation: KVReservation, spare: float = 0.0) -> bool:
        """Whether there is room with a part `spare` left free; into an empty pool everything fits."""
        if not self.num_reservations:
            return True
        growth = self._growth(reservation.mean, reservation.variance, reservation.max_growth)
        room = self.limit_tokens - int(spare * self.capacity_tokens) - self.prompt_tokens - growth
        if room >= len(reservation.ids) or room < 0:
            return room >= 0
        return room >= self.unshared_tokens(reservation)

    def take(self, reservation: KVReservation) -> None:
        """Reserve."""
        self.num_reservations += 1
        reservation.hold(self._tree)
        self._count(reservation, 1)

    def correct(self, reservation: KVReservation, growth: LengthEstimate, generated: int) -> None:
        """Take on a new estimate of a request in flight, and the tokens that it has generated."""
        self._count(reservation, -1)
        reservation.expect(growth, generated)
        self._count(reservation, 1)

    def give_back(self, reservation: KVReservation) -> None:
        """End a reservation, once."""
        self.num_reservations -= 1
        self._count(reservation, -1)
        reservation.let_go(self._tree)

    def observe(self, used_tokens: int) -> None:
        """Compare with the engine's own count, which is some steps old: the least of the last ones counts."""
        self._drifts.append(max(used_tokens - self.prompt_tokens - self.used_tokens, 0))
        least = min(self._drifts) if len(self._drifts) == self._drifts.maxlen else 0
        self._drift_tokens = min(least, self.capacity_tokens // 2)

    def _count(self, reservation: KVReservation, sign: int) -> None:
        self._mean += sign * reservation.mean
        self._variance += sign * reservation.variance
        self._max_growth += sign * reservation.max_growth
        self.used_tokens += sign * reservation.generated

    def _growth(self, mean: int, variance: int, max_growth: int) -> int:
        deviation = self._tuning.kv_margin_deviations * math.sqrt(self._variance + variance)
        return min(self._mean + mean + math.ceil(deviation), self._max_growth + max_growth)


class PrefillWindow:
    """Bound on the uncached prompt tokens that were let in and have no first token yet.

    It begins small, doubles with each window of first tokens in time until one comes late, and from then on
    grows by one step a window (additive increase, multiplicative decrease: Chiu and Jain, 1989). `target_s`
    is the time from being let in to the first token.
    """

    def __init__(self, target_s: float, max_tokens: int, tuning: AdmissionTuning) -> None:
        self._target_s, self._tuning = target_s, tuning
        self._max_tokens = max(max_tokens, tuning.prefill_step_tokens)
        self.waiting_tokens = 0
        """Let in, and without a first token."""
        self._speed = Throughput(self._max_tokens / target_s, 0.0, tuning)
        self.reset()

    def reset(self) -> None:
        """Narrow the window: the engine has just started."""
        self.window_tokens = float(self._tuning.prefill_step_tokens)
        self._threshold = math.inf
        self._narrowed_at_s = -math.inf
        self._limiting = False

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of so many uncached tokens may go to the engine now; a single one always."""
        open_ = not self.waiting_tokens or self.waiting_tokens + self._size(tokens) <= self.window_tokens
        self._limiting = self._limiting or not open_
        return open_

    def soon_tokens(self, age_s: float) -> int:
        """What may wait for the prefill alone, at the speed of late: for half of the target, less its age."""
        left_s = max(self._target_s / 2 - age_s, 0.0)
        return int(self._speed.tokens_per_s * left_s) - self.waiting_tokens

    def enter(self, tokens: int, now_s: float) -> bool:
        """Let a prompt in; whether others are before it."""
        queued_behind = self.waiting_tokens > 0
        if not queued_behind:  # the speed is measured from here on, not since the last burst
            self._speed.advance(now_s, waiting=False)
        self.waiting_tokens += self._size(tokens)
        return queued_behind

    def leave(self, tokens: int) -> None:
        """A prompt ended without a first token."""
        self.waiting_tokens -= self._size(tokens)

    def started(self, tokens: int, admitted_s: float, now_s: float, *, queued_behind: bool) -> None:
        """A prompt has its first token. A late one counts if others were before it."""
        size, step = self._size(tokens), self._tuning.prefill_step_tokens
        # A window that holds nobody back measures no speed.
        self._speed.advance(now_s, waiting=self._limiting)
        self._speed.freed(size if self._limiting else 0)
        wide = self._limiting or 2 * self.waiting_tokens >= self.window_tokens
        self.waiting_tokens -= size
        if now_s - admitted_s > self._target_s:
            if queued_behind and admitted_s >= self._narrowed_at_s:  # once for all that were let in before
                self.window_tokens = max(self.window_tokens * self._tuning.prefill_decrease, step)
                self._threshold, self._narrowed_at_s = self.window_tokens, now_s
        elif wide:  # a window that nobody fills says nothing about a wider one
            slow = self.window_tokens >= self._threshold
            self.window_tokens += step * size / self.window_tokens if slow else size
            self.window_tokens = min(self.window_tokens, self._max_tokens)
        if not self.waiting_tokens:
            self._limiting = False

    def _size(self, tokens: int) -> int:
        return max(tokens, self._tuning.prefill_min_tokens)


class DecodeWindow:
    """Bound on the choices that decode at once, to keep the time per output token (TPOT) within a target.

    A decode step gives each running choice one token and takes longer the more there are, and a prompt that
    comes waits for the step that runs. The window narrows while tokens take too long. While it holds requests
    back and there is time left, it widens: a full one to what the time left allows, another to twice, after a
    narrowing by one. What runs is not stopped. `target_s` of 0 is no target, and the window has no end. With
    `slowdown` the target is that many times the least TPOT since the start.
    """

    def __init__(self, tuning: AdmissionTuning, target_s: float = 0.0, *, slowdown: float = 0.0) -> None:
        self._tuning = tuning
        self._fixed_target_s = target_s
        self._slowdown = slowdown
        self.reset()

    def reset(self) -> None:
        """Begin anew: the engine has just started."""
        first = self._tuning.decode_first_choices
        self._target_s = self._fixed_target_s
        self._smooth_s, self._least_s = 0.0, math.inf
        self.max_choices = first if self._target_s or self._slowdown else math.inf
        self._proven_choices = first
        self._narrowed = self._held_back = False
        self._tokens, self._took_s = 0, 0.0
        self._looked_s: float | None = None

    @property
    def shown(self) -> float:
        """The window as a metric shows it: 0 for one without end."""
        return 0.0 if math.isinf(self.max_choices) else self.max_choices

    def has_place(self, num_choices: int, spare: float) -> bool:
        """Whether so many may run, a part of the window kept for others."""
        open_ = num_choices <= self.max_choices * (1.0 - spare)
        self._held_back = self._held_back or not open_
        return open_

    def made(self, tokens: int, took_s: float, running: int, now_s: float) -> None:
        """A choice has been given so many tokens in that time, beside `running` with itself."""
        if not (self._target_s or self._slowdown):
            return
        tuning = self._tuning
        self._looked_s = now_s if self._looked_s is None else self._looked_s
        self._tokens += tokens
        self._took_s += took_s
        if now_s - self._looked_s < tuning.decode_look_s:
            return
        tpot_s = self._took_s / self._tokens
        if self._slowdown:  # smoothed, as a burst after a stall is no fast step
            weight = tuning.decode_smoothing if self._smooth_s else 1.0
            self._smooth_s += (tpot_s - self._smooth_s) * weight
            self._least_s = min(self._least_s, self._smooth_s)
            self._target_s = self._slowdown * self._least_s
        part_used = tpot_s / self._target_s
        held_back, self._held_back = self._held_back, False
        self._tokens, self._took_s, self._looked_s = 0, 0.0, now_s
        if part_used > 1.0:
            if (
                1 < running <= tuning.decode_overrun * self.max_choices
            ):  # else it was narrowed for these already
                self._narrowed = True
                self.max_choices = max(self.max_choices * max(1.0 / part_used, tuning.decode_decrease), 1.0)
            return
        self._proven_choices = max(self._proven_choices, running)
        if part_used < tuning.decode_widen_below and held_back:
            self._widen(running, running / part_used)

    def _widen(self, running: int, safe_choices: float) -> None:
        """Let more run; `safe_choices` would be within the target were all of a step's time the choices'."""
        if self._narrowed:
            wider = self.max_choices + 1.0
        elif running >= self._tuning.decode_filled * self.max_choices:
            wider = max(self.max_choices + 1.0, safe_choices)
        else:
            wider = 2 * self.max_choices
        self.max_choices = max(
            min(wider, self._tuning.decode_unproven * self._proven_choices), self.max_choices
        )
