"""The memory row of `bench path`: what a server of ours holds after many requests, against after a few."""

from __future__ import annotations

from scripts.benchmarks.driver import run_load
from scripts.benchmarks.findings import Finding, unjudged, within
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.processes import ServerProcess
from scripts.benchmarks.prompts import chat_work

FIRST, AT_ONCE, STREAMS, TOKENS = 1_000, 10_000, 32, 2
"""Requests before the first reading, requests of a run of the load generator, and what each asks for."""
MAX_GROWTH = 1.1
"""The same memory, give or take what an allocator keeps."""


def measure(server: ServerProcess, requests: int) -> list[Finding]:
    """Start a server, read its resident memory after the first requests and after `requests` of them.

    Raises RunFailed where an answer is not whole.
    """
    server.start()
    try:
        server.wait_ready()
        sent = _send(server, 0, min(FIRST, requests))
        early_bytes = server.rss_bytes()
        while sent < requests:
            sent += _send(server, sent, min(AT_ONCE, requests - sent))
        late_bytes = server.rss_bytes()
    finally:
        server.stop()
    label = f"memory after {requests:,} requests against after {min(FIRST, requests):,}"
    return [
        within(label, late_bytes / early_bytes, MAX_GROWTH, "{:.3f}"),
        unjudged(f"memory after {requests:,} requests, MB", late_bytes / 1e6, "{:.0f}"),
    ]


def _send(server: ServerProcess, sent: int, count: int) -> int:
    work = chat_work("scripted", count, mean_tokens=TOKENS, prompt_words=10, seed=sent + 1, spread=0.0)
    path, bodies, output_tokens = "/api/chat/completions", work.bodies, work.output_tokens
    run_load(server, LoadPlan("127.0.0.1", server.port, path, bodies, output_tokens, STREAMS))
    return count
