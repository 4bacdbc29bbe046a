"""The prompts in flight as a tree of token ids: what they share, the engine holds once.

A node is a run of ids that no prompt in flight leaves in the middle. Taking in a prompt costs a
comparison of what it shares with others, at the speed of list slices, and one node for the rest,
however long that is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from app.admission.estimates import LengthEstimate, Throughput

_STRIDE = 32
"""Ids compared in the first step; doubled from step to step."""


class _Node:
    """The ids `ids[start:stop]`, after those of its parent; `holders` prompts go through it."""

    __slots__ = ("children", "holders", "ids", "parent", "start", "stop")

    def __init__(self, parent: _Node | None, ids: Sequence[int], start: int, stop: int) -> None:
        self.parent = parent
        self.ids = ids
        self.start = start
        self.stop = stop
        self.children: dict[int, _Node] = {}
        self.holders = 0


class Held:
    """A prompt in the tree, until it is let go."""

    __slots__ = ("leaf", "space")

    def __init__(self, leaf: _Node, space: str) -> None:
        self.leaf = leaf
        self.space = space


class PrefixTree:
    """Prompts in flight, by space: what may not share a cache is in different spaces."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all prompts, each shared run counted once."""
        self._roots: dict[str, _Node] = {}

    def shared_tokens(self, ids: Sequence[int], space: str) -> int:
        """How many of the first ids the tree has already."""
        node, at = self._roots.get(space), 0
        while node is not None and at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                break
            same = _common(child.ids, ids, at, min(child.stop, len(ids)))
            at += same
            if same < child.stop - child.start:
                break
            node = child
        return at

    def hold(self, ids: Sequence[int], space: str) -> Held:
        """Take a prompt in. `ids` must stay as it is until the prompt is let go."""
        node, at = self._roots.get(space), 0
        if node is None:
            node = self._roots[space] = _Node(None, (), 0, 0)
        node.holders += 1
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                child = node.children[ids[at]] = _Node(node, ids, at, len(ids))
                self.tokens += len(ids) - at
            else:
                same = _common(child.ids, ids, at, min(child.stop, len(ids)))
                if same < child.stop - child.start:
                    child = _split(child, same)
            child.holders += 1
            node, at = child, child.stop
        return Held(node, space)

    def let_go(self, held: Held) -> None:
        """Take a prompt out, once."""
        node: _Node | None = held.leaf
        while node is not None:
            node.holders -= 1
            if not node.holders:
                self.tokens -= node.stop - node.start
                if node.parent is None:
                    del self._roots[held.space]
                else:
                    del node.parent.children[node.ids[node.start]]
            node = node.parent


def _split(node: _Node, same: int) -> _Node:
    """Cut a node after its first `same` ids; the first part, which takes its place, comes back."""
    parent, cut = node.parent, node.start + same
    assert parent is not None
    first = _Node(parent, node.ids, node.start, cut)
    first.holders = node.holders
    first.children[node.ids[cut]] = node
    parent.children[node.ids[node.start]] = first
    node.parent, node.start = first, cut
    return first


def _common(known: Sequence[int], ids: Sequence[int], start: int, stop: int) -> int:
    """How many ids from `start` are the same in both, `stop` excluded."""
    at, stride = start, _STRIDE
    while at < stop:
        end = min(at + stride, stop)
        if known[at:end] != ids[at:end]:
            return _first_other(known, ids, at, end) - start
        at, stride = end, stride * 2
    return stop - start


def _first_other(known: Sequence[int], ids: Sequence[int], start: int, stop: int) -> int:
    """The first position in which both differ; there is one."""
    while stop - start > 1:
        middle = (start + stop) // 2
        if known[start:middle] != ids[start:middle]:
            stop = middle
        else:
            start = middle
    return start


SAFETY = 2.5
"""Standard deviations of margin."""
HEADROOM = 0.02
"""Part of the pool that is never reserved: pages that are not full, and what was not foreseen."""
_SAMPLES = 6


class KVReservation:
    """What one request takes of the pool."""

    __slots__ = ("generated", "held", "ids", "mean", "most", "n", "space", "variance")

    def __init__(
        self, ids: Sequence[int], space: str | None, n: int, most: int, growth: LengthEstimate
    ) -> None:
        self.ids: Sequence[int] = ids if type(ids) is list else list(ids)
        self.space = space
        self.n = n
        self.most = n * most
        self.generated = 0
        self.held: Held | None = None
        self.mean = self.variance = 0
        self.expect(growth)

    def expect(self, growth: LengthEstimate) -> None:
        """Take on a new estimate of a choice's length. Choices are alike: their deviations add up."""
        self.mean = min(self.n * growth.mean, self.most)
        self.variance = self.n * self.n * growth.variance


