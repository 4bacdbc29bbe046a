"""The text of a stream as OpenAI's assistant messages, one for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.stream.ring import ControlEvent, Finished, TextRun, TextTrack, ToolStarted


@dataclass(frozen=True, slots=True)
class ChoiceMessage:
    """One choice: its message, and how it ended if it has."""

    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    matched_stop: str | int | None = None


def build_messages(
    parts: Mapping[TextTrack, TextRun], control_events: Sequence[ControlEvent]
) -> dict[int, ChoiceMessage]:
    """The answers in everything that a ring holds, by choice."""
    calls: dict[int, list[dict[str, Any]]] = {}
    ends: dict[int, tuple[str, str | int | None]] = {}
    choices = dict.fromkeys(track.choice for track in parts)
    for event in control_events:
        match event:
            case ToolStarted(choice, tool):
                arguments = _text(parts, TextTrack(choice, "tool", tool.index)) or ""
                function = {"name": tool.name, "arguments": arguments}
                calls.setdefault(choice, []).append({"id": tool.id, "type": "function", "function": function})
                choices.setdefault(choice)
            case Finished(choice, finish_reason, matched_stop):
                ends[choice] = finish_reason, matched_stop
                choices.setdefault(choice)
    return {
        choice: ChoiceMessage(_message(choice, parts, calls.get(choice)), *ends.get(choice, (None, None)))
        for choice in choices
    }


def _message(
    choice: int, parts: Mapping[TextTrack, TextRun], calls: list[dict[str, Any]] | None
) -> dict[str, Any]:
    content = _text(parts, TextTrack(choice, "text"))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if (reasoning := _text(parts, TextTrack(choice, "reasoning"))) is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    elif content is None:
        message["content"] = ""
    return message


def _text(parts: Mapping[TextTrack, TextRun], track: TextTrack) -> str | None:
    text_run = parts.get(track)
    return None if text_run is None else orjson.loads(b'"' + text_run.text + b'"')
