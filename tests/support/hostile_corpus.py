"""Cases of the corpus: read from files, made into bytes, sent to a server, and what was seen meanwhile."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.clocks import unhindered_s
from tests.support.sse_client import Connection, Response, fetch, request_bytes

REQUESTS = Path(__file__).parents[1] / "fault" / "hostile" / "requests"
WITHIN_S = 20.0
HEALTHZ_MS = 2_000
GROWS_MB = 250
DRIP_EVERY_S = 0.2
MB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One file of the corpus."""

    name: str
    why: str
    steps: list[dict[str, Any]]
    engine: str = "scripted"
    api_key: bool = False
    healthz_ms: int = HEALTHZ_MS
    grows_mb: int = GROWS_MB
    log_lines: int | None = None


def cases(engine: str) -> list[Case]:
    """The cases for an engine, by name."""
    read = [
        Case(path.stem, **json.loads(path.read_text("utf-8"))) for path in sorted(REQUESTS.glob("*.json"))
    ]
    return [case for case in read if case.engine == engine]


def encoded(value: Any) -> str:  # noqa: PLR0911  # a line for each generator
    """The JSON text of a value with generators in it, without making the large value."""
    if isinstance(value, list):
        return "[" + ",".join(map(encoded, value)) + "]"
    if not isinstance(value, dict):
        return json.dumps(value)
    if "$repeat" in value:
        return (
            json.dumps(value["$repeat"])[:-1]
            + json.dumps(value["$repeat"])[1:-1] * (value["times"] - 1)
            + '"'
        )
    if "$list" in value:
        return "[" + ",".join([encoded(value["$list"])] * value["times"]) + "]"
    if "$map" in value:
        item = encoded(value["$map"])
        return "{" + ",".join(f'"{i}":{item}' for i in range(value["times"])) + "}"
    if "$png" in value:
        return json.dumps(png_url(*value["$png"]))
    return "{" + ",".join(f"{json.dumps(k)}:{encoded(v)}" for k, v in value.items()) + "}"


def png_url(width: int, height: int) -> str:
    """A black image: its pixels compress a thousandfold."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    pixels = zlib.compress(bytes(((width + 7) // 8 + 1) * height), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def bytes_of(step: Mapping[str, Any], saved: Mapping[str, str]) -> bytes:
    """What a step sends. Raises KeyError for a value that no step before it had."""
    if "raw" in step:
        pieces = [step["raw"]] if isinstance(step["raw"], str) else step["raw"]
        return "".join(p if isinstance(p, str) else p["$repeat"] * p["times"] for p in pieces).encode(
            "latin-1"
        )
    headers = {name: text.format_map(saved) for name, text in step.get("headers", {}).items()}
    path = step["path"].format_map(saved)
    body = None
    if "body" in step:
        body = encoded(step["body"])
        for name in step.get("fill", ()):
            body = body.replace("{" + name + "}", saved[name])
    return request_bytes(step["method"], path, None if body is None else body.encode(), headers)


@dataclass
class Seen:
    """What was seen of the server while a case ran."""

    slowest_healthz_ms: float = 0.0
    grown_mb: float = 0.0
    faults: list[str] = field(default_factory=list)


@asynccontextmanager
async def watched(port: int, pid: int) -> AsyncIterator[Seen]:
    """Ask `/healthz` and look at the memory all the while, and once more after it."""
    process, seen = psutil.Process(pid), Seen()
    at_first = process.memory_info().rss

    async def look() -> None:
        asked_s = unhindered_s(pid)
        try:
            async with asyncio.timeout(WITHIN_S):
                status = (await fetch(port, "GET", "/healthz")).status
        except (TimeoutError, OSError) as exc:
            status = 0
            seen.faults.append(f"/healthz: {type(exc).__name__}")
        if status != 200:
            seen.faults.append(f"/healthz: {status}")
        seen.slowest_healthz_ms = max(seen.slowest_healthz_ms, (unhindered_s(pid) - asked_s) * 1000)
        seen.grown_mb = max(seen.grown_mb, (process.memory_info().rss - at_first) / MB)

    async def look_on() -> None:
        while True:
            await look()
            await asyncio.sleep(0.05)

    looking = asyncio.create_task(look_on())
    try:
        yield seen
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await look()


async def run_step(port: int, step: Mapping[str, Any], sent: bytes) -> tuple[Response, list[str]]:
    """Send a step's bytes; the answer, status 0 for none, and what did not hold of it."""
    async with await Connection.to(port) as connection:
        sending = asyncio.create_task(_send(connection, sent))
        try:
            async with asyncio.timeout(step.get("within_s", WITHIN_S)):
                response = await connection.response()
        except TimeoutError:
            return Response(0, {}, b""), ["no answer in time"]
        except (OSError, AssertionError, ValueError):
            response = Response(0, {}, b"")
        faults = [*_wrong(step, response)]
        if step.get("drip"):
            faults += await _dripped(connection, step.get("closes_within_s", WITHIN_S))
        sending.cancel()
        return response, faults


async def _send(connection: Connection, sent: bytes) -> None:
    with contextlib.suppress(OSError):  # the server has answered already, and closed
        await connection.send(sent)


async def _dripped(connection: Connection, within_s: float) -> Iterable[str]:
    """Send a byte now and then, for as long as the server takes them."""

    async def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                await connection.send(b" ")
                await asyncio.sleep(DRIP_EVERY_S)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(within_s):
            with contextlib.suppress(OSError):
                while await connection.read():
                    pass
    except TimeoutError:
        return [f"the connection is still open after {within_s} s"]
    finally:
        dripping.cancel()
    return []


def _wrong(step: Mapping[str, Any], response: Response) -> Iterable[str]:
    if response.status not in step["allowed"]:
        yield f"status {response.status}: {response.body[:200]!r}"
    if response.status >= 500 and not (response.status == 503 and "retry-after" in response.headers):
        yield f"status {response.status} is a fault of the server"
    yield from (f"it says {text!r}" for text in step.get("lacks", ()) if text.encode() in response.body)
    if step.get("lacks_header") in response.headers:
        yield f"it has the header {step['lacks_header']}"


def saved_of(step: Mapping[str, Any], response: Response) -> dict[str, str]:
    """What later steps take from an answer."""
    saved = {}
    for name, where in step.get("save", {}).items():
        kind, _, place = where.partition(":")
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            value: Any = response.headers[place] if kind == "header" else response.json()
            for step_in in place.split(".") if kind == "body" else ():
                value = value[int(step_in) if step_in.isdigit() else step_in]
            saved[name] = str(value)
    return saved


async def run(case: Case, port: int, pid: int) -> Seen:
    """Send all steps of a case; what did not hold is in `faults`."""
    saved: dict[str, str] = {}
    async with watched(port, pid) as seen:
        for number, step in enumerate(case.steps):
            try:
                sent = await asyncio.to_thread(bytes_of, step, saved)
            except KeyError:
                continue  # it needs what an earlier step was refused
            outcomes = await asyncio.gather(
                *[run_step(port, step, sent) for _ in range(step.get("times", 1))]
            )
            for response, faults in outcomes:
                seen.faults += [f"step {number}: {fault}" for fault in faults]
                saved |= saved_of(step, response)
    if seen.slowest_healthz_ms > case.healthz_ms:
        seen.faults.append(f"/healthz took {seen.slowest_healthz_ms:.0f} ms")
    if seen.grown_mb > case.grows_mb:
        seen.faults.append(f"the server grew by {seen.grown_mb:.0f} MB")
    return seen
