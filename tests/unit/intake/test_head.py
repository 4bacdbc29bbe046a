"""The headers of a request about its stream: who may come back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from app.core import Key, KeyTerms
from app.errors import BadRequest
from app.intake.head import may_resume

ALWAYS = Key("tr-a", "ann", KeyTerms("ann", resume="always"), 0)
ASKED = Key("tr-b", "bob", KeyTerms("bob"), 0)


@pytest.mark.parametrize(
    ("headers", "key", "expected"),
    [
        ({}, None, None),
        ({}, ASKED, None),
        ({}, ALWAYS, True),
        ({"x-resume": "1"}, ASKED, True),
        ({"x-resume": "true"}, None, True),
        ({"x-resume": "0"}, ALWAYS, False),
        ({"x-resume": "0", "idempotency-key": "k", "last-event-id": "3"}, None, False),
        ({"idempotency-key": "k"}, ASKED, True),
        ({"last-event-id": "0"}, None, True),
    ],
)
def test_signs_of_return(headers: Mapping[str, str], key: Key | None, expected: bool | None):
    """The header wins over all else; None is left to whether the answer is stored."""
    assert may_resume(headers, key) is expected


@pytest.mark.parametrize("sent", ["", "2", "yes", "1, 1"])
def test_a_wrong_value_is_refused(sent: str):
    """By the header's name."""
    with pytest.raises(BadRequest, match="x-resume must be 1 or 0") as refused:
        may_resume({"x-resume": sent}, None)
    assert refused.value.param == "x-resume"
