"""Every metric there is: its name, what it means and where it is read.

docs/metrics.md is made from these tables. Each reads one object: the runtime, a model's traffic,
an engine's load, a model's admission (app.api.metrics.admission) and balance, a tier's refusals.
"""

from __future__ import annotations

from pathlib import Path

from app.api.metrics.admission import OF_ADMISSION
from app.api.metrics.kinds import counter, gauge, histogram
from app.api.metrics.models import OF_BACKENDS, OF_DEGRADED, OF_MODE, OF_ROUTES
from app.api.metrics.restarts import OF_LOSSES, OF_RESTARTS
from app.api.metrics.safety import OF_LIFTED, OF_OBSERVED, OF_SCREEN_FAILURES, OF_SCREENS, OF_VERDICTS


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


OF_PROCESS = (
    gauge(
        "tokenring_ready",
        "0 or 1",
        "Whether new requests are accepted, as `/readyz` says.",
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
        "Clients attached to a stream, whether it is live or has ended.",
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
        "Memory that the events of live streams take.",
        lambda r: r.streams.live_bytes,
        labels=(),
    ),
    gauge(
        "tokenring_retained_streams_bytes",
        "bytes",
        "Memory that the events of ended streams take.",
        lambda r: r.streams.retained_bytes,
        labels=(),
    ),
    gauge(
        "tokenring_store_queue_depth",
        "units",
        "Units of work that wait for the store's writer, or are being written.",
        lambda r: r.database.queue_depth,
        labels=(),
    ),
    gauge(
        "tokenring_store_writer_lag_seconds",
        "seconds",
        "Waiting time of the oldest unit of work that is not committed; 0 if there is none.",
        lambda r: r.database.writer_lag_s,
        labels=(),
    ),
    counter(
        "tokenring_store_commits_total",
        "commits",
        "Transactions committed by the store's writer.",
        lambda r: r.database.num_commits,
        labels=(),
    ),
    counter(
        "tokenring_store_units_total",
        "units",
        "Units of work in those transactions; units divided by commits is how many share one fsync.",
        lambda r: r.database.num_units,
        labels=(),
    ),
    gauge(
        "tokenring_store_failing",
        "0 or 1",
        "Whether the last commit failed; while it is 1, new requests are refused.",
        lambda r: r.database.failing,
        labels=(),
    ),
    gauge(
        "tokenring_store_file_bytes",
        "bytes",
        "Size of the database file, without its write-ahead log.",
        lambda r: _size_bytes(r.database.path),
        labels=(),
    ),
    gauge(
        "tokenring_store_wal_bytes",
        "bytes",
        "Size of the write-ahead log; it grows while a reader holds a long transaction.",
        lambda r: _size_bytes(_log_of(r.database.path)),
        labels=(),
    ),
    gauge(
        "tokenring_checkpoint_age_seconds",
        "seconds",
        "Time since live streams were last checkpointed; a crash now would lose this much of them.",
        lambda r: r.journal.checkpoint_age_s,
        labels=(),
    ),
    gauge(
        "tokenring_unsettled_requests",
        "requests",
        "Ended requests whose settlement is not committed.",
        lambda r: r.journal.num_unsettled,
        labels=(),
    ),
    gauge(
        "tokenring_unsettled_age_seconds",
        "seconds",
        "Waiting time of the oldest unsettled request; 0 if there is none.",
        lambda r: r.journal.unsettled_age_s,
        labels=(),
    ),
    gauge(
        "tokenring_reconciled_requests",
        "requests",
        "Requests that a dead process had left open, and that this process settled at its start.",
        lambda r: r.num_reconciled,
        labels=(),
    ),
    gauge(
        "tokenring_suspended_streams",
        "streams",
        "Streams that the process before has suspended, and that nobody has asked for yet.",
        lambda r: len(r.suspensions),
        labels=(),
    ),
    counter(
        "tokenring_continued_streams_total",
        "streams",
        "Suspended streams that went on in this process.",
        lambda r: r.suspensions.num_continued,
        labels=(),
    ),
    counter(
        "tokenring_expired_streams_total",
        "streams",
        "Suspended streams that nobody asked for within `suspend_timeout_s`, settled at what was released.",
        lambda r: r.suspensions.num_expired,
        labels=(),
    ),
    gauge(
        "tokenring_ledger_differs",
        "0 or 1",
        "Whether the bill of any request differs from what the engine handed over; 1 until the restart.",
        lambda r: r.balance.differs,
        labels=(),
    ),
)

