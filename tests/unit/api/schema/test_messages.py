"""The messages of a request: every key is known, and what SDKs send back is taken."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import pytest
from openai.types import chat as types
from openai.types.chat import chat_completion_assistant_message_param as assistant_types
from openai.types.chat.chat_completion_message import Annotation, ChatCompletionMessage
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.chat.parsed_chat_completion import ParsedChatCompletionMessage

from app.api.schema.messages import MESSAGES, normalized
from app.api.schema.parameters import MAX_MESSAGES, MAX_REQUEST_CALLS
from app.errors import BadRequest
from app.messages import MAX_ID_CHARS, MAX_NAME_CHARS, MAX_PARTS, MAX_TOOL_CALLS

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
TYPES = {
    "system": types.ChatCompletionSystemMessageParam,
    "developer": types.ChatCompletionDeveloperMessageParam,
    "user": types.ChatCompletionUserMessageParam,
    "assistant": types.ChatCompletionAssistantMessageParam,
    "tool": types.ChatCompletionToolMessageParam,
}
VALUES: dict[str, Any] = {
    "content": "hi",
    "name": "Ada",
    "tool_call_id": "call_1",
    "tool_calls": [CALL],
    "refusal": "no",
    "audio": {"id": "audio_1"},
    "function_call": {"name": "f", "arguments": ""},
    "annotations": [],
}


def refusal(*messages: Any) -> tuple[str, str | None]:
    """The code and param that messages are refused with."""
    with pytest.raises(BadRequest) as error:
        normalized(messages)
    return error.value.code, error.value.param


def one(message: Any) -> dict[str, Any]:
    """A message as the stages read it."""
    [result] = normalized([message])
    return result


def user(**more: Any) -> dict[str, Any]:
    """A message of the user's."""
    return {"role": "user", "content": "hi", **more}


def said(**more: Any) -> dict[str, Any]:
    """A message of the assistant's."""
    return {"role": "assistant", "content": "hi", **more}


def of_part(**part: Any) -> tuple[str, str | None]:
    """What a content part is refused with."""
    return refusal({"role": "user", "content": [part]})


def of_call(**call: Any) -> tuple[str, str | None]:
    """What a tool call is refused with."""
    return refusal(said(tool_calls=[CALL | call]))


@pytest.mark.parametrize("role", TYPES)
def test_every_key_of_the_sdk_is_taken(role: str):
    """Each key that OpenAI's SDK types for a role passes, set and null; a new key there fails here."""
    hints = get_type_hints(TYPES[role])
    for name in hints.keys() - {"role"}:
        message = {"role": role, "content": "hi"} | {name: VALUES[name]}
        assert one(message)["role"] == role
        assert one({"role": role, "content": "hi"} | {name: None if name != "content" else "hi"})
    assert hints.keys() - set(MESSAGES[role].fields) == set()


def test_every_key_of_an_answer_is_taken():
    """What `model_dump()` of an answer has can be sent back."""
    assert set(ChatCompletionMessage.model_fields) - set(MESSAGES["assistant"].fields) == set()
    answer = ChatCompletionMessage(
        role="assistant",
        content="hi",
        annotations=[
            Annotation.model_validate(
                {
                    "type": "url_citation",
                    "url_citation": {"start_index": 0, "end_index": 1, "title": "", "url": ""},
                }
            )
        ],
    )
    for dumped in (answer.model_dump(), answer.to_dict(), answer.model_dump(exclude_none=True)):
        assert one(dumped) == {"role": "assistant", "content": "hi"}


def test_an_answer_that_the_sdk_has_parsed_is_taken():
    """What `chat.completions.parse` adds to a message and to its calls is dropped; the call stays."""
    call = CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}
    parsed = ParsedChatCompletionMessage[Any].model_validate(
        {"role": "assistant", "content": "hi", "parsed": {"a": 1}, "tool_calls": [call]}
    )
    assert one(parsed.to_dict()) == said(tool_calls=[CALL])


