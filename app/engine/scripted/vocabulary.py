"""Token ids of the scripted engine: a word has one id, the same in prompts and in answers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from app.core import RawPrompt
from app.errors import BadRequest

VOCABULARY = 50_000
"""Ids are below this."""
_REMEMBERED_WORDS = 4096


class Vocabulary:
    """Turns words into ids, and ids back into the words that it was asked for last."""

    def __init__(self) -> None:
        self._word_of: dict[int, str] = {}

    def ids(self, text: str) -> list[int]:
        """An id for each word."""
        words = [word for word in text.split(" ") if word]
        ids = [token_id(word) for word in words]
        self._word_of.update(zip(ids, words, strict=True))
        while len(self._word_of) > _REMEMBERED_WORDS:
            del self._word_of[next(iter(self._word_of))]
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """The words; an id without a word is spelled `<ID>`. Raises BadRequest for what is no id."""
        _check(token_ids)
        return " ".join(self._word_of.get(token_id, f"<{token_id}>") for token_id in token_ids)

    def raw_ids(self, raw: RawPrompt) -> list[int]:
        """The ids of a prompt without a template. Raises BadRequest for what is no id."""
        if raw.token_ids is None:
            return self.ids(raw.preface) + self.ids(raw.text)
        _check(raw.token_ids, "prompt")
        return [*self.ids(raw.preface), *raw.token_ids]


def _check(token_ids: Sequence[int], param: str | None = None) -> None:
    if any(not 0 <= token_id < VOCABULARY for token_id in token_ids):
        raise BadRequest(
            f"A token id is not in the model's vocabulary, which has {VOCABULARY:,} tokens.", param=param
        )


def prompt_ids(messages: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """One id a word; an answer's words have the ids they were generated as, and no role before them."""
    for message in messages:
        if message.get("role") != "assistant":
            yield token_id(str(message.get("role")))
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        for word in filter(None, " ".join(parts).split(" ")):
            yield token_id(word)


def reused_runs(token_ids: list[int], past: Sequence[Sequence[int]]) -> tuple[int, str | None]:
    """The number of runs that the ids begin with, and the reason why not with all."""
    at = 0
    for turn, run in enumerate(past, start=1):
        if token_ids[at : at + len(run)] != list(run):
            return turn - 1, f"template changed turn {turn}"
        at += len(run)
    return len(past), None


def token_id(word: str) -> int:
    """The id of a word."""
    return zlib.crc32(word.encode()) % VOCABULARY
