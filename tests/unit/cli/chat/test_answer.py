"""An answer over several connections: nothing lost, nothing twice, and an end to every wait."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.chat import answer as module
from app.cli.chat.answer import GIVE_UP_S, Answer, AnswerStream
from app.cli.chat.interrupts import Interrupts
from app.cli.client_options import NoServer, Refused, Unreachable, Unreadable

BODY = {"messages": []}
LOST = Unreachable("The connection was lost.")
GONE = NoServer("No server answers.")


def event(number: int, data: Any) -> bytes:
    """An event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"id: {number}\ndata: {text}\n\n".encode()


def text(number: int, content: str, **choice: Any) -> bytes:
    """An event with text."""
    delta = {"content": content, **choice.pop("delta", {})}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} | choice]
    return event(number, {"id": "chatcmpl-1", "choices": choices})


END = text(3, "", finish_reason="stop") + event(4, "[DONE]")


class Response(io.BytesIO):
    """A response of a server."""

    def __init__(self, body: bytes = b"", status: int = 200, kind: str = "text/event-stream") -> None:
        super().__init__(body)
        self.status = status
        self.headers = Message()
        self.headers["x-request-id"] = "chatcmpl-1"
        self.headers["content-type"] = kind


Act = Response | Exception | Callable[[], Response]


class Acting:
    """A server whose answers are a list; the last is given again and again."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.asked: list[tuple[str, str, str | None]] = []
        self.keys: set[str] = set()

    def open(
        self, method: str, path: str, _body: Any, headers: Mapping[str, str], **_timeout: float
    ) -> Response:
        self.asked.append((method, path, headers.get("Last-Event-ID")))
        self.keys |= {headers["Idempotency-Key"]} if "Idempotency-Key" in headers else set()
        act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        if isinstance(act, Exception):
            raise act
        return act if isinstance(act, Response) else act()

    def call(self, method: str, path: str, **_: Any) -> None:
        self.asked.append((method, path, None))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which only the clock feels."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(module, "time", clock)
    return slept


def stream_of(*acts: Act, body: Any = BODY, answer_id: str = "") -> tuple[AnswerStream, Acting, list[str]]:
    """A stream, its server, and what was said meanwhile."""
    server, said = Acting(*acts), list[str]()
    stream = AnswerStream(server, Interrupts(), body, answer_id, notify=said.append)  # type: ignore[arg-type]
    return stream, server, said


def texts(stream: AnswerStream) -> Sequence[str]:
    """The pieces of text."""
    return [piece.text for piece in stream.pieces()]


def refusal(status: int, code: str, **headers: str) -> Refused:
    """A refusal of the server."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Refused(status, {"error": {"code": code, "message": "No."}}, named)


def test_an_answer_is_its_events():
    """Text, reasoning and everything about them; comments count for nothing, nor does another choice."""
    first = {"conversation_id": "conv_1", "message_id": "msg_1", "model": "m", "choices": []}
    body = event(1, first) + b": ping\n" + text(2, "hi", delta={"reasoning_content": "hm"})
    other = text(3, "other", index=1)
    usage = event(4, {"choices": [], "usage": {"completion_tokens": 2}})
    stream, *_ = stream_of(Response(body + other + usage + END))
    assert texts(stream) == ["hm", "hi"]
    answer = stream.answer
    assert (answer.conversation_id, answer.message_id, answer.model) == ("conv_1", "msg_1", "m")
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("hi", "hm", "stop")
    assert (answer.usage, answer.reconnects, answer.is_whole) == ({"completion_tokens": 2}, 0, True)


def test_a_lost_connection_continues_behind_the_last_event():
    """An event that was cut is not counted; the rest is asked for by id, and said once."""
    cut = text(1, "a") + text(2, "b")[:-9]
    stream, server, said = stream_of(Response(cut), GONE, GONE, Response(text(2, "b") + END))
    assert texts(stream) == ["a", "b"]
    path = "/api/chat/completions"
    attach = ("GET", f"{path}/chatcmpl-1", "1")
    assert server.asked == [("POST", path, None), attach, attach, attach]
    assert said == [
        "The connection was lost; reconnecting. Ctrl-C stops the answer.",
        "The server answers again.",
    ]
    assert stream.answer.reconnects == 1


def test_without_an_answer_yet_the_same_question_is_asked_again():
    """With the same `Idempotency-Key`, so that it is answered once."""
    stream, server, _ = stream_of(LOST, GONE, Response(text(1, "a") + END))
    assert texts(stream) == ["a"]
    assert [method for method, *_ in server.asked] == ["POST"] * 3
    assert len(server.keys) == 1


def test_an_answer_that_a_killed_server_forgot_is_asked_for_again():
    """Only if nothing of it had arrived; else the refusal is raised."""
    missing = refusal(404, "stream_not_found")
    stream, server, _ = stream_of(Response(b""), missing, Response(text(1, "a") + END))
    assert texts(stream) == ["a"]
    assert [method for method, *_ in server.asked] == ["POST", "GET", "POST"]
    stream, *_ = stream_of(Response(text(1, "a")), missing)
    with pytest.raises(Refused):
        texts(stream)


def test_where_no_server_is_the_first_try_is_the_last():
    """Nothing was asked, so nothing is waited for."""
    stream, server, said = stream_of(GONE)
    with pytest.raises(NoServer):
        texts(stream)
    assert (len(server.asked), said) == (1, [])


