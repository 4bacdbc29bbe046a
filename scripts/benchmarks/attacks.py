"""What a caller does at its worst: one process that attacks a server of this machine for some seconds.

`python -m scripts.benchmarks.attacks NAME --port P --seconds S [--key K]`. The key, if any, is an ordinary
chat key. Each attack keeps its connections busy until the time is over; what the server answers is counted
by status and printed as JSON. It runs at the lowest priority: an attacker's CPU is not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

READ_BYTES = 65_536
MAX_READ_BYTES = 2_000_000
DRIP_S = 0.5
CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"
STORED = "/api/chat/completions"


@dataclass
class Target:
    """The server under attack, and what it has answered so far: HTTP statuses, 0 for none."""

    port: int
    key: str
    model: str
    statuses: Counter[int] = field(default_factory=Counter)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def request(
        self, method: str, path: str, body: bytes = b"", *, length: int | None = None, close: bool = True
    ) -> bytes:
        """An HTTP/1.1 request as bytes; `length` declares another length than the body's."""
        authorization = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n{authorization}"
            f"Content-Type: application/json\r\nConnection: {'close' if close else 'keep-alive'}\r\n"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
        ).encode() + body

    def chat(self, path: str = CHAT, content: str = "Count to ten.", **parameters: Any) -> bytes:
        """A chat request."""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 2000}
        return self.request("POST", path, json.dumps(body | parameters).encode())

    def texts(self, count: int, **parameters: Any) -> bytes:
        """A request of so many short texts."""
        body = {"model": self.model, "prompt": [f"{number}" for number in range(count)]}
        return self.request("POST", TEXTS, json.dumps(body | parameters).encode())

    def begin(self) -> None:
        """Say that what is to be sent is ready, and the attack begins."""
        print("begun", flush=True)
        self.begun.set()

    async def exchange(self, payload: bytes, *, read_bytes: int = MAX_READ_BYTES) -> bytes:
        """Send, read to the end or so many bytes, and leave; what was read. Counts the status."""
        answer = b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            # What is refused before its body was read may be answered before all is sent.
            sending = asyncio.create_task(_send(writer, payload))
            try:
                while len(answer) < read_bytes and (piece := await reader.read(READ_BYTES)):
                    answer += piece
            finally:
                sending.cancel()
                writer.transport.abort()
        except OSError:
            pass
        self.statuses[int(answer[9:12]) if answer[9:12].isdigit() else 0] += 1
        return answer


