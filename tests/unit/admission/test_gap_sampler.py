"""The sampled time between two tokens: which gap is timed, and for how many it counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from app.admission.gap_sampler import GapSampler
from app.metering.traffic import Histogram


class Answer:
    """An answer whose tokens arrive at these times, in steps of 4 tokens after the first."""

    def __init__(self, chance: float) -> None:
        self.now_s = 0.0
        self.looks = 0
        self.gaps = Histogram((0.5, 1.0, 2.0))
        self.sampler = GapSampler(self.gaps, lambda: self.now_s, lambda: chance)

    def run(self, times_s: Sequence[float], tokens: Sequence[int] = range(1, 100)) -> list[int]:
        """Let the tokens arrive; returns how many gaps count up to each bound."""
        due, step_ends = 1, 1
        for self.now_s, count in zip(times_s, tokens, strict=False):
            if count < due:
                continue
            self.looks += 1
            due = self.sampler.look(count)
            if count >= step_ends:
                step_ends, due = count + 4, self.sampler.begin(count, 4)
        return [number for _, number in self.gaps.cumulative()]


@pytest.mark.parametrize(
    ("chance", "within"), [(0.0, [4, 4, 4, 4]), (0.5, [0, 0, 4, 4]), (0.99, [4, 4, 4, 4])]
)
def test_a_gap_of_a_step_counts_for_all_of_it(chance: float, within: list[int]) -> None:
    """Of four gaps, of which the third is long, chance says which is timed."""
    assert Answer(chance).run([0.0, 0.1, 0.2, 2.0, 2.1]) == within


def test_several_tokens_at_once_share_their_gap() -> None:
    """Four tokens that come together after two seconds took half a second each."""
    assert Answer(0.0).run([0.0, 2.0], [1, 5]) == [4, 4, 4, 4]


def test_tokens_between_cost_nothing() -> None:
    """A step of four tokens has at most three looks, also where no token is skipped."""
    answer = Answer(0.5)
    answer.run([float(i) for i in range(41)])
    assert answer.looks <= 31
    assert answer.gaps.cumulative()[-1][1] == 40


def test_an_end_without_a_token_is_no_gap() -> None:
    """The last delta has no token of its own: there is nothing to time."""
    assert Answer(0.0).run([0.0, 1.0], [1, 1]) == [0, 0, 0, 0]
