"""/metrics and /readyz over HTTP: what they say is what happened, and the ledger balances."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.api.metrics.tables import METRICS
from app.core import ChatRequest, KeyTerms, Usage
from app.engine.scripted.engine import Script, ScriptedEngine
from app.errors import EngineNotReady, NotFound
from app.routing.backend import Backend
from app.store import ledger as ledger_module
from app.store.keys import create
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import until

PRICES = ({"model": "scripted", "input": "1", "cached_input": "0.5", "output": "2"},)

Samples = dict[tuple[str, tuple[str, ...]], float]


async def scrape(served: Served, **headers: str) -> Samples:
    """Every sample by its name and label values, the model first."""
    answer = await served.call("GET", "/metrics", **headers)
    assert answer.status == 200
    families = list(parse_text(answer.body.decode()))
    samples = [sample for family in families for sample in family.samples]
    by_key = {}
    for sample in samples:
        labels = sorted(sample.labels.items(), key=lambda label: label[0] != "model")
        by_key[sample.name, tuple(value for _, value in labels)] = sample.value
    assert len(by_key) == len(samples), "a sample twice"
    return by_key


def of_model(samples: Samples, name: str) -> float:
    """The scripted model's sample."""
    return samples[f"tokenring_{name}", ("scripted",)]


def by_content(**scripts: Script):
    """A script per message content; all others get the plain one."""

    def script_for(request: ChatRequest) -> Script:
        return scripts.get(request.body["messages"][0]["content"], Script(tokens=20))

    return script_for


async def test_every_documented_metric_is_there(serve: Serve):
    """/metrics has each metric of the table, as the type it says, and no other."""
    served = await serve()
    text = (await served.call("GET", "/metrics")).body.decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types == {metric.name: metric.kind for metric in METRICS}
    assert {line.split("{")[0].split()[0] for line in text.splitlines() if line[0] != "#"} >= {
        metric.name for metric in METRICS if metric.kind == "gauge" and metric.labels != ("gpu",)
    }


async def test_openmetrics_to_who_asks(serve: Serve):
    """A scraper that accepts OpenMetrics gets it, down to its end mark."""
    served = await serve(Script(tokens=5))
    await served.post(chat())
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    answer = await served.call("GET", "/metrics", accept=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(answer.body.decode())}
    assert names == {metric.name.removesuffix("_total") for metric in METRICS}


async def test_counters_begin_at_zero(serve: Serve):
    """A model's counters are there before its first request."""
    samples = await scrape(await serve())
    for metric in METRICS:
        if metric.kind == "counter" and metric.labels == ("model",):
            assert samples[metric.name, ("scripted",)] == 0


async def test_a_request_is_counted_as_it_was_billed(serve: Serve):
    """Tokens, cost and outcome are those of the answer and of /api/usage."""
    served = await serve(Script(tokens=9, reasoning=4), prices=PRICES)
    usage = (await served.post(chat(stream=False))).json()["usage"]
    samples = await scrape(served)
    assert samples["tokenring_requests_total", ("scripted", "stop")] == 1
    assert of_model(samples, "prompt_tokens_total") == usage["prompt_tokens"]
    assert of_model(samples, "completion_tokens_total") == usage["completion_tokens"] == 9
    assert of_model(samples, "reasoning_tokens_total") == 4
    billed = (await served.call("GET", "/api/usage")).json()
    assert of_model(samples, "cost_micro_usd_total") == billed["cost_micro_usd"] > 0
    for name in ("queue", "time_per_output_token", "request_duration"):
        assert of_model(samples, f"{name}_seconds_count") == 1
        assert samples[f"tokenring_{name}_seconds_bucket", ("scripted", "+Inf")] == 1
    assert samples["tokenring_time_to_first_token_seconds_count", ("scripted", "miss")] == 1


async def test_latencies_are_seconds(serve: Serve):
    """A prefill of 0.2 s lies between 0.1 and 5 s to the first token."""
    served = await serve(Script(tokens=2, prefill_s=0.2))
    await served.post(chat())
    samples = await scrape(served)
    buckets = "tokenring_time_to_first_token_seconds_bucket"
    within = [samples[buckets, ("scripted", bound, "miss")] for bound in ("0.1", "5.0")]
    assert within == [0, 1]


