"""SGLang 0.5.20's chat conversion, with a prompt's length checked before it is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from app.errors import ContextOverflow

REPLACED: Mapping[str, str] = {
    "entrypoints.openai.serving_chat:OpenAIServingChat._render_and_encode_chat_template": "705bebe2bd3cbd52",
}


class PromptTooLong(BaseException):
    """Carries a ContextOverflow through SGLang, which would render again after any `Exception`."""

    def __init__(self, overflow: ContextOverflow) -> None:
        super().__init__(str(overflow))
        self.overflow = overflow


class MeasuredChat(OpenAIServingChat):
    """A loaded `OpenAIServingChat` that several threads may convert with.

    Of SGLang's conversion only its cache of rendered prompts (for models that see) is changed by a
    request. It is not used here: the same prompt is hardly sent twice within 64 others.
    """

    def __init__(self, chat: OpenAIServingChat, check_length: Callable[[str], None]) -> None:
        self.__dict__.update(vars(chat))
        self._check_length = check_length

    def _render_and_encode_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        encode_kwargs: dict[str, Any],
        use_cache: bool,
    ) -> tuple[str, list[int], None]:
        """Apply the template and tokenize, as SGLang does; raises PromptTooLong between the two."""
        del use_cache
        tokenizer = self.tokenizer_manager.tokenizer
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            tools=tools,
            return_dict=False,
            **template_kwargs,
        )
        try:
            self._check_length(text)
        except ContextOverflow as overflow:
            raise PromptTooLong(overflow) from None
        return text, tokenizer.encode(text, **encode_kwargs), None
