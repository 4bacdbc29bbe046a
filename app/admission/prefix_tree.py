"""The prompts in flight as a tree of token ids: what they share, the engine holds once.

A node is a run of ids that no prompt in flight leaves in the middle. Taking in a prompt costs a
comparison of what it shares with others, at the speed of list slices, and one node for the rest,
however long that is.
"""

from __future__ import annotations

from collections.abc import Sequence

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
