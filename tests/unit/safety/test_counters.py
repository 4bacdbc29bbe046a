"""What the screens have done, as numbers by stage, category and action."""

from __future__ import annotations

from app.metering.traffic import Histogram
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from tests.support.policies import policy


def test_verdicts_are_counted_by_stage_category_and_action():
    """Those that let pass too: they are what the others are a share of."""
    counters, rules = SafetyCounters(Histogram(HOLD_BACK_S)), policy()
    for p in (0.7, 0.7, 0.01):
        counters.judged(rules.judge_prompt({"S2": p}, "encoder"))
    counters.judged(rules.halted())
    assert counters.verdicts["encoder"]["S2"] == {"block": 2}
    assert counters.verdicts["encoder"]["none"] == {"pass": 1}
    assert counters.verdicts["hard_list"]["none"] == {"block": 1}


def test_halts_add_up():
    """Tokens that were too late, and those that reached no one."""
    counters = SafetyCounters(Histogram(HOLD_BACK_S))
    counters.halted(leaked_tokens=3, dropped_tokens=16)
    counters.halted(leaked_tokens=0, dropped_tokens=5)
    assert (counters.leaked_tokens, counters.dropped_tokens) == (3, 21)