def test_every_part_of_the_sdk_is_decided():
    """Each type of part that OpenAI's SDK has is served, or refused as content that no model here reads."""
    served = {"text", "image_url", "refusal"}
    kinds = set()
    for part in (
        *get_args(types.ChatCompletionContentPartParam),
        *get_args(assistant_types.ContentArrayOfContentPart),
    ):
        hints = get_type_hints(part)
        [kind] = get_args(hints["type"])
        kinds.add(kind)
        if kind in served:
            assert hints.keys() == {"type", kind}
        else:
            assert of_part(type=kind)[0] == "unsupported_content"
    assert served <= kinds


def test_every_key_of_a_call_is_taken():
    """A call of a function has the keys of the SDK's type."""
    assert set(get_type_hints(types.ChatCompletionMessageFunctionToolCallParam)) == set(CALL)
    assert set(get_type_hints(Function)) == set(CALL["function"])
    assert get_origin(types.ChatCompletionMessageFunctionToolCallParam) is None
    assert one(said(tool_calls=[CALL]))["tool_calls"] == [CALL]


SENT_BACK: dict[str, dict[str, Any]] = {
    "openai": said(refusal=None, annotations=None, audio=None, function_call=None, tool_calls=None),
    "litellm": said(function_call=None, provider_specific_fields={"a": 1}, images=[], thinking_blocks=[]),
    "openrouter": said(reasoning="hm", reasoning_details=[{"type": "reasoning.text"}], tool_calls=[]),
    "langchain": {
        "role": "assistant",
        "content": [{"type": "text", "text": "hi", "annotations": [], "index": 0}],
        "name": None,
    },
    "anthropic": said(cache_control={"type": "ephemeral"}),
    "this server": said(
        id="msg_1",
        parent_id="msg_0",
        created_at=1,
        status="complete",
        finish_reason="stop",
        usage={},
        request_id="chatcmpl-1",
        choice=0,
        matched_stop=None,
    ),
    "an unknown null": said(something_new=None),
}


@pytest.mark.parametrize("sent", SENT_BACK.values(), ids=SENT_BACK.keys())
def test_an_answer_is_taken_as_sdks_send_it(sent: dict[str, Any]):
    """What no model reads is dropped, null is absent, and what was said stays."""
    result = one(sent)
    assert result.keys() <= {"role", "content", "reasoning_content"}
    assert result["content"] in ("hi", [{"type": "text", "text": "hi"}])


def test_tool_calls_are_counted_over_all_messages():
    """One more than a request may have is a 400 before any is checked; as many pass."""
    most = [said(tool_calls=[CALL] * 64) for _ in range(MAX_REQUEST_CALLS // 64)]
    assert len(normalized(most)) == len(most)
    with pytest.raises(BadRequest, match=r"at most 4,096 tool calls together, got 4,097\.") as error:
        normalized([*most, said(tool_calls=[None])])
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    ("sent", "code", "param"),
    [
        (user(foo=1), "unknown_parameter", "messages[0].foo"),
        (user(tool_calls=[CALL]), "unknown_parameter", "messages[0].tool_calls"),
        (said(tool_call_id="c"), "unknown_parameter", "messages[0].tool_call_id"),
        (said(prefix=True), "unknown_parameter", "messages[0].prefix"),
        (said(tools=[]), "unknown_parameter", "messages[0].tools"),
        (user(role="function"), "invalid_role", "messages[0].role"),
        (user(name=5), "invalid_type", "messages[0].name"),
        (user(name="x" * (MAX_NAME_CHARS + 1)), "invalid_value", "messages[0].name"),
        (
            {"role": "tool", "content": "", "tool_call_id": "x" * (MAX_ID_CHARS + 1)},
            "invalid_value",
            "messages[0].tool_call_id",
        ),
        (said(reasoning_content=["hm"]), "invalid_type", "messages[0].reasoning_content"),
        (said(tool_calls={}), "invalid_type", "messages[0].tool_calls"),
        (said(tool_calls=[None]), "invalid_type", "messages[0].tool_calls[0]"),
        (said(tool_calls=[CALL] * (MAX_TOOL_CALLS + 1)), "invalid_value", "messages[0].tool_calls"),
        ({"role": "user", "content": [{}] * (MAX_PARTS + 1)}, "invalid_value", "messages[0].content"),
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            "missing_parameter",
            "messages[0].content",
        ),
        ({"role": "assistant"}, "missing_parameter", "messages[0].content"),
    ],
)
def test_a_message_is_refused_by_name(sent: dict[str, Any], code: str, param: str):
    """Each wrong key, type and length names its place."""
    assert refusal(sent) == (code, param)