async def test_first_tokens_are_split_by_the_prefix_cache(serve: Serve):
    """A prompt that comes again is a hit, as most of it is cached; the first time it is a miss."""
    served = await serve(Script(tokens=2))
    for _ in range(3):
        await served.post(chat("a prompt of many words " * 20))
    samples = await scrape(served)
    name = "tokenring_time_to_first_token_seconds_count"
    assert (samples[name, ("scripted", "miss")], samples[name, ("scripted", "hit")]) == (1, 2)


async def test_tokens_are_counted_while_an_answer_grows(serve: Serve):
    """Computed prompt tokens with the first token, generated ones in steps; at the end all but the first."""
    served = await serve(Script(rate=200, tokens=100))
    async with await served.open(chat()) as stream:
        await stream.read_events(60)
        grown = await scrape(served)
        assert of_model(grown, "decode_tokens_total") >= 32
        assert of_model(grown, "prefill_tokens_total") > 0
        await stream.to_end()
    samples = await scrape(served)
    assert of_model(samples, "decode_tokens_total") == 99
    assert of_model(samples, "prefill_tokens_total") == of_model(samples, "prompt_tokens_total")


async def test_inter_token_latency_is_that_of_the_engine(serve: Serve):
    """Of an answer at 100 tokens a second most gaps are between 5 and 50 ms, and each step counts whole."""
    served = await serve(Script(rate=100, tokens=98))
    await served.post(chat())
    samples = await scrape(served)
    bucket = "tokenring_inter_token_latency_seconds_bucket"
    assert samples[bucket, ("scripted", "0.005")] == 0
    assert of_model(samples, "inter_token_latency_seconds_count") in (96, 128)


async def test_the_price_of_the_gpus_is_there(serve: Serve):
    """The setting, from which the cost of a million tokens is made; and room on the disk."""
    samples = await scrape(await serve(gpu_hour_usd=2.5))
    assert samples["tokenring_gpu_hour_usd", ()] == 2.5
    assert samples["tokenring_store_disk_free_bytes", ()] > 0


async def test_the_event_loop(serve: Serve):
    """CPU of its thread and not of others; a loop that was held for 0.2 s was late by some of that."""
    served = await serve(degrade_rise_s=0.1)
    name = "tokenring_event_loop_cpu_seconds_total"
    before_s = (await scrape(served))[name, ()]
    await asyncio.to_thread(burn, 0.2)
    between_s = (await scrape(served))[name, ()]
    assert between_s - before_s < 0.2
    burn(0.2)
    while (samples := await scrape(served))["tokenring_event_loop_lag_seconds_sum", ()] < 0.1:
        pass
    assert samples[name, ()] - between_s >= 0.2
    assert samples["tokenring_event_loop_lag_seconds_count", ()] > 0


def burn(seconds: float) -> None:
    """Use so much CPU in this thread."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


async def test_live_and_retained_streams(serve: Serve):
    """A stream and its reader count while it lives; then it is retained, with its bytes."""
    served = await serve(Script(rate=200, tokens=10_000))
    async with await served.open(chat()) as stream:
        await stream.read_events(3)
        samples = await scrape(served)
        assert samples["tokenring_live_streams", ()] == samples["tokenring_stream_readers", ()] == 1
        assert of_model(samples, "engine_running_requests") == 1
        assert of_model(samples, "engine_used_tokens") > 0
        await served.call("POST", f"/api/chat/completions/{stream.id}/cancel")
        await stream.to_end()
    samples = await scrape(served)
    assert (samples["tokenring_live_streams", ()], samples["tokenring_retained_streams", ()]) == (0, 1)
    assert samples["tokenring_retained_streams_bytes", ()] > 0


async def test_the_store(serve: Serve):
    """Commits, units and the file's size rise with work; nothing waits once it is done."""
    served = await serve(Script(tokens=3))
    before = await scrape(served)
    for _ in range(3):
        await served.post(chat())
    after = await scrape(served)
    for name in ("commits_total", "units_total"):
        assert after[f"tokenring_store_{name}", ()] > before[f"tokenring_store_{name}", ()]
    assert after["tokenring_store_units_total", ()] >= after["tokenring_store_commits_total", ()]
    assert after["tokenring_store_file_bytes", ()] > 0
    assert after["tokenring_store_wal_bytes", ()] > 0
    for name in ("store_failing", "unsettled_requests", "unsettled_age_seconds"):
        assert after[f"tokenring_{name}", ()] == 0
    assert 0 <= after["tokenring_checkpoint_age_seconds", ()] < 60


