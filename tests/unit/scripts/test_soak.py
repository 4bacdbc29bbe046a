"""What a soak checks and reckons, without a server."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

from scripts.crash.books import Bill, Row
from scripts.crash.engine_clients import Reply
from scripts.crash.findings import Findings
from scripts.crash.server import ServerFailed
from scripts.crash.soak_cases import Case, profile
from scripts.crash.soak_checks import StoryChecks
from scripts.crash.soak_clients import Manner, Story
from scripts.crash.soak_faults import Disturber, Fault, planned
from scripts.crash.soak_lives import Lives
from scripts.crash.soak_metrics import Sample, last_two_thirds, slope_per_hour

MANNER = Manner("/api", stored=False, streamed=True)
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


def reply(text="a b c ", finish="stop", request_id="chatcmpl-1", **fields):
    """An answer with its end."""
    return Reply(
        "case", request_id, [1, 2, 3], {"0": text}, {0: finish} if finish else {}, usage=USAGE, **fields
    )


def row(request_id="chatcmpl-1", outcome="stop", completion_tokens=3):
    """A settled request."""
    bill = Bill("settled", outcome, 0, 5, 0, completion_tokens, 0, 0, 1, 1)
    return Row(1, request_id, bill, (0, 0, 0), 10, None, None)


def violations(tmp_path: Path, story: Story, *rows: Row, keys=()):
    """What is found of a request whose undisturbed answer is "a b c "."""
    findings = Findings()
    lives = Lives(tmp_path, [], findings)
    lives.keys.update(keys)
    StoryChecks(lives, findings).check([story], {one.id: one for one in rows})
    return [violation["what"] for violation in findings.violations]


def told(answer: Reply, **fields) -> Story:
    """The story of one answer."""
    case = Case("case", {}, expected=reply(done=True))
    return Story(case, MANNER, fields.pop("key", None), attempts=[answer], **fields)


def test_a_whole_answer_with_its_row_is_right(tmp_path):
    """Nothing is found."""
    assert violations(tmp_path, told(reply(done=True)), row()) == []


def test_another_text_is_found(tmp_path):
    """A whole answer must be the undisturbed one."""
    wrong = told(reply("a b x ", done=True))
    assert "the text is the undisturbed one" in violations(tmp_path, wrong, row())


def test_a_part_must_be_how_the_answer_begins(tmp_path):
    """Of one that its client left."""
    assert violations(tmp_path, told(reply("a b", finish=""), left=True), row()) == []
    found = violations(tmp_path, told(reply("b", finish=""), left=True), row())
    assert found == ["what was received is how the undisturbed answer begins"]


def test_an_answer_that_does_not_end_is_found(tmp_path):
    """Its client neither left nor stopped it."""
    assert violations(tmp_path, told(reply("a ", finish="")), row()) == ["every stream ends"]


def test_an_answer_that_is_not_in_the_ledger_is_found(tmp_path):
    """It was begun, and nobody was killed."""
    assert violations(tmp_path, told(reply(done=True))) == ["what was begun is in the ledger"]


def test_another_count_is_found(tmp_path):
    """The bill has more than the client was told."""
    found = violations(tmp_path, told(reply(done=True)), row(completion_tokens=4))
    assert "the bill is what was told" in found


def test_two_bills_of_one_key_are_found(tmp_path):
    """Though the second has another id."""
    keys = {"chatcmpl-1": "key", "chatcmpl-2": "key"}
    found = violations(tmp_path, told(reply(done=True), key="key"), row(), row("chatcmpl-2"), keys=keys)
    assert found == ["nothing is billed twice"]


def test_a_row_of_nobody_is_found(tmp_path):
    """Unless a client went away before it knew its id."""
    rows = (row(), row("chatcmpl-2"))
    assert violations(tmp_path, told(reply(done=True)), *rows) == ["every row is of a request that was sent"]
    assert violations(tmp_path, told(reply(done=True), unknown=True), *rows) == []


def test_an_end_by_a_fault_needs_a_fault(tmp_path):
    """No engine was lost twice, and no server killed."""
    for error in ("engine_restarted", "interrupted", "engine_failed"):
        broken = told(reply("a ", finish="", error=error, done=True, error_usage=USAGE))
        assert violations(tmp_path, broken, row(outcome=error)) == ["no answer ends without need"]


def test_ids_that_step_back_are_found(tmp_path):
    """A repeated event is one."""
    answer = reply(done=True)
    answer.ids = [1, 2, 2]
    assert violations(tmp_path, told(answer), row()) == ["ids strictly increase"]


def test_the_slope_is_that_of_the_last_two_thirds():
    """10 MB in each minute, after a beginning that grows faster."""
    beginning = [Sample(60.0 * i, 1, {"rss_mb": 100 * i}) for i in range(1, 4)]
    rest = [Sample(60.0 * i, 1, {"rss_mb": 500 + 10 * i}) for i in range(4, 11)]
    late = last_two_thirds([*beginning, *rest])
    assert late == rest
    assert round(slope_per_hour(late, "rss_mb")) == 600


def test_the_server_is_stopped_and_killed_only_where_it_may_be():
    """In the last two thirds one process must live, so that its memory says something."""
    rng = random.Random(1)
    calm = [f.kind for _ in range(50) for f in planned(rng, may_restart=False, has_processes=True)]
    assert set(calm) == {"engine", "burst"}
    wild = [f.kind for _ in range(50) for f in planned(rng, may_restart=True, has_processes=True)]
    assert set(wild) == {"engine", "burst", "TERM", "KILL"}


class StartingServer:
    """A server that is ready never, and whose process is there after the loop has turned a few times."""

    pid, port, faults, noise = 1, 0, (), ()

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    @classmethod
    async def start(cls, *_: object) -> StartingServer:
        """See Server.start."""
        for _turn in range(9):
            await asyncio.sleep(0)
        return cls()

    async def ready(self) -> None:
        """See Server.ready."""
        await self.killed.wait()
        raise ServerFailed

    async def kill(self) -> None:
        """See Server.kill."""
        self.killed.set()


async def test_a_kill_in_the_start_hits_the_server_that_starts(tmp_path, monkeypatch):
    """However early it comes: one that lived on would have the store, and the next start would fail."""
    monkeypatch.setattr("scripts.crash.soak_lives.Server", StartingServer)
    monkeypatch.setattr("scripts.crash.soak_faults._EARLY_KILL", 2.0)
    lives = Lives(tmp_path, [], Findings())
    monkeypatch.setattr(lives, "start", lives.begin)
    rng = random.Random(1)
    monkeypatch.setattr(rng, "uniform", lambda *_: 0.0)
    async with asyncio.timeout(10):
        await lives.start()
        await Disturber(lives, cast("Any", None), rng).disturb([Fault(0.0, "KILL")])
    assert [life.end for life in lives.all] == ["KILL", "KILL", ""]


def test_each_kind_of_request_is_asked():
    """Of real SGLang: choices, grammars, tools, penalties, reasoning, conversations and screens."""
    names = " ".join(case.name for case in profile("sglang").cases)
    for kind in ("two choices", "schema", "tool", "penalties", "reasoning", "watched", "blocked"):
        assert kind in names
    assert any(case.then for case in profile("sglang").cases)