def test_parts_are_refused_by_name():
    """What a part has is known; another image's hash, which SGLang would take for its own, is not."""
    place = "messages[0].content[0]"
    url = {"url": "data:,"}
    assert of_part(type="text", text="x", foo=1) == ("unknown_parameter", f"{place}.foo")
    assert of_part(type="text") == ("missing_parameter", f"{place}.text")
    assert of_part(type="image_url", image_url="data:,") == ("invalid_type", f"{place}.image_url")
    for extra in ("content_hash", "max_dynamic_patch"):
        hostile = of_part(type="image_url", image_url=url | {extra: 1})
        assert hostile == ("unknown_parameter", f"{place}.image_url.{extra}")
    assert of_part(type="image_url", image_url=url | {"detail": "huge"}) == (
        "invalid_value",
        f"{place}.image_url.detail",
    )
    for kind in ("thinking", "tool_reference", "video_url", "input_audio", "x"):
        assert of_part(type=kind, text="x") == ("unsupported_content", place)
    assert of_part(type="refusal", refusal="no") == ("unsupported_content", place)


def test_calls_are_refused_by_name():
    """What a call has is known."""
    place = "messages[0].tool_calls[0]"
    assert of_call(foo=1) == ("unknown_parameter", f"{place}.foo")
    assert of_call(type="custom") == ("unsupported_content", place)
    assert of_call(type=[]) == ("unsupported_content", place)
    assert of_call(function=None) == ("missing_parameter", f"{place}.function")
    assert of_call(function={"arguments": ""}) == ("missing_parameter", f"{place}.function.name")
    assert of_call(function={"name": "f", "foo": 1}) == ("unknown_parameter", f"{place}.function.foo")
    assert of_call(function={"name": "f", "arguments": 1}) == ("invalid_type", f"{place}.function.arguments")
    assert of_call(id="x" * (MAX_ID_CHARS + 1)) == ("invalid_value", f"{place}.id")


@pytest.mark.parametrize(
    ("sent", "read"),
    [("", "{}"), (" ", "{}"), (None, "{}"), ('{"x": 1}', '{"x": 1}'), ({"x": 1}, '{"x":1}'), ("{", "{")],
)
def test_arguments_are_json_text(sent: Any, read: str):
    """Nothing is an empty object, which templates need; an object is written as JSON."""
    call = one(said(tool_calls=[{"function": {"name": "f", "arguments": sent}, "index": 0}]))["tool_calls"]
    assert call == [{"type": "function", "function": {"name": "f", "arguments": read}}]


def test_an_assistant_that_only_called_tools_has_no_content():
    """Null content is absent beside calls; beside what else an answer may be, it is empty."""
    assert "content" not in one({"role": "assistant", "content": None, "tool_calls": [CALL]})
    for instead in ({"refusal": "no"}, {"audio": {"id": "a"}}, {"function_call": {"name": "f"}}):
        assert one({"role": "assistant", "content": None, **instead})["content"] == ""
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert one(refused)["content"] == [{"type": "text", "text": "no"}]


def test_messages_are_bounded():
    """More than any context holds are refused at once."""
    assert refusal(*[user()] * (MAX_MESSAGES + 1)) == ("invalid_value", "messages")
    assert len(normalized([user()] * MAX_MESSAGES)) == MAX_MESSAGES


def test_a_refusal_costs_no_more_than_what_it_says():
    """Neither a name of megabytes nor a million values in the place of a word are written out."""
    many = [0] * 1_000_000
    places = [
        {"x" * 10_000_000: 1},
        {"role": many},
        {"content": [{"type": "image_url", "image_url": {"url": "", "detail": many}}]},
    ]
    for hostile in places:
        with pytest.raises(BadRequest) as error:
            normalized([user() | hostile])
        assert len(error.value.message) < 300
    with pytest.raises(BadRequest) as error:
        normalized([said(tool_calls=[CALL | {"type": many}])])
    assert "no string" in error.value.message