async def test_a_writer_that_lags_is_seen(serve: Serve):
    """While a unit holds the writer, the queue has a depth and its oldest unit an age."""
    served = await serve()
    release = threading.Event()
    held = served.runtime.database.submit(lambda _c: release.wait(20))
    waiting = served.runtime.database.submit(lambda _c: None)
    samples = await scrape(served)
    release.set()
    assert samples["tokenring_store_queue_depth", ()] >= 2  # a clock may have come due meanwhile
    assert 0 < samples["tokenring_store_writer_lag_seconds", ()] < 5
    await asyncio.gather(held, waiting)
    assert (await scrape(served))["tokenring_store_writer_lag_seconds", ()] == 0


async def test_scrape_before_the_engine_is_ready(serve: Serve):
    """Before start and before the engine has a model, /metrics answers, and says not ready."""

    class Loading(ScriptedEngine):
        """An engine that knows no model yet."""

        loading = True

        @property
        def model(self):
            """Unknown while it loads."""
            if self.loading:
                raise EngineNotReady("The engine is starting.", retry_after_s=5)
            return super().model

    served = await serve()
    runtime = served.runtime
    engine = Loading(Script())
    large = runtime.backends.large
    runtime.engine, ready = engine, runtime.engine
    runtime.backends.large = Backend(engine, large.admission)
    try:
        samples = await scrape(served)
    finally:
        runtime.engine, runtime.backends.large = ready, large
    assert samples["tokenring_ready", ()] == 0
    assert not any(name.startswith(("tokenring_engine", "tokenring_admission")) for name, _ in samples)
    assert (await scrape(served))["tokenring_ready", ()] == 1


async def test_a_dead_engine_is_not_ready(serve: Serve):
    """The server that can take no requests says so, and still answers scrapes."""
    served = await serve()
    served.engine.die("test")
    assert (await scrape(served))["tokenring_ready", ()] == 0


async def test_metrics_want_the_key(serve: Serve):
    """With an API key set /metrics is for those who have it; /readyz is for all."""
    served = await serve(api_key="sesame")
    assert (await served.call("GET", "/metrics")).refusal() == (401, "missing_api_key", None)
    assert (await scrape(served, authorization="Bearer sesame"))["tokenring_ready", ()] == 1
    assert (await served.call("GET", "/readyz")).status == 200


# The ledger against what was handed over


async def ledger(served: Served) -> dict[str, Any]:
    """What /readyz says of it, on a server that is ready."""
    answer = await served.call("GET", "/readyz")
    assert answer.status == 200
    detail: dict[str, Any] = answer.json()["ledger"]
    return detail


async def balanced(served: Served) -> Samples:
    """The samples, once everything is settled; the two counts are equal and no flag is up."""
    await until(lambda: not (served.live() or served.runtime.journal.num_unsettled))
    samples = await scrape(served)
    billed, emitted_tokens = (
        of_model(samples, "ledger_tokens_total"),
        of_model(samples, "handed_over_tokens_total"),
    )
    assert billed + of_model(samples, "unread_tokens_total") == emitted_tokens
    assert samples["tokenring_ledger_differs", ()] == 0
    assert not (await ledger(served))["differs"]
    return samples


