"""Metrics of the safety screens: values of app.safety.counters.SafetyCounters."""

from __future__ import annotations

from app.api.metrics.kinds import counter, histogram

OF_VERDICTS = (
    counter(
        "tokenring_safety_verdicts_total",
        "verdicts",
        "Decisions of safety screening; `none` and `pass` if no category reached a threshold.",
        lambda value: value,
        labels=("stage", "category", "action"),
    ),
)

OF_OBSERVED = (
    counter(
        "tokenring_safety_observed_total",
        "verdicts",
        "Decisions that safety screening recorded and did not take, because the policy observes.",
        lambda value: value,
        labels=("stage", "category", "action"),
    ),
)

OF_LIFTED = (
    counter(
        "tokenring_safety_lifted_total",
        "prompts",
        "Prompts that the classifiers would refuse and an `allow` entry of the policy lets be watched.",
        lambda value: value,
        labels=("category",),
    ),
)

OF_SCREEN_FAILURES = (
    counter(
        "tokenring_safety_failures_total",
        "failures",
        "Screenings that failed or took too long; `outcome` is `refused`, or `passed` with "
        "`safety_fail_open`.",
        lambda failed: failed,
        labels=("stage", "reason", "outcome"),
    ),
)

OF_SCREENS = (
    histogram(
        "tokenring_safety_hold_back_seconds",
        "seconds",
        "From the moment when a delta came from the engine to its release.",
        lambda s: s.hold_back,
        labels=(),
    ),
    counter(
        "tokenring_safety_examined_answers_total",
        "examinations",
        "Answers read by the encoder, as they were flagged or their prompts watched.",
        lambda s: s.examined_answers,
        labels=(),
    ),
    counter(
        "tokenring_safety_leaked_tokens_total",
        "tokens",
        "Tokens of halted answers that were released after the token where the harm began.",
        lambda s: s.leaked_tokens,
        labels=(),
    ),
    counter(
        "tokenring_safety_dropped_tokens_total",
        "tokens",
        "Tokens of halted answers that were held back and released to nobody.",
        lambda s: s.dropped_tokens,
        labels=(),
    ),
)
