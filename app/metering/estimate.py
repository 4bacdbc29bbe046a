"""Estimates of a request's tokens before it is rendered; rendering corrects them.

With a byte-level BPE tokenizer the text is counted by tiktoken, over the model's own merges; with any
other one by its bytes, on the high side. Neither sees what a conversation's history adds, which is
not read yet, nor what an image really takes.

An answer is expected to be as long as its key's last ones: so much of the key's limit is set aside before it
begins (app.metering.limits), and what it uses beyond is charged as it grows. KV memory, which must not run
out, is set aside (app.admission.budget) by lengths that have a variance: app.admission.estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from app.core import ChatRequest
from app.messages import content_texts, count_media

if TYPE_CHECKING:
    import tiktoken

MESSAGE_TOKENS = 4
"""Tokens that a chat template writes around a message."""
IMAGE_TOKENS = 256
_SAMPLES = 8
_ENCODED_CHARS = 4096
"""Characters in each sample that is encoded, and below in each that is counted by its bytes: 5 ms for all."""
_COUNTED_CHARS = 65_536
_NO_TEXT = bytes(range(0x80, 0x100))
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \t\n\r"
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""The pattern that `ByteLevel` splits by with `use_regex`: GPT-2's, as tiktoken writes it."""

_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Fields of a message that some templates write."""

CountText = Callable[[str], int]


def bytes_estimate(text: str) -> int:
    """Tokens of a text by its bytes: letters by three, digits and signs one each, the others by two.

    Higher than most tokenizers by a third on prose, by half on code. Letters without sense
    (base64) can be up to twice what this says.
    """
    raw = text.encode("utf-8", "surrogatepass")
    plain = raw.translate(None, _NO_TEXT)
    letters = len(plain) - len(plain.translate(None, _LETTERS))
    return -(-letters // 3) + (len(plain) - letters) + -(-(len(raw) - len(plain)) // 2)


def sampled_bytes_estimate(text: str) -> int:
    """`bytes_estimate`, of a long text by samples."""
    return _sampled(bytes_estimate, text, _COUNTED_CHARS)


def text_counter(tokenizer_json: str | None) -> tuple[CountText, bool]:
    """A function that counts a text's tokens, and whether it counts by the model's own merges.

    Takes half a second for a large vocabulary.
    """
    encoding = None if tokenizer_json is None else encoding_of(json.loads(tokenizer_json))
    if encoding is None:
        return sampled_bytes_estimate, False
    return lambda text: _sampled(partial(_count, encoding), text, _ENCODED_CHARS), True


class TextCounter:
    """Counts a text's tokens: by its bytes, and by the model's own merges once loaded."""

    def __init__(self) -> None:
        self._count: CountText = bytes_estimate

    def __call__(self, text: str) -> int:
        return self._count(text)

    def use(self, tokenizer_json: str | None) -> bool:
        """Count as a model's tokenizer does; True if by its own merges (`text_counter`)."""
        self._count, exact = text_counter(tokenizer_json)
        return exact


def encoding_of(tokenizer: Mapping[str, Any]) -> tiktoken.Encoding | None:
    """A tokenizer.json as a tiktoken encoding that counts the same; None where it cannot be one.

    Ids are not the model's: ranks are the order of the merges.
    """
    model = tokenizer.get("model") or {}
    pattern = _pattern_of(tokenizer.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or pattern is None or tokenizer.get("normalizer") not in (None, _NFC):
        return None
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    of_char = _byte_of_char()
    try:
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            ranks.setdefault(bytes(of_char[char] for char in left + right), len(ranks))
        return tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except (KeyError, ValueError):  # not byte-level after all, or a pattern in another dialect
        return None


_NFC = {"type": "NFC"}


def _pattern_of(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The pattern that a pre-tokenizer splits by, its own or GPT-2's; None for any other kind."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if steps[-1].get("use_regex", True):
        return _GPT2_PATTERN if len(steps) == 1 else None
    if len(steps) != 2 or steps[0].get("type") != "Split" or steps[0].get("behavior") != "Isolated":
        return None
    pattern: str | None = steps[0].get("pattern", {}).get("Regex")
    return pattern


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, which byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _sampled(count: CountText, text: str, sample_chars: int) -> int:
    """Tokens of a text; of a long one by samples, so that no request holds the loop up."""
    if len(text) <= _SAMPLES * sample_chars:
        return count(text)
    step = (len(text) - sample_chars) // (_SAMPLES - 1)
    sampled = sum(count(text[i * step : i * step + sample_chars]) for i in range(_SAMPLES))
    return -(-sampled * len(text) // (_SAMPLES * sample_chars))


def _count(encoding: tiktoken.Encoding, text: str) -> int:
    # Lone surrogates, which JSON can spell, have no UTF-8.
    return len(encoding.encode_ordinary(text.encode("utf-8", "replace").decode("utf-8")))


def prompt_estimate(request: ChatRequest, count: CountText) -> int:
    """Tokens of a request's prompt, without the history that it continues."""
    messages = request.body["messages"]
    media = sum(count_media(message.get("content")) for message in messages)
    # In one, so that many texts are sampled as one long one is.
    text = "\n".join(_texts(request.body))
    return MESSAGE_TOKENS * (len(messages) + 1) + IMAGE_TOKENS * media + count(text)


def texts_estimate(texts: Sequence[str], count: CountText) -> int:
    """Tokens of texts that are read and not answered."""
    return MESSAGE_TOKENS * len(texts) + count("\n".join(texts))


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """Every text of the prompt."""
    for message in body["messages"]:
        yield from content_texts(message.get("content"))
        yield from (message[name] for name in _FIELDS if name in message)
        if message.get("tool_calls"):
            yield _json(message["tool_calls"])
    for name in ("tools", "response_format"):
        if body.get(name):
            yield _json(body[name])


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


class ChoiceTokens(NamedTuple):
    """Tokens of a choice."""

    least: int
    """Tokens that the choice will have in any case."""
    expected: int


def expected_answer(request: ChatRequest, mean: float) -> ChoiceTokens:
    """The expected tokens of each choice: the mean of the key's answers, within this request's limits."""
    limit = math.inf if request.max_tokens is None else request.max_tokens
    least = min(max(request.body.get("min_tokens") or 0, 1), limit)
    if request.body.get("ignore_eos") and request.max_tokens is not None:
        least = request.max_tokens
    return ChoiceTokens(int(least), int(min(max(math.ceil(mean), least), limit)))
