"""A remote server dies, hangs or lies in mid-answer: the answer goes on, nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from app.core import ChatRequest, Counts, Delta
from app.engine.http.engine import RemoteEngine
from app.engine.http.generation import ABORT_WAIT_S
from app.errors import EngineFailed
from tests.support.false_sglang import (
    PROMPT_TOKENS,
    TOKENS,
    FalseServer,
    Fault,
    PlainModel,
    all_read,
    ask,
    ends_restarted,
    faults,
    frame,
    moved,
    once,
    words,
)
from tests.support.sse_client import until

WHOLE = list(range(1, TOKENS + 1))


def ids_of(deltas: Sequence[Delta]) -> list[int]:
    """All token ids of an answer."""
    return [token_id for delta in deltas for token_id in delta.token_ids]


def check_whole(deltas: Sequence[Delta], tokens: int = TOKENS) -> None:
    """Every token and its text once, counts that never fall and end true, one last delta."""
    assert ids_of(deltas) == list(range(1, tokens + 1))
    assert "".join(delta.text for delta in deltas) == words(range(1, tokens + 1))
    received = 0
    for delta in deltas:
        received += len(delta.token_ids)
        assert delta.counts == Counts(PROMPT_TOKENS, received, 2)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]


async def four_tokens(response: web.StreamResponse, request: web.Request) -> None:
    """The beginning of an answer, or of the rest of one."""
    before = len((await request.json())["input_ids"]) - PROMPT_TOKENS
    await response.prepare(request)
    for number in range(before + 1, before + 5):
        await response.write(frame(number, before=before))


async def breaks_off(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """The connection is cut."""
    await four_tokens(response, request)
    await all_read()
    request.transport.close()


async def ends_early(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """A tidy end without a last event."""
    await four_tokens(response, request)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


async def babbles(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Something that is no event."""
    await four_tokens(response, request)
    await response.write(b"data: \x00\xff\n\n")
    await asyncio.sleep(30)


