"""Parsing by SGLang's own parsers, fed what models of those formats write, in any split."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from app.core import Counts, Delta
from app.errors import BadRequest, EngineFailed, EngineOverloaded, ServingError

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

STOP = {"type": "stop", "matched": 2}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class Collected:
    """An output that keeps what it is given."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: ServingError | None = None

    def put(self, delta: Delta) -> None:
        assert not any(seen.finish_reason for seen in self.deltas)
        self.deltas.append(delta)

    def put_final(self, delta: Delta) -> None:
        self.put(delta)

    def fail(self, error: ServingError) -> None:
        self.error = error

    def text(self, channel: str) -> str:
        return "".join(delta.text for delta in self.deltas if delta.channel == channel)


def parse(
    engine: Any, pieces: list[str], finish: dict[str, Any], body: dict[str, Any], **parsers: Any
) -> Collected:
    """Feed a choice its text in pieces, one id each."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    from app.engine.sglang.parse import choice_sink

    chat = copy.copy(engine._running().launched.chat)
    vars(chat).update(parsers)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", **body)
    out = Collected()
    sink = choice_sink(0, out, 9, chat, request=request)
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        sink.take(piece, [number], finish if last else None, Counts(9, number + 1), None, 0)
    return out


def splits(text: str, seed: int) -> list[str]:
    """The text in pieces of 1 to 7 characters."""
    rng = random.Random(seed)
    pieces = []
    while text:
        size = rng.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(8))
def test_reasoning_is_told_apart_from_the_answer(sglang_engine: Any, seed: int) -> None:
    """Text between think tags is reasoning, what follows is the answer, however it is cut."""
    pieces = splits("<think>two and two</think>four", seed)
    out = parse(sglang_engine, pieces, STOP, {}, reasoning_parser="qwen3")
    assert out.text("reasoning") == "two and two"
    assert out.text("text") == "four"
    assert [delta.finish_reason for delta in out.deltas if delta.finish_reason] == ["stop"]
    assert [token for delta in out.deltas for token in delta.token_ids] == list(range(len(pieces)))


@pytest.mark.parametrize("seed", range(8))
def test_a_tool_call_is_put_together_from_any_pieces(sglang_engine: Any, seed: int) -> None:
    """Text before a call stays text; the call has one id and name, and whole arguments."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
    out = parse(sglang_engine, splits("Let me look. " + call, seed), STOP, {"tools": TOOLS})
    assert out.text("text").strip() == "Let me look."
    named = [delta.tool for delta in out.deltas if delta.tool and delta.tool.name]
    assert [(tool.index, tool.name) for tool in named] == [(0, "weather")]
    assert named[0].id.startswith("call_")
    assert json.loads(out.text("tool")) == {"city": "Ulm", "days": 2}
    assert out.deltas[-1].finish_reason == "tool_calls"


def test_two_tool_calls_keep_their_arguments_apart(sglang_engine: Any) -> None:
    """Fragments carry the index of the call that they belong to."""
    calls = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
        for city in ("Ulm", "Bonn")
    ]
    out = parse(sglang_engine, splits("".join(calls), 3), STOP, {"tools": TOOLS})
    arguments = {0: "", 1: ""}
    for delta in out.deltas:
        if delta.tool:
            arguments[delta.tool.index] += delta.text
    assert [json.loads(arguments[index])["city"] for index in (0, 1)] == ["Ulm", "Bonn"]


def test_a_cut_tool_call_finishes_with_length(sglang_engine: Any) -> None:
    """A call that max_tokens cuts is not a finished call."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "U'
    out = parse(sglang_engine, splits(text, 1), {"type": "length", "length": 9}, {"tools": TOOLS})
    assert out.deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_stopped_tool_call_has_only_what_was_written(sglang_engine: Any, seed: int, choice: str) -> None:
    """Its arguments are not closed for it, as SGLang does where an answer ends by itself."""
    arguments = '{"city": "Ulm'
    call = f'{{"name": "weather", "parameters": {arguments}'
    text = f"[{call}" if choice == "required" else f"<tool_call>\n{call}"
    body = {"tools": TOOLS, "tool_choice": choice}
    out = parse(sglang_engine, splits(text, seed), {"type": "abort"}, body)
    assert arguments.startswith(out.text("tool"))
    assert out.deltas[-1].finish_reason == "abort"


def test_a_half_marker_at_the_end_is_text(sglang_engine: Any) -> None:
    """What was held back as the start of a call is given out when the answer ends without one."""
    out = parse(sglang_engine, ["is a ", "<tool"], STOP, {"tools": TOOLS})
    assert out.text("text") == "is a <tool"
    assert out.deltas[-1].finish_reason == "stop"


def test_several_tokens_in_one_step_have_their_own_alternatives(sglang_engine: Any) -> None:
    """SGLang's own streaming gives every token of a step the alternatives of its first."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    from app.engine.sglang.parse import choice_sink

    chat = sglang_engine._running().launched.chat
    ids = chat.tokenizer_manager.tokenizer.encode("ring stream")[:2]
    assert len(ids) == 2
    batch = SimpleNamespace(
        output_token_logprobs_val=[[-0.1, -0.2]],
        output_token_logprobs_idx=[ids],
        output_top_logprobs_val=[[[-0.1, -3.0], [-0.2, -4.0]]],
        output_top_logprobs_idx=[[[ids[0], ids[1]], [ids[1], ids[0]]]],
    )
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], model="m", logprobs=True, top_logprobs=2
    )
    out = Collected()
    choice_sink(0, out, 9, chat, request=request).take("ring stream", ids, STOP, Counts(9, 2), batch, 0)
    first, second = out.deltas[0].logprobs or ()
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.1, -3.0]
    assert [entry["logprob"] for entry in second["top_logprobs"]] == [-0.2, -4.0]
    assert second["top_logprobs"][0]["token"] == second["token"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (HTTPStatus.SERVICE_UNAVAILABLE, EngineOverloaded),
        (HTTPStatus.BAD_REQUEST, BadRequest),
        (HTTPStatus.INTERNAL_SERVER_ERROR, EngineFailed),
    ],
)
def test_an_abort_with_a_status_is_an_error_and_no_answer(
    sglang_engine: Any, status: HTTPStatus, error: type[ServingError]
) -> None:
    """SGLang counts one token for a prompt that it refused: such an abort is never a delta."""
    finish = {"type": "abort", "message": "no", "status_code": status, "err_type": None}
    for body in ({}, {"logprobs": True}):
        out = parse(sglang_engine, [""], finish, body)
        assert out.deltas == []
        assert type(out.error) is error