async def test_a_miscount_raises_the_flag(serve: Serve):
    """One token too many on a bill shows in /readyz, /metrics and one warning; the server stays ready."""
    served = await serve(by_content(bad=Script(tokens=20, fault="miscount", fault_after=10)))
    await served.post(chat())
    await balanced(served)
    wrong = await served.post(chat("bad"))
    await served.post(chat())
    assert await ledger(served) == {
        "differs": True,
        "differing_requests": 1,
        "drift_tokens": 1,
        "last_request_id": wrong.headers["x-request-id"],
    }
    samples = await scrape(served)
    assert samples["tokenring_ledger_differs", ()] == 1
    assert of_model(samples, "ledger_tokens_total") == 61
    assert of_model(samples, "handed_over_tokens_total") == 60
    assert of_model(samples, "ledger_differing_requests_total") == 1
    assert of_model(samples, "ledger_drift_tokens_total") == 1
    [warning] = served.logged("ledger_differs")
    assert warning["request_id"] == wrong.headers["x-request-id"]


@pytest.mark.parametrize("body", [chat(n=3), chat(max_tokens=5), chat(stop=["ring"]), chat(stream=False)])
async def test_whole_answers_balance(serve: Serve, body: dict[str, Any]):
    """Several choices, a length, a stop string, an answer in one piece: the counts are equal."""
    served = await serve(Script(tokens=30, reasoning=2))
    await served.post(body)
    samples = await balanced(served)
    assert of_model(samples, "ledger_tokens_total") > 0
    assert of_model(samples, "unread_tokens_total") == 0


async def test_cancelled_answers_balance(serve: Serve):
    """After a cancel the bill has the engine's final count, which is what was handed over."""
    served = await serve(Script(rate=300, tokens=10_000))
    streams = [await served.open(chat(n=2)) for _ in range(3)]
    for stream in streams:
        async with stream:
            await stream.read_events(7)
            await served.call("DELETE", f"/api/chat/completions/{stream.id}")
            await stream.to_end()
    samples = await balanced(served)
    assert samples["tokenring_requests_total", ("scripted", "abort")] == 3
    assert of_model(samples, "unread_tokens_total") == 0


@pytest.mark.parametrize("fault", ["fail", "overload"])
async def test_failed_answers_balance(serve: Serve, fault: str):
    """An answer that broke, or was refused by the engine, raises no flag."""
    served = await serve(Script(tokens=20, fault=fault, fault_after=0 if fault == "overload" else 10))
    await served.post(chat())
    samples = await balanced(served)
    assert of_model(samples, "ledger_tokens_total") == (0 if fault == "overload" else 10)


async def test_a_dead_engine_s_answers_balance(serve: Serve):
    """What the engine handed over before it died is billed, and raises no flag."""
    served = await serve(by_content(die=Script(fault="die", fault_after=5), slow=Script(rate=50, tokens=99)))
    slow = await served.open(chat("slow"))
    await slow.read_events(3)
    await served.post(chat("die"))
    async with slow:
        await slow.to_end()
    await until(lambda: not served.runtime.journal.num_unsettled)
    balance = served.runtime.balance
    assert not balance.differs
    assert balance.models["scripted"].ledger_tokens == balance.models["scripted"].handed_over_tokens > 5


