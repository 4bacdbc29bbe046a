"""The limit on a mask's time: one rank's clock counts, and the others hear of it only while they wait."""

from __future__ import annotations

import pytest

from app.engine.sglang.stall_limit import StallLimit


class Board:
    """What two ranks tell one another, and how often one of them asked."""

    def __init__(self) -> None:
        self.told: set[str] = set()
        self.asked = 0


class Rank:
    """One rank's end of it."""

    def __init__(self, board: Board, *, is_first: bool) -> None:
        self._board = board
        self.is_first = is_first

    def set(self, key: str) -> None:
        self._board.told.add(key)

    def has(self, key: str) -> bool:
        self._board.asked += 1
        return key in self._board.told


@pytest.fixture
def board() -> Board:
    """Nothing told yet."""
    return Board()


def limits(board: Board) -> tuple[StallLimit, StallLimit]:
    """Those of the first rank and of another, in their first step."""
    first = StallLimit(0.5, Rank(board, is_first=True))
    other = StallLimit(0.5, Rank(board, is_first=False))
    for limit in (first, other):
        limit.begin_step()
    return first, other


def test_the_first_rank_goes_by_its_clock_and_the_other_by_the_first(board: Board) -> None:
    """However long a mask takes on the other rank, it waits until the first has left that row."""
    first, other = limits(board)
    assert not first.is_over(3, 0.4)
    assert not other.is_over(3, 9.0)
    assert first.is_over(3, 0.6)
    first.leave(3)
    assert other.is_over(3, 0.0)
    assert not other.is_over(4, 9.0)


def test_a_row_left_in_one_step_is_not_left_in_the_next(board: Board) -> None:
    """The same row is another request's then, unless the first rank says it again."""
    first, other = limits(board)
    first.leave(0)
    for limit in (first, other):
        limit.begin_step()
    assert not other.is_over(0, 9.0)


def test_the_other_rank_tells_nothing(board: Board) -> None:
    """Only one may decide."""
    _, other = limits(board)
    other.leave(0)
    assert board.told == set()


def test_one_rank_alone_needs_no_store() -> None:
    """Its own clock counts."""
    limit = StallLimit(0.5)
    limit.begin_step()
    limit.leave(0)
    assert (limit.is_over(0, 0.6), limit.is_over(0, 0.4)) == (True, False)
