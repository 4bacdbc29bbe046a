"""What a completion's prompts share with the choices of a chat: bounds that hold for all of them together."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.schema.completions import parse_completion
from app.errors import BadRequest

STOPS = {"stop": ["a" * 1000] * 16}
BIASES = {"logit_bias": {str(token_id): 1 for token_id in range(1024)}}


@pytest.mark.parametrize(("shared", "most"), [(STOPS, 4), (BIASES, 16)], ids=["stop", "logit_bias"])
@pytest.mark.parametrize("n", [1, 2])
def test_prompts_count_as_choices_do(shared: dict[str, Any], most: int, n: int):
    """With the largest stops and biases there are as many prompts times `n` as choices; one more is 400."""
    parse_completion({"model": "m", "prompt": ["x"] * (most // n), "n": n, **shared}, "owner")
    with pytest.raises(BadRequest, match="together") as refused:
        parse_completion({"model": "m", "prompt": ["x"] * (most // n + 1), "n": n, **shared}, "owner")
    assert refused.value.param in shared
