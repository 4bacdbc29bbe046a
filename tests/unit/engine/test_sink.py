"""Token ids counted apart: what a tally remembers, and for how long."""

from app.engine.sink import Tallies


def test_a_running_tally_is_kept_and_an_ended_one_told_once():
    """Asking does not forget what still runs; after the end it does."""
    tallies = Tallies()
    tally = tallies.begin("a")
    tally.add(3)
    assert (tallies.pop("a"), tallies.pop("a")) == (3, 3)
    tallies.end("a")
    assert (tallies.pop("a"), tallies.pop("a")) == (3, 0)


def test_ids_that_come_after_the_end_do_not_count():
    """They reach nobody: the stream they were for has failed."""
    tallies = Tallies()
    tally = tallies.begin("a")
    tally.add(3)
    tallies.end("a")
    tally.add(1)
    assert tallies.pop("a") == 3


def test_the_oldest_ended_tallies_are_forgotten():
    """What nobody asks for does not pile up; what runs is never forgotten."""
    tallies = Tallies(remembered=2)
    for name in ("running", "a", "b", "c"):
        tallies.begin(name).add(1)
    for name in ("a", "b", "c", "unknown"):
        tallies.end(name)
    assert [tallies.pop(name) for name in ("running", "a", "b", "c")] == [1, 0, 1, 1]
