"""Every metric there is: its name, what it means and where it is read.

docs/metrics.md is made from these tables. Each reads one object: the runtime, a model's traffic,
an engine's load, a model's admission (app.api.metrics.admission) and balance, a tier's refusals.
"""

from __future__ import annotations

from pathlib import Path

from app.api.metrics.admission import OF_ADMISSION
from app.api.metrics.kinds import counter, gauge, histogram
from app.api.metrics.models import OF_DEGRADED, OF_MODE, OF_PLACES, OF_ROUTES


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


OF_PROCESS = (
    gauge(
        "tokenring_ready",
        "0 or 1",
        "Whether new requests are taken, as `/readyz` says.",
        lambda r: r.ready,
        labels=(),
    ),
    gauge(
        "tokenring_live_streams",
        "streams",
        "Streams whose generation has not ended.",
        lambda r: r.streams.num_live,
        labels=(),
    ),
    gauge(
        "tokenring_stream_readers",
        "readers",
        "Clients attached to a stream, live or ended.",
        lambda r: r.streams.num_readers,
        labels=(),
    ),
    gauge(
        "tokenring_retained_streams",
        "streams",
        "Streams that have ended and are still in memory.",
        lambda r: r.streams.num_retained,
        labels=(),
    ),
    gauge(
        "tokenring_live_streams_bytes",
        "bytes",
        "What live streams hold in memory.",
        lambda r: r.streams.live_bytes,
        labels=(),
    ),
    gauge(
        "tokenring_retained_streams_bytes",
        "bytes",
        "What ended streams hold in memory.",
        lambda r: r.streams.retained_bytes,
        labels=(),
    ),
    gauge(
        "tokenring_store_queue_depth",
        "units",
        "Units of work that wait for the store's writer or are being written.",
        lambda r: r.database.queue_depth,
        labels=(),
    ),
    gauge(
        "tokenring_store_writer_lag_seconds",
        "seconds",
        "How long the oldest unit not yet committed has waited; 0 when there is none.",
        lambda r: r.database.writer_lag_s,
        labels=(),
    ),
    counter(
        "tokenring_store_commits_total",
        "commits",
        "Transactions committed.",
        lambda r: r.database.num_commits,
        labels=(),
    ),
    counter(
        "tokenring_store_units_total",
        "units",
        "Units of work in them; units over commits is how many share one fsync.",
        lambda r: r.database.num_units,
        labels=(),
    ),
    gauge(
        "tokenring_store_failing",
        "0 or 1",
        "Whether the last commit failed; new requests are refused until one succeeds.",
        lambda r: r.database.failing,
        labels=(),
    ),
    gauge(
        "tokenring_store_file_bytes",
        "bytes",
        "Size of the database file, without its log.",
        lambda r: _size_bytes(r.database.path),
        labels=(),
    ),
    gauge(
        "tokenring_store_wal_bytes",
        "bytes",
        "Size of the write-ahead log, which grows while a reader holds a long transaction.",
        lambda r: _size_bytes(_log_of(r.database.path)),
        labels=(),
    ),
    gauge(
        "tokenring_checkpoint_age_seconds",
        "seconds",
        "How long ago live streams were last checkpointed: what a crash now would lose of them.",
        lambda r: r.journal.checkpoint_age_s,
        labels=(),
    ),
    gauge(
        "tokenring_unsettled_requests",
        "requests",
        "Ended requests whose settlement is not committed yet.",
        lambda r: r.journal.num_unsettled,
        labels=(),
    ),
    gauge(
        "tokenring_unsettled_age_seconds",
        "seconds",
        "How long the oldest of them has waited; 0 when there is none.",
        lambda r: r.journal.unsettled_age_s,
        labels=(),
    ),
    gauge(
        "tokenring_reconciled_requests",
        "requests",
        "Requests that a dead process had left open, settled when this one started.",
        lambda r: r.num_reconciled,
        labels=(),
    ),
    gauge(
        "tokenring_ledger_differs",
        "0 or 1",
        "Whether any request's bill was not what was handed over; 1 stays until the restart.",
        lambda r: r.balance.differs,
        labels=(),
    ),
)

OF_TRAFFIC = (
    counter(
        "tokenring_requests_total",
        "requests",
        "Requests that came to their end. `outcome` is their finish reasons, or an error's code.",
        lambda t: t.outcomes,
        labels=("model", "outcome"),
    ),
    counter(
        "tokenring_prompt_tokens_total",
        "tokens",
        "Prompt tokens, as settled.",
        lambda t: t.usage.prompt_tokens,
    ),
    counter(
        "tokenring_cached_tokens_total",
        "tokens",
        "The part of the prompt tokens that the prefix cache had.",
        lambda t: t.usage.cached_tokens,
    ),
    counter(
        "tokenring_completion_tokens_total",
        "tokens",
        "Generated tokens, as settled.",
        lambda t: t.usage.completion_tokens,
    ),
    counter(
        "tokenring_reasoning_tokens_total",
        "tokens",
        "The part of the generated tokens that is reasoning.",
        lambda t: t.usage.reasoning_tokens,
    ),
    counter(
        "tokenring_withheld_tokens_total",
        "tokens",
        "The part of the generated tokens that was released to no one, and is not billed.",
        lambda t: t.usage.withheld_tokens,
    ),
    counter(
        "tokenring_cost_micro_usd_total",
        "micro-dollars",
        "What the settled requests cost, at the prices stored with them.",
        lambda t: t.cost_micro_usd,
    ),
    histogram(
        "tokenring_queue_seconds",
        "seconds",
        "From a request's arrival until it was admitted: rendering, and waiting for room and its turn.",
        lambda t: t.queue,
    ),
    histogram(
        "tokenring_time_to_first_token_seconds",
        "seconds",
        "From a request's arrival until its first token.",
        lambda t: t.ttft,
    ),
    histogram(
        "tokenring_time_per_output_token_seconds",
        "seconds",
        "From a request's first token to its last, over one token less; of its longest choice.",
        lambda t: t.tpot,
    ),
    histogram(
        "tokenring_request_duration_seconds",
        "seconds",
        "From a request's arrival until its end, whichever it was.",
        lambda t: t.total,
    ),
)

