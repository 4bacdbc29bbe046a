"""Verdicts in OpenAI's format: the results of `/moderations`, and a chat answer's `moderation` object.

Pure functions, shared by the route, the refusal of a blocked prompt and the pipeline's extra chunk. Shapes
are those of OpenAI's API of 2026-06-04 ("moderated completions"), as openai-python 2.4x types them in
`types/chat/chat_completion.py`, `chat_completion_chunk.py` and `types/moderation.py`:

    request   moderation: {"model": str}
    answer    moderation: {"input": outcome, "output": outcome}
    outcome   {"type": "moderation_results", "model": str, "results": [result, …]}
              or {"type": "error", "code": str, "message": str}
    result    {"type": "moderation_result", "model", "flagged", "categories", "category_scores",
               "category_applied_input_types"}

`output.results[i]` is that of `choices[i]`. In a stream the object is the field of one chunk without
choices, after the last choice has finished. What OpenAI has no field for is beside its own: `watched`, and
the names of our categories that none of its keys says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from app.safety.categories import ALL, OPENAI_KEYS
from app.safety.verdict import Scores, Verdict

MODEL = "tokenring-moderation"
"""The name of the classifiers behind all results."""

MODELS: Collection[str] = (
    MODEL,
    "omni-moderation-latest",
    "omni-moderation-2024-09-26",
    "text-moderation-latest",
    "text-moderation-stable",
)
"""Accepted model names: OpenAI's are aliases of the one model here, whose own name is answered."""

Result = dict[str, Any]
Outcome = dict[str, Any]

KEYS: Mapping[str, tuple[str, ...]] = {c.code: c.openai or (c.name,) for c in ALL}
"""The keys of `categories` and `category_scores` that say each of our categories."""

_CLASSIFIED_KEYS = frozenset(key for keys in KEYS.values() for key in keys)

"""The keys that any of our categories say; OpenAI's finer ones are said by none."""
ALL_KEYS: tuple[str, ...] = (*OPENAI_KEYS, *(c.name for c in ALL if not c.openai))


def result(verdict: Verdict, blocked: Collection[str] = ()) -> Result:
    """One entry of `results` as `/moderations` has it.

    `flagged` is *would be blocked*, also by a policy that only observes; `watched` the lower threshold, so
    that whatever is flagged is watched too. `categories` are the keys of `blocked`, our categories that
    would block on their own, and of the verdict's one when it blocks. The maximum of `category_scores` is
    `harm(verdict.scores)`.
    """
    is_flagged = verdict.enforced == "block"
    over = {*blocked, verdict.enforced_category} if is_flagged else set()
    flagged_keys = {key for category in over if category is not None for key in KEYS[category]}
    return {
        "flagged": is_flagged,
        "watched": is_flagged or verdict.enforced == "watch",
        "categories": {key: key in flagged_keys for key in ALL_KEYS},
        "category_scores": category_scores(verdict.scores),
        "category_applied_input_types": {
            key: ["text"] if key in _CLASSIFIED_KEYS else [] for key in ALL_KEYS
        },
    }


def category_scores(scores: Scores) -> dict[str, float]:
    """`scores` by key: the highest of the categories that a key says, 0 for those that none does."""
    by_key = dict.fromkeys(ALL_KEYS, 0.0)
    for category, p in scores.items():
        for key in KEYS[category]:
            by_key[key] = max(by_key[key], p)
    return by_key


def results(verdicts: Iterable[Verdict]) -> Outcome:
    """The outcome of a direction that was judged: an entry for the prompt, or for each choice in order.

    Without verdicts it says that there was nothing to judge, as the output of a blocked prompt.
    """
    entries = [{"type": "moderation_result", "model": MODEL} | result(verdict) for verdict in verdicts]
    return {"type": "moderation_results", "model": MODEL, "results": entries}


def failed(code: str, message: str) -> Outcome:
    """The outcome of a direction that could not be judged, as when a screen failed open."""
    return {"type": "error", "code": code, "message": message}


def not_judged() -> Outcome:
    """The outcome of both directions where the server runs with `safety` off."""
    return failed("safety_unavailable", "This server runs with safety off: nothing is classified.")


def moderation(prompt: Outcome, output: Outcome) -> dict[str, Outcome]:
    """The `moderation` object of a chat answer; the value of `stream.extra_chunk("moderation", …)`."""
    return {"input": prompt, "output": output}


def of_blocked_prompt(verdict: Verdict) -> dict[str, Outcome]:
    """The `moderation` object beside the error of a refused prompt: there is no output."""
    return moderation(results([verdict]), results([]))


def of_answer(prompt: Verdict, choices: Sequence[Verdict]) -> dict[str, Outcome]:
    """The `moderation` object of an answer: halted, or asked for; `choices` by their index."""
    return moderation(results([prompt]), results(choices))
