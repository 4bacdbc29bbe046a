"""How SGLang makes a request's text of its ids, and what ends it; for answers that go on elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.sampling.sampling_params import SamplingParams, get_request_reasoning_end_token_ids
from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs

from app.engine.continuation import TextRules


def text_rules(chat: Any, sampling: Mapping[str, Any], *, reasons: bool) -> TextRules:
    """The rules of a request with these sampling parameters; `reasons` if its reasoning is counted.

    `chat` is SGLang's chat conversion, which knows the model's tokenizer and parsers.
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
    is_fast = getattr(tokenizer, "is_fast", False)

    def decode(token_ids: Sequence[int]) -> str:
        """As SGLang's detokenizer does."""
        if not token_ids:
            return ""
        if not is_fast:
            return decode_without_hf_kwargs(tokenizer, list(token_ids), params.skip_special_tokens)
        text: str = tokenizer.decode(
            list(token_ids),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return text

    def decode_all(token_ids: Sequence[int]) -> str:
        """As SGLang's scheduler does, where it looks for stop strings."""
        text: str = tokenizer.decode(list(token_ids))
        return text

    return TextRules(
        decode=decode,
        decode_all=decode_all,
        max_tokens=int(sampling["max_new_tokens"]),
        stops=tuple(params.stop_strs or ()),
        stop_tokens=params.stop_str_max_len,
        keeps_stop=params.no_stop_trim,
        end_ids=frozenset(ends),
        think_end_ids=_think_end_ids(chat, params) if reasons else (),
    )


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
