"""The parts of a request that say where its answer begins, and who may set its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.messages import content_texts


class AnswerContext(NamedTuple):
    """Where an answer begins, and who may set its end."""

    preceding_text: str = ""
    """The end of the last assistant message: a client reads the answer after it."""
    continues: bool = False
    """True if the answer continues that message itself."""
    has_forced_end: bool = False
    """True if parameters may force an end that looks like the model's own."""
    stop_ids: frozenset[int] = frozenset()


_PRECEDING_CHARS = 65_536
_FORCING = ("regex", "ebnf", "structural_tag", "logit_bias", "min_tokens", "custom_logit_processor")


def answer_context_of(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], *, is_raw: bool = False
) -> AnswerContext:
    """The context of a request, by its body and the messages that the model sees.

    An answer continues a prompt that has no template (`is_raw`), as it does an assistant's message.
    """
    answers = (message for message in reversed(messages) if is_raw or message.get("role") == "assistant")
    answer = next(answers, None)
    answer_format = body.get("response_format")
    kind = answer_format.get("type") if isinstance(answer_format, Mapping) else None
    tool_choice = body.get("tool_choice")
    return AnswerContext(
        "" if answer is None else "".join(content_texts(answer.get("content")))[-_PRECEDING_CHARS:],
        answer is not None and answer is messages[-1],
        any(body.get(name) for name in _FORCING)
        or kind not in (None, "text", "json_object")
        or tool_choice == "required"
        or isinstance(tool_choice, Mapping),
        frozenset(body.get("stop_token_ids") or ()),
    )
