"""What a turn sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.chat.turn import Turn, image_part, user_message
from app.errors import BadRequest


def test_a_turn_names_its_place_only_if_it_has_one():
    """A first turn leaves the conversation to the server."""
    options = {"model": "m", "temperature": 0}
    first = Turn([user_message("hi")]).body(options)
    assert first == {
        "model": "m",
        "temperature": 0,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    again = Turn([], "conv_1", "msg_1").body(options)
    assert (again["conversation_id"], again["parent_id"], again["messages"]) == ("conv_1", "msg_1", [])


@pytest.mark.parametrize(
    ("content", "kind"), [(b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff\xe0", "jpeg"), (b"GIF89a", "gif")]
)
def test_an_image_is_known_by_its_first_bytes(content: bytes, kind: str, tmp_path: Path):
    """Whatever its name says; it stands before the text."""
    (tmp_path / "picture.txt").write_bytes(content)
    image = image_part(tmp_path / "picture.txt")
    assert image["image_url"]["url"].startswith(f"data:image/{kind};base64,")
    assert user_message("what?", [image])["content"] == [image, {"type": "text", "text": "what?"}]


@pytest.mark.parametrize("name", ["nowhere.png", "text.png"])
def test_what_is_no_image_is_an_error_that_names_it(name: str, tmp_path: Path):
    """A file that is not there, or something else."""
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(BadRequest, match=name):
        image_part(tmp_path / name)
