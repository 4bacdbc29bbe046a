"""Answers as training hears them: the same as the server does."""

from __future__ import annotations

import random

import numpy as np
import pytest

from app.safety.classifiers.output_model import BITS, OutputModel
from scripts.training.safety import replies
from scripts.training.safety.rows import Row

TEXT = "Sure, here's what I'd do: first, look around. " * 12


@pytest.fixture
def weights() -> np.ndarray:
    """A weight for each place, at random."""
    return np.random.default_rng(3).normal(size=1 << BITS).astype(np.float16).astype(np.float32)


def test_training_hears_what_the_server_hears(weights: np.ndarray):
    """The sum is the same after every token."""
    model = OutputModel(weights.astype(np.float16), drift=0.1, line=(1.0, 0.0))
    answer = model.start(0.0)
    reply = replies.read(Row(TEXT, harmful=True, source="test"))
    heard = replies.sums(weights, 0.1, [(reply, len(reply))])
    for token, total in zip(replies.tokens(TEXT), heard, strict=True):
        before = answer.logit
        answer.feed(token)
        assert answer.logit == pytest.approx(total, abs=1e-4) or answer.logit == before


def test_a_spliced_reply_is_heard_after_the_other(weights: np.ndarray):
    """Two replies in a row are heard as one text."""
    first = replies.read(Row("All is well. " * 40, harmful=False, source="test"))
    second = replies.read(Row(TEXT, harmful=True, source="test"))
    both = replies.sums(weights, 0.1, [(first, 50), (second, len(second))])
    assert len(both) == 50 + len(second)
    assert both[:50] == pytest.approx(replies.sums(weights, 0.1, [(first, 50)]))


def test_cuts_lie_within_the_reply():
    """What is trained on are the whole, beginnings and windows."""
    reply = replies.read(Row(TEXT, harmful=True, source="test"))
    found = replies.cuts(reply, random.Random(1), 50)
    assert found[0] == (0, len(reply))
    assert all(0 <= start < end <= len(reply) for start, end in found)
    assert any(end - start == replies.WINDOW_TOKENS for start, end in found)
    assert replies.cuts(replies.read(Row("No.", harmful=False, source="test")), random.Random(1), 4) == [
        (0, 2)
    ]


def test_one_hit_is_none():
    """A threshold counts as reached at the second of two tokens in a row."""
    scores = np.array([0.0, 3.0, 0.0, 2.0, 2.5, 0.0])
    assert replies.twice(scores) == 2.0
    assert replies.halted_at(scores, 2.0) == 4
    assert replies.halted_at(scores, 2.1) is None
