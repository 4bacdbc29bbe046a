"""What the kill test takes for a fault, and what it counts."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from scripts.crash.engine_clients import Reply
from scripts.crash.findings import Findings
from scripts.crash.kill_checks import StreamChecks, check_ledger


def reply(text: str = "abcdef", **facts: Any) -> Reply:
    """A stream that went well."""
    usage = {"prompt_tokens": 5, "completion_tokens": len(text)}
    whole: dict[str, Any] = {"done": True, "finish": {0: "length"}, "ids": [1, 2, 3], "usage": usage}
    return Reply("asked", "id", text={"0": text}, **(whole | facts))


def wrong(
    stream: Reply, *, at_loss: str = "abc", replayed: str | None = None, exact: bool = True
) -> list[str]:
    """What is found wrong with a stream that went through a loss."""
    findings = Findings()
    again = reply(replayed) if replayed is not None else stream
    StreamChecks(findings, exact=exact).stream(stream, reply(), {"0": at_loss}, again)
    return [violation["what"] for violation in findings.violations]


def test_an_undisturbed_stream_is_right() -> None:
    """Nothing is wrong with it."""
    assert wrong(reply()) == []


@pytest.mark.parametrize(
    ("stream", "what"),
    [
        (reply("abcdeX"), "the text is the undisturbed one"),
        (reply(finish={0: "stop"}), "the end is the undisturbed one"),
        (reply(ids=[1, 3, 3]), "ids strictly increase"),
        (reply(error="engine_failed"), "a stream ends well"),
        (reply(done=False), "a stream ends well"),
        (reply(usage={"completion_tokens": 7}), "the count is the undisturbed one"),
        (
            reply(usage={"completion_tokens": 6, "reasoning_tokens": 4}),
            "the count of reasoning is the undisturbed one",
        ),
    ],
)
def test_each_fault_is_found(stream: Reply, what: str) -> None:
    """By its own check."""
    assert wrong(stream) == [what]


def test_what_was_released_is_not_taken_back() -> None:
    """The server's own record still begins with it, also where the arithmetic is another."""
    assert "what was released before the loss stays" in wrong(reply("abXdef"), exact=False)
    assert "a replay has what was sent" in wrong(reply(), replayed="abcdeX")


def test_where_a_text_parts_is_counted_from_the_loss_on() -> None:
    """In characters; another text before the loss was not caused by it."""
    checks = StreamChecks(Findings(), exact=False)
    for text in ("abcdXX", "abcXXX", "aXXXXX", "abcdef"):
        checks.stream(reply(text), reply(), {"0": text[:3]}, reply(text))
    result = checks.result()
    assert result["diverged_choices"] == 3
    assert result["diverged_before_the_loss"] == 1
    assert result["diverged_behind_the_loss_chars_least"] == 0
    assert result["diverged_behind_the_loss_chars_median"] == 0.5


def test_a_stream_that_a_kill_cut_off_is_a_true_beginning() -> None:
    """Of the undisturbed text, billed for no more, and told as such."""
    findings = Findings()
    checks = StreamChecks(findings, exact=True)
    cut = reply("abcd", error="interrupted", finish={})
    checks.cut_off(cut, reply(), {"0": "abcd"}, reply("abc", error="interrupted"))
    assert findings.violations == []
    checks.cut_off(reply("abXd", error="engine_failed", finish={}), reply(), {}, reply("abX"))
    assert [violation["what"] for violation in findings.violations] == [
        "a stream is cut off as such",
        "the text is the beginning of the undisturbed one",
    ]


@pytest.mark.parametrize(
    ("rows", "killed", "faults"),
    [
        ([("id", "settled", "length", 5, 6, 0)], False, 0),
        ([("id", "settled", "length", 5, 8, 2)], False, 0),
        ([("id", "settled", "length", 5, 7, 0)], False, 1),
        ([("id", "reserved", None, 5, 6, 0)], False, 1),
        ([], False, 1),
        ([("id", "settled", "length", 5, 6, 0), ("x", "settled", "interrupted", 5, 0, 0)], True, 0),
        ([("id", "settled", "length", 5, 6, 0), ("x", "settled", "interrupted", 5, 0, 0)], False, 1),
        ([("id", "settled", "length", 5, 6, 0), ("x", "settled", "length", 5, 6, 0)], True, 1),
    ],
)
def test_the_ledger_has_each_request_once(
    tmp_path: Path, rows: list[tuple[Any, ...]], killed: bool, faults: int
) -> None:
    """With what its client was told."""
    names = "id, state, outcome, prompt_tokens, completion_tokens, withheld_tokens"
    connection = sqlite3.connect(tmp_path / "ledger.db")
    connection.execute(f"CREATE TABLE requests ({names})")
    connection.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()
    findings = Findings()
    check_ledger(tmp_path / "ledger.db", [reply()], findings, killed=killed)
    assert len(findings.violations) == faults
