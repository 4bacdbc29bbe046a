"""Memory of texts that were judged: by a keyed hash of each, bounded, and never the text."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from app.safety.text.strings import fields_of
from app.safety.verdict import Verdict

JUDGED = 65_536
"""Turns and answers that are known to have been judged: some 10 MB."""
WATCHED = 8_192
"""Users' turns that are known to have made a prompt watched."""

SHORT_CHARS = 4_096
"""Characters of a text that is hashed in 10 us; a megabyte takes 3 ms."""

T = TypeVar("T")


class Remembered(Generic[T]):
    """Something about each of the texts seen last; for several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._secret = secrets.token_bytes(16)
        self._values: OrderedDict[bytes, T] = OrderedDict()

    def key(self, text: str) -> bytes:
        """The keyed hash of a text."""
        encoded = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(encoded, digest_size=16, key=self._secret).digest()

    def get(self, key: bytes) -> T | None:
        """The value under a key, which counts as seen now; None for none."""
        try:
            self._values.move_to_end(key)
        except KeyError:
            return None
        return self._values.get(key)

    def put(self, key: bytes, value: T) -> T:
        """Remember a value, in place of the one that was not seen for longest."""
        self._values[key] = value
        if len(self._values) > self._capacity:
            self._values.popitem(last=False)
        return value


class Judged:
    """The texts that this server has judged, by whose they are and which policy was in force.

    Users' turns that passed, and answers: those that it released, and those that were read in an
    unwatched prompt. After a restart it is empty, and what clients send of a conversation is read again.
    """

    def __init__(self, capacity: int = JUDGED) -> None:
        self._texts = Remembered[bool](capacity)
        self._watched = Remembered[Verdict](WATCHED)

    def of(self, owner: str, policy_hash: str) -> JudgedTexts:
        """The texts of an owner under a policy."""
        return JudgedTexts(self._texts, self._watched, f"{policy_hash} {owner}", {})


class JudgedTexts(NamedTuple):
    """The texts of one owner that were judged by one policy; one for each request."""

    texts: Remembered[bool]
    watched: Remembered[Verdict]
    whose: str
    digests: dict[str, bytes]
    """Those of this request's long texts, each of which is looked up several times."""

    def is_passed(self, turn: str) -> bool:
        """True if a user's turn was judged and passed."""
        return self.texts.get(self._key("user", turn)) is not None

    def is_answer(self, field: str) -> bool:
        """True if a field of an answer was released or read earlier."""
        return self.texts.get(self._key("assistant", field.strip())) is not None

    def add_passed(self, turns: Iterable[str]) -> None:
        """Remember users' turns of a prompt that passed."""
        for turn in turns:
            self.texts.put(self._key("user", turn), True)

    def add_answers(self, fields: Iterable[str]) -> None:
        """Remember fields of answers."""
        for field in fields:
            self.texts.put(self._key("assistant", field.strip()), True)

    def add_released(self, message: Mapping[str, Any]) -> None:
        """Remember an answer as it was released."""
        self.add_answers(fields_of(message))

    def add_watched(self, turns: Iterable[str], verdict: Verdict) -> None:
        """Remember users' turns with which a prompt was watched."""
        if verdict.readings:  # those are of this prompt, and the verdict is for later ones
            verdict = replace(verdict, readings=())
        for turn in turns:
            self.watched.put(self._key("user", turn), verdict)

    def watched_by(self, turns: Iterable[str]) -> Verdict | None:
        """The verdict that watched the newest of these users' turns that was watched; None for none."""
        verdict = None
        for turn in turns:
            verdict = self.watched.get(self._key("user", turn)) or verdict
        return verdict

    def add_recorded(self, turns: Iterable[str]) -> None:
        """Remember users' turns with which a prompt was recorded."""
        for turn in turns:
            self.texts.put(self._key("recorded", turn), True)

    def is_any_recorded(self, turns: Iterable[str]) -> bool:
        """True if a prompt was recorded with any of these users' turns as its newest."""
        return any(self.texts.get(self._key("recorded", turn)) is not None for turn in turns)

    def _key(self, role: str, text: str) -> bytes:
        if len(text) > SHORT_CHARS:
            digest = self.digests.get(text)
            if digest is None:
                digest = self.digests[text] = self.texts.key(text)
            role, text = f"long {role}", digest.hex()
        return self.texts.key(f"{role} {len(self.whose)} {self.whose} {text}")
