"""The interface of a model that another server holds, and the facts that this server reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.core import ChatRequest, ModelCard, Prompt
from app.engine.continuation import TextRules
from app.engine.sink import ChoiceSink, GenerationStream


@dataclass(frozen=True, slots=True)
class Facts:
    """A server's `/model_info` and `/server_info`."""

    model: Mapping[str, Any]
    server: Mapping[str, Any]

    @property
    def identity(self) -> tuple[str, ...]:
        """Servers that answer for one another agree in this; paths may differ from node to node."""
        names = ("served_model_name", "model_type", "architectures", "reasoning_parser", "tool_call_parser")
        return tuple(str(self.model.get(name)) for name in names)


class RemoteModel(Protocol):
    """Renders requests here for a model that runs elsewhere, and parses what it generates.

    Methods of the names that `Engine` has do what they do there, and block.
    """

    card: ModelCard

    def render(self, request: ChatRequest) -> Prompt: ...

    def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def tokenizer_json(self) -> str | None: ...

    async def start(self) -> None:
        """Start what it needs on the event loop. Raises InternalError."""
        ...

    async def aclose(self) -> None:
        """Stop it; a second call does nothing."""
        ...

    async def check_grammar(self, owner: str, prompt: Prompt) -> None:
        """Refuse a grammar that cannot be followed or costs too much. Raises BadRequest, Overloaded."""
        ...

    def choices(self, prompt: Prompt) -> int: ...

    def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """The body of `/generate` for one choice, less `rid` and `stream`."""
        ...

    def rules(self, prompt: Prompt) -> TextRules:
        """The rules by which the ids of an answer to `prompt` become its text."""
        ...

    def sink(self, prompt: Prompt, index: int, out: GenerationStream) -> ChoiceSink: ...


LoadModel = Callable[[Facts], RemoteModel]
"""Makes a model from the facts of its server; blocks for seconds. Raises EngineFailed with the reason."""