class KVBudget:
    """Who holds how much of the KV memory. All in tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_reservations = 0
        self.used_tokens = 0
        """Generated tokens of requests in flight, as last seen."""
        self._tree = PrefixTree()
        self._private_tokens = 0
        self._mean = self._variance = self._most = 0
        self._drifts: deque[int] = deque(maxlen=_SAMPLES)
        self.drift_tokens = 0
        """What the engine uses beyond what is known here."""

    @property
    def prompt_tokens(self) -> int:
        """Distinct prompt tokens of the requests in flight."""
        return self._tree.tokens + self._private_tokens

    @property
    def committed_tokens(self) -> int:
        """What is reserved now."""
        return self.prompt_tokens + self._growth(0, 0, 0)

    @property
    def limit_tokens(self) -> int:
        """What may be reserved."""
        return int(self.capacity_tokens * (1 - HEADROOM)) - self.drift_tokens

    def shared_tokens(self, reservation: KVReservation) -> int:
        """Tokens of the prompt that others in flight hold already."""
        return (
            0 if reservation.space is None else self._tree.shared_tokens(reservation.ids, reservation.space)
        )

    def fits(self, reservation: KVReservation, spare_tokens: int = 0) -> bool:
        """Whether there is room, `spare_tokens` left over; into an empty pool everything fits."""
        if not self.num_reservations:
            return True
        growth = self._growth(reservation.mean, reservation.variance, reservation.most)
        room = self.limit_tokens - spare_tokens - self.prompt_tokens - growth
        if room >= len(reservation.ids) or room < 0:
            return room >= 0
        return room >= len(reservation.ids) - self.shared_tokens(reservation)

    def take(self, reservation: KVReservation) -> None:
        """Reserve."""
        self.num_reservations += 1
        if reservation.space is None:
            self._private_tokens += len(reservation.ids)
        else:
            reservation.held = self._tree.hold(reservation.ids, reservation.space)
        self._count(reservation, 1)

    def correct(self, reservation: KVReservation, growth: LengthEstimate, generated: int) -> None:
        """Take on what is known now of a request in flight."""
        self._count(reservation, -1)
        reservation.generated = generated
        reservation.expect(growth)
        self._count(reservation, 1)

    def give_back(self, reservation: KVReservation) -> None:
        """End a reservation."""
        self.num_reservations -= 1
        self._count(reservation, -1)
        if reservation.held is None:
            self._private_tokens -= len(reservation.ids)
        else:
            self._tree.let_go(reservation.held)
            reservation.held = None

    def observe(self, used_tokens: int) -> None:
        """Compare with what the engine says that it uses.

        What it says is some steps old, and has requests that ended since: the least of the last
        comparisons counts.
        """
        self._drifts.append(max(used_tokens - self.prompt_tokens - self.used_tokens, 0))
        least = min(self._drifts) if len(self._drifts) == _SAMPLES else 0
        self.drift_tokens = min(least, self.capacity_tokens // 2)

    def forget_drift(self) -> None:
        """Begin to compare anew, with an engine that has just started."""
        self._drifts.clear()
        self.drift_tokens = 0

    def _count(self, reservation: KVReservation, sign: int) -> None:
        self._mean += sign * reservation.mean
        self._variance += sign * reservation.variance
        self._most += sign * reservation.most
        self.used_tokens += sign * reservation.generated

    def _growth(self, mean: int, variance: int, most: int) -> int:
        deviation = SAFETY * math.sqrt(self._variance + variance)
        return min(self._mean + mean + math.ceil(deviation), self._most + most)


STEP_TOKENS = 2048
"""The window after a start, its least, and what it grows by."""
LEAST_TOKENS = 64
"""What a request counts at least: each costs something, however short its prompt."""
DECREASE = 0.7


class PrefillWindow:
    """The window. `target_s` is the time from being let in to the first token."""

    def __init__(self, target_s: float, widest_tokens: int) -> None:
        self._target_s = target_s
        self._widest = max(widest_tokens, STEP_TOKENS)
        self.waiting_tokens = 0
        """Let in, and without a first token."""
        self._prefill = Throughput(self._widest / target_s, 0.0)
        self.reset()

    def reset(self) -> None:
        """Narrow the window: the engine has just started. What it had before it is lost with it."""
        self.window_tokens = float(STEP_TOKENS)
        self._threshold = math.inf
        self._closed_at_s = -math.inf
        self._limiting = False

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of so many uncached tokens may go to the engine now; a single one always."""
        open_ = not self.waiting_tokens or self.waiting_tokens + self.size(tokens) <= self.window_tokens
        self._limiting = self._limiting or not open_
        return open_

    def soon_tokens(self, age_s: float) -> int:
        """What may wait for the prefill alone, at the pace of late: for half of the target, less its age."""
        left_s = max(self._target_s / 2 - age_s, 0.0)
        return int(self._prefill.tokens_per_s * left_s) - self.waiting_tokens

    @staticmethod
    def size(tokens: int) -> int:
        """What a prompt counts."""
        return max(tokens, LEAST_TOKENS)

    def enter(self, tokens: int, now_s: float) -> bool:
        """Let a prompt in; whether it has others before it."""
        before = self.waiting_tokens > 0
        if not before:
            # From here on it is measured, not since the last burst.
            self._prefill.advance(now_s, waiting=False)
        self.waiting_tokens += self.size(tokens)
        return before

    def leave(self, tokens: int) -> None:
        """A prompt ended without a first token."""
        self.waiting_tokens -= self.size(tokens)

    def started(self, tokens: int, admitted_s: float, now_s: float, *, queued_behind: bool) -> None:
        """A prompt has its first token. Late ones count where they had others before them."""
        size = self.size(tokens)
        self._prefill.advance(
            now_s, waiting=self._limiting
        )  # a window that holds nobody back measures nothing
        self._prefill.freed(size if self._limiting else 0)
        wide = self._limiting or 2 * self.waiting_tokens >= self.window_tokens
        self.waiting_tokens -= size
        if now_s - admitted_s > self._target_s:
            if (
                queued_behind and admitted_s >= self._closed_at_s
            ):  # once for those let in before it was narrowed
                self.window_tokens = max(self.window_tokens * DECREASE, STEP_TOKENS)
                self._threshold = self.window_tokens
                self._closed_at_s = now_s
        elif wide:  # a window that nobody fills says nothing about a wider one
            slow = self.window_tokens >= self._threshold
            self.window_tokens += STEP_TOKENS * size / self.window_tokens if slow else size
            self.window_tokens = min(self.window_tokens, self._widest)
        if not self.waiting_tokens:
            self._limiting = False


