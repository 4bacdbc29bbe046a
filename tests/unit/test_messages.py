"""The stored form of a message: known keys only, of known types and lengths."""

from typing import Any

import orjson
import pytest

from app.messages import (
    MAX_ID_CHARS,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    arguments_text,
    as_kept,
    content_text,
    content_texts,
    count_media,
    kept,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
PLAIN_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def test_a_row_without_a_body_is_its_role_and_text() -> None:
    """So are a body that is damaged and one that is no object."""
    plain = {"role": "user", "content": "hi"}
    assert as_kept("user", "hi", None) == plain
    assert as_kept("user", "hi", b"{") == plain
    assert as_kept("user", "hi", b"[1]") == plain


def test_the_rows_role_wins_over_the_bodys() -> None:
    """So do all keys that the server writes: what is not known is left out."""
    body = orjson.dumps({"role": "system", "content": "hi", "id": "x", "parent_id": "x", "choice": 9})
    assert as_kept("user", "hi", body) == {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("content", "stored"),
    [
        ("other", "other"),
        ([{"type": "text", "text": "a", "id": 1}, IMAGE], [{"type": "text", "text": "a"}, IMAGE]),
        ([{"type": "image_url", "image_url": {"url": "data:,", "detail": "x"}}], [PLAIN_IMAGE]),
        (["a", None, {"type": "text"}, {"type": "video"}, {"type": "image_url", "image_url": "data:,"}], []),
        ([{"type": "text", "text": "a"}] * (MAX_PARTS + 1), [{"type": "text", "text": "a"}] * MAX_PARTS),
        (5, "hi"),
        (None, "hi"),
    ],
    ids=["text", "parts", "detail", "malformed", "many", "number", "null"],
)  # fmt: skip
def test_content_keeps_the_parts_that_are_known(content: Any, stored: Any) -> None:
    """The row's text stands in for a content that cannot be read."""
    assert kept({"content": content}, "user", "hi")["content"] == stored


def test_an_assistants_message_keeps_reasoning_and_tool_calls() -> None:
    """With calls and no content, the content is null, as OpenAI has it."""
    source = {"content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
    assert kept(source, "assistant", "") == {"role": "assistant"} | source
    assert kept(source, "user", "hi") == {"role": "user", "content": "hi"}
    assert kept({"tool_calls": None}, "assistant", "hi") == {"role": "assistant", "content": "hi"}


def test_calls_that_cannot_be_read_are_left_out() -> None:
    """Without a name, with one that is too long, or beyond the number that is kept."""
    bad = [None, {}, {"function": {}}, {"function": {"name": "x" * (MAX_NAME_CHARS + 1)}}]
    assert "tool_calls" not in kept({"tool_calls": bad}, "assistant", "hi")
    assert len(kept({"tool_calls": [CALL] * 200}, "assistant", "")["tool_calls"]) == MAX_TOOL_CALLS
    long_id = {**CALL, "id": "x" * (MAX_ID_CHARS + 1)}
    [call] = kept({"tool_calls": [long_id]}, "assistant", "")["tool_calls"]
    assert "id" not in call


def test_names_and_ids_have_their_bounds() -> None:
    """A tool's message has the id of its call; a name that is too long is left out."""
    assert kept({"name": "ann", "tool_call_id": "c1"}, "tool", "12") == {
        "role": "tool",
        "content": "12",
        "name": "ann",
        "tool_call_id": "c1",
    }
    assert "name" not in kept({"name": "x" * (MAX_NAME_CHARS + 1)}, "user", "hi")
    assert "tool_call_id" not in kept({"tool_call_id": "c1"}, "user", "hi")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"a": 1}', '{"a": 1}'), ("", "{}"), ("  ", "{}"), ({"a": 1}, '{"a":1}'), (None, "{}"), ([1], "{}")],
)
def test_arguments_are_json_text(arguments: Any, text: str) -> None:
    """Objects are written as JSON; nothing is an object without members."""
    assert arguments_text(arguments) == text


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("hello", ["hello"]),
        ("", [""]),
        (None, []),
        ([], []),
        ([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}], ["a", "b"]),
        ([{"type": "text", "text": 3}, "loose", None], []),
        (7, []),
    ],
)
def test_the_texts_of_a_content_are_its_string_or_its_parts(content: Any, texts: list[str]):
    """In order; what is no text is left out, whatever it is."""
    assert content_texts(content) == texts


@pytest.mark.parametrize(
    ("content", "text", "media"),
    [
        ("hi", "hi", 0),
        (None, "", 0),
        ([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}], "a\nb", 1),
        ([IMAGE, IMAGE], "", 2),
        ([{"text": "a"}, 5, "b"], "a", 0),
    ],
)
def test_a_contents_text_is_its_texts_a_line_each_and_the_rest_is_media(
    content: Any, text: str, media: int
) -> None:
    """Whatever a row of an older version holds, nothing is raised."""
    assert (content_text(content), count_media(content)) == (text, media)
