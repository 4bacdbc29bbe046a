"""What is said of many open streams."""

from scripts.benchmarks.connections import _rows

SEEN = {
    "streams": 10_000,
    "fates": {"whole": 9_998, "cut after 200": 2},
    "delay_p50_ms": 9.3,
    "delay_p99_ms": 122.0,
    "delay_with_client_lag_p99_ms": 150.0,
    "bytes_per_stream": 46 * 1024,
    "server_cpus": 0.76,
    "machine_cpus": 1.4,
}


def test_streams_that_broke_and_late_events_are_missed():
    """What became of the streams that were not whole is named."""
    verdicts = {row.label.partition(": ")[2]: row.verdict for row in _rows(SEEN)}
    assert verdicts["streams not whole (2 cut after 200)"] == "missed"
    assert verdicts["delay p99, ms"] == "missed"
    assert verdicts["memory of each, KB"] == "met"
    whole = {**SEEN, "fates": {"whole": 10_000}, "delay_p99_ms": 80.0}
    assert [row.verdict for row in _rows(whole)][:3] == ["met"] * 3
