"""Checks on a rendered request, for engines whose limits are a context length alone."""

from __future__ import annotations

from app.core import ChatRequest, ModelCard
from app.errors import BadRequest, ContextOverflow


def answer_budget(prompt_tokens: int, max_tokens: int | None, model: ModelCard) -> int:
    """The tokens that the answer may have.

    Without `max_tokens` it is what the context leaves. Raises ContextOverflow, which says
    by how much prompt and answer are too long together.
    """
    left_tokens = min(model.context_length, model.max_prompt_tokens + 1) - prompt_tokens
    requested = 1 if max_tokens is None else max_tokens
    if requested > left_tokens:
        answer = "" if max_tokens is None else f" and max_tokens asks for {max_tokens} more"
        limit = prompt_tokens + left_tokens
        raise ContextOverflow(
            f"This model holds {limit} tokens; the messages take {prompt_tokens}{answer}:"
            f" {requested - left_tokens} too many. Shorten the messages"
            f"{' or lower max_tokens' if max_tokens is not None else ''}.",
            param="messages",
        )
    return left_tokens if max_tokens is None else max_tokens


def check_text_only(request: ChatRequest) -> None:
    """Refuse content parts other than text. Raises BadRequest naming the part."""
    for i, message in enumerate(request.body["messages"]):
        content = message.get("content")
        for j, content_part in enumerate(content if isinstance(content, list) else ()):
            if content_part.get("type") != "text":
                kind = content_part.get("type")
                raise BadRequest(
                    f"The model {request.model!r} reads text only; remove the {kind} part.",
                    code="unsupported_content",
                    param=f"messages[{i}].content[{j}]",
                )
