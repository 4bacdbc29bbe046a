"""OpenAI's usage object of a request: what was released is what is billed."""

from __future__ import annotations

from app.core import Usage
from app.store.usage_body import usage_body


def test_withheld_tokens_stand_beside_those_that_are_billed():
    """Not among the completion tokens, nor in the total."""
    assert usage_body(Usage(10, 7, 4, 2, 3)) == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2, "withheld_tokens": 3},
    }


def test_where_all_was_released_nothing_is_said_of_withheld_tokens():
    """OpenAI's object has no such field."""
    assert usage_body(Usage(10, 7, 4, 2))["completion_tokens_details"] == {"reasoning_tokens": 2}
