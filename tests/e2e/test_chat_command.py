"""`tokenring chat` against a server process: answers that resume, stop and are said to have halted."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import Serve, Spawn
from tests.support.sse_client import fetch
from tests.support.terminals import Piped, Terminal

TOKENS = 60
WHOLE = "".join(scripted_text(1, 0, TOKENS))
BEGUN = "".join(scripted_text(1, 0, 10)).rstrip()
HANGING = f"rate=2000,tokens={TOKENS},seed=1,fault=hang,fault_after=10"
"""An answer that goes no further than `BEGUN`."""
FAST = f"rate=2000,tokens={TOKENS},seed=1"
"""Of processes; the other servers are in the test's own loop."""


def script(rate: float, **changes: int) -> Script:
    """The course of the answers of a server in the test's loop."""
    return Script(**{"rate": rate, "tokens": TOKENS, "seed": 1} | changes)


def at(port: int) -> tuple[str, ...]:
    """The command against a server of this machine."""
    return "chat", "--url", f"http://127.0.0.1:{port}"


async def statuses(port: int) -> list[tuple[str, str, str]]:
    """Role, status and content of all messages of the newest conversation."""
    page = (await fetch(port, "GET", "/api/conversations")).json()
    view = (await fetch(port, "GET", f"/api/conversations/{page['data'][0]['id']}")).json()
    return [(message["role"], message["status"], message["content"]) for message in view["messages"]]


@asynccontextmanager
async def cutting(port: int, lengths: list[int]) -> AsyncIterator[int]:
    """A network before the server that cuts each connection after so many bytes of its answer, then none."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_server = await asyncio.open_connection("127.0.0.1", port)
        request = await reader.readuntil(b"\r\n\r\n")
        length = [
            int(line[15:]) for line in request.lower().split(b"\r\n") if line[:15] == b"content-length:"
        ]
        to_server.write(request + (await reader.readexactly(length[0]) if length else b""))
        is_answer = b"chat/completions" in request
        left = lengths.pop(0) if is_answer and lengths else 10**9
        while left > 0 and (data := await behind.read(min(4096, left))):
            writer.write(data)
            left -= len(data)
            await writer.drain()
        to_server.close()
        writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_an_answer_in_a_pipe_is_its_text_alone(serve: Serve, tmp_path: Path):
    """No reasoning, no style; with `--json` one object. Text of a pipe goes below the question."""
    port = (await serve(script(2000, reasoning=5))).port
    plain = await Piped.run(*at(port), "--max-tokens", "50", "hello", cwd=tmp_path)
    status, out, err = await plain.ended()
    assert status == 0
    assert out.rstrip() == "".join(scripted_text(1, 0, TOKENS)[5:50]).rstrip()
    assert err == "[The answer reached the limit of its length; --max-tokens sets another.]\n"
    piped = await Piped.run(*at(port), "--json", "--no-store", "sum up:", cwd=tmp_path, given=b"a text\n")
    status, out, err = await piped.ended()
    answer = json.loads(out)
    assert (status, err, answer["finish_reason"], answer["conversation_id"]) == (0, "", "stop", None)
    assert answer["reasoning_content"] + answer["content"] == WHOLE
    assert answer["usage"]["prompt_tokens"] == len(["user", "sum", "up:\n\na", "text"])


async def test_connections_that_break_change_no_text(serve: Serve, tmp_path: Path):
    """Cut in the head, in an event and between two, again and again: the text is that of no cut at all."""
    port = (await serve(script(300))).port
    async with cutting(port, [100, 700, 1500, 3001, 999, 2048, 4000]) as broken:
        status, out, err = await (await Piped.run(*at(broken), "hello", cwd=tmp_path)).ended()
    assert (status, out.rstrip()) == (0, WHOLE.rstrip())
    assert "[The connection was lost; reconnecting." in err
    assert await statuses(port) == [("user", "complete", "hello"), ("assistant", "complete", WHOLE)]


async def test_a_restart_of_the_server_changes_no_text(spawn: Spawn, tmp_path: Path):
    """SIGTERM in the middle of an answer; the next process on the address continues it."""
    first = await spawn(HANGING, "--drain-timeout-s", "0.1")
    port = await first.ready(60)
    chat = await Piped.run(*at(port), "hello", cwd=tmp_path)
    await chat.read_words(len(BEGUN.split()))
    first.terminate()
    assert await first.exit_status() == 0
    await spawn(FAST, "--port", str(port))
    status, out, err = await chat.ended()
    assert (status, out.rstrip()) == (0, WHOLE.rstrip())
    assert "reconnecting" in err
    assert "The server answers again." in err


async def test_a_killed_server_is_waited_for_and_the_end_is_told(spawn: Spawn, tmp_path: Path):
    """After `kill -9` the text is what was sent, once; status and standard error say that it is not whole."""
    first = await spawn(HANGING)
    port = await first.ready(60)
    chat = await Piped.run(*at(port), "hello", cwd=tmp_path)
    await chat.read_words(len(BEGUN.split()))
    first.process.send_signal(signal.SIGKILL)
    await first.exit_status()
    await spawn(FAST, "--port", str(port))
    status, out, err = await chat.ended()
    assert status == 1
    assert out.rstrip() == BEGUN
    assert "(interrupted)" in err


async def test_a_refused_question_is_an_error_with_what_to_do(serve: Serve, tmp_path: Path):
    """No model of that name; no key where keys are needed; a key that is wrong."""
    port = (await serve(api_key="right")).port
    for argv, key, words in (
        (("--model", "gpt-9"), "right", "(model_not_found)"),
        (("--conversation", "conv_1"), "right", "(conversation_not_found)"),
        ((), "", "Set TOKENRING_API_KEY to your key"),
        ((), "wrong", "Set TOKENRING_API_KEY to your key"),
    ):
        chat = await Piped.run(*at(port), *argv, "hello", cwd=tmp_path, TOKENRING_API_KEY=key)
        status, out, err = await chat.ended()
        assert (status, out) == (2, ""), err
        assert words in err


async def test_ctrl_c_stops_the_answer_at_the_server(serve: Serve, tmp_path: Path):
    """The text so far is shown and stored, the exit status is 130."""
    port = (await serve(Script.parse(HANGING))).port
    chat = await Piped.run(*at(port), "hello", cwd=tmp_path)
    await chat.read_words(len(BEGUN.split()))
    chat.process.send_signal(signal.SIGINT)
    status, out, err = await chat.ended()
    assert (status, err) == (130, "[Stopped.]\n")
    [_, (role, state, content)] = await statuses(port)
    assert (role, state, content.rstrip()) == ("assistant", "cancelled", out.rstrip())
    assert out.rstrip() == BEGUN


async def test_a_dialogue_at_a_terminal(serve: Serve, tmp_path: Path):
    """Questions, another answer, a changed question, a step back, and the conversation at the server."""
    port = (await serve(script(200, tokens=8, reasoning=2))).port
    async with Terminal(*at(port), "--system", "Be brief.", cwd=tmp_path) as chat:
        await chat.expect("model scripted")
        await chat.expect("> ")
        chat.line("one")
        assert "\x1b[2m" in await chat.expect("8 out")  # the reasoning is dimmed
        await chat.expect("\n> ")
        chat.line("/retry")
        await chat.expect("8 out")
        await chat.expect("\n> ")
        chat.line("/edit")
        await chat.expect("one")
        chat.line("\x17two")  # deletes the word
        await chat.expect("8 out")
        await chat.expect("\n> ")
        chat.line('"""')
        chat.line("three")
        chat.line('four"""\n"""')
        await chat.expect("8 out")
        await chat.expect("\n> ")
        chat.line("\x1b[200~pasted\ntext\x1b[201~")
        await chat.expect("8 out")
        await chat.expect("\n> ")
        chat.line("/undo")
        await chat.expect("Your next question goes here.")
        chat.line("/history")
        between = await chat.expect("two")
        assert "one" not in between
        await chat.expect("\n> ")
        chat.line("/nonsense")
        await chat.expect("There is no command /nonsense")
        chat.line("/model nothing")
        await chat.expect("There is no model 'nothing'. There are: scripted.")
        chat.line("/quit")
        assert await chat.exit_status() == 0
    messages = await statuses(port)
    questions = [content for role, _, content in messages if role == "user"]
    assert questions == ["one", "two", 'three\nfour"""', "pasted\ntext"]
    assert [role for role, *_ in messages].count("assistant") == 5
    assert messages[0] == ("system", "complete", "Be brief.")


async def test_ctrl_c_at_a_terminal_stops_then_leaves(serve: Serve, tmp_path: Path):
    """The first ends the answer and gives the prompt back; NO_COLOR leaves no escape sequence of ours."""
    port = (await serve(Script.parse(HANGING))).port
    async with Terminal(*at(port), cwd=tmp_path, NO_COLOR="1") as chat:
        await chat.expect("> ")
        chat.line("hello")
        await chat.expect(BEGUN)
        chat.type("\x03")
        await chat.expect("[Stopped.]")
        await chat.expect("\n> ")
        chat.type("\x03")
        assert await chat.exit_status() == 0
    assert "\x1b[2m" not in chat.shown
    assert [status for _, status, _ in await statuses(port)] == ["complete", "cancelled"]


async def test_the_last_conversation_goes_on_with_its_running_answer(serve: Serve, tmp_path: Path):
    """A terminal that was closed in mid-answer: `--continue` shows all of it once, and stops it on Ctrl-C."""
    port = (await serve(Script.parse(HANGING))).port
    async with Terminal(*at(port), cwd=tmp_path) as chat:
        await chat.expect("> ")
        chat.line("hello")
        await chat.expect(BEGUN)
    async with Terminal(*at(port), "--continue", cwd=tmp_path) as chat:
        await chat.expect("> hello\n")
        await chat.expect(BEGUN)
        chat.type("\x03")
        await chat.expect("[Stopped.]")
        await chat.expect("10 out")
        await chat.expect("\n> ")
        chat.type("\x04")
        assert await chat.exit_status() == 0
    assert chat.shown.count(BEGUN) == 1


async def test_a_question_with_a_nul_is_opened_and_edited(serve: Serve, tmp_path: Path):
    """An API's client may have sent one, which no line of a terminal can hold."""
    served = await serve(script(200, tokens=8))
    messages = [{"role": "user", "content": "a\0b\x1b]0;x"}, {"role": "assistant", "content": "c"}]
    assert (await served.call("POST", "/api/conversations", {"messages": messages})).status == 201
    async with Terminal(*at(served.port), "--continue", cwd=tmp_path) as chat:
        await chat.expect("> ab]0;x")
        await chat.expect("\n> ")
        chat.line("/edit")
        await chat.expect("ab")
        chat.line("\x15changed")  # deletes the line
        await chat.expect("8 out")
        chat.line("/quit")
        assert await chat.exit_status() == 0
    assert [content for role, _, content in await statuses(served.port) if role == "user"][1] == "changed"
