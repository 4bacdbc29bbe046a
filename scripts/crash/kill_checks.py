"""What the kill test checks: each stream against the undisturbed one, and the ledger against the clients."""

from __future__ import annotations

import sqlite3
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from scripts.crash.engine_clients import Reply
from scripts.crash.findings import Findings
from scripts.crash.kill_requests import WATCHED_TOKENS

Text = dict[str, str]
"""Text by track, as clients have it."""


class StreamChecks:
    """Checks streams, and counts where those in bfloat16 part from the undisturbed ones."""

    def __init__(self, findings: Findings, *, exact: bool) -> None:
        self._findings = findings
        self._exact = exact
        self._behind: list[int] = []
        self._parted_before = 0

    def undisturbed(self, streams: Sequence[Reply], first: Sequence[Reply]) -> None:
        """A run in which nothing was lost, beside the first one."""
        for reply, earlier in zip(streams, first, strict=True):
            self._whole(reply)
            if self._exact:
                same = reply.text == earlier.text
                self._findings.check(same, "undisturbed runs agree", prompt=reply.prompt)

    def kind(self, kind: str, reply: Reply, *, screened: bool) -> None:
        """An undisturbed stream is of its kind: else losing it would prove nothing of that."""
        check, tracks = self._findings.check, reply.text.keys()
        if kind.startswith("reasoning"):
            check("0 reasoning" in tracks, "a reasoning request reasons", tracks=list(tracks))
        if kind == "reasoning, then text":
            check("0" in tracks, "its answer has text, too", tracks=list(tracks))
        if kind == "reasoning":
            check(_reasoning_tokens(reply), "its reasoning is counted", usage=reply.usage)
        if kind in ("watched", "held") and screened:
            check(reply.burst_tokens >= WATCHED_TOKENS, "its text is held back", tokens=reply.burst_tokens)
        if kind == "choices":
            check({"0", "1"} <= tracks, "it has two choices", tracks=list(tracks))
        if kind == "tool":
            check("0.0" in tracks, "it calls a tool", tracks=list(tracks))

    def stream(self, reply: Reply, expected: Reply, at_loss: Text, replayed: Reply) -> None:
        """A stream that went through a loss; `at_loss` is what its client had then."""
        check, prompt = self._findings.check, reply.prompt
        self._whole(reply)
        check(replayed.text == reply.text, "a replay has what was sent", prompt=prompt)
        kept = all(replayed.text.get(track, "").startswith(text) for track, text in at_loss.items())
        check(kept, "what was released before the loss stays", prompt=prompt)
        if not self._exact:
            # The arithmetic of a prefill is another: from some point on it is another valid answer.
            check(reply.finish.keys() == expected.finish.keys(), "every choice ends", prompt=prompt)
            self._part(reply.text, expected.text, at_loss)
            return
        check(reply.finish == expected.finish, "the end is the undisturbed one", prompt=prompt)
        check(reply.text == expected.text, "the text is the undisturbed one", prompt=prompt)
        tokens = [stream.usage.get("completion_tokens") for stream in (reply, expected)]
        check(tokens[0] == tokens[1], "the count is the undisturbed one", prompt=prompt, tokens=tokens)
        reasoning = [_reasoning_tokens(stream) for stream in (reply, expected)]
        check(
            reasoning[0] == reasoning[1],
            "the count of reasoning is the undisturbed one",
            prompt=prompt,
            tokens=reasoning,
        )

    def cut_off(self, reply: Reply, expected: Reply, at_loss: Text, replayed: Reply) -> None:
        """A stream whose server was killed: it ended before, or it is cut off, truthfully."""
        if reply.error is None:
            self.stream(reply, expected, at_loss, replayed)
            return
        check, prompt = self._findings.check, reply.prompt
        check(reply.error == "interrupted", "a stream is cut off as such", prompt=prompt, error=reply.error)
        self._ids(reply)
        stored = all(reply.text.get(t, "").startswith(text) for t, text in replayed.text.items())
        check(stored, "what is stored is the beginning of what was sent", prompt=prompt)
        if self._exact:
            is_beginning = all(expected.text.get(t, "").startswith(text) for t, text in reply.text.items())
            check(is_beginning, "the text is the beginning of the undisturbed one", prompt=prompt)
            limit = expected.usage.get("completion_tokens", 0)
            check(
                reply.error_usage.get("completion_tokens", 0) <= limit,
                "no more is billed than the undisturbed answer",
                prompt=prompt,
            )

    def result(self) -> dict[str, Any]:
        """The choices that parted from the undisturbed ones, and how far behind the loss, in characters."""
        return {
            "diverged_choices": self._parted_before + len(self._behind),
            "diverged_before_the_loss": self._parted_before,
            "diverged_behind_the_loss_chars_least": min(self._behind, default=None),
            "diverged_behind_the_loss_chars_median": statistics.median(self._behind)
            if self._behind
            else None,
        }

    def _whole(self, reply: Reply) -> None:
        self._findings.check(
            reply.done and reply.error is None, "a stream ends well", prompt=reply.prompt, error=reply.error
        )
        self._ids(reply)

    def _ids(self, reply: Reply) -> None:
        increasing = all(a < b for a, b in zip(reply.ids, reply.ids[1:], strict=False))
        self._findings.check(increasing, "ids strictly increase", prompt=reply.prompt)

    def _part(self, text: Text, expected: Text, at_loss: Text) -> None:
        for track in text.keys() | expected.keys():
            pair = [text.get(track, ""), expected.get(track, "")]
            if pair[0] != pair[1]:
                behind = _agreement(*pair) - len(at_loss.get(track, ""))
                if behind < 0:
                    self._parted_before += 1
                else:
                    self._behind.append(behind)


def _agreement(text: str, expected: str) -> int:
    """Characters at the beginning of two texts that are the same."""
    pairs = zip(text, expected, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(expected)))


def _reasoning_tokens(reply: Reply) -> object:
    details = reply.usage.get("completion_tokens_details") or {}
    return details.get("reasoning_tokens", reply.usage.get("reasoning_tokens"))


def check_ledger(database: Path, streams: Sequence[Reply], findings: Findings, *, killed: bool) -> None:
    """Each request has one row, settled, with the counts that its client was told.

    Where servers were `killed`, a row of nobody is of a request whose client did not have its id yet.
    """
    query = "SELECT id, state, outcome, prompt_tokens, completion_tokens - withheld_tokens FROM requests"
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(query).fetchall()
    by_id = {row[0]: row[1:] for row in rows}
    findings.check(len(by_id) == len(rows), "one row for each request")
    for reply in streams:
        row = by_id.pop(reply.request_id, None)
        usage = reply.error_usage if reply.error else reply.usage
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        is_right = row is not None and row[0] == "settled" and list(row[2:]) == counts
        findings.check(is_right, "the ledger says what the client was told", row=row, told=counts)
    for row in by_id.values():
        is_cut_off = killed and row[:2] == ("settled", "interrupted")
        findings.check(is_cut_off, "each row is of a request that was sent", row=row)