async def says_nothing(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Accepts the request, and never answers."""
    await response.prepare(request)
    await asyncio.sleep(30)


async def falls_silent(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Nothing more, though the server is well."""
    await four_tokens(response, request)
    await asyncio.sleep(30)


async def counts_too_many(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """A count beyond its ids."""
    await four_tokens(response, request)
    await response.write(frame(5, completion_tokens=9))
    await asyncio.sleep(30)


async def counts_back(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """A count below the last one."""
    await four_tokens(response, request)
    await response.write(frame(5, completion_tokens=2))
    await asyncio.sleep(30)


async def gives_up(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """SGLang's own end of a request that it cannot go on with, or of all while it stops."""
    await four_tokens(response, request)
    finish = {"type": "abort", "status_code": 503, "message": "no memory"}
    await response.write(frame(4, finish))
    await response.write_eof()


async def queues_too_long(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Accepts the request, and refuses it after a while without a token."""
    await response.prepare(request)
    await asyncio.sleep(0.8)
    finish = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    await response.write(frame(4, finish, before=4).replace(b"w4 ", b"").replace(b"[4]", b"[]"))
    await response.write_eof()


KIND_OF: dict[Fault, str] = {
    breaks_off: "broke_off",
    ends_early: "broke_off",
    babbles: "unreadable",
    falls_silent: "silent",
    counts_too_many: "wrong_count",
    counts_back: "wrong_count",
    gives_up: "broke_off",
}


@pytest.mark.parametrize("fault", KIND_OF, ids=lambda fault: fault.__name__)
async def test_an_answer_goes_on_at_another_server(
    servers: list[FalseServer], connect: Any, capsys: pytest.CaptureFixture[str], fault: Fault
) -> None:
    """The other one gets the ids so far and what is left; the fault is counted, and logged."""
    engine = await connect(*servers, silence_s=0.3 if fault is falls_silent else 10.0)
    shared = once(fault)
    for server in servers:
        server.fault = shared
    check_whole(await ask(engine))
    assert engine.pop_emitted_tokens("r") == TOKENS
    first, second = sorted(
        (body for server in servers for body in server.asked), key=lambda body: body["rid"]
    )
    assert [len(server.asked) for server in servers] == [1, 1]
    assert second["input_ids"] == [*first["input_ids"], 1, 2, 3, 4]
    assert second["sampling_params"]["max_new_tokens"] == TOKENS - 4
    assert (faults(engine), moved(engine)) == ({KIND_OF[fault]: 1}, {"resumed": 1})
    logged = capsys.readouterr().out
    assert first["rid"] in logged
    assert "w1 " not in logged


async def test_sixteen_answers_survive_the_death_of_one_of_two_servers(
    servers: list[FalseServer], connect: Any
) -> None:
    """Those that ran on it end whole at the other one; the others notice nothing."""
    engine = await connect(*servers)
    for server in servers:
        server.tokens, server.pause_s = 60, 0.01
    asking = [asyncio.create_task(ask(engine, f"r{n:02}", max_tokens=60)) for n in range(16)]
    await until(lambda: all(engine.pop_emitted_tokens(f"r{n:02}") >= 5 for n in range(16)))
    assert [len(server.asked) for server in servers] == [8, 8]
    await servers[0].stop()
    for answer in await asyncio.gather(*asking):
        check_whole(answer, 60)
    assert all(engine.pop_emitted_tokens(f"r{n:02}") == 60 for n in range(16))
    assert moved(engine) == {"resumed": 8}
    assert len(servers[1].asked) == 16


async def test_an_answer_goes_on_at_the_same_server_once_it_is_back(
    servers: list[FalseServer], connect: Any
) -> None:
    """Until then it waits, and nothing comes."""
    engine = await connect(servers[0])
    servers[0].tokens, servers[0].pause_s = 60, 0.01
    asking = [asyncio.create_task(ask(engine, f"r{n}", max_tokens=60)) for n in range(6)]
    await until(lambda: all(engine.pop_emitted_tokens(f"r{n}") >= 5 for n in range(6)))
    await servers[0].stop()
    await until(lambda: not engine._pool.is_healthy)
    assert not any(task.done() for task in asking)
    await servers[0].start()
    for answer in await asyncio.gather(*asking):
        check_whole(answer, 60)


async def test_a_request_whose_server_dies_before_its_first_token_waits_too(
    servers: list[FalseServer], connect: Any
) -> None:
    """It was accepted, and nothing of it was handed over: it is sent again as it was."""
    engine = await connect(servers[0])

    async def takes_it(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await response.prepare(request)
        await asyncio.sleep(30)

    servers[0].fault = once(takes_it)
    asking = asyncio.create_task(ask(engine))
    await until(lambda: len(servers[0].asked) == 1)
    await servers[0].stop()
    await until(lambda: not engine._pool.is_healthy)
    await servers[0].start()
    check_whole(await asking)


async def read(deltas: AsyncIterator[Delta], seen: list[Delta]) -> None:
    """Read to the end, whatever that is."""
    async for delta in deltas:
        seen.append(delta)  # noqa: PERF401  # what came before an error counts


async def test_a_server_that_accepts_and_never_answers_loses_the_request(
    servers: list[FalseServer], connect: Any
) -> None:
    """It goes whole to the other one."""
    engine = await connect(*servers, silence_s=0.3)
    shared = once(says_nothing)
    for server in servers:
        server.fault = shared
    check_whole(await ask(engine))
    assert (faults(engine), moved(engine)) == ({"silent": 1}, {"resumed": 1})


async def test_an_answer_whose_server_stays_away_ends(servers: list[FalseServer], connect: Any) -> None:
    """After the time set, with what has come; the log names the request and a hash of its prompt."""
    engine = await connect(servers[0], resume_s=0.3)
    servers[0].tokens, servers[0].pause_s = 10_000, 0.01
    prompt = await engine.render(ChatRequest("r", "owner", "model", {"messages": []}, 0, max_tokens=10_000))
    seen: list[Delta] = []
    reading = asyncio.create_task(read(engine.generate("r", prompt), seen))
    await until(lambda: len(seen) > 4)
    await servers[0].stop()
    with pytest.raises(EngineFailed, match="lost in mid-answer"):
        await reading
    assert ids_of(seen) == list(range(1, len(seen) + 1))
    assert moved(engine) == {"ended": 1}


async def test_an_answer_that_waited_long_at_another_server_is_moved_again(
    servers: list[FalseServer], connect: Any
) -> None:
    """It was queued there for longer than the time set, and then refused: the time starts again."""
    engine = await connect(*servers, resume_s=0.5)
    queues_and_refuses = once(queues_too_long)

    async def dies_then_refuses(
        server: FalseServer, response: web.StreamResponse, request: web.Request
    ) -> None:
        if len((await request.json())["input_ids"]) == PROMPT_TOKENS:
            await breaks_off(server, response, request)
        else:
            await queues_and_refuses(server, response, request)

    for server in servers:
        server.fault = dies_then_refuses
    check_whole(await ask(engine))
    assert moved(engine) == {"resumed": 1}


async def test_an_abort_while_no_server_is_there_ends_at_once(
    servers: list[FalseServer], connect: Any
) -> None:
    """With the counts of what has come; nobody has to be asked."""
    engine = await connect(servers[0])
    servers[0].tokens, servers[0].pause_s = 10_000, 0.01
    asking = asyncio.create_task(ask(engine, max_tokens=10_000))
    await until(lambda: engine.pop_emitted_tokens("r") > 4)
    await servers[0].stop()
    await until(lambda: not engine._pool.is_healthy)
    engine.abort("r")
    deltas = await asyncio.wait_for(asking, ABORT_WAIT_S / 2)
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].counts.completion_tokens == len(ids_of(deltas))


async def test_a_request_that_kills_its_servers_is_not_sent_to_a_third(
    servers: list[FalseServer], connect: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two died without a token in between: it ends, is recorded, and the others go on."""
    third = await FalseServer().start()
    engine = await connect(*servers, third)
    killed: list[FalseServer] = []

    async def dies_of_it(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        body = await request.json()
        if not body["rid"].startswith("poison"):
            await server.answer(response, request, body)
            return
        killed.append(server)
        await response.prepare(request)
        request.transport.close()

    for server in (*servers, third):
        server.fault = dies_of_it
    try:
        with ends_restarted():
            await ask(engine, "poison")
        assert len(killed) == 2
        assert len(set(map(id, killed))) == 2
        check_whole(await ask(engine, "innocent"))
        assert "fingerprint=" in capsys.readouterr().out
    finally:
        await third.stop()


async def test_an_answer_is_not_moved_for_ever(
    servers: list[FalseServer], connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that loses every server again and again has other troubles."""
    monkeypatch.setattr("app.engine.http.generation.MAX_MOVES", 3)
    engine = await connect(*servers)
    for server in servers:
        server.fault = breaks_off
    prompt = await engine.render(ChatRequest("r", "owner", "model", {"messages": []}, 0, max_tokens=100))
    seen: list[Delta] = []
    with ends_restarted():
        await read(engine.generate("r", prompt), seen)
    assert ids_of(seen) == WHOLE
    assert sum(len(server.asked) for server in servers) == 3


@pytest.mark.parametrize("sampling", [{"regex": "a*"}, {"frequency_penalty": 0.5}])
async def test_what_lives_in_its_server_alone_ends(
    servers: list[FalseServer], connect: Any, sampling: dict[str, Any]
) -> None:
    """A grammar's place and penalties are gone with the server; a request without a token is sent again."""
    model = type("Sampling", (PlainModel,), {"sampling": sampling})
    engine = await connect(*servers, model=model)
    shared = once(breaks_off)
    for server in servers:
        server.fault = shared
    with ends_restarted():
        await ask(engine)
    assert engine.pop_emitted_tokens("r") == 4
    check_whole(await ask(engine, "s"))


async def test_of_several_choices_only_the_lost_one_moves(servers: list[FalseServer], connect: Any) -> None:
    """Each choice is a request of its own."""
    engine = await connect(*servers)

    async def one_breaks(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        body = await request.json()
        if body["rid"] == "r-001-0":
            await breaks_off(server, response, request)
        else:
            await server.answer(response, request, body)

    for server in servers:
        server.fault = one_breaks
    deltas = await ask(engine, n=3)
    for choice in range(3):
        check_whole([delta for delta in deltas if delta.choice == choice])
    assert sum(len(server.asked) for server in servers) == 4


async def test_a_server_that_lives_and_generates_nothing_loses_its_answers(
    servers: list[FalseServer], connect: Any
) -> None:
    """Its routes answer and its health does not: long before one stream's silence would be too long."""
    engine = await connect(*servers, silence_s=60.0)
    stuck: list[FalseServer] = []

    async def sticks(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await four_tokens(response, request)
        server.generates = False
        stuck.append(server)
        await asyncio.sleep(60)

    shared = once(sticks)
    for server in servers:
        server.fault = shared
    check_whole(await asyncio.wait_for(ask(engine), 10))
    assert len(stuck) == 1
    assert faults(engine)["stalled"] == 1


async def test_a_server_that_hangs_loses_its_answers(servers: list[FalseServer], connect: Any) -> None:
    """Polls that are not answered break its connections, long before the silence would be too long."""
    engine = await connect(*servers, silence_s=60.0, poll_s=0.05)

    async def hangs(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await four_tokens(response, request)
        server.well = False
        await asyncio.sleep(60)

    shared = once(hangs)
    for server in servers:
        server.fault = shared
    check_whole(await asyncio.wait_for(ask(engine), 10))


async def test_a_silent_server_that_is_healthy_keeps_its_answers(
    servers: list[FalseServer], connect: Any
) -> None:
    """A long prompt takes its time: health says that the server generates."""
    engine = await connect(servers[0])

    async def thinks(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await response.prepare(request)
        asked = server.num_health
        async with asyncio.timeout(10):
            while server.num_health < asked + 3:
                await asyncio.sleep(0.01)
        for number in WHOLE:
            await response.write(frame(number, {"type": "length"} if number == TOKENS else None))

    servers[0].fault = thinks
    check_whole(await ask(engine))
    assert len(servers[0].asked) == 1


async def test_a_server_whose_load_changes_keeps_its_answers(
    servers: list[FalseServer], connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is read in chunks leaves no room for the token of a health check."""
    engine = await connect(servers[0], stall_s=10.0)
    asked = asyncio.Event()
    remote = engine._pool.servers[0]
    poll = remote.poll

    async def and_six_seconds_pass() -> None:
        await poll()
        remote._progress_s -= 6.0

    monkeypatch.setattr(remote, "poll", and_six_seconds_pass)

    async def reads_long(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await response.prepare(request)
        server.generates, server.advances = False, 1
        asked.set()
        begun = server.used_tokens
        while server.used_tokens < begun + 40:
            await asyncio.sleep(0.01)
        server.generates = True
        for number in WHOLE:
            await response.write(frame(number, {"type": "length"} if number == TOKENS else None))

    servers[0].fault = reads_long
    asking = asyncio.create_task(ask(engine))
    await asked.wait()
    check_whole(await asking)
    assert not faults(engine)


@pytest.mark.parametrize("last", [None, {"type": "length"}], ids=["a delta", "a second end"])
async def test_what_comes_after_the_end_is_noted_and_dropped(
    servers: list[FalseServer], connect: Any, last: dict[str, str] | None
) -> None:
    """The answer has ended: nothing of it reaches the reader."""
    engine = await connect(servers[0])

    async def talks_on(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await response.prepare(request)
        for number in WHOLE:
            await response.write(frame(number, {"type": "length"} if number == TOKENS else None))
        await response.write(frame(TOKENS + 1, last))
        await response.write_eof()

    servers[0].fault = talks_on
    check_whole(await ask(engine))
    await until(lambda: faults(engine) == {"after_end": 1})
    await until(lambda: not engine._tasks)


async def test_a_wrong_count_of_the_prompt_is_not_billed(servers: list[FalseServer], connect: Any) -> None:
    """What was sent is what is counted."""
    engine = await connect(servers[0])

    async def miscounts(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        await response.prepare(request)
        for number in WHOLE:
            finish = {"type": "length"} if number == TOKENS else None
            await response.write(frame(number, finish, prompt_tokens=5000))
        await response.write_eof()

    servers[0].fault = miscounts
    check_whole(await ask(engine))
    await until(lambda: faults(engine) == {"wrong_count": 1})


async def test_an_answer_that_nobody_reads_any_more_is_let_go(
    servers: list[FalseServer], connect: Any
) -> None:
    """The server sends on after its client has gone: nothing of it arrives, and nothing is left open."""
    engine = await connect(*servers)
    other_begun = asyncio.Event()

    async def sends_on(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        body = await request.json()
        if body["index"] == 0:
            await four_tokens(response, request)
            await other_begun.wait()
            finish = {"type": "abort", "status_code": 400, "message": "No."}
            await response.write(frame(4, finish))
            return
        await response.prepare(request)
        other_begun.set()
        for number in range(1, 10_000):
            await response.write(frame(number))
            await asyncio.sleep(0.001)

    for server in servers:
        server.fault = sends_on
    with pytest.raises(Exception, match="No"):
        await ask(engine, n=2)
    handed_over = engine.pop_emitted_tokens("r")
    await until(lambda: not engine._tasks)
    await until(lambda: sum(server.num_left for server in servers) == 1)
    assert handed_over > 0
    assert engine.pop_emitted_tokens("r") == 0
    assert not moved(engine)


async def test_few_answers_move_at_once(servers: list[FalseServer], connect: Any) -> None:
    """The next one is let in when one before it has a token."""
    engine = await connect(*servers)
    may_answer = asyncio.Semaphore(0)

    async def slowly(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        body = await request.json()
        if body["rid"].endswith("-0"):
            await breaks_off(server, response, request)
            return
        await response.prepare(request)
        asked.append(body["rid"])
        await may_answer.acquire()
        await server.answer(response, request, body)

    asked: list[str] = []
    for server in servers:
        server.fault = slowly
    asking = [asyncio.create_task(ask(engine, f"r{n:02}")) for n in range(12)]
    for allowed in range(4, 13):
        await until(lambda allowed=allowed: len(asked) == allowed)  # type: ignore[misc]
        may_answer.release()
    for _ in range(3):
        may_answer.release()
    for answer in await asyncio.gather(*asking):
        check_whole(answer)


async def continued(engine: RemoteEngine, runs: Sequence[Sequence[int]]) -> list[Delta]:
    """The deltas of an answer that goes on behind what an earlier process had of it."""
    request = ChatRequest("r", "owner", "model", {"messages": []}, 0, n=len(runs))
    prompt = replace(await engine.render(request), continued=runs)
    return [delta async for delta in engine.generate("r", prompt)]


async def test_an_answer_of_an_earlier_process_goes_on(servers: list[FalseServer], connect: Any) -> None:
    """Its ids are handed over again, at once, and the rest is asked for; each choice has its own."""
    engine = await connect(servers[0])
    runs = [[1, 2, 3, 4, 5], [], WHOLE]
    deltas = await continued(engine, runs)
    for choice, run in enumerate(runs):
        mine = [delta for delta in deltas if delta.choice == choice]
        assert ids_of(mine) == WHOLE
        assert "".join(delta.text for delta in mine) == words(WHOLE)
        assert [delta.counts.completion_tokens for delta in mine] == WHOLE[max(len(run), 1) - 1 :]
        assert mine[-1].finish_reason == "length"
    asked = {body["rid"].split("-", 2)[2]: len(body["input_ids"]) for body in servers[0].asked}
    assert asked == {"000-0": 3 + 5, "001-0": 3}
    assert engine.pop_emitted_tokens("r") == 3 * TOKENS


async def test_an_answer_of_an_earlier_process_runs_beside_what_is_left_of_it(
    servers: list[FalseServer], connect: Any
) -> None:
    """Its server may not have noticed that the process before is gone: it takes each id once at a time."""
    first, second = await connect(servers[0]), await connect(servers[0])
    servers[0].pause_s = 0.05
    begun = first.generate("r", await first.render(ChatRequest("r", "owner", "model", {"messages": []}, 0)))
    assert list((await anext(begun)).token_ids) == [1]
    assert ids_of(await continued(second, [[1]])) == WHOLE
    assert len({body["rid"] for body in servers[0].asked}) == 2
    first.abort("r")


async def test_an_answer_of_an_earlier_process_can_lose_its_server(
    servers: list[FalseServer], connect: Any
) -> None:
    """It then moves as any other."""
    engine = await connect(*servers)
    shared = once(breaks_off)
    for server in servers:
        server.fault = shared
    deltas = await continued(engine, [[1, 2]])
    assert ids_of(deltas) == WHOLE
    assert [len(body["input_ids"]) for server in servers for body in server.asked] in ([5, 9], [9, 5])


async def test_an_earlier_answer_that_cannot_be_rebuilt_ends(
    servers: list[FalseServer], connect: Any
) -> None:
    """Its server would begin its grammar anew."""
    engine = await connect(servers[0], model=type("Sampling", (PlainModel,), {"sampling": {"regex": "a"}}))
    with ends_restarted():
        await continued(engine, [[1, 2]])
    assert not servers[0].asked
