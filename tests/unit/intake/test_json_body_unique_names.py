"""A JSON object with a member twice is refused: readers differ in which of the two they take."""

import orjson
import pytest

from app.errors import BadRequest
from app.intake.json_body import check_unique_names


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": 1, "b": {"a": 2}}',
        '{"a": [{"b": 1}, {"b": 2}]}',
        '{"a": "b\\": 1, \\"a\\": 2"}',
        '{"a\\\\": ":", ":": "\\\\"}',
        '{"": ":::", "a": {}}',
    ],
)
def test_objects_whose_names_differ_pass(text: str) -> None:
    """The same name in two objects, and colons and quotes in strings, are no repetition."""
    check_unique_names(text.encode(), orjson.loads(text))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"a": 1, "a": 2}', "a"),
        ('{"x": {"b": [], "b": []}}', "b"),
        ('{"x": [[{"c": 1, "d": 2, "c": 3}]]}', "c"),
        ('{"a": 1, "\\u0061": 2}', "a"),
    ],
)
def test_a_name_given_twice_is_named(text: str, name: str) -> None:
    """However deep it stands, and however it is written."""
    with pytest.raises(BadRequest, match=f"'{name}' twice in one object") as refused:
        check_unique_names(text.encode(), orjson.loads(text))
    assert (refused.value.code, refused.value.param) == ("invalid_json", name)


def test_in_a_large_body_it_is_refused_without_its_name() -> None:
    """To find the name costs a second parse."""
    text = '{"a": 1, "a": 2, "text": "' + "x" * (1 << 20) + '"}'
    with pytest.raises(BadRequest, match="a member twice"):
        check_unique_names(text.encode(), orjson.loads(text))
