"""The sender of a request, and its rights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.core import LOCAL_OWNER, ChatRequest, Key
from app.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request and its rights. `key` is None in open mode and for the setting `api_key`."""

    owner: str
    is_admin: bool
    key: Key | None = None

    @property
    def models(self) -> tuple[str, ...] | None:
        """The only models they may use; None for all."""
        return None if self.key is None else self.key.terms.models

    def check_grammars(self, chat: ChatRequest) -> None:
        """Raise Forbidden, naming the caller's own parameter, for a grammar that the key may not send."""
        if self.key is None or self.key.terms.grammars == "all":
            return
        body = chat.body
        response_format = body.get("response_format")
        tagged = isinstance(response_format, Mapping) and response_format.get("type") == "structural_tag"
        sent = [name for name in ("regex", "ebnf") if body.get(name) is not None]
        for param in [*sent, *(["response_format"] if tagged else [])]:
            error = Forbidden(
                f"{param}: this key may constrain answers by JSON schemas and tools only.",
                code="grammar_forbidden",
                param=param,
            )
            error.with_caller_param(chat.caller_names)
            raise error


LOCAL = Caller(LOCAL_OWNER, is_admin=True)
