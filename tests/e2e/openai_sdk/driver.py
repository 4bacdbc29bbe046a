"""Runs one case after another on the Python SDK: a JSON line in, a JSON line out.

Knows nothing of this project, so that it runs in any environment that has `openai`.
`driver.mjs` beside it does the same on the Node SDK.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The schema that the parsing helper is given; zod's `Weather` in driver.mjs."""

    sky: Literal["clear", "cloudy"]
    windy: bool


def answer(completion: Any) -> dict[str, Any]:
    """What a completion in one piece says."""
    return {
        "id": completion.id,
        "text": [c.message.content for c in completion.choices],
        "finish": [c.finish_reason for c in completion.choices],
        "tools": [[call(t) for t in c.message.tool_calls or ()] for c in completion.choices],
        "usage": completion.usage and completion.usage.total_tokens,
        "parsed": [p.model_dump() for c in completion.choices if (p := getattr(c.message, "parsed", None))],
    }


def call(tool: Any) -> list[str]:
    """A tool call's name and arguments."""
    return [tool.function.name, tool.function.arguments]


def collected(chunks: Any) -> dict[str, Any]:
    """What the chunks of a stream add up to, put together as a user would."""
    out: dict[str, Any] = {"text": [], "finish": [], "tools": [], "usage": None, "chunks": 0}
    for chunk in chunks:
        out["chunks"] += 1
        out["id"] = chunk.id
        out["usage"] = chunk.usage.total_tokens if chunk.usage else out["usage"]
        for choice in chunk.choices:
            while len(out["text"]) <= choice.index:
                for name, empty in (("text", ""), ("finish", None), ("tools", [])):
                    out[name].append(empty)
            out["text"][choice.index] += choice.delta.content or ""
            out["finish"][choice.index] = choice.finish_reason or out["finish"][choice.index]
            add_tools(out["tools"][choice.index], choice.delta.tool_calls or ())
    return out


def add_tools(calls: list[list[str]], deltas: Any) -> None:
    """Add the fragments of tool calls to those seen so far."""
    for delta in deltas:
        if delta.index == len(calls):
            calls.append([delta.function.name, ""])
        calls[delta.index][1] += delta.function.arguments or ""


def create(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """An answer in one piece."""
    return answer(client.chat.completions.create(**params, extra_headers=headers))


def stream(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """A stream, put together as a user would."""
    with client.chat.completions.create(**params, stream=True, extra_headers=headers) as chunks:
        return collected(chunks)


def broken_stream(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """A stream that breaks: what came before the exception, and the exception."""
    text = ""
    try:
        for chunk in client.chat.completions.create(**params, stream=True, extra_headers=headers):
            text += "".join(c.delta.content or "" for c in chunk.choices)
    except openai.APIError as exc:
        return {"text": [text], **error(exc)}
    return {"text": [text]}


def stream_helper(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """The SDK's own accumulator."""
    with client.chat.completions.stream(**params, extra_headers=headers) as events:
        for _ in events:
            pass
        return answer(events.get_final_completion())


def parse(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """A JSON answer, parsed by the SDK into `Weather`."""
    return answer(client.chat.completions.parse(**params, response_format=Weather, extra_headers=headers))


def raw(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """An answer with its headers."""
    response = client.chat.completions.with_raw_response.create(**params, extra_headers=headers)
    completion = response.parse()
    return {
        **answer(completion),
        "status": response.status_code,
        "request_id": response.headers["x-request-id"],
        "sdk_request_id": completion._request_id,
    }


def raw_stream(client: OpenAI, params: Any, headers: Any, events: int = 10**9) -> dict[str, Any]:
    """The lines of a stream, up to its `events`th data line, when the connection is dropped."""
    ids, pings = [], 0
    create_raw = client.chat.completions.with_streaming_response.create
    with create_raw(**params, stream=True, extra_headers=headers) as response:
        for line in response.iter_lines():
            pings += line == ": ping"
            if line.startswith("id: "):
                ids.append(int(line.removeprefix("id: ")))
            events -= line.startswith("data: ")
            if not events:
                break
    return {"ids": ids, "pings": pings}


def resume(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """Read 4 events, drop the connection, and go on after them with the same Idempotency-Key."""
    keyed = {**(headers or {}), "Idempotency-Key": f"resume-{time.monotonic_ns()}"}
    first = raw_stream(client, params, keyed, events=4)
    rest = stream(client, params, {**keyed, "Last-Event-ID": str(first["ids"][-1])})
    return {**rest, "ids": first["ids"], "pings": first["pings"]}


def stop(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """A stream that is closed after 5 chunks, as by a Stop button: no route is called to cancel it."""
    chunks = client.chat.completions.create(**params, stream=True, extra_headers=headers)
    ids = [next(chunks).id for _ in range(5)]
    chunks.close()
    return {"id": ids[0]}


def objects(client: OpenAI, params: Any, headers: Any) -> dict[str, Any]:
    """Models and a stored completion by the SDK's own methods."""
    made = client.chat.completions.create(**params, extra_headers=headers)
    again = client.chat.completions.retrieve(made.id)
    deleted = client.chat.completions.delete(made.id)
    models = [m.id for m in client.models.list()]
    return {
        **answer(again),
        "models": models,
        "model": client.models.retrieve(models[0]).id,
        "deleted": deleted.deleted,
    }


def error(exc: Any) -> dict[str, Any]:
    """An SDK exception as its class, status and the body's fields."""
    return {
        "error": type(exc).__name__,
        "status": getattr(exc, "status_code", None),
        "code": exc.code,
        "param": exc.param,
        "message": exc.message,
        "request_id": getattr(exc, "request_id", None),
    }


OPERATIONS: dict[str, Any] = {
    "create": create,
    "stream": stream,
    "broken_stream": broken_stream,
    "stream_helper": stream_helper,
    "parse": parse,
    "raw": raw,
    "resume": resume,
    "stop": stop,
    "objects": objects,
}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case: what the SDK made of it."""
    client = OpenAI(base_url=case["base_url"], api_key=case["api_key"], max_retries=case["max_retries"])
    started_s = time.monotonic()
    try:
        with client:
            seen = OPERATIONS[case["op"]](client, case["params"], case["headers"])
    except openai.APIError as exc:
        seen = error(exc)
    except Exception as exc:  # noqa: BLE001  # any other exception is the finding
        seen = {"crash": f"{type(exc).__name__}: {exc}"}
    return {**seen, "took_s": time.monotonic() - started_s}


def say(line: dict[str, Any]) -> None:
    """Write a line to the test."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer cases until the input ends."""
    say({"sdk": f"python {openai.__version__}"})
    for line in sys.stdin:
        say(run(json.loads(line)))


if __name__ == "__main__":
    main()
