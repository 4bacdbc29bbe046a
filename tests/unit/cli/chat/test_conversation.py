"""The branch of a conversation that is shown and continued."""

from __future__ import annotations

from typing import Any

from app.cli.chat.conversation import branch, last_question, split, text_of


def message(
    id_: str, parent_id: str | None, role: str, content: Any = "x", status: str = "complete"
) -> dict[str, Any]:
    """A message as the server has it."""
    return {"id": id_, "parent_id": parent_id, "role": role, "content": content, "status": status}


TREE = [
    message("u1", None, "user"),
    message("a1", "u1", "assistant"),
    message("u2", "a1", "user"),
    message("a2", "u2", "assistant"),
    message("u3", "a1", "user"),
    message("a3", "u3", "assistant", "", "failed"),
]


def ids(messages: list[Any]) -> list[str]:
    """Their ids."""
    return [each["id"] for each in messages]


def test_without_a_leaf_it_ends_at_the_newest_answer_with_text():
    """As the server continues it."""
    assert ids(branch(TREE, None)) == ["u1", "a1", "u2", "a2"]


def test_a_running_answer_is_the_newest():
    """Although it has no text yet."""
    running = message("a4", "u3", "assistant", "", "in_progress")
    assert ids(branch([*TREE, running], None)) == ["u1", "a1", "u3", "a4"]


def test_a_leaf_has_its_own_branch():
    """Also one without text; an unknown one has none."""
    assert ids(branch(TREE, "a3")) == ["u1", "a1", "u3", "a3"]
    assert branch(TREE, "nowhere") == []
    assert branch([], None) == []


def test_the_last_question_is_the_users():
    """None in a conversation that has none."""
    question = last_question(branch(TREE, None))
    assert question is not None
    assert question["id"] == "u2"
    assert last_question([]) is None


def test_the_text_of_a_message_with_images():
    """An image is a word; no text is an empty one."""
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "what?"}]
    assert text_of(message("u", None, "user", parts)) == "[image]\nwhat?"
    assert text_of(message("u", None, "user", parts[:1])) == "[image]"
    assert split(message("u", None, "user", parts)) == ("what?", parts[:1])
    assert text_of(message("u", None, "user", None)) == ""
