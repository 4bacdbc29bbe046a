"""What other policies would have made of recorded traffic, and the groups that it is counted by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.safety.categories import CATEGORIES
from app.safety.evaluation.traffic import RATES, RECORDED, as_recorded, by_policy, policies, report
from app.safety.text.groups import GROUPINGS
from app.safety.verdict import Reading
from app.store.safety_records import SafetyRecord, Total
from tests.support.policies import policy

RECORD = SafetyRecord(
    at_us=0,
    day=20260921,
    key_id="tr-1",
    subject="prompt",
    stage="encoder",
    action="block",
    done=None,
    category="S2",
    score=0.7,
    threshold=0.6,
    policy_hash="0123456789abcdef",
    length="0-99",
    role="user",
    script="latin",
    again=False,
    watched=False,
    readings=[("encoder", 1, False, {"S2": 0.7})],
)
ANSWER = replace(
    RECORD, subject="answer", stage="stream", readings=[("stream", 1, False, {"S2": 0.75})], action=None
)
TOTAL = Total(20260921, "tr-1", "prompt", "0123456789abcdef", "0-99", "user", "latin")


def scored(p: float, **changes: Any) -> SafetyRecord:
    """A prompt with this score."""
    return replace(RECORD, readings=[("encoder", 1, False, {"S2": p})], **changes)


def test_other_policies_judge_by_the_scores():
    """At their own thresholds: 0.9, 0.6 and 0.39 at 0.1%, 0.2% and 5% (tests/support/policies.py)."""
    compared = policies(policy())
    assert list(compared)[:3] == ["observe", "enforce", "strict"]
    assert list(compared)[3:] == [f"block at {100 * fpr:g}%" for fpr in RATES]
    actions = {name: by_policy(rules)(scored(0.7))[0] for name, rules in compared.items()}
    assert actions == {
        "observe": None,
        "enforce": "block",
        "strict": "block",
        "block at 0.1%": "watch",
        "block at 0.2%": "block",
        "block at 0.5%": "block",
        "block at 1%": "block",
        "block at 2%": "block",
        "block at 5%": "block",
    }
    assert by_policy(compared["observe"])(replace(RECORD, readings=[("encoder", 1, False, {"S4": 0.7})]))[0]


def test_an_answer_is_judged_by_the_terms_of_its_prompt():
    """Those of a watched prompt if it would have been watched; a hard-listed span halts in any case."""
    judges = by_policy(policy())
    low = replace(ANSWER, readings=[("stream", 1, False, {"S2": 0.55})])
    assert judges(ANSWER) == ("block", "S2")
    assert [judges(replace(low, watched=watched))[0] for watched in (False, True)] == [None, "block"]
    assert judges(replace(ANSWER, stage="hard_list", readings=[])) == ("block", None)


def test_what_was_recorded_without_scores_stays_as_it_was():
    """Earlier turns had decided, and no policy can be asked again."""
    record = replace(RECORD, action="watch", category=None, readings=[])
    assert by_policy(policy())(record) == as_recorded(record) == ("watch", None)


SCORES = st.dictionaries(st.sampled_from(CATEGORIES), st.floats(0, 1), max_size=4)
READINGS = st.lists(
    st.builds(
        Reading, st.sampled_from(["ngrams", "encoder", "guard"]), SCORES, st.integers(1, 30), st.booleans()
    ),
    min_size=1,
    max_size=3,
)


@given(READINGS)
def test_the_policy_in_force_judges_a_record_as_it_judged_the_prompt(readings):
    """Whatever the scores: the record has all that a verdict is made of."""
    rules = policy({"mode": "observe"})
    verdict = rules.judge(readings)
    record = replace(
        RECORD,
        action=verdict.enforced,
        readings=[(r.stage, r.texts, r.watch_only, r.scores) for r in readings],
    )
    assert by_policy(rules.enforced)(record)[0] == as_recorded(record)[0]
    assert by_policy(rules)(record)[0] == verdict.action


def figures(records: list[SafetyRecord], totals: dict[Total, int], under: str = RECORDED) -> dict[str, Any]:
    """A report."""
    judges = {RECORDED: as_recorded, "at 0.1%": by_policy(policy().at_rate(0.001))}
    return report(records, totals, judges, under)


def test_rates_are_of_all_texts():
    """Of prompts and of answers; later turns of a recorded conversation are counted among them and apart."""
    records = [
        RECORD,
        replace(RECORD, again=True),
        scored(0.5, action="watch"),
        replace(ANSWER, action="block"),
    ]
    found = figures(records, {TOTAL: 200, TOTAL._replace(subject="answer"): 50})
    assert (found["records"], found["prompts"], found["answers"]) == (4, 200, 50)
    recorded, looser = found["policies"]
    assert recorded["name"] == RECORDED
    assert recorded["prompts"] == {
        "read": 200,
        "refused": 2,
        "refused_again": 1,
        "refused_rate": {"rate": 0.01, "low": 0.0027, "high": 0.0357},
        "watched": 1,
        "watched_rate": {"rate": 0.005, "low": 0.0009, "high": 0.0278},
        "flagged": 0,
    }
    assert (recorded["answers"]["halted"], recorded["answers"]["halted_rate"]["rate"]) == (1, 0.02)
    assert (looser["prompts"]["refused"], looser["prompts"]["watched"]) == (0, 3)


def test_groups_have_their_own_texts():
    """Each value of each grouping, also one of which nothing was refused."""
    other = TOTAL._replace(key_id="", script="han", day=20260922, length="500-1999", role="tool")
    found = figures([RECORD], {TOTAL: 10, other: 30})["by"]
    assert tuple(found) == GROUPINGS
    shown = {
        grouping: {
            entry["value"]: (entry["prompts"]["read"], entry["prompts"]["refused"]) for entry in entries
        }
        for grouping, entries in found.items()
    }
    assert shown == {
        "category": {"S2": (40, 1)},
        "key": {"": (30, 0), "tr-1": (10, 1)},
        "length": {"0-99": (10, 1), "500-1999": (30, 0)},
        "role": {"tool": (30, 0), "user": (10, 1)},
        "script": {"han": (30, 0), "latin": (10, 1)},
        "day": {"2026-09-21": (10, 1), "2026-09-22": (30, 0)},
    }


def test_groups_are_of_the_policy_that_was_asked_for():
    """Its categories, its refusals."""
    records = [scored(0.95), scored(0.7)]
    found = figures(records, {TOTAL: 10}, under="at 0.1%")
    [entry] = found["by"]["category"]
    assert (entry["value"], entry["name"]) == ("S2", "non_violent_crimes")
    assert (entry["prompts"]["refused"], entry["prompts"]["watched"]) == (1, 1)


@pytest.mark.parametrize("records", [[], [replace(RECORD, action=None)]])
def test_without_traffic_there_are_no_rates(records: list[SafetyRecord]):
    """And no division by nothing."""
    found = figures(records, {})
    assert found["policies"][0]["prompts"]["refused_rate"] is None
    assert found["by"]["category"] == []