def test_output_that_cannot_be_parsed_is_counted_before_it_fails(sglang_engine: Any) -> None:
    """What was generated is told with its ids and counts, then comes the error."""
    broken = {"reasoning_parser": "qwen3", "_process_reasoning_stream": None}
    out = parse(sglang_engine, ["a"], STOP, {}, **broken)
    assert type(out.error) is EngineFailed
    assert out.deltas == [Delta(0, "text", "", [0], Counts(9, 1))]


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_long_arguments_are_parsed_in_time_that_grows_with_their_length(
    sglang_engine: Any, choice: str
) -> None:
    """A call of 8,000 tokens is parsed in a few seconds, not in a time that grows with its square."""
    arguments = json.dumps({"city": "word " * 8000})
    call = f'{{"name": "weather", "parameters": {arguments}}}'
    call = f"[{call}]" if choice == "required" else f"<tool_call>\n{call}\n</tool_call>"
    pieces = [call[start : start + 5] for start in range(0, len(call), 5)]
    began_s = time.process_time()
    out = parse(sglang_engine, pieces, STOP, {"tools": TOOLS, "tool_choice": choice})
    assert time.process_time() - began_s < 6  # 1 s where 25 s were
    assert json.loads(out.text("tool")) == json.loads(arguments)
    assert [token for delta in out.deltas for token in delta.token_ids] == list(range(len(pieces)))


@pytest.mark.parametrize("size", [1, 3, 200, 5000])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_after_a_long_one_are_told_whole(sglang_engine: Any, choice: str, size: int) -> None:
    """Three calls, the first of them long, keep their names and arguments however they are cut."""
    cities = ["Ulm " * 1000, "Bonn", "Kiel"]
    calls = [json.dumps({"name": "weather", "parameters": {"city": city}}) for city in cities]
    text = f"[{','.join(calls)}]"
    if choice == "auto":
        text = "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in calls)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    out = parse(sglang_engine, pieces, STOP, {"tools": TOOLS, "tool_choice": choice})
    arguments = {0: "", 1: "", 2: ""}
    for delta in out.deltas:
        if delta.tool:
            arguments[delta.tool.index] += delta.text
    assert [json.loads(arguments[index])["city"] for index in range(3)] == cities
    assert [delta.tool.name for delta in out.deltas if delta.tool and delta.tool.name] == ["weather"] * 3


async def test_output_that_comes_faster_than_it_is_parsed_leaves_the_loop_to_others() -> None:
    """While batches keep coming, each slow to parse, whatever else waits for the loop has its turn."""
    from sglang.srt.managers.io_struct import AbortReq, sock_send

    from app.engine.sglang.patches.handover import RECEIVING_S, HandoverTokenizerManager

    context = zmq.Context()
    with context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as engine:
        inbox.bind("inproc://batches")
        engine.connect("inproc://batches")
        taken: list[Any] = []

        class Manager(HandoverTokenizerManager):
            def __init__(self) -> None:
                self._inbox = inbox
                self._receiving = asyncio.get_running_loop()

            def _receive(self, message: Any) -> None:
                taken.append(message)
                time.sleep(RECEIVING_S * 2)  # a parser that takes that long
                if len(taken) < 20:
                    sock_send(engine, AbortReq(rid="next"))

        sock_send(engine, AbortReq(rid="first"))
        Manager()._on_readable()
        assert len(taken) == 1
        while len(taken) < 20:
            before = len(taken)
            await asyncio.sleep(0)
            assert len(taken) <= before + 1
    context.term()
