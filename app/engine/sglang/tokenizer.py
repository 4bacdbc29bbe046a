"""The model's tokenizer: ids to text and back, as SGLang makes text of a request's ids, and what ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.sampling.sampling_params import SamplingParams, get_request_reasoning_end_token_ids
from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs

from app.engine.continuation import TextRules
from app.errors import BadRequest


class TokenizerText:
    """Ids to text and back, adding and dropping nothing that was not asked for.

    For `splice`, and for prompts without a template.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, *, adds_specials: bool) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        # As SGLang encodes a rendered template: tokenizers that add nothing do not take the argument.
        self._adds_specials = adds_specials

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids of the vocabulary."""
        return _decode(
            self._tokenizer,
            token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, with those that the tokenizer puts around a prompt where they are asked for."""
        if not self._adds_specials:
            return self._tokenizer.encode(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_ids(self, token_ids: Sequence[int], param: str | None = None) -> None:
        """Raise BadRequest, of `param`, for an id that is not in the vocabulary: it has no embedding."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocabulary):
            raise BadRequest(
                f"A token id is not in the model's vocabulary, which has {self.vocabulary:,} tokens.",
                param=param,
            )


def text_rules(chat: Any, sampling: Mapping[str, Any], *, reasons: bool) -> TextRules:
    """The rules of a request with these sampling parameters; `reasons` if its reasoning is counted.

    `chat` is SGLang's chat conversion, which has the model's tokenizer and parsers.
    """
    manager = chat.tokenizer_manager
    tokenizer = manager.tokenizer
    params = SamplingParams(**sampling)
    params.normalize(tokenizer)
    ends: set[int] = set()
    if not params.ignore_eos:
        ends |= set(params.stop_token_ids or ()) | set(manager.model_config.hf_eos_token_id or ())
        ends |= {tokenizer.eos_token_id} - {None} | set(
            getattr(tokenizer, "additional_stop_token_ids", None) or ()
        )
    return TextRules(
        decode=partial(  # as SGLang's detokenizer does
            _decode,
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        ),
        # As SGLang's scheduler does, where it looks for stop strings.
        decode_all=lambda token_ids: str(tokenizer.decode(list(token_ids))),
        max_tokens=int(sampling["max_new_tokens"]),
        stops=tuple(params.stop_strs or ()),
        stop_tokens=params.stop_str_max_len,
        keeps_stop=params.no_stop_trim,
        end_ids=frozenset(ends),
        think_end_ids=_think_end_ids(chat, params) if reasons else (),
    )


def _decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool, **options: bool) -> str:
    """The text of ids; only tokenizers of the `tokenizers` library take the other options."""
    if not token_ids:
        return ""
    if not getattr(tokenizer, "is_fast", False):
        return decode_without_hf_kwargs(tokenizer, list(token_ids), skip_special_tokens=skip_special_tokens)
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **options)


def _think_end_ids(chat: Any, params: Any) -> Sequence[int]:
    """The ids that end the reasoning, as SGLang's scheduler has them; empty where it counts none."""
    tokenizer = chat.tokenizer_manager.tokenizer
    if not chat.reasoning_parser:
        return ()
    parser = ReasoningParser(model_type=chat.reasoning_parser, stream_reasoning=False, tokenizer=tokenizer)
    selectable = getattr(parser.detector, "request_selectable_think_end_tokens", ())
    chosen = get_request_reasoning_end_token_ids(
        params.custom_params,
        allowed_sequences=[tuple(tokenizer.encode(end, add_special_tokens=False)) for end in selectable],
    )
    if chosen is not None:
        return tuple(chosen)
    return tuple(tokenizer.encode(parser.detector.think_end_token, add_special_tokens=False))
