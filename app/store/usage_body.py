"""OpenAI's `usage` object of a request: for its stream, its replay and its stored message."""

from __future__ import annotations

from typing import Any

from app.core import Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object over all choices; `completion_tokens` are those that were released.

    What was generated and released to no one is not billed: `withheld_tokens`, where there are any,
    stand beside them, not among them.
    """
    released_tokens = usage.completion_tokens - usage.withheld_tokens
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.withheld_tokens:
        details["withheld_tokens"] = usage.withheld_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": released_tokens,
        "total_tokens": usage.reported_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }
