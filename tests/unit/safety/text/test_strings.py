"""Every string of a request that a template can write is read: keys and values, wherever they stand."""

from __future__ import annotations

from typing import Any

import pytest

from app.safety.text.strings import fields_of, message_text, request_text, strings_in, text_of


def test_keys_are_read_before_what_they_name():
    """In the order of the request, through objects and arrays."""
    value = {"how": ["to", {"build": "it"}], "now": 7}
    assert list(strings_in(value)) == ["how", "to", "build", "it", "now"]


def test_words_of_the_protocol_say_nothing():
    """But a longer string that has them in it does."""
    assert list(strings_in({"type": "object", "title": "an object of mine"})) == ["an object of mine"]


@pytest.mark.parametrize(
    ("arguments", "strings"),
    [
        ('{"path": "\\u0062omb"}', ["path", "bomb"]),
        ({"path": "bomb"}, ["path", "bomb"]),
    ],
)
def test_arguments_of_a_call_are_read_as_the_json_that_they_are(arguments: Any, strings: list[str]):
    """Their escapes are undone, as templates do."""
    assert list(strings_in({"arguments": arguments})) == strings


def test_arguments_that_are_no_json_are_read_all_the_same():
    """With their escapes undone as far as that goes."""
    text = "".join(strings_in({"arguments": '{"path": "\\u0062omb'}))
    assert "bomb" in text


def test_text_cut_between_two_parts_is_read_whole_too():
    """Some templates write nothing between them."""
    parts = [{"type": "text", "text": "bo"}, {"type": "text", "text": "mb"}]
    assert text_of(parts) == "bo\nmb\nbomb"
    assert text_of([{"type": "text", "text": "one. "}, {"type": "text", "text": "two"}]) == "one. \ntwo"
    assert text_of("plain") == "plain"
    assert text_of(None) == ""


def test_message_is_read_with_all_its_fields():
    """Its name, its calls one by one, and unknown keys inside of its content."""
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "hi", "hidden": "there"}],
        "tool_calls": [
            {"id": "call_1", "function": {"name": "f", "arguments": '{"x": "first"}'}},
            {"id": "call_2", "function": {"name": "g", "arguments": '{"x": "second"}'}},
        ],
    }
    fields = fields_of(message)
    assert fields[0] == "hi"
    assert any("there" in field for field in fields)
    assert [("first" in field, "second" in field) for field in fields[-2:]] == [(True, False), (False, True)]
    assert message_text({"role": "user", "content": "hi"}) == "hi"
    assert message_text({"role": "user", "content": "hi", "name": "Ann"}) == "hi\nAnn"


def test_bytes_of_an_image_are_not_read():
    """A data URL says nothing; any other URL is text."""
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "alt": "words"}}
    web = {"type": "image_url", "image_url": {"url": "https://example.org/words"}}
    read = message_text({"role": "user", "content": [data, web]})
    assert "AAAA" not in read
    assert "words" in read
    assert "https://example.org/words" in read


def test_what_no_template_writes_is_left_out():
    """The model's name and sampling; tools and variables of the template are read."""
    body = {
        "model": "secret-name",
        "messages": [{"role": "user", "content": "read elsewhere"}],
        "temperature": 1,
        "stop": ["halt"],
        "tools": [{"type": "function", "function": {"name": "f", "description": "Does it."}}],
        "chat_template_kwargs": {"persona": "pirate"},
    }
    assert request_text(body).split("\n") == ["f", "Does it.", "persona", "pirate"]
    assert request_text({"model": "m", "messages": []}) == ""
