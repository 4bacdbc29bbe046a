"""Any JSON value as a message is refused by its place, or stored and shown with known keys only."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from app.api.schema.chat_request import parse_chat_request
from app.api.schema.messages import SERVERS_OWN
from app.errors import BadRequest
from app.journal.history import stored_message
from app.store.conversations import NewMessage
from tests.support.conversing import Chats

SHOWN = SERVERS_OWN - {"matched_stop"} | {"role", "content"}
MAY_HAVE = {
    "system": {"name"},
    "developer": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls"},
    "tool": {"name", "tool_call_id"},
}
NAMES = sorted(
    SERVERS_OWN
    | {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio"}
    | {"type", "text", "image_url", "url", "detail", "function", "arguments", "function_call", "foo"}
)
WORDS = ["user", "assistant", "tool", "system", "text", "image_url", "function", "msg_1", "", "root", "a"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=3)}, optional={"arguments": json_values})},
    optional={"id": json_values, "type": json_values, "index": json_values, "foo": json_values},
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "refusal"])},
    optional={"text": st.text(max_size=5), "image_url": json_values, "id": json_values, "foo": json_values},
)
likely = st.fixed_dictionaries(
    {
        "role": st.sampled_from(sorted(MAY_HAVE)),
        "content": st.text(max_size=5) | st.none() | st.lists(parts, max_size=2),
    },
    optional={name: json_values for name in NAMES if name not in ("role", "content")}
    | {"tool_calls": st.lists(calls, max_size=2) | st.none()},
)


def check_shown(message: dict[str, Any], message_id: str) -> None:
    """Raises unless a shown message is as the server has it."""
    assert message.keys() - SHOWN <= MAY_HAVE[message["role"]]
    assert message["id"] == message_id
    assert message["parent_id"] is None
    assert (message["status"], message["finish_reason"], message["usage"]) == ("complete", None, None)
    assert "request_id" not in message
    assert isinstance(message["content"], str | list | None)
    for call in message.get("tool_calls", ()):
        assert {type(value) for value in call["function"].values()} == {str}


@given(sent=json_values | likely | likely)
def test_any_message_is_refused_or_stored_with_known_keys(sent: Any):
    """A refusal names a place in the message; what is stored is shown under the server's own values."""
    try:
        normalized = parsed(sent)
    except BadRequest as error:
        refused_at = error.param
    else:
        check_stored(normalized)
        return
    assert refused_at is not None
    assert refused_at.startswith("messages[0]")


def parsed(sent: Any) -> dict[str, Any]:
    """A message as the stages read it."""
    [message] = parse_chat_request({"model": "m", "messages": [sent]}, "chatcmpl-1", "local").body["messages"]
    assert isinstance(message, dict)
    return message


def check_stored(normalized: dict[str, Any]) -> None:
    """Raises unless a message is stored and shown with known keys, and can be sent again as it is shown."""
    stored = stored_message(normalized)
    chats = Chats()
    chats.begin("conv_1", NewMessage("msg_mine", stored.role, stored.text, stored.body))
    check_shown(chats.view()["messages"][0], "msg_mine")
    chats.export("markdown")
    again = parsed(chats.view()["messages"][0])
    assert again.items() <= normalized.items()


@given(body=json_values | likely)
def test_any_stored_body_is_shown_with_known_keys(body: Any):
    """Whatever an older version stored, a view and both exports are made, and a turn continues it."""
    chats = Chats()
    role = body.get("role") if isinstance(body, dict) else None
    role = role if role in list(MAY_HAVE) else "user"
    chats.begin("conv_1", NewMessage("msg_mine", role, "text", orjson.dumps(body)))
    message = chats.view()["messages"][0]
    message.pop("reasoning_content", None)  # an older version's caller may have sent it
    check_shown(message, "msg_mine")
    chats.export("markdown")
    for read in chats.branch("msg_mine").messages:
        assert read.keys() <= {"role", "content", "reasoning_content"} | MAY_HAVE[role]
