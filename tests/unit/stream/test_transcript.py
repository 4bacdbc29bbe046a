"""What a ring holds, as messages."""

from __future__ import annotations

from app.core import Counts, Delta, ToolCall
from app.stream.ring import Finished, Ring, ToolStarted
from app.stream.transcript import ChoiceMessage, build_messages


def said(*deltas: Delta) -> dict[int, ChoiceMessage]:
    """The answers of a ring that these deltas went into."""
    ring = Ring(1 << 20)
    for delta in deltas:
        if delta.tool is not None and delta.tool.name is not None:
            ring.append_control(ToolStarted(delta.choice, delta.tool))
        if delta.text:
            ring.append(delta)
        if delta.finish_reason is not None:
            ring.append_control(Finished(delta.choice, delta.finish_reason, delta.matched_stop))
    return build_messages(*ring.contents())


def delta(text: str, channel: str = "text", choice: int = 0, **more) -> Delta:
    """A piece of text."""
    return Delta(choice, channel, text, (1,), Counts(), **more)


def test_text_of_each_choice_is_joined():
    """Interleaved choices come apart, each with its end."""
    found = said(delta("a"), delta("x", choice=1), delta("b", finish_reason="stop"), delta("y", choice=1))
    assert [found[i].message["content"] for i in (0, 1)] == ["ab", "xy"]
    assert [found[i].finish_reason for i in (0, 1)] == ["stop", None]


def test_reasoning_and_tool_calls_have_their_fields():
    """Reasoning stands beside the content; a call alone leaves the content null."""
    call = ToolCall(0, "call_1", "weather")
    found = said(
        delta("hm", "reasoning"),
        delta("", "tool", tool=call),
        delta("{}", "tool", tool=ToolCall(0), finish_reason="tool_calls"),
    )
    message = found[0].message
    assert message["content"] is None
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ]


def test_nothing_said_is_an_empty_answer():
    """A choice that only ended has empty content."""
    assert said(delta("", finish_reason="abort"))[0].message == {"role": "assistant", "content": ""}