def test_a_server_that_stays_away_is_given_up(pauses: list[float]):
    """After ten minutes, with pauses of two seconds; the error says how to see the rest."""
    stream, *_ = stream_of(Response(text(1, "a")), GONE)
    with pytest.raises(Unreachable, match=r"away for 10 minutes.*--continue"):
        texts(stream)
    assert GIVE_UP_S < sum(pauses) < GIVE_UP_S + 5
    assert max(pauses) == 2.0


def test_a_question_that_no_server_takes_is_given_up_sooner(pauses: list[float]):
    """Something takes connections and says nothing: after a minute the reason is raised."""
    stream, *_ = stream_of(LOST)
    with pytest.raises(Unreachable):
        texts(stream)
    assert 30 < sum(pauses) < 120


def test_a_full_server_is_waited_for(pauses: list[float]):
    """As long as it says, and its message is shown once."""
    full = refusal(503, "overloaded", retry_after="7")
    stream, _, said = stream_of(full, full, Response(text(1, "a") + END))
    assert texts(stream) == ["a"]
    assert pauses == [0.0, 7.0, 7.0]
    assert said == ["No. Waiting; Ctrl-C ends the wait.", "The server answers again."]


@pytest.mark.parametrize(
    "refused",
    [
        refusal(429, "insufficient_quota"),
        refusal(429, "rate_limit_exceeded", retry_after="3", x_should_retry="false"),
        refusal(503, "overloaded", retry_after="3600"),
        refusal(400, "content_filter"),
    ],
)
def test_a_refusal_that_waiting_does_not_help_is_raised(refused: Refused):
    """At once, with the server's words."""
    stream, server, _ = stream_of(refused)
    with pytest.raises(Refused, match=r"No\."):
        texts(stream)
    assert len(server.asked) == 1


def test_a_gateway_without_a_server_behind_it_is_waited_for():
    """502 and 504 are a proxy's, while its server restarts."""
    stream, *_ = stream_of(
        Response(text(1, "a")), refusal(502, "x"), refusal(504, "x"), Response(text(2, "b") + END)
    )
    assert texts(stream) == ["a", "b"]


def test_an_answer_whose_end_was_seen_has_no_more_events():
    """204 ends it."""
    stream, *_ = stream_of(Response(status=204), body=None, answer_id="chatcmpl-1")
    assert texts(stream) == []
    assert stream.answer.done


@pytest.mark.parametrize(
    "body",
    [
        b"data: <html>\n",
        b"id: x\n",
        b'data: {"choices": [{}]}\n',
        b'data: {"choices": 1}\n',
        b"data: [1]\n",
        b'data: {"budget": "x"}\n',
    ],
)
def test_events_that_no_server_of_ours_sends_are_an_error(body: bytes):
    """They are not asked for again and again."""
    stream, server, _ = stream_of(Response(body))
    with pytest.raises(Unreadable):
        texts(stream)
    assert len(server.asked) == 1


def test_what_is_no_stream_is_an_error():
    """Another server's answer in one piece."""
    stream, *_ = stream_of(Response(b"{}", kind="application/json"))
    with pytest.raises(Unreadable):
        texts(stream)


def interrupted() -> Response:
    """Ctrl-C while the server is waited for."""
    raise KeyboardInterrupt


def test_ctrl_c_cancels_at_the_server_and_reads_the_end():
    """The rest of what was generated is still shown."""
    stream, server, _ = stream_of(interrupted, Response(text(1, "a") + END))
    assert texts(stream) == ["a"]
    assert stream.is_stopping
    assert server.asked[-1] == ("POST", "/api/chat/completions/chatcmpl-1/cancel", None)


def test_a_second_ctrl_c_is_raised():
    """Whatever the server does."""
    stream, *_ = stream_of(interrupted, interrupted)
    with pytest.raises(KeyboardInterrupt):
        texts(stream)


def test_an_answer_that_cannot_be_stopped_is_said_so():
    """The server is away: it is not waited for."""
    stream, *_ = stream_of(Response(text(1, "a")), interrupted, GONE)
    with pytest.raises(Unreachable, match="cannot be reached to stop the answer"):
        texts(stream)


def test_ctrl_c_in_the_wait_after_a_refusal_raises_it(monkeypatch: pytest.MonkeyPatch):
    """Nothing is generated, so nothing is to be stopped."""

    def sleep(pause_s: float) -> None:
        if pause_s:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    stream, server, _ = stream_of(refusal(503, "overloaded", retry_after="7"))
    with pytest.raises(Refused):
        texts(stream)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("chunk", "is_whole"),
    [
        ({"error": {"code": "interrupted", "message": "Lost."}}, False),
        ({"budget": {"message": "Used up."}, "choices": []}, False),
        ({"abandoned": {"message": "Left."}, "choices": []}, False),
        ({"choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}, False),
        ({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, True),
    ],
)
def test_an_answer_that_ended_early_is_not_whole(chunk: Mapping[str, Any], is_whole: bool):
    """An error, a budget, a client that came too late, the policy; a length that was asked for is whole."""
    answer = Answer()
    assert list(answer.take(1, json.dumps(chunk).encode())) == []
    assert list(answer.take(2, b"[DONE]")) == []
    assert answer.is_whole == is_whole
