"""Every metric there is: its name, its meaning and where it is read. docs/metrics.md is made of these tables.

A table is a text. A row has the kind and name, the unit, the attribute that is read, and the labels beside
the table's own; the lines below it are the meaning. An attribute with labels is a mapping by them, nested.
What an engine counts begins at 0 with each engine, as after a reset; all else begins with the process.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar, cast

from app.core import TIERS
from app.errors import EngineNotReady
from app.routing.backend import Backend
from app.runtime import Runtime

T = TypeVar("T")
Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """A metric. `read` gives its number or its histogram, or these by the labels behind the table's own."""

    kind: Kind
    name: str
    unit: str
    meaning: str
    read: Callable[[Any], Any]
    labels: tuple[str, ...]


class Table(NamedTuple):
    """Metrics that are read from the same objects: `sources` has one for each value of the first label."""

    sources: Callable[[Runtime], Mapping[str, Any]]
    metrics: tuple[Metric, ...]


def _rows(text: str, labels: tuple[str, ...]) -> Iterator[Metric]:
    rows: list[tuple[str, list[str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if " | " in line:
            rows.append((line, []))
        else:
            rows[-1][1].append(line)
    for row, meaning in rows:
        name, unit, attribute, *more = row.split(" | ")
        kind, name = name.split()
        own = tuple(" ".join(more).split())
        yield Metric(cast("Kind", kind), name, unit, " ".join(meaning), attrgetter(attribute), labels + own)


def _table(sources: Callable[[Runtime], Mapping[str, Any]], text: str, *labels: str) -> Table:
    return Table(sources, tuple(_rows(text, labels)))


def by_model(runtime: Runtime, read: Callable[[Backend], T]) -> Mapping[str, T]:
    """Something of each model; nothing before its engine has one, and once it is dead."""
    readings = {}
    for backend in runtime.backends:
        with contextlib.suppress(EngineNotReady):
            readings[backend.id] = read(backend)
    return readings


def _process(runtime: Runtime) -> SimpleNamespace:
    path = runtime.database.path
    return SimpleNamespace(
        file_bytes=_size_bytes(path),
        disk_free_bytes=shutil.disk_usage(path.parent).free if path.exists() else 0,
        gpu_hour_usd=runtime.settings.gpu_hour_usd,
        wal_bytes=_size_bytes(path.with_name(path.name + "-wal")),
        num_suspended=len(runtime.suspensions),
        responses=runtime.responses.by_route(),
        loop_cpu_s=time.thread_time(),  # a scrape is answered in the event loop
    )


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tiers(backend: Backend) -> SimpleNamespace:
    admission, ranks = backend.admission, range(len(TIERS))
    return SimpleNamespace(
        depth={TIERS[rank]: admission.queue.depth(rank) for rank in ranks},
        tokens={TIERS[rank]: admission.queue.waiting_tokens(rank) for rank in ranks},
        oldest_s={TIERS[rank]: admission.waited_s(rank) for rank in ranks},
    )


TABLES = (
    _table(
        lambda runtime: {"": runtime},
        """
        gauge tokenring_ready | 0 or 1 | ready
            Whether new requests are accepted, as `/readyz` says.
        gauge tokenring_live_streams | streams | streams.num_live
            Streams whose generation has not ended.
        gauge tokenring_stream_readers | readers | streams.num_readers
            Clients attached to a stream, whether it is queued, live or has ended.
        gauge tokenring_retained_streams | streams | streams.num_retained
            Streams that have ended and are still in memory.
        gauge tokenring_live_streams_bytes | bytes | streams.live_bytes
            Memory that the events of live streams take.
        gauge tokenring_retained_streams_bytes | bytes | streams.retained_bytes
            Memory that the events of ended streams take.
        histogram tokenring_event_loop_lag_seconds | seconds | loop_lag
            Delay of a timer of the event loop, once a second.
        gauge tokenring_store_queue_depth | units | database.queue_depth
            Units of work that wait for the store's writer, or are being written.
        gauge tokenring_store_writer_lag_seconds | seconds | database.writer_lag_s
            Waiting time of the oldest unit of work that is not committed; 0 if there is none.
        counter tokenring_store_commits_total | commits | database.num_commits
            Transactions committed by the store's writer.
        counter tokenring_store_units_total | units | database.num_units
            Units of work in those transactions; units divided by commits is how many share one fsync.
        gauge tokenring_store_failing | 0 or 1 | database.failing
            Whether the last commit failed; while it is 1, new requests are refused.
        gauge tokenring_checkpoint_age_seconds | seconds | journal.checkpoint_age_s
            Time since live streams were last checkpointed; a crash now would lose this much of them.
        gauge tokenring_unsettled_requests | requests | journal.num_unsettled
            Ended requests whose settlement is not committed.
        gauge tokenring_unsettled_age_seconds | seconds | journal.unsettled_age_s
            Waiting time of the oldest unsettled request; 0 if there is none.
        gauge tokenring_reconciled_requests | requests | num_reconciled
            Requests that a dead process had left open, and that this process settled at its start.
        counter tokenring_continued_streams_total | streams | suspensions.num_continued
            Suspended streams that were continued by this process.
        counter tokenring_expired_streams_total | streams | suspensions.num_expired
            Suspended streams that no client resumed within `suspend_timeout_s`, settled at the
            released tokens.
        gauge tokenring_ledger_differs | 0 or 1 | balance.differs
            Whether the bill of any request differs from what the engine handed over; 1 until the
            restart.

        counter tokenring_outages_total | outages | restarts.losses | cause
            Times that the engine was lost: a process `exited`, it `hung`, or it `failed` to start or be
            read.
        counter tokenring_restarts_total | restarts | restarts.num_restarts
            Times that the engine was started again and its streams continued.
        counter tokenring_outage_seconds_total | seconds | restarts.away_s
            Time from each loss of the engine to the end of its restart, added up.
        gauge tokenring_last_outage_seconds | seconds | restarts.last_away_s
            The same for the last restart; 0 if there was none.
        counter tokenring_choices_resumed_total | choices | restarts.num_choices_continued
            Choices that continued after a restart of the engine.
        counter tokenring_choices_lost_total | choices | restarts.num_choices_lost
            Choices that ended because the engine was lost.
        counter tokenring_contradictions_total | choices | restarts.num_contradictions
            Outputs of the engine that contradicted themselves, or arrived after their end; the log names
            each.

        counter tokenring_limited_requests_total | requests | limiter.refused | tier reason
            Requests refused with 429 by a key's limits. `tokens_rendered`: refused after rendering;
            `reads`: lists, views, exports and stored answers.
        counter tokenring_prefix_break_total | requests | prefixes.breaks | cause
            Requests whose system prompt should have been in the prefix cache and was not; see
            docs/prefixes.md.
        gauge tokenring_abuse_flags | flags | abuse.counts | kind
            Flags of keys that an admin may want to look at; see docs/abuse.md.

        counter tokenring_safety_verdicts_total | verdicts | safety_counters.verdicts | stage category action
            Decisions of safety screening; `none` and `pass` if no category reached a threshold.
        counter tokenring_safety_observed_total | verdicts | safety_counters.observed | stage category action
            Decisions that safety screening recorded and did not take, because the policy observes.
        counter tokenring_safety_lifted_total | prompts | safety_counters.lifted | category
            Prompts that the classifiers would refuse and an `allow` entry of the policy lets be
            watched.
        counter tokenring_safety_failures_total | failures | safety_counters.failures | stage reason outcome
            Screenings that failed or took too long; `outcome` is `refused`, or `passed` with
            `safety_fail_open`.
        histogram tokenring_safety_hold_back_seconds | seconds | safety_counters.hold_back
            From the arrival of a delta from the engine to its release.
        counter tokenring_safety_examined_answers_total | examinations | safety_counters.examined_answers
            Answers read by the encoder, as they were flagged or their prompts watched.
        counter tokenring_safety_leaked_tokens_total | tokens | safety_counters.leaked_tokens
            Tokens of halted answers that were released after the token where the harm began.
        counter tokenring_safety_dropped_tokens_total | tokens | safety_counters.dropped_tokens
            Tokens of halted answers that were held back and never released.
        """,
    ),
    _table(
        lambda runtime: {"": _process(runtime)},
        """
        gauge tokenring_store_file_bytes | bytes | file_bytes
            Size of the database file, without its write-ahead log.
        gauge tokenring_store_wal_bytes | bytes | wal_bytes
            Size of the write-ahead log; it grows while a reader holds a long transaction.
        gauge tokenring_store_disk_free_bytes | bytes | disk_free_bytes
            Room left on the database's disk.
        gauge tokenring_suspended_streams | streams | num_suspended
            Streams that the previous process has suspended, and that no client has resumed yet.
        counter tokenring_event_loop_cpu_seconds_total | seconds | loop_cpu_s
            CPU time of the event loop's thread. Where its rate is near 1, the event loop limits the node,
            and not the engine; see docs/sizing.md.
        counter tokenring_http_responses_total | responses | responses | route status
            HTTP responses by route and status, refusals and wrong keys too. `route` is a template such
            as `/v1/models/{id:path}`, and `none` where no route was met.
        gauge tokenring_gpu_hour_usd | dollars | gpu_hour_usd
            The setting of that name.
        """,
    ),
    _table(
        lambda runtime: {"": runtime.gpus},
        """
        gauge tokenring_gpu_utilization | 0 to 1 | utilization | gpu
            Share of time in which a kernel ran, from nvidia-smi.
        gauge tokenring_gpu_used_bytes | bytes | used_bytes | gpu
            Memory in use.
        gauge tokenring_gpu_memory_bytes | bytes | total_bytes | gpu
            Its memory.
        gauge tokenring_gpu_power_watts | watts | power_w | gpu
            Its power.
        """,
    ),
    _table(
        lambda runtime: {} if runtime.router is None else {"": runtime.router},
        """
        counter tokenring_routed_total | requests | routed | model reason
            Requests for the model `auto`, by the chosen model and the reason; see docs/routing.md.
        """,
    ),
    _table(
        lambda runtime: {} if runtime.degrade is None else {"": runtime.degrade},
        """
        gauge tokenring_degraded_step | 0 to 3 | step
            Step of degraded mode: 1 shortens answers, 2 also uses the small model, 3 refuses requests;
            see docs/routing.md.
        gauge tokenring_degraded_pressure | 1 | pressure
            Pressure that decides the step: the expected wait divided by the longest allowed one, or the
            share of the queue in use; the larger.
        counter tokenring_degraded_requests_total | requests | requests_by_measure | done
            Requests affected by degraded mode: shortened, answered by the small model, or refused.
        """,
    ),
    _table(
        lambda runtime: runtime.traffic.models,
        """
        counter tokenring_requests_total | requests | finishes | outcome
            Requests that ended. `outcome` is their finish reasons, or the code of an error.
        counter tokenring_prompt_tokens_total | tokens | usage.prompt_tokens
            Prompt tokens of settled requests.
        counter tokenring_cached_tokens_total | tokens | usage.cached_tokens
            Prompt tokens that were in the prefix cache.
        counter tokenring_completion_tokens_total | tokens | usage.completion_tokens
            Generated tokens of settled requests.
        counter tokenring_reasoning_tokens_total | tokens | usage.reasoning_tokens
            Generated tokens that are reasoning.
        counter tokenring_withheld_tokens_total | tokens | usage.withheld_tokens
            Generated tokens that were never released, and are not billed.
        counter tokenring_cost_micro_usd_total | micro-dollars | cost_micro_usd
            Cost of settled requests, at the prices stored with them.
        histogram tokenring_queue_seconds | seconds | queue
            From a request's arrival to its admission: rendering, and waiting.
        histogram tokenring_time_to_first_token_seconds | seconds | ttft | prefix
            From a request's arrival to its first token; `hit` where half of the prompt was cached, else
            `miss`.
        histogram tokenring_time_per_output_token_seconds | seconds | tpot
            Time from the first token to the last, divided by the number of tokens less one; of the
            longest choice.
        histogram tokenring_request_duration_seconds | seconds | total
            From a request's arrival to its end, whatever the outcome.
        """,
        "model",
    ),
    _table(
        lambda runtime: by_model(runtime, _tiers),
        """
        gauge tokenring_admission_waiting_requests | requests | depth | tier
            Requests that wait for admission to the engine.
        gauge tokenring_admission_waiting_tokens | tokens | tokens | tier
            KV memory that waiting requests are expected to need.
        gauge tokenring_admission_oldest_wait_seconds | seconds | oldest_s | tier
            Waiting time of the oldest waiting request; 0 if there is none.
        """,
        "model",
    ),
    _table(
        lambda runtime: by_model(runtime, lambda backend: backend),
        """
        gauge tokenring_model_ready | 0 or 1 | ready
            Whether the model takes requests; the small model may be away while the server is ready.
        """,
        "model",
    ),
    _table(
        lambda runtime: by_model(runtime, lambda backend: backend.admission),
        """
        gauge tokenring_admission_reserved_tokens | tokens | scheduler.kv_pools.committed_tokens
            KV memory reserved for admitted requests: their prompts, and the expected length of their
            answers.
        gauge tokenring_admission_reservable_tokens | tokens | scheduler.kv_pools.limit_tokens
            KV memory that may be reserved: the engine's, less a margin and unaccounted use.
        gauge tokenring_admission_prefill_tokens | tokens | scheduler.prefill_window.waiting_tokens
            Uncached prompt tokens of admitted requests that have no first token yet.
        gauge tokenring_admission_gate_tokens | tokens | scheduler.prefill_window.window_tokens
            Bound on those tokens; narrow after a start, and while first tokens are late.
        gauge tokenring_admission_decode_window | choices | scheduler.window.shown
            Choices that may run at the same time to keep `tpot_target_s`; 0 is no bound.
        gauge tokenring_admission_key_window | choices | scheduler.key_window.shown
            Choices that may run at the same time before a key with more than its share must wait
            (`key_slowdown`); 0 is no bound.
        histogram tokenring_inter_token_latency_seconds | seconds | itl
            Time between two tokens: of each 32, later of each eighth of an answer, a random one counts
            for all.
        counter tokenring_prefill_tokens_total | tokens | prefill_tokens
            Computed prompt tokens, without cached ones; counted with first tokens.
        counter tokenring_decode_tokens_total | tokens | decode_tokens
            Generated tokens after first ones; counted every 32 of an answer.
        counter tokenring_admission_admitted_total | requests | admitted | tier
            Admitted requests, whether they had waited or not.
        counter tokenring_admission_let_in_total | requests | admitted | tier
            The same by its earlier name, which the next version no longer has.
        counter tokenring_admission_refused_total | requests | load_shedder.refused | tier code
            Requests refused for lack of capacity; with `queue_timeout` after their whole waiting time.
        counter tokenring_admission_appointments_total | requests | load_shedder.retry_slots | outcome
            Refused requests that returned at the time of `Retry-After` (`kept`), or did not
            (`missed`).
        counter tokenring_admission_unread_aborted_total | streams | num_unread_aborted
            Streams without a reader that were stopped because other requests waited for KV memory.
        """,
        "model",
    ),
    _table(
        lambda runtime: by_model(runtime, lambda backend: backend.engine.load()),
        """
        gauge tokenring_engine_running_requests | requests | num_running_reqs
            Choices that the engine is running: the size of its batch.
        gauge tokenring_engine_queued_requests | requests | num_queue_reqs
            Requests in the engine's own queue.
        gauge tokenring_engine_used_tokens | tokens | used_tokens
            KV cache that running requests use.
        gauge tokenring_engine_max_tokens | tokens | max_total_tokens
            Size of the KV cache.
        gauge tokenring_engine_throughput_tokens_per_second | tokens/second | gen_throughput_tokens_per_s
            Tokens generated per second, as measured by the engine.
        counter tokenring_engine_retractions_total | requests | num_retractions
            Running requests that the engine set aside because KV memory ran out, counted when they end.
        counter tokenring_remote_faults_total | faults | faults | kind
            Faults of remote servers, by kind; see docs/remote.md.
        counter tokenring_remote_moved_total | choices | moved | outcome
            Choices whose remote server was lost: `resumed` at another one or once it was back, or
            `ended`.
        """,
        "model",
    ),
    _table(
        lambda runtime: runtime.balance.models,
        """
        counter tokenring_ledger_tokens_total | tokens | ledger_tokens
            Generated tokens in the settlements that this process has committed.
        counter tokenring_handed_over_tokens_total | tokens | handed_over_tokens
            Token ids of the same requests, counted separately where the engine hands them over.
        counter tokenring_unread_tokens_total | tokens | unread_tokens
            Token ids handed over, and neither released nor billed, because the generation was interrupted.
        counter tokenring_ledger_differing_requests_total | requests | differing_requests
            Requests whose bill differs from what the engine handed over.
        counter tokenring_ledger_drift_tokens_total | tokens | drift_tokens
            Sum of these differences, without their signs.
        """,
        "model",
    ),
)

METRICS = tuple(metric for table in TABLES for metric in table.metrics)