OF_TRAFFIC = (
    counter(
        "tokenring_requests_total",
        "requests",
        "Requests that ended. `outcome` is their finish reasons, or the code of an error.",
        lambda t: t.outcomes,
        labels=("model", "outcome"),
    ),
    counter(
        "tokenring_prompt_tokens_total",
        "tokens",
        "Prompt tokens of settled requests.",
        lambda t: t.usage.prompt_tokens,
    ),
    counter(
        "tokenring_cached_tokens_total",
        "tokens",
        "Prompt tokens that were in the prefix cache.",
        lambda t: t.usage.cached_tokens,
    ),
    counter(
        "tokenring_completion_tokens_total",
        "tokens",
        "Generated tokens of settled requests.",
        lambda t: t.usage.completion_tokens,
    ),
    counter(
        "tokenring_reasoning_tokens_total",
        "tokens",
        "Generated tokens that are reasoning.",
        lambda t: t.usage.reasoning_tokens,
    ),
    counter(
        "tokenring_withheld_tokens_total",
        "tokens",
        "Generated tokens that were released to nobody, and are not billed.",
        lambda t: t.usage.withheld_tokens,
    ),
    counter(
        "tokenring_cost_micro_usd_total",
        "micro-dollars",
        "Cost of settled requests, at the prices stored with them.",
        lambda t: t.cost_micro_usd,
    ),
    histogram(
        "tokenring_queue_seconds",
        "seconds",
        "From a request's arrival to its admission: rendering, and waiting.",
        lambda t: t.queue,
    ),
    histogram(
        "tokenring_time_to_first_token_seconds",
        "seconds",
        "From a request's arrival to its first token.",
        lambda t: t.ttft,
    ),
    histogram(
        "tokenring_time_per_output_token_seconds",
        "seconds",
        "Time from the first token to the last, divided by the number of tokens less one; of the longest "
        "choice.",
        lambda t: t.tpot,
    ),
    histogram(
        "tokenring_request_duration_seconds",
        "seconds",
        "From a request's arrival to its end, whatever the outcome.",
        lambda t: t.total,
    ),
)

OF_ENGINE = (
    gauge(
        "tokenring_engine_running_requests",
        "requests",
        "Requests that the engine is running.",
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
        "KV cache that running requests use.",
        lambda e: e.used_tokens,
    ),
    gauge(
        "tokenring_engine_max_tokens",
        "tokens",
        "Size of the KV cache.",
        lambda e: e.max_total_tokens,
    ),
    gauge(
        "tokenring_engine_throughput_tokens_per_second",
        "tokens/second",
        "Tokens generated per second, as measured by the engine.",
        lambda e: e.gen_throughput_tokens_per_s,
    ),
    counter(
        "tokenring_engine_retractions_total",
        "requests",
        "Running requests that the engine set aside because KV memory ran out, counted when they end.",
        lambda e: e.num_retractions,
    ),
    counter(
        "tokenring_remote_faults_total",
        "faults",
        "Faults of remote servers, by kind; see docs/remote.md.",
        lambda e: e.faults,
        labels=("model", "kind"),
    ),
    counter(
        "tokenring_remote_moved_total",
        "choices",
        "Choices whose remote server was lost: `resumed` at another one or once it was back, or `ended`.",
        lambda e: e.moved,
        labels=("model", "outcome"),
    ),
)

OF_BALANCE = (
    counter(
        "tokenring_ledger_tokens_total",
        "tokens",
        "Generated tokens in the settlements that this process has committed.",
        lambda b: b.ledger_tokens,
    ),
    counter(
        "tokenring_handed_over_tokens_total",
        "tokens",
        "Token ids of the same requests, counted separately where the engine hands them over.",
        lambda b: b.handed_over_tokens,
    ),
    counter(
        "tokenring_unread_tokens_total",
        "tokens",
        "Token ids handed over, and neither released nor billed, because the generation broke off.",
        lambda b: b.unread_tokens,
    ),
    counter(
        "tokenring_ledger_differing_requests_total",
        "requests",
        "Requests whose bill differs from what the engine handed over.",
        lambda b: b.differing_requests,
    ),
    counter(
        "tokenring_ledger_drift_tokens_total",
        "tokens",
        "Sum of these differences, without their signs.",
        lambda b: b.drift_tokens,
    ),
)

OF_LIMITS = (
    counter(
        "tokenring_limited_requests_total",
        "requests",
        "Requests refused with 429 by a key's limits. `tokens_rendered`: refused after rendering; `reads`: "
        "lists, views, exports and stored answers.",
        lambda refused: refused,
        labels=("tier", "reason"),
    ),
)

OF_PREFIXES = (
    counter(
        "tokenring_prefix_break_total",
        "requests",
        "Requests whose system prompt should have been in the prefix cache and was not; see "
        "docs/prefixes.md.",
        lambda broken: broken,
        labels=("cause",),
    ),
)

OF_RESPONSES = (
    counter(
        "tokenring_http_responses_total",
        "responses",
        "HTTP responses by route and status, refusals and wrong keys too. `route` is a template such as"
        " `/v1/models/{id:path}`, and `none` where no route was met.",
        lambda statuses: statuses,
        labels=("route", "status"),
    ),
)

OF_ABUSE = (
    gauge(
        "tokenring_abuse_flags",
        "flags",
        "Flags of keys that an admin may want to look at; see docs/abuse.md.",
        lambda flags: flags,
        labels=("kind",),
    ),
)

METRICS = (
    *OF_PROCESS,
    *OF_LOSSES,
    *OF_RESTARTS,
    *OF_BACKENDS,
    *OF_ROUTES,
    *OF_MODE,
    *OF_DEGRADED,
    *OF_TRAFFIC,
    *OF_ADMISSION,
    *OF_ENGINE,
    *OF_BALANCE,
    *OF_RESPONSES,
    *OF_LIMITS,
    *OF_PREFIXES,
    *OF_ABUSE,
    *OF_VERDICTS,
    *OF_OBSERVED,
    *OF_LIFTED,
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
