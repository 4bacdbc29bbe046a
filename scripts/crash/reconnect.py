"""What the clients of a dead server find when they come back, against what they knew."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from app.core import known_finish
from scripts.crash.books import Row
from scripts.crash.findings import Findings
from scripts.crash.http import get_json, read
from scripts.crash.sent_request import Reply, SentRequest, WireViolation

CHECKPOINT_S = 1.0
_UNTOLD = 8
"""Tokens of a real model that say nothing yet, as a part of a character: their chunk comes later."""
_STATUS_OF = {"stop": "complete", "length": "complete", "abort": "cancelled"}


@dataclass(frozen=True)
class Bounds:
    """How exact a bill can be: tokens per second of a choice at most, seconds a checkpoint may be late."""

    rate: float
    margin_s: float


@dataclass
class Replay:
    """What a GET brought."""

    status: int
    code: str | None
    reply: Reply
    violation: str | None = None


async def resume_stream(port: int, sent: SentRequest, after: int) -> Replay:
    """Attach to a stream after event `after`. Raises one of `Gone`."""
    path = f"{sent.path}/chat/completions/{sent.request_id}"
    back = {"accept": "text/event-stream", "last-event-id": str(after)}
    async with read(port, path, back) as answer:
        replay = Replay(answer.status, None, Reply(counted=sent.reply.counted, last_id=after))
        if answer.status == 200:
            try:
                async for event in answer.events():
                    replay.reply.add(event, time.monotonic())
            except WireViolation as error:
                replay.violation = str(error)
        elif (body := await answer.json()) is not None:
            replay.code = body["error"]["code"]
        return replay


class Reconnect:
    """The checks of one request whose server has died or stopped."""

    def __init__(self, sent: SentRequest, row: Row | None, bounds: Bounds, findings: Findings) -> None:
        self._sent = sent
        self._row = row
        self._bounds = bounds
        self._findings = findings

    def _check(self, holds: object, what: str, **facts: object) -> bool:
        sent, row = self._sent, self._row
        identity = {
            "id": sent.request_id,
            "number": sent.number,
            "body": sent.body,
            "key": sent.key,
            "received": (sent.reply.last_id, sent.reply.tokens, sent.reply.finish_reasons, sent.reply.done),
            "bill": None if row is None else row.bill._asdict(),
        }
        return self._findings.check(holds, what, **identity, **facts)

    async def run(self, port: int, rng: random.Random) -> None:
        """Do all checks. Raises one of `Gone`: then do them again."""
        sent, row = self._sent, self._row
        self._check(sent.violation is None, "what a client receives is in order", violation=sent.violation)
        if row is None:
            await self._check_never_was(port)
            return
        whole = await resume_stream(port, sent, 0)
        places = [sent.reply.last_id, *(mark.id for mark in sent.reply.marks)]
        resumed = [
            (after, await resume_stream(port, sent, after)) for after in {places[0], rng.choice(places)}
        ]
        path = f"/api/conversations/{row.conversation_id}"
        view = await get_json(port, path) if sent.stored and not sent.refused else None
        self._findings.ended("interrupted" if row.interrupted else str(row.bill.outcome))
        at_end = await resume_stream(port, sent, whole.reply.last_id)
        self._check_prompt(row)
        if row.interrupted:
            self._check_interrupted_bill(row)
        else:
            self._check_settled_bill(row)
        if sent.refused:
            return
        self._check_whole(row, whole)
        self._check(at_end.status == 204, "after [DONE] there is nothing", status=at_end.status)
        for after, replay in resumed:
            self._check_resumed(row, whole, after, replay)
        if view is not None:
            self._check_stored(row, whole)
            self._check_view(row, *view)

    async def _check_never_was(self, port: int) -> None:
        """A request without a row has released nothing, and is not known."""
        sent = self._sent
        released = sent.reply.tokens > 0 or sent.reply.done
        self._check(not released, "no token is released before its reservation is durable")
        if sent.request_id is not None and not sent.refused:
            replay = await resume_stream(port, sent, sent.reply.last_id)
            facts = {"status": replay.status, "code": replay.code}
            self._check(replay.status == 404, "what died before its reservation is not found", **facts)

    # The bill

    def _check_prompt(self, row: Row) -> None:
        """The scripted prompt is its words and one for the role."""
        sent = self._sent
        if sent.scripted and sent.continues is None and row.bill.outcome != "draining":
            words = sent.prompt_words + 1
            self._check(row.bill.prompt_tokens == words, "the prompt is billed as it was sent", words=words)

    def _check_interrupted_bill(self, row: Row) -> None:
        sent, reply, billed = self._sent, self._sent.reply, row.bill.released_tokens
        killed_at_s = sent.life.killed_at_s
        self._check(not reply.done or reply.error is not None, "an end is told only once it is settled")
        due_before_s = killed_at_s - CHECKPOINT_S - self._bounds.margin_s
        due = max((mark.tokens for mark in reply.marks if mark.at_s <= due_before_s), default=0)
        what = "what was received is billed but for the last checkpoint interval"
        self._check(billed >= due, what, due=due)
        first_unbilled = next((mark.at_s for mark in reply.marks if mark.tokens > billed), killed_at_s)
        if reply.tokens > billed:
            self._findings.short(reply.tokens - billed, killed_at_s - first_unbilled)
        self._check_not_over(billed)
        if sent.body.get("stream") and not sent.left and reply.tokens:
            self._findings.ahead_tokens = max(self._findings.ahead_tokens, billed - reply.tokens)
            in_flight = sent.n * (2 + self._bounds.rate * self._bounds.margin_s)
            self._check(billed <= reply.tokens + in_flight, "nothing is billed that was not on its way")

    def _check_not_over(self, billed: int) -> None:
        """Not more than the whole answer, nor than the engine can have made in the time."""
        sent = self._sent
        self._check(billed <= sent.length * sent.n, "no more is billed than the whole answer")
        lived_s = sent.life.killed_at_s - sent.sent_at_s
        made = sent.n * (2 + 1.25 * self._bounds.rate * lived_s)
        self._check(billed <= made or not sent.scripted, "no more is billed than was generated", made=made)

    def _check_settled_bill(self, row: Row) -> None:
        sent, reply, bill = self._sent, self._sent.reply, row.bill
        if bill.outcome == sent.finish_reason:
            made = bill.released_tokens + bill.cut_tokens
            self._check(made == sent.length * sent.n, "a whole answer is billed whole")
            return
        stopped = bill.outcome == "abort" and sent.cancelled
        died = bill.outcome == "draining" and (reply.error is not None or sent.refused is not None)
        unreceived = sent.left or not reply.done
        self._check(stopped or died or unreceived, "the outcome is the one that the client was told")
        self._check_not_over(bill.released_tokens)
        if reply.done and (sent.scripted or reply.error is None):
            self._check(
                bill.released_tokens == reply.tokens, "what was received to its end is billed exactly"
            )

    # The replay

    def _check_whole(self, row: Row, whole: Replay) -> None:
        """From the beginning: what is stored, and its end."""
        facts = {"status": whole.status, "code": whole.code, "violation": whole.violation}
        if not self._check(whole.status == 200 and not whole.violation, "it can be replayed", **facts):
            return
        sent, reply, billed = self._sent, whole.reply, row.bill.released_tokens
        right = sent.is_beginning(reply.text)
        self._check(right, "what is stored is how the answer begins", text=reply.text)
        of_one = reply.tokens <= billed <= reply.tokens + (0 if sent.scripted else _UNTOLD)
        self._check(of_one, "text and bill are of one moment", replayed=reply.tokens)
        if reply.usage is not None and not reply.counted:
            reported = reply.usage["completion_tokens"]
            self._check(reported == billed, "the usage that was told is billed", reported=reported)
        self._check_end(row, whole, 0)

    def _check_end(self, row: Row, replay: Replay, after: int) -> None:
        sent, reply = self._sent, replay.reply
        if not self._check(reply.done, "a replay ends with [DONE]"):
            return
        code = None if reply.error is None else reply.error["code"]
        if row.interrupted:
            self._check(code == "interrupted", "a stream cut off by a crash says so", error=reply.error)
            counts = (reply.error or {}).get("usage", {}).get("completion_tokens")
            billed = row.bill.released_tokens
            self._check(counts == billed, "the interruption has the counts", error=reply.error)
            return
        if row.bill.outcome == "draining":
            was_told = sent.reply.error_id is not None and sent.reply.error_id <= after
            self._check(
                was_told or code == "draining", "a stream cut off by a stop says so", error=reply.error
            )
            return
        outcome = {known_finish(each) for each in str(row.bill.outcome).split(",")}
        ended = set(reply.finish_reasons.values()) or outcome
        self._check(code is None and ended == outcome, "the end is as it was", error=reply.error)
        if sent.reply.done:
            same = reply.finish_reasons.items() <= sent.reply.finish_reasons.items()
            self._check(same, "the end is the one that was received", replayed=reply.finish_reasons)

    def _check_resumed(self, row: Row, whole: Replay, after: int, replay: Replay) -> None:
        """After an event that its client had seen: nothing lost, nothing twice."""
        sent, reply = self._sent, replay.reply
        facts = {"after": after, "status": replay.status, "code": replay.code, "violation": replay.violation}
        if after == whole.reply.last_id:
            self._check(replay.status == 204, "after [DONE] there is nothing", **facts)
            return
        if not self._check(
            replay.status == 200 and not replay.violation, "its client can come back", **facts
        ):
            return
        self._check_end(row, replay, after)
        known_id = (reply.error or {}).get("last_event_id")
        if row.interrupted and known_id is not None and after > known_id:
            # It had received more than was stored.
            self._check(not reply.text, "a client that is ahead gets the end alone", **facts)
            return
        joined = joined_text(sent.reply.text_until(after), reply.text)
        self._check(joined == whole.reply.text, "what was received and what is replayed join", **facts)

    # The conversation

    def _check_stored(self, row: Row, whole: Replay) -> None:
        sent = self._sent
        self._check(row.conversation_id == sent.conversation_id, "the answer is in its conversation")
        self._check(len(row.answers) == sent.n, "each choice has its message", answers=row.answers)
        stored = {answer.choice: answer.text for answer in row.answers if answer.text}
        replayed = {choice: text for choice, text in whole.reply.text.items() if text}
        self._check(stored == replayed, "message and stream say the same", answers=row.answers)
        status = "interrupted" if row.interrupted else _STATUS_OF.get(str(row.bill.outcome), "interrupted")
        statuses = {answer.status for answer in row.answers}
        self._check(statuses == {status}, "the message says how it ended", answers=row.answers)
        if status == "complete":
            as_sent = sent.is_beginning if row.bill.cut_tokens else sent.is_whole
            self._check(as_sent(stored), "a complete answer is whole", answers=row.answers)

    def _check_view(self, row: Row, status: int, view: dict[str, Any]) -> None:
        if not self._check(status == 200, "its conversation can be looked at", view=view):
            return
        shown = [m for m in view["messages"] if m.get("request_id") == row.id]
        answers = [(m["choice"], m["content"], m["status"], m["finish_reason"]) for m in shown]
        stored = [(*answer[:3], known_finish(answer[3])) for answer in row.answers]
        self._check(answers == stored, "the conversation shows what is stored", shown=shown)
        shown_tokens = sum(m["usage"]["completion_tokens"] for m in shown if m["usage"] is not None)
        self._check(
            shown_tokens == row.bill.released_tokens, "the conversation shows what is billed", shown=shown
        )


def joined_text(earlier: dict[int, str], later: dict[int, str]) -> dict[int, str]:
    """The text of two parts of a stream, by choice."""
    return {
        choice: earlier.get(choice, "") + later.get(choice, "") for choice in earlier.keys() | later.keys()
    }