async def test_a_reader_that_breaks_is_explained(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Tokens handed over to a generation that broke are unread, and raise no flag."""
    served = await serve(Script(tokens=20))

    def broken(_stream: Any, _delta: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("app.stream.token_stream.TokenStream.append", broken)
    monkeypatch.setattr("app.pipeline.trace.Trace.record", lambda _trace, _delta: None)
    await served.post(chat())
    samples = await balanced(served)
    assert of_model(samples, "unread_tokens_total") == 1
    assert of_model(samples, "ledger_tokens_total") == 0


async def test_a_settlement_that_is_tried_again_counts_once(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """While it cannot be written the request is unsettled, and counted nowhere; then it is, once."""
    served = await serve(Script(tokens=20))
    settle, settle_all = ledger_module.settle, ledger_module.settle_all
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def refuse(*_args: Any) -> bool:
        raise full

    monkeypatch.setattr(ledger_module, "settle", refuse)
    monkeypatch.setattr(ledger_module, "settle_all", refuse)
    await served.post(chat())
    samples = await scrape(served)
    assert of_model(samples, "ledger_tokens_total") == of_model(samples, "handed_over_tokens_total") == 0
    assert samples["tokenring_unsettled_requests", ()] == 1
    assert samples["tokenring_unsettled_age_seconds", ()] > 0
    assert samples["tokenring_store_failing", ()] == 1
    monkeypatch.setattr(ledger_module, "settle", settle)
    monkeypatch.setattr(ledger_module, "settle_all", settle_all)
    samples = await balanced(served)
    assert of_model(samples, "ledger_tokens_total") == of_model(samples, "completion_tokens_total") == 20


async def test_a_row_that_is_not_what_was_said_differs(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """What is compared is what the store has: a row that others settled too early raises the flag."""
    served = await serve(Script(tokens=20))
    settle = ledger_module.settle

    def too_late(connection: sqlite3.Connection, settlement: ledger_module.Settlement) -> bool:
        early = dataclasses.replace(settlement, usage=Usage(completion_tokens=15))
        assert settle(connection, early)
        return settle(connection, settlement)

    def one_by_one(*_args: object) -> None:
        raise ledger_module.AlreadySettled

    monkeypatch.setattr(ledger_module, "settle", too_late)
    monkeypatch.setattr(ledger_module, "settle_all", one_by_one)
    await served.post(chat())
    detail = await ledger(served)
    assert (detail["differs"], detail["drift_tokens"]) == (True, 5)


async def test_a_refused_reservation_counts_nowhere(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """A request whose reservation cannot be written is not billed, and raises no flag."""
    served = await serve(Script(tokens=20))

    def refuse(*_args: Any) -> int:
        raise NotFound("Gone meanwhile.", code="conversation_not_found")

    monkeypatch.setattr(ledger_module, "reserve", refuse)
    await served.post(chat())
    samples = await balanced(served)
    assert of_model(samples, "handed_over_tokens_total") == 0
    assert served.engine._tallies._running == served.engine._tallies._ended == {}


async def test_every_response_is_counted_by_its_route_and_status(serve: Serve):
    """Answers, refusals, wrong keys and unknown paths, under templates: no path makes a label of its own."""
    served = await serve(Script(tokens=2), api_key="right")
    right = {"authorization": "Bearer right"}
    await served.post(chat(), **right)
    await served.post(chat(n=0), **right)
    await served.call("GET", "/v1/models/a", **right)
    await served.call("GET", "/v1/models/b/", **right)
    await served.call("GET", "/api/usage", authorization="Bearer wrong")
    await served.call("GET", "/no/such/path")
    await served.call("PUT", "/api/usage")
    samples = await scrape(served, **right)
    counted = {key: value for (name, key), value in samples.items() if "http_responses" in name}
    assert {key: value for key, value in counted.items() if key[0] != "/metrics"} == {
        ("/api/chat/completions", "200"): 1,
        ("/api/chat/completions", "400"): 1,
        ("/v1/models/{id:path}", "404"): 2,
        ("/api/usage", "401"): 1,
        ("/api/usage", "405"): 1,
        ("none", "404"): 1,
    }


async def test_what_is_no_request_is_counted_too(serve: Serve):
    """The connection answers broken HTTP by itself, without a route."""
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"this is not HTTP\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    samples = await scrape(served)
    assert samples["tokenring_http_responses_total", ("none", "400")] == 1


async def test_the_log_names_the_key_of_what_was_refused(serve: Serve, tmp_path: Path):
    """By its id, for a wrong secret of it too; an id that no key has is not written."""
    served = await serve(data_dir=tmp_path)
    issued = await served.runtime.database.write(lambda c: create(c, KeyTerms("laptop"), 1))
    await served.runtime.keys.load()
    for text in (issued.text, issued.text + "x", "tr-000000000000-" + "0" * 64):
        await served.call("GET", "/metrics", authorization=f"Bearer {text}")
    lines = [line for line in served.log if line["event"] == "refused"]
    assert [(line["status"], line["key"]) for line in lines] == [
        (403, issued.key.id),
        (401, issued.key.id),
        (401, None),
    ]
    assert issued.text.rpartition("-")[2] not in str(served.log)
