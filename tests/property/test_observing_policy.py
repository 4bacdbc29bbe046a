"""For any scores: an observing policy says what the enforced does, and acts for locked categories alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.safety.categories import CATEGORIES, LOCKED
from app.safety.verdict import ACTIONS, Reading, Scores, Stage
from tests.support.policies import policy

SCORES = st.dictionaries(st.sampled_from(CATEGORIES), st.floats(0, 1), max_size=6)
STAGES: st.SearchStrategy[Stage] = st.sampled_from(("ngrams", "encoder", "guard"))
READINGS = st.lists(
    st.builds(Reading, STAGES, SCORES, st.integers(1, 40), st.booleans()), min_size=1, max_size=4
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "action": st.sampled_from(ACTIONS),
        "categories": st.dictionaries(
            st.sampled_from([category for category in CATEGORIES if category not in LOCKED]),
            st.fixed_dictionaries({"action": st.sampled_from(ACTIONS)}),
            max_size=3,
        ),
    }
)


def locked(scores: Scores) -> Scores:
    """The scores of the locked categories."""
    return {category: p for category, p in scores.items() if category in LOCKED}


@given(DOCUMENTS, SCORES, STAGES, st.integers(1, 40))
def test_a_prompt_meets_what_the_enforced_policy_says(document, scores, stage, texts):
    """As what is observed; what is done comes of the locked categories' scores alone."""
    observing = policy(document | {"mode": "observe"})
    verdict = observing.judge_prompt(scores, stage, texts=texts)
    enforced = observing.enforced.judge_prompt(scores, stage, texts=texts)
    assert verdict.enforced == enforced.action
    assert verdict.action == observing.enforced.judge_prompt(locked(scores), stage, texts=texts).action


@given(DOCUMENTS, READINGS)
def test_several_readings_meet_it_too(document, readings):
    """Of several stages and texts, some of which can only watch."""
    observing = policy(document | {"mode": "observe"})
    verdict = observing.judge(readings)
    assert verdict.enforced == observing.enforced.judge(readings).action
    acting = [reading._replace(scores=locked(reading.scores)) for reading in readings]
    assert verdict.action == observing.enforced.judge(acting).action
    assert verdict.readings == readings


@given(DOCUMENTS, SCORES, st.booleans())
def test_an_answer_meets_it_too(document, scores, watched):
    """The same of answers."""
    observing = policy(document | {"mode": "observe"})
    verdict = observing.judge_output(scores, watched=watched)
    assert verdict.enforced == observing.enforced.judge_output(scores, watched=watched).action
    assert verdict.action == observing.enforced.judge_output(locked(scores), watched=watched).action