OF_ENGINE = (
    gauge(
        "tokenring_engine_running_requests",
        "requests",
        "Requests that the engine runs.",
        lambda e: e.num_running_reqs,
    ),
    gauge(
        "tokenring_engine_queued_requests",
        "requests",
        "Requests in the engine's own queue.",
        lambda e: e.num_queue_reqs,
    ),
    gauge(
        "tokenring_engine_used_tokens",
        "tokens",
        "KV cache that running requests take.",
        lambda e: e.used_tokens,
    ),
    gauge(
        "tokenring_engine_max_tokens",
        "tokens",
        "KV cache that there is.",
        lambda e: e.max_total_tokens,
    ),
    gauge(
        "tokenring_engine_throughput_tokens_per_second",
        "tokens/second",
        "Tokens generated a second, as the engine measures it.",
        lambda e: e.gen_throughput_tokens_per_s,
    ),
    counter(
        "tokenring_engine_retractions_total",
        "requests",
        "Running requests that the engine set aside for lack of KV memory, counted when they end.",
        lambda e: e.num_retractions,
    ),
)

OF_BALANCE = (
    counter(
        "tokenring_ledger_tokens_total",
        "tokens",
        "Generated tokens of the settlements that this process has committed.",
        lambda b: b.ledger_tokens,
    ),
    counter(
        "tokenring_handed_over_tokens_total",
        "tokens",
        "Token ids of the same requests, counted by other code where the engine hands them over.",
        lambda b: b.handed_over_tokens,
    ),
    counter(
        "tokenring_unread_tokens_total",
        "tokens",
        "Those handed over and neither read nor billed, because the generation was not read to its end.",
        lambda b: b.unread_tokens,
    ),
    counter(
        "tokenring_ledger_differing_requests_total",
        "requests",
        "Requests whose bill is not what was handed over.",
        lambda b: b.differing_requests,
    ),
    counter(
        "tokenring_ledger_drift_tokens_total",
        "tokens",
        "By how many tokens they differ, more and less added up.",
        lambda b: b.drift_tokens,
    ),
)

OF_LIMITS = (
    counter(
        "tokenring_limited_requests_total",
        "requests",
        "Requests refused with 429 for their key's limits. `tokens_rendered` is found after rendering;"
        " `reads` are lists, views, exports and stored answers.",
        lambda refused: refused,
        labels=("tier", "reason"),
    ),
)

OF_PREFIXES = (
    counter(
        "tokenring_prefix_break_total",
        "requests",
        "Requests whose system prompt the prefix cache should have had and had not; see docs/prefixes.md.",
        lambda broken: broken,
        labels=("cause",),
    ),
)

OF_ABUSE = (
    gauge(
        "tokenring_abuse_flags",
        "flags",
        "Keys that an admin may want to look at, as `/api/admin/abuse` lists them.",
        lambda flags: flags,
        labels=("kind",),
    ),
)

OF_VERDICTS = (
    counter(
        "tokenring_safety_verdicts_total",
        "verdicts",
        "What the screens decided; `none` and `pass` where no category reached a threshold.",
        lambda value: value,
        labels=("stage", "category", "action"),
    ),
)

OF_SCREEN_FAILURES = (
    counter(
        "tokenring_safety_failures_total",
        "failures",
        "Screens that threw or took too long; `outcome` is `refused`, or `passed` with `safety_fail_open`.",
        lambda failed: failed,
        labels=("stage", "reason", "outcome"),
    ),
)

OF_SCREENS = (
    histogram(
        "tokenring_safety_hold_back_seconds",
        "seconds",
        "From when a delta came from the engine until it was released.",
        lambda s: s.hold_back,
        labels=(),
    ),
    counter(
        "tokenring_safety_leaked_tokens_total",
        "tokens",
        "Tokens of halted answers that had been released after the one where the harm began.",
        lambda s: s.leaked_tokens,
        labels=(),
    ),
    counter(
        "tokenring_safety_dropped_tokens_total",
        "tokens",
        "Tokens of halted answers that were held back and released to no one.",
        lambda s: s.dropped_tokens,
        labels=(),
    ),
)

METRICS = (
    *OF_PROCESS,
    *OF_PLACES,
    *OF_ROUTES,
    *OF_MODE,
    *OF_DEGRADED,
    *OF_TRAFFIC,
    *OF_ADMISSION,
    *OF_ENGINE,
    *OF_BALANCE,
    *OF_LIMITS,
    *OF_PREFIXES,
    *OF_ABUSE,
    *OF_VERDICTS,
    *OF_SCREEN_FAILURES,
    *OF_SCREENS,
)


def markdown() -> str:
    """The table of docs/metrics.md."""
    rows = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return "\n".join(rows) + "\n"
