"""A server's own traffic by its safety records: the policy's actions, and those of other policies.

A record has the scores of everything that the screens read of a text, so that another policy judges it as the
server would have. Two things it cannot know: whether people would have continued differently, and, of an
answer, whether the other policy had watched its prompt. Rates have the 95% interval of Wilson (1927).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from app.safety.categories import BY_CODE, name_of
from app.safety.evaluation.prompts import rate
from app.safety.policies.policy import Policy
from app.safety.text.groups import GROUPINGS, LENGTHS
from app.safety.verdict import Action, Reading
from app.store.safety_records import SafetyRecord, Total

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Targets at which a report shows what would have been refused and halted."""
RECORDED = "recorded"
"""The name of the policy's action when the record was made."""
_NONE = "none"
Judges = Callable[[SafetyRecord], tuple[Action | None, str | None]]
"""Gives the action on a record, and the category that decides it."""


def policies(policy: Policy) -> dict[str, Policy]:
    """The policies that a report compares, by name: a level of keys, or a target."""
    named = {level: policy.at_level(level) for level in ("observe", "enforce", "strict")}
    return named | {f"block at {100 * fpr:g}%": policy.at_rate(fpr) for fpr in RATES}


def as_recorded(record: SafetyRecord) -> tuple[Action | None, str | None]:
    """The verdict of the policy in force, enforced or observed."""
    action: Any = record.action
    return action, record.category


def by_policy(policy: Policy) -> Judges:
    """The actions of a policy; of one that observes, only where it acts all the same."""

    def judges(record: SafetyRecord) -> tuple[Action | None, str | None]:
        stages: Any = [stage for stage, *_ in record.readings]
        readings = [
            Reading(stage, scores, texts, watch_only)
            for stage, (_, texts, watch_only, scores) in zip(stages, record.readings, strict=True)
        ]
        if record.subject == "answer":
            if record.stage == "hard_list":
                return "block", None
            verdict = policy.judge_output(readings[0].scores, watched=record.watched)
        elif readings:
            verdict = policy.judge(readings)
        else:
            return as_recorded(record)
        return verdict.action, verdict.category

    return judges


class Tally:
    """Counts of actions on texts."""

    def __init__(self) -> None:
        self.prompts: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.again = 0
        """Refused prompts of conversations in which an earlier prompt was recorded."""

    def add(self, record: SafetyRecord, action: Action | None) -> None:
        """Count a record of which this is made."""
        if action is None:
            return
        if record.subject == "answer":
            self.answers[action] += 1
            return
        self.prompts[action] += 1
        self.again += record.again and action == "block"

    def as_json(self, texts: Mapping[str, int]) -> dict[str, Any]:
        """The counts, and their rates among so many prompts and answers."""
        prompts, answers = texts.get("prompt", 0), texts.get("answer", 0)
        return {
            "prompts": {
                "read": prompts,
                "refused": self.prompts["block"],
                "refused_again": self.again,
                "refused_rate": rate(self.prompts["block"], prompts),
                "watched": self.prompts["watch"],
                "watched_rate": rate(self.prompts["watch"], prompts),
                "flagged": self.prompts["flag"],
            },
            "answers": {
                "read": answers,
                "halted": self.answers["block"],
                "halted_rate": rate(self.answers["block"], answers),
                "flagged": self.answers["flag"],
            },
        }


def report(
    records: Iterable[SafetyRecord],
    totals: Mapping[Total, int],
    judges: Mapping[str, Judges],
    under: str,
) -> dict[str, Any]:
    """The actions of each judge on the records, and by GROUPINGS those of the judge named `under`."""
    overall: dict[str, Tally] = {name: Tally() for name in judges}
    groups: dict[str, dict[str, Tally]] = {name: defaultdict(Tally) for name in GROUPINGS}
    num_records = 0
    for record in records:
        num_records += 1
        for name, judge in judges.items():
            action, category = judge(record)
            overall[name].add(record, action)
            if name == under and action is not None:
                for grouping, value in {"category": category or _NONE, **_groups(record)}.items():
                    groups[grouping][value].add(record, action)
    texts = _texts(totals)
    everything: Mapping[str, int] = texts["all"].get("", Counter())
    return {
        "records": num_records,
        "prompts": everything.get("prompt", 0),
        "answers": everything.get("answer", 0),
        "policies": [{"name": name, **tally.as_json(everything)} for name, tally in overall.items()],
        "under": under,
        "by": {grouping: _entries(grouping, groups[grouping], texts, everything) for grouping in GROUPINGS},
    }


def _groups(of: SafetyRecord | Total) -> dict[str, str]:
    """The values of all groupings but the category."""
    day = f"{of.day // 10_000:04}-{of.day // 100 % 100:02}-{of.day % 100:02}"
    return {"key": of.key_id, "length": of.length, "role": of.role, "script": of.script, "day": day}


def _texts(totals: Mapping[Total, int]) -> dict[str, dict[str, Counter[str]]]:
    """The number of prompts and of answers, by grouping and value."""
    texts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for total, number in totals.items():
        for grouping, value in {"all": "", **_groups(total)}.items():
            texts[grouping][value][total.subject] += number
    return texts


def _entries(
    grouping: str,
    tallies: Mapping[str, Tally],
    texts: Mapping[str, Mapping[str, Counter[str]]],
    everything: Mapping[str, int],
) -> list[dict[str, Any]]:
    """An entry for each value; of categories those alone that decided, as a share of all texts."""
    if grouping == "category":
        order: Sequence[str] = [code for code in (*BY_CODE, _NONE) if code in tallies]
        names = {_NONE: "hard list or earlier turns"} | {code: name_of(code) for code in BY_CODE}
        return [{"value": code, "name": names[code], **tallies[code].as_json(everything)} for code in order]
    of = texts.get(grouping, {})
    values = sorted({*of, *tallies}, key=lambda value: (value in LENGTHS and LENGTHS.index(value), value))
    return [{"value": value, **tallies.get(value, Tally()).as_json(of.get(value, {}))} for value in values]