async def _send(writer: asyncio.StreamWriter, payload: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(payload)
        await writer.drain()


Attack = Callable[[Target], Coroutine[Any, Any, None]]


async def flood(target: Target, payloads: Iterable[bytes], connections: int, **options: Any) -> None:
    """Send the payloads in turn, for ever, over so many connections at once."""
    turns: Iterator[bytes] = itertools.cycle(payloads)
    target.begin()

    async def again() -> None:
        while True:
            await target.exchange(next(turns), **options)

    await asyncio.gather(*(again() for _ in range(connections)))


async def drip(target: Target, beginning: bytes, connections: int) -> None:
    """Begin requests and go on with a byte each half a second; open another when one is closed."""
    target.begin()

    async def again() -> None:
        while True:
            answer = b""
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                try:
                    writer.write(beginning)
                    while not reader.at_eof():
                        writer.write(b"a")
                        await writer.drain()
                        with contextlib.suppress(TimeoutError):
                            answer += await asyncio.wait_for(reader.read(READ_BYTES), DRIP_S)
                finally:
                    writer.transport.abort()
            target.statuses[int(answer[9:12]) if answer[9:12].isdigit() else 0] += 1

    await asyncio.gather(*(again() for _ in range(connections)))


# --- bodies


async def bodies(target: Target) -> None:
    """Containers, tiny messages, biases, a long string: 31 MB, and what a small model may be sent."""
    shapes = [shape for size in (31_000_000, 1_000_000) for shape in _bodies(target.model, size)]
    await flood(target, [target.request("POST", CHAT, body) for body in shapes], 4)


def _bodies(model: str, size_bytes: int) -> Iterator[bytes]:
    message = b'{"role":"user","content":"a"}'
    beginning = b'{"model":"' + model.encode() + b'","max_tokens":1,"messages":['
    yield beginning + message + b'],"metadata":{"a":[' + b"{}," * (size_bytes // 3) + b"{}]}}"
    yield beginning + b",".join([message] * (size_bytes // 30)) + b"]}"
    biases = b",".join(b'"%d":1' % number for number in range(size_bytes // 12))
    yield beginning + message + b'],"logit_bias":{' + biases + b"}}"
    yield beginning + b'{"role":"user","content":"' + b"a" * size_bytes + b'"}]}'
    yield beginning + b'{"role":"user","content":"' + b"\\u0041" * (size_bytes // 6) + b'"}]}'


async def dripped_bodies(target: Target) -> None:
    """Bodies that come byte by byte."""
    await drip(target, target.request("POST", CHAT, b'{"a":"', length=10_000_000, close=False), 150)


async def dripped_refusals(target: Target) -> None:
    """Bodies dripped to a route that does not exist."""
    await drip(target, target.request("POST", "/nowhere", b"a", length=10_000_000, close=False), 150)


async def dripped_heads(target: Target) -> None:
    """Heads that never end."""
    await drip(target, f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nX-A: ".encode(), 150)


async def large_heads(target: Target) -> None:
    """Heads just under the limit."""
    lines = "".join(f"X-{number}: {'a' * 900}\r\n" for number in range(60))
    request = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nConnection: close\r\n{lines}\r\n"
    await flood(target, [request.encode()], 16)


async def refusals(target: Target) -> None:
    """Requests that are refused, as fast as they can be."""
    payloads = [
        target.request("POST", CHAT, b"{"),
        target.request("GET", "/nowhere"),
        target.request("GET", "/api/conversations/conv_none"),
        target.chat(temperature=99),
        b"nonsense\r\n\r\n",
    ]
    await flood(target, payloads, 32)


async def connections(target: Target) -> None:
    """Connections that are made and dropped."""
    await flood(target, [b"G"], 64, read_bytes=0)


# --- what the engine and its helpers have to work for


async def grammars(target: Target) -> None:
    """Grammars whose masks are slow, or slow to compile."""
    items = {"type": "array", "items": {"type": "array", "maxItems": 999, "items": {"type": "string"}}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(10):
        deep = {"anyOf": [deep, {"type": "array", "items": deep}]}
    hostile: list[dict[str, Any]] = [
        {"regex": "((a{0,999}){0,999}){0,999}", "min_tokens": 500},
        {"regex": "((a|b|ab|ba)*c?){1,400}", "min_tokens": 500},
        {"ebnf": 'root ::= s\ns ::= s s s | s s | "a"', "min_tokens": 500},
        {"regex": "(x+x+)+y" * 20},
        {"regex": "(.*a){1,60}", "min_tokens": 500},
        {"response_format": _format({**items, "maxItems": 999, "minItems": 900})},
        {"response_format": _format(deep)},
        {"response_format": _format({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"})},
    ]
    await flood(target, [target.chat(stream=True, **shape) for shape in hostile], 8, read_bytes=50_000)


async def tool_schemas(target: Target) -> None:
    """Many tools that must be called, a schema of 1,800 optional properties, tens of thousands of words."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "parameters": {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string"} for i in range(20)},
                },
            },
        }
        for number in range(40)
    ]
    wide = {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(1800)}}
    enum = {"type": "object", "properties": {"p": {"enum": [f"w{number}" for number in range(60_000)]}}}
    wordy = [{"type": "function", "function": {"name": "wordy", "parameters": enum}}]
    payloads = [
        target.chat(tools=tools, tool_choice="required", stream=True, max_tokens=200),
        target.chat(response_format=_format(wide), stream=True, max_tokens=200),
        target.chat(tools=wordy, stream=True, max_tokens=200),
    ]
    await flood(target, payloads, 4, read_bytes=5_000)


async def long_prompts(target: Target) -> None:
    """Texts that are far over the context."""
    texts = ["word " * 1_500_000, "a1B!" * 1_800_000, "\u4f60\u597d" * 1_200_000]
    await flood(target, [target.chat(content=text) for text in texts], 3)


async def choices(target: Target) -> None:
    """As many long choices as may be, whose readers leave or stay."""
    payloads = [target.chat(n=128, ignore_eos=True, stream=True), target.chat(n=128, ignore_eos=True)]
    await flood(target, payloads, 8, read_bytes=200_000)


async def generations(target: Target) -> None:
    """More long answers than the engine has room for."""
    await flood(target, [target.chat(ignore_eos=True, stream=True, content=f"{i}") for i in range(64)], 64)


async def moderations(target: Target) -> None:
    """As many texts as one request may have."""
    texts = [f"number {number}: " + "how do people live here? " * 30 for number in range(1024)]
    body = json.dumps({"input": texts}).encode()
    await flood(target, [target.request("POST", "/v1/moderations", body)], 8)


async def histories(target: Target) -> None:
    """A large conversation, viewed, exported and searched over and over."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": f"word{number} " * 40} for number in range(401)
    ]
    body = json.dumps(
        {"model": target.model, "messages": messages, "max_tokens": 1, "stream": False}
    ).encode()
    await target.exchange(target.request("POST", STORED, body))
    listed = await target.exchange(target.request("GET", "/api/conversations?limit=1"))
    conversations = json.loads(listed.partition(b"\r\n\r\n")[2] or b"{}").get("data") or [{"id": "none"}]
    path = f"/api/conversations/{conversations[0]['id']}"
    paths = [path, path + "/export?format=markdown", path + "/export?format=json"]
    paths += [
        "/api/conversations?q=word1*",
        "/api/conversations?limit=100",
        "/api/usage?group_by=day,model,key",
    ]
    await flood(target, [target.request("GET", each) for each in paths], 16)


async def images(target: Target) -> None:
    """Images that are small until they are decoded."""
    url = "data:image/png;base64," + base64.b64encode(_png(15_000)).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": target.model, "messages": [{"role": "user", "content": [image] * 50}]}
    await flood(target, [target.request("POST", CHAT, json.dumps(body).encode())], 4)


# --- what the step that all requests share has to work for


async def stops(target: Target) -> None:
    """As many characters of stop strings as may be, of which an answer of one letter never begins any."""
    bias = {str(await _token(target, "a")): 100}
    forced: dict[str, Any] = {"logit_bias": bias, "ignore_eos": True}
    payloads = [target.chat(stop=_stops(count, chars), n=n, **forced) for count, chars, n in STOPS]
    await flood(target, payloads, 4, read_bytes=200_000)


async def stops_of_prompts(target: Target) -> None:
    """The same with many prompts in place of many choices."""
    forced = {"logit_bias": {str(await _token(target, "a")): 100}, "ignore_eos": True, "max_tokens": 2000}
    payloads = [target.texts(n, stop=_stops(count, chars), **forced) for count, chars, n in STOPS]
    await flood(target, payloads, 4, read_bytes=200_000)


async def stops_begun(target: Target) -> None:
    """Stop strings that are always half there: nothing may be sent, and all of it is looked at again."""
    bias = {str(await _token(target, "a")): 100}
    forced: dict[str, Any] = {"logit_bias": bias, "ignore_eos": True, "stream": True}
    begun = ["a" * 999 + chr(0x62 + number) for number in range(16)]
    await flood(target, [target.chat(stop=begun, n=n, **forced) for n in (4, 128)], 4, read_bytes=200_000)


async def broken_characters(target: Target) -> None:
    """Answers of half characters without an end, with stop strings and without."""
    half = str(await _half_character(target))
    forced: dict[str, Any] = {"logit_bias": {half: 100}, "ignore_eos": True, "stream": True}
    forced["max_tokens"] = 7000
    payloads = [target.chat(n=16, **forced), target.chat(n=16, stop=["\n\n", "END"], **forced)]
    await flood(target, payloads, 2)


async def biases(target: Target) -> None:
    """As many entries of `logit_bias`, and choices, as may be; one token, and again."""
    entries = {str(token_id): 1 for token_id in range(1024)}
    payloads = [target.chat(n=n, logit_bias=entries, max_tokens=1) for n in (128, 16)]
    await flood(target, payloads, 8)


async def biases_of_prompts(target: Target) -> None:
    """The same with many prompts in place of many choices."""
    entries = {str(token_id): 1 for token_id in range(1024)}
    await flood(target, [target.texts(n, logit_bias=entries, max_tokens=1) for n in (128, 16)], 8)


async def biases_of_requests(target: Target) -> None:
    """Many requests of one choice with all entries, some spelled twice, which come and go with each token."""
    entries = {str(token_id): 1 for token_id in range(512)} | {f"0{token_id}": -1 for token_id in range(512)}
    await flood(target, [target.chat(logit_bias=entries, max_tokens=n) for n in (1, 2, 3)], 64)


async def dead_ends(target: Target) -> None:
    """Grammars that leave no token: the end is forbidden, or what they want is, or nothing is left."""
    never = 'root ::= "abc" never\nnever ::= never "b"'
    shapes: list[dict[str, Any]] = [
        {"regex": "a", "min_tokens": 500},
        {"response_format": _format({"const": None}), "min_tokens": 500},
        {"regex": "a(bcd)+e", "min_tokens": 500, "stop_token_ids": [await _token(target, "b")]},
        {"ebnf": never},
        {"ebnf": never, "ignore_eos": True, "no_stop_trim": True},
        {"regex": "(ab)*", "min_tokens": 500, "stop_token_ids": list(range(16))},
    ]
    await flood(target, [target.chat(n=n, **shape) for shape in shapes for n in (1, 128)], 8)


async def numbers(target: Target) -> None:
    """Numbers at the ends of their ranges, and beyond: seeds, lengths, biases, penalties."""
    shapes: list[dict[str, Any]] = [
        {"seed": 2**63 - 1, "n": 8},
        {"seed": -(2**63), "n": 8},
        {"min_tokens": 2**31, "max_tokens": 2**31},
        {"temperature": 1.1e-6, "repetition_penalty": 0.01, "logit_bias": {"9": 100, "8": -100}},
        {"top_p": 1e-46, "top_k": 1_000_000, "min_p": 1},
        {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 2},
    ]
    await flood(target, [target.chat(**{"max_tokens": 20} | shape) for shape in shapes], 8)


STOPS = ((16, 1000, 128), (16, 1000, 4), (1, 512, 128), (16, 32, 128))
"""Stop strings, characters of each, and choices: the first is over the bound, the others are the bound."""


def _stops(count: int, chars: int) -> list[str]:
    return ["b" + "a" * (chars - 2) + chr(0x62 + number) for number in range(count)]


async def _token(target: Target, text: str) -> int:
    """The token of a letter."""
    body = json.dumps({"model": target.model, "prompt": text, "add_special_tokens": False}).encode()
    return int(_answer(await target.exchange(target.request("POST", "/tokenize", body)))["tokens"][0])


async def _half_character(target: Target) -> int:
    """A token that is a byte of a character."""
    body = json.dumps({"model": target.model, "tokens": [[token_id] for token_id in range(600)]}).encode()
    texts = _answer(await target.exchange(target.request("POST", "/detokenize", body)))["text"]
    return int(texts.index("\ufffd"))


def _answer(response: bytes) -> Any:
    """The JSON of a response, whose body may come in one chunk."""
    content = response.partition(b"\r\n\r\n")[2]
    return json.loads(content[content.index(b"{") : content.rindex(b"}") + 1])


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _png(side_px: int) -> bytes:
    """A black square, 1 bit a pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\0" * ((side_px + 7) // 8)) * side_px
    head = struct.pack(">IIBBBBB", side_px, side_px, 1, 0, 0, 0, 0)
    image = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + image


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        bodies,
        dripped_bodies,
        dripped_refusals,
        dripped_heads,
        large_heads,
        refusals,
        connections,
        grammars,
        tool_schemas,
        long_prompts,
        choices,
        generations,
        moderations,
        histories,
        images,
        stops,
        stops_of_prompts,
        stops_begun,
        broken_characters,
        biases,
        biases_of_prompts,
        biases_of_requests,
        dead_ends,
        numbers,
    )
}
KEYLESS = ("bodies", "dripped_bodies", "dripped_refusals", "dripped_heads", "refusals", "connections")
"""Those that are worth a run without a key."""


async def attack(name: str, target: Target, seconds: float) -> None:
    """Attack for so long, from its beginning."""
    attacking = asyncio.create_task(ATTACKS[name](target))
    begun = asyncio.create_task(target.begun.wait())
    await asyncio.wait({attacking, begun}, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(attacking, seconds)


def main() -> int:
    """Attack, and print the statuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--key", default="")
    parser.add_argument("--model", default="tokenring-builtin")
    arguments = parser.parse_args()
    os.nice(19)
    target = Target(arguments.port, arguments.key, arguments.model)
    asyncio.run(attack(arguments.name, target, arguments.seconds))
    print(json.dumps(dict(sorted(target.statuses.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
