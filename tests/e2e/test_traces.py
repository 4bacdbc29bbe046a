"""OpenTelemetry: a trace of each request reaches a collector, with its stages, and with none of its text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.engine.scripted.engine import Script
from tests.support.collector import Collector, collector
from tests.support.servers import Serve, chat

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["receive", "queue", "prefill", "decode", "settle"]


@pytest.fixture
def collected() -> Iterator[Collector]:
    """What a collector gets."""
    with collector() as kept:
        yield kept


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as numbers and texts."""
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


async def test_a_request_is_a_trace_of_its_stages(serve: Serve, collected: Collector) -> None:
    """One span for the whole, and one for each stage, end to end, below it; names, counts and no text."""
    served = await serve(Script(tokens=9, prefill_s=0.06), otlp_endpoint=collected.url)
    answer = await served.post(chat("a secret question"))
    await served.runtime.aclose()
    assert set(collected.paths) == {"/v1/traces"}
    assert collected.resource["service.name"] == "tokenring"
    *stages, whole = collected.spans
    assert [span.name for span in stages] == STAGES
    assert {span.parent_span_id for span in stages} == {whole.span_id}
    assert {span.trace_id for span in stages} == {whole.trace_id}
    edges = [whole.start_time_unix_nano, *(span.end_time_unix_nano for span in stages)]
    assert edges[:-1] == [span.start_time_unix_nano for span in stages]
    assert edges[-1] == whole.end_time_unix_nano
    # of 60 ms: uvloop's timers count whole milliseconds, and one may come early
    assert stages[2].end_time_unix_nano - stages[2].start_time_unix_nano >= 0.05e9
    assert whole.name == "chat scripted"
    said = attributes(whole)
    assert said["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (9, "stop")
    sent = b"".join(collected.bodies)
    assert b"secret" not in sent
    assert b"ring" not in sent.replace(b"tokenring", b"")  # a word of the answer


async def test_the_trace_of_the_caller_goes_on(serve: Serve, collected: Collector) -> None:
    """Spans are below the caller's `traceparent`; an unsampled trace and a wrong header are no error."""
    served = await serve(Script(tokens=3), otlp_endpoint=collected.url)
    for flags in ("01", "00"):
        await served.post(chat(), traceparent=f"00-{TRACE_ID}-{SPAN_ID}-{flags}")
    wrong = await served.post(chat(), traceparent="00-\u0fff-" + "f" * 900)
    assert wrong.status == 200
    await served.runtime.aclose()
    wholes = [span for span in collected.spans if span.name.startswith("chat")]
    assert len(wholes) == 2, "what its caller does not sample is not sent"
    assert (wholes[0].trace_id.hex(), wholes[0].parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert not wholes[1].parent_span_id


async def test_a_request_that_fails_is_an_error(serve: Serve, collected: Collector) -> None:
    """The last stage is the one that it failed in, and the code of the error stands in the trace."""
    served = await serve(Script(tokens=9, fault="fail", fault_after=4), otlp_endpoint=collected.url)
    await served.post(chat())
    await served.runtime.aclose()
    *stages, whole = collected.spans
    assert [span.name for span in stages] == STAGES[:4]
    assert (whole.status.code, whole.status.message) == (2, "engine_failed")
    assert attributes(whole)["error.type"] == "engine_failed"


async def test_a_collector_that_is_away_holds_nothing_up(serve: Serve) -> None:
    """Requests are answered, and the server stops within its seconds for it."""
    served = await serve(Script(tokens=3), otlp_endpoint="http://127.0.0.1:9")
    assert (await served.post(chat())).status == 200
    await served.runtime.aclose()
