"""An endpoint: one kind of requests for answers, with a parser of their bodies and a renderer of answers.

`app.api.routes.endpoints` makes the three that there are, and `Intake.open_stream` serves them all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.core import ChatRequest, IdempotencyKey, Placement
from app.stream.token_stream import TokenStream, Wire


class ParseContext(NamedTuple):
    """What a parser is given of a request beside its body."""

    owner: str
    idempotency: IdempotencyKey | None
    placement: Placement


@dataclass(frozen=True, slots=True)
class AnswerEndpoint:
    """A kind of requests for answers, in the words of one API."""

    id_prefix: str
    """The beginning of its answers' ids; no endpoint's begins with another's."""
    object: str
    """OpenAI's name for the kind of its answers."""
    parse: Callable[[Mapping[str, Any], ParseContext], Sequence[ChatRequest]]
    """The checked requests of a body, one for each prompt. Raises BadRequest. A thread may call it."""
    make_wire: Callable[[ChatRequest], Wire]
    """The writer of a stream's frames."""
    render: Callable[[Sequence[TokenStream]], dict[str, Any]]
    """The whole answer, from the ended streams of all prompts. Raises ServingError."""

    def new_id(self) -> str:
        """A fresh id."""
        return new_id(self.id_prefix)


def new_id(prefix: str) -> str:
    """A fresh id: of fixed length for its prefix, and not to be guessed."""
    return prefix + secrets.token_hex(14)
