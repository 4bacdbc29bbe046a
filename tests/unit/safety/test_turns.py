"""What is read of a conversation, how it weighs, and that slices leave nothing out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from app.safety.turns import (
    DECAY,
    MAX_AGE,
    OVERLAP_CHARS,
    SLICE_CHARS,
    Read,
    messages_of,
    slices,
    text_of,
    turns_of,
)


def user(text: object) -> dict[str, object]:
    """A user's message."""
    return {"role": "user", "content": text}


def test_the_newest_turn_counts_alone_and_joined():
    """The last turn, the last three joined, and each earlier one fading with its age."""
    newest, earlier = turns_of(
        [user("a"), {"role": "assistant", "content": "x"}, user("b"), user("c"), user("d")]
    )
    assert newest == [Read("d"), Read("b\nc\nd")]
    assert earlier == [Read("c", DECAY), Read("b", DECAY**2), Read("a", DECAY**3)]


def test_one_turn_is_read_once():
    """There is nothing to join."""
    assert turns_of([user("a")]) == ([Read("a")], [])


def test_what_no_user_says_is_read_too():
    """A client's system prompt or tool result may carry a request; past answers were screened before."""
    messages = [
        {"role": "system", "content": "s"},
        user("a"),
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "t"},
        user("b"),
    ]
    assert turns_of(messages).earlier == [Read("s", DECAY), Read("t", DECAY), Read("a", DECAY)]


def test_an_answer_to_go_on_with_is_read_in_full():
    """The model would go on with words put into its mouth."""
    assert turns_of([user("a"), {"role": "assistant", "content": "Sure:"}]).earlier == [Read("Sure:", 1.0)]


def test_what_has_faded_is_left_out():
    """Beyond MAX_AGE a score could reach no threshold."""
    turns = turns_of([user(str(i)) for i in range(50)])
    assert len(turns.earlier) == MAX_AGE
    assert turns.earlier[-1].weight == pytest.approx(DECAY**MAX_AGE)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        (5, ""),
        (
            [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {}},
                {"type": "text", "text": "b"},
            ],
            "a\nb",
        ),
        ([{"type": "text", "text": None}, "x"], ""),
    ],
)
def test_the_text_of_a_message(content, text):
    """A string, or the text parts; what is no text is left out."""
    assert text_of(content) == text


def test_a_conversation_without_text_has_nothing_to_read():
    """An image alone, white space, no messages."""
    assert turns_of([]) == turns_of([user(None), user(" \n")]) == ([], [])


def test_what_tools_and_formats_describe_is_read():
    """A model reads descriptions as it reads a system prompt; names and values are no sentences."""
    body = {
        "messages": [user("a")],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "one",
                    "parameters": {"properties": {"x": {"type": "string", "description": "two"}}},
                },
            },
            {"type": "function", "function": {"name": "g", "description": "three"}},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"description": "four"}}},
    }
    [described, said] = messages_of(body)
    assert described["role"] == "system"
    assert sorted(described["content"].split("\n")) == ["four", "one", "three", "two"]
    assert said == user("a")
    assert turns_of([described, said]).earlier == [Read(described["content"], DECAY)]
    assert messages_of({"messages": [user("a")], "tools": None}) == [user("a")]


@pytest.mark.parametrize("length", [0, 1, SLICE_CHARS, SLICE_CHARS + 1, 10 * SLICE_CHARS + 7])
@pytest.mark.parametrize("unit", ["x", "word ", "é\n"])
def test_slices_leave_nothing_out(length, unit):
    """Together they are the text; each is bounded, and begins with the end of the one before."""
    text = "".join(unit[i % len(unit)] if i % 7 else str(i % 10) for i in range(length))
    pieces = slices(text)
    joined = pieces[0] + "".join(piece[OVERLAP_CHARS:] for piece in pieces[1:])
    assert joined == text
    assert all(len(piece) <= SLICE_CHARS for piece in pieces)
    for before, after in pairwise(pieces):
        assert before[-OVERLAP_CHARS:] == after[:OVERLAP_CHARS]