LOOK_S = 1.0
"""How long TPOT is measured before the window is changed."""
TIME_LEFT = 0.95
"""Below this part of the target the window widens."""
FIRST_CHOICES = 8.0
"""The window after a start."""
LEAST_PART = 0.7
"""What one look leaves of it, at the least: a long prompt makes one slow second."""
OVER = 1.5
"""With so many times as many running it does not narrow: they were let in before it last did."""


FILLED = 0.75
"""From this part of it on the window is full; then TPOT tells how far it may widen."""
UNPROVEN = 3.0
"""The window is at most so many times what has been seen to run within the target: a request of many choices
must not be the one that shows how slow so many are, for they are let in together."""
SMOOTHING = 0.3
"""Weight of one look in the TPOT of an engine that few use: a burst after a stall is no fast step."""


class DecodeWindow:
    """The window. `target_s` is the time per output token; 0 is none, and the window has no end.

    With `slowdown` the target is so many times the least TPOT that was measured since the start.
    """

    def __init__(self, target_s: float = 0.0, *, slowdown: float = 0.0) -> None:
        self._fixed_target_s = target_s
        self._slowdown = slowdown
        self.reset()

    def reset(self) -> None:
        """Begin anew: the engine has just started."""
        self._target_s = self._fixed_target_s
        self._smooth_s = self._least_s = 0.0
        self.most_choices = FIRST_CHOICES if self._target_s or self._slowdown else math.inf
        self._proven_choices = FIRST_CHOICES
        self._narrowed = self._held_back = False
        self._tokens = 0
        self._took_s = 0.0
        self._looked_s: float | None = None

    @property
    def shown(self) -> float:
        """The window as a metric shows it: 0 for one without end."""
        return 0.0 if math.isinf(self.most_choices) else self.most_choices

    def has_place(self, num_choices: int, spare: float) -> bool:
        """Whether so many may run, a part of the window kept for others."""
        open_ = num_choices <= self.most_choices * (1.0 - spare)
        self._held_back = self._held_back or not open_
        return open_

    def made(self, tokens: int, took_s: float, running: int, now_s: float) -> None:
        """A choice has been given so many tokens in that time, beside `running` with itself."""
        if not (self._target_s or self._slowdown):
            return
        if self._looked_s is None:
            self._looked_s = now_s
        self._tokens += tokens
        self._took_s += took_s
        if now_s - self._looked_s < LOOK_S:
            return
        tpot_s = self._took_s / self._tokens
        if self._slowdown:
            self._learn(tpot_s)
        part = tpot_s / self._target_s
        held_back, self._held_back = self._held_back, False
        self._tokens, self._took_s, self._looked_s = 0, 0.0, now_s
        if part > 1.0:
            if 1 < running <= OVER * self.most_choices:
                self._narrowed = True
                self.most_choices = max(self.most_choices * max(1.0 / part, LEAST_PART), 1.0)
            return
        self._proven_choices = max(self._proven_choices, running)
        if part < TIME_LEFT and held_back:
            self._widen(running, running / part)

    def _widen(self, running: int, safe_choices: float) -> None:
        """Let more run; `safe_choices` would be within the target were all of a step's time the choices'."""
        if self._narrowed:
            wider = self.most_choices + 1.0
        elif running >= FILLED * self.most_choices:
            wider = max(self.most_choices + 1.0, safe_choices)
        else:
            wider = 2 * self.most_choices
        self.most_choices = max(min(wider, UNPROVEN * self._proven_choices), self.most_choices)

    def _learn(self, tpot_s: float) -> None:
        self._smooth_s += (tpot_s - self._smooth_s) * (SMOOTHING if self._smooth_s else 1.0)
        self._least_s = min(self._least_s or math.inf, self._smooth_s)
        self._target_s = self._slowdown * self._least_s
