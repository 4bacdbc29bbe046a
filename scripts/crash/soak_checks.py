"""What must hold of each request of a soak: for its client, and in the ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.crash.books import Row
from scripts.crash.engine_clients import Reply
from scripts.crash.findings import Findings
from scripts.crash.soak_clients import SERVER_FAULTS, Story
from scripts.crash.soak_lives import Lives


class StoryChecks:
    """Checks the stories of a round against the undisturbed answers and the rows of the ledger."""

    def __init__(self, lives: Lives, findings: Findings) -> None:
        self._lives = lives
        self._findings = findings
        self.num_requests = 0
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.choices_lost = 0
        """Choices of answers that ended in `engine_restarted`."""
        self.choices_unseen = 0
        """Choices whose end their clients did not receive."""
        self.num_unread = 0
        """Answers that the server stopped while their client was away."""
        self.longest_wait_s = 0.0

    def check(self, stories: Sequence[Story], rows: Mapping[str, Row]) -> None:
        """Check all that was asked since the last time, and that no row is of nobody."""
        by_key: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows.values():
            if row.id in self._lives.keys:
                by_key[self._lives.keys[row.id]].append(row)
        left_over = dict(rows)
        for story in stories:
            ids = [reply.request_id for reply in story.attempts] + story.refused_ids
            mine = {id_: rows[id_] for id_ in ids if id_ in rows}
            mine |= {row.id: row for row in by_key.get(story.key or "", ())}
            for id_ in mine:
                self._findings.check(left_over.pop(id_, None), "a row is of one request", id=id_)
            self._check_story(story, mine)
        unknown = [(story.case.name, story.manner) for story in stories if story.unknown]
        what = "every row is of a request that was sent"
        self._findings.check(len(left_over) <= len(unknown), what, rows=left_over, unknown=unknown)

    def _check_story(self, story: Story, rows: Mapping[str, Row]) -> None:
        self.num_requests += 1
        self.refusals += story.refusals
        self.longest_wait_s = max(self.longest_wait_s, story.longest_wait_s)
        check = self._checker(story, rows)
        check(not story.faults, "the server answers as it should", faults=story.faults)
        for reply in story.attempts:
            row = rows.get(reply.request_id)
            nothing_kept = not reply.text and self._was_killed(story)
            if row is not None:
                self._check_attempt(story, reply, row)
            else:
                check(nothing_kept, "what was begun is in the ledger", id=reply.request_id)
        if story.is_lost:
            check(self._was_killed(story) and not story.reply.text, "a stream is found again")
        for row in rows.values():
            self._check_row(story, row, check)
        good = [row.id for row in rows.values() if row.bill.outcome not in SERVER_FAULTS]
        check(len(good) <= 1, "nothing is billed twice", ids=good)
        for twin in story.again:
            same = next((h for h in story.attempts if h.request_id == twin.request_id), None)
            check(same is not None, "a key finds its answer", found=twin.request_id)
            if same is not None and same.done and not same.error and not twin.error:
                check(same.text == twin.text and same.finish == twin.finish, "a key finds the same answer")
        self._note_end(story)

    def _checker(self, story: Story, rows: Mapping[str, Row]) -> Any:
        """`Findings.check` with what is known of the request."""

        def check(holds: object, what: str, **facts: Any) -> bool:
            if holds:
                return self._findings.check(holds, what)
            facts_known = {
                "case": story.case.name,
                "manner": story.manner,
                "key": story.key,
                "refusals": dict(story.refusals),
                "attempts": [_told(reply) for reply in story.attempts],
                "bills": {id_: row.bill._asdict() for id_, row in rows.items()},
                "left": story.left,
                "stopped": story.tried_to_stop,
            }
            return self._findings.check(holds, what, **facts_known, **facts)

        return check

    def _check_attempt(self, story: Story, reply: Reply, row: Row) -> None:
        """One answer that was begun, whole or not."""
        check, expected, bill = self._checker(story, {row.id: row}), story.case.expected, row.bill
        check(all(a < b for a, b in zip(reply.ids, reply.ids[1:], strict=False)), "ids strictly increase")
        beginning = all(expected.text.get(t, "").startswith(text) for t, text in reply.text.items())
        check(
            beginning, "what was received is how the undisturbed answer begins", why=_parting(reply, expected)
        )
        usage = reply.error_usage if reply.error else reply.usage
        if usage:
            counts = usage["prompt_tokens"], usage["completion_tokens"]
            check(
                counts == (bill.prompt_tokens, bill.released_tokens),
                "the bill is what was told",
                counts=counts,
            )
        if reply.error is not None:
            check(self._may_end_in(story, reply.error), "no answer ends without need", error=reply.error)
        elif reply.done and "abort" in str(bill.outcome).split(","):
            unread = not story.tried_to_stop and story.manner.act == "drop"
            self.num_unread += unread
            check(story.tried_to_stop or unread, "an answer is stopped only when asked to")
        elif reply.done:
            check(reply.finish == expected.finish, "the end is the undisturbed one")
            check(
                reply.text == expected.text, "the text is the undisturbed one", why=_parting(reply, expected)
            )
            check(_counts(reply) == _counts(expected), "the counts are the undisturbed ones")
            check(row.bill.outcome in reply.finish.values(), "the ledger says how it ended")
        else:
            check(story.left or story.is_lost or story.deleted, "every stream ends")

    def _check_row(self, story: Story, row: Row, check: Any) -> None:
        expected, bill = story.case.expected, row.bill
        longest = expected.usage.get("completion_tokens", 0)
        check(bill.released_tokens <= longest, "no more is billed than the whole answer", id=row.id)
        same_prompt = bill.prompt_tokens in (0, expected.usage.get("prompt_tokens"))
        check(same_prompt, "the prompt is billed as it is", id=row.id)
        for answer in row.answers:
            whole = expected.text.get(f"{answer.choice}", "")
            if answer.status == "complete":
                check(answer.text == whole, "a stored answer is the undisturbed one", id=row.id)
            else:
                check(whole.startswith(answer.text), "a stored part is how the answer begins", id=row.id)

    def _may_end_in(self, story: Story, error: str) -> bool:
        """Whether what was done to the server explains the end."""
        if error == "engine_restarted":
            return self._lives.num_losses(story.began_s, story.ended_s) >= 2
        if error == "interrupted":
            stopped = self._lives.ended_by("TERM", story.began_s, story.ended_s)
            return self._was_killed(story) or (stopped and (story.tried_to_stop or not story.manner.streamed))
        return False

    def _was_killed(self, story: Story) -> bool:
        return self._lives.ended_by("KILL", story.began_s, story.ended_s)

    def _note_end(self, story: Story) -> None:
        n = story.case.n
        self.choices_lost += n * sum(reply.error == "engine_restarted" for reply in story.attempts)
        if story.left or story.unknown or story.is_lost or story.deleted:
            self.choices_unseen += n
        if story.left:
            self.ends["left"] += 1
        elif story.unknown or not story.attempts:
            self.ends["blocked" if story.case.blocked else "unknown"] += 1
        else:
            reply = story.reply
            self.ends[reply.error or "/".join(sorted(set(reply.finish.values()))) or "deleted"] += 1


def _counts(reply: Reply) -> tuple[Any, Any]:
    return reply.usage.get("prompt_tokens"), reply.usage.get("completion_tokens")


def _told(reply: Reply) -> dict[str, Any]:
    """An answer without its text."""
    return {
        "id": reply.request_id,
        "events": (reply.ids[:1], reply.ids[-1:], len(reply.ids)),
        "characters": {track: len(text) for track, text in reply.text.items()},
        "finish": reply.finish,
        "error": reply.error,
        "usage": reply.usage or reply.error_usage,
        "done": reply.done,
    }


def _parting(reply: Reply, expected: Reply) -> dict[str, Any]:
    """Where the texts part; the built-in model's answers are nobody's secret."""
    parted = {}
    for track in reply.text.keys() | expected.text.keys():
        mine, whole = reply.text.get(track, ""), expected.text.get(track, "")
        at = next((i for i, (a, b) in enumerate(zip(mine, whole, strict=False)) if a != b), None)
        at = min(len(mine), len(whole)) if at is None else at
        if mine != whole:
            lengths = (len(mine), len(whole))
            parted[track] = (at, lengths, mine[max(0, at - 20) : at + 20], whole[max(0, at - 20) : at + 20])
    return parted
