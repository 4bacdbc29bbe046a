"""How fast a model was when it was last full, over restarts."""

from __future__ import annotations

from pathlib import Path

from app.admission.estimates import LengthHistogram, Throughput, ThroughputProfile, expected
from tests.support.admissions import TUNING

LENGTHS = LengthHistogram(TUNING)


def measured(tokens_per_s: float, seconds: int = 120) -> Throughput:
    """A throughput after so long a wait."""
    throughput = Throughput(1.0, 0.0, TUNING)
    for second in range(1, seconds + 1):
        throughput.advance(float(second), waiting=True)
        throughput.freed(int(tokens_per_s))
    return throughput


def test_nothing_known_is_guessed_low() -> None:
    """A pool in eight seconds, and never more than a small model does: a large pool is no fast engine."""
    assert ThroughputProfile(None, TUNING).throughput("m", 8000, 0.0).tokens_per_s == 1000.0
    assert (
        ThroughputProfile(None, TUNING).throughput("m", 10**6, 0.0).tokens_per_s == TUNING.guess_tokens_per_s
    )


def test_a_restarted_process_begins_with_what_was_measured(tmp_path: Path) -> None:
    """Each model has its own; a few seconds of waiting are no measurement."""
    file = tmp_path / "throughput.json"
    first = ThroughputProfile(file, TUNING)
    first.observe("m", measured(20_000), LENGTHS, 120.0)
    first.observe("n", measured(50_000, seconds=3), LENGTHS, 500.0)
    assert 18_000 < ThroughputProfile(file, TUNING).throughput("m", 8000, 0.0).tokens_per_s < 22_000
    assert ThroughputProfile(file, TUNING).throughput("n", 8000, 0.0).tokens_per_s == 1000.0
    other = ThroughputProfile(file, TUNING)
    other.observe("n", measured(300), LENGTHS, 120.0)
    assert 18_000 < ThroughputProfile(file, TUNING).throughput("m", 8000, 0.0).tokens_per_s < 22_000


def test_the_file_of_an_earlier_version_is_read_and_replaced(tmp_path: Path) -> None:
    """By its first write."""
    file, old = tmp_path / "throughput.json", tmp_path / "pace.json"
    ThroughputProfile(file, TUNING).observe("m", measured(20_000), LENGTHS, 120.0)
    file.rename(old)
    profile = ThroughputProfile(file, TUNING)
    assert profile.throughput("m", 8000, 0.0).tokens_per_s > 18_000
    profile.observe("m", measured(20_000), LENGTHS, 120.0)
    assert file.exists()
    assert not old.exists()


def test_what_was_measured_outlasts_a_start(tmp_path: Path) -> None:
    """Nothing ends in the first seconds of a full node: five of them make it a third less, not a sixth."""
    file = tmp_path / "throughput.json"
    ThroughputProfile(file, TUNING).observe("m", measured(1000), LENGTHS, 120.0)
    for profile, least in ((ThroughputProfile(file, TUNING), 600), (ThroughputProfile(None, TUNING), 100)):
        throughput = profile.throughput("m", 8000, 0.0)
        throughput.advance(5.0, waiting=True)
        assert least < throughput.tokens_per_s < least + 100


def test_it_is_written_once_a_minute(tmp_path: Path) -> None:
    """Not at every look; and this process goes by what it saw last."""
    file = tmp_path / "throughput.json"
    profile = ThroughputProfile(file, TUNING)
    profile.observe("m", measured(1000), LENGTHS, 120.0)
    earlier = file.read_text()
    profile.observe("m", measured(2000), LENGTHS, 170.0)
    assert file.read_text() == earlier
    assert profile.throughput("m", 8, 0.0).tokens_per_s > 1500
    profile.observe("m", measured(2000), LENGTHS, 181.0)
    assert file.read_text() != earlier


def test_how_long_answers_are_is_known_again_too(tmp_path: Path) -> None:
    """What a key without a past is expected to answer is the same before and after."""
    lengths = LengthHistogram(TUNING)
    for tokens in (3, 30, 30, 40, 500) * 30:
        lengths.add(tokens)
    ThroughputProfile(tmp_path / "throughput.json", TUNING).observe("m", measured(1000), lengths, 120.0)
    again = ThroughputProfile(tmp_path / "throughput.json", TUNING).lengths("m")
    earlier, after, unknown = (
        expected(LengthHistogram(TUNING), entry, 0, 4096, TUNING)
        for entry in (lengths, again, LengthHistogram(TUNING))
    )
    assert earlier == after
    assert after.mean < unknown.mean


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    """Text, another shape, a number that is none: the guess; a folder that is not there: nothing is kept."""
    file = tmp_path / "throughput.json"
    contents = (
        '{"tokens_per_s": "fast"}',
        '{"tokens_per_s": NaN, "answers": 3}',
        '{"answers": [[1, 9]]}',
        "3",
    )
    for text in ("{", "[1]", "\xff", *(f'{{"m": {entry}}}' for entry in contents)):
        file.write_text(text, "latin-1")
        assert ThroughputProfile(file, TUNING).throughput("m", 8000, 0.0).tokens_per_s == 1000.0
        assert not ThroughputProfile(file, TUNING).lengths("m").total
    ThroughputProfile(tmp_path / "nowhere" / "throughput.json", TUNING).observe(
        "m", measured(1000), LENGTHS, 120.0
    )
