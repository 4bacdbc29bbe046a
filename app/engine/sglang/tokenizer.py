"""The model's tokenizer, with arguments that make it add and drop nothing that was not asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs

from app.errors import BadRequest


class TokenizerText:
    """Ids to text and back, for `splice` and for prompts without a template."""

    def __init__(self, tokenizer: Any, vocabulary: int, *, adds_specials: bool) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        # As SGLang encodes a rendered template: tokenizers that add nothing do not take the argument.
        self._adds_specials = adds_specials

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids of the vocabulary."""
        if not getattr(self._tokenizer, "is_fast", False):
            return decode_without_hf_kwargs(
                self._tokenizer, list(token_ids), skip_special_tokens=skip_special_tokens
            )
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, with those that the tokenizer puts around a prompt where they are asked for."""
        if not self._adds_specials:
            return self._tokenizer.encode(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise BadRequest for an id that is not in the vocabulary: it has no embedding."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocabulary):
            raise BadRequest(
                f"A token id is not in the model's vocabulary, which has {self.vocabulary:,} tokens."
            )
