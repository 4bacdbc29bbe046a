"""Stop strings, found in time linear in the new text.

SGLang 0.5.20 decodes the tail of an answer twice a step, as many tokens as the longest stop has. Then it
compares the tail's end with each beginning of each stop: 16 stops of 1,000 characters are 16,000 pairs of
slices, 3 to 10 ms a choice, in the step that all requests share.

It looks no further back than the tokens that a stop has by the tokenizer. Here a stop is found however the
model spells it; on such answers as SGLang's window covers both agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

REPLACED: Mapping[str, str] = {
    "managers.schedule_batch:Req.check_match_stop_str_prefix": "116e62ec9e12d8de",
    "managers.schedule_batch:Req._check_str_based_finish": "bba588eb60564a2f",
}
CONTEXT_TOKENS = 8
"""Tokens that are decoded before new ones, at least: the text of a token may depend on those before it."""
MAX_BROKEN_TOKENS = 32
"""Tokens after which half a character is taken as it is; a character has four at most."""
MAX_CHARS_KEPT = 256
"""Different characters of an answer whose places are kept: 2 KB each, for 16 stops of 1,000 characters."""
BROKEN = "\ufffd"


class StopMatcher:
    """The stop strings that have begun at the end of an answer, and those that are complete.

    Shift-And (Baeza-Yates and Gonnet, 1992): the characters of all stops are bits of one integer. A bit is
    set where the text so far ends with its stop up to that character.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Any], str]) -> None:
        self._stops = stops
        self._decode = decode
        self._ends: list[int] = []
        self._first_bits = self._last_bits = end = 0
        for stop in stops:
            self._first_bits |= 1 << end
            end += len(stop)
            self._last_bits |= 1 << (end - 1)
            self._ends.append(end - 1)
        self._codes = np.frombuffer("".join(stops).encode("utf-32-le", "surrogatepass"), np.uint32)
        self._places: dict[str, int] = {}
        self._restart()

    def _restart(self) -> None:
        # Whole characters are settled. Text that ends in half of one is looked at again with the next token.
        self._settled = self._begun = 0
        self._start = self._read = self._num_ids = self._settled_ids = self._fed_chars = 0

    @property
    def has_begun(self) -> bool:
        """True if the text read so far ends with the beginning of a stop, or with a whole one."""
        return self._begun != 0

    @property
    def is_settled(self) -> bool:
        """True if the text read so far ends with a whole character."""
        return self._settled_ids == self._num_ids

    def read(self, token_ids: Sequence[int], num_ids: int) -> int:
        """Read up to so many of an answer's ids; the bits of the stops that the new ones complete."""
        if num_ids < self._num_ids:  # SGLang begins such an answer again
            self._restart()
        if num_ids == self._num_ids:
            return 0
        self._num_ids = num_ids
        text = self._decode(token_ids[self._start : num_ids])
        self._begun, complete = self._passed(text[self._fed_chars :])
        is_whole = not text.endswith(BROKEN)
        if is_whole or num_ids - self._read > MAX_BROKEN_TOKENS:
            self._settled, self._settled_ids, self._fed_chars = self._begun, num_ids, len(text)
            if num_ids - self._read >= CONTEXT_TOKENS:
                self._start, self._read = self._read if is_whole else num_ids, num_ids
                self._fed_chars = len(self._decode(token_ids[self._start : num_ids]))
        return complete

    def first(self, complete: int) -> tuple[int, str]:
        """The bit and the text of the first stop, in the caller's order, of those that are complete."""
        bit = complete & -complete
        return bit, self._stops[bisect_left(self._ends, bit.bit_length() - 1)]

    def _passed(self, text: str) -> tuple[int, int]:
        """The stops that have begun behind `text`, and those that it completes."""
        state, complete = self._settled, 0
        for char in text:
            places = self._places.get(char)
            if places is None:
                places = self._places_of(char)
            state = (state << 1 | self._first_bits) & places
            complete |= state & self._last_bits
        return state, complete

    def _places_of(self, char: str) -> int:
        """The bits of the stops' characters that are `char`."""
        if len(self._places) >= MAX_CHARS_KEPT:
            self._places.clear()
        bits = np.packbits(self._codes == ord(char), bitorder="little")
        places = self._places[char] = int.from_bytes(bits.tobytes(), "little")
        return places


def install() -> None:
    """Have SGLang's requests look for their stop strings in this way."""
    begins, ends = Req.check_match_stop_str_prefix, Req._check_str_based_finish  # noqa: SLF001

    def check_match_stop_str_prefix(self: Any) -> bool:
        matcher = _matcher_of(self)
        if matcher is None:
            return bool(begins(self))
        matcher.read(self.output_ids, len(self.output_ids))
        return matcher.has_begun

    def check_str_based_finish(self: Any, new_accepted_len: int = 1) -> bool:
        matcher = _matcher_of(self)
        if matcher is None:
            return bool(ends(self, new_accepted_len))
        ids = self.output_ids
        counts = range(len(ids) - new_accepted_len + 1, len(ids) + 1)
        complete: list[int] = []
        matched = 0
        for count in counts:
            complete.append(matcher.read(ids, count))
            if matcher.is_settled or count == len(ids):  # else it is read again with the next token
                matched |= complete[-1]
        if not matched:
            return False
        bit, stop = matcher.first(matched)
        self.finished_reason = FINISH_MATCHED_STR(matched=stop)
        self.finished_len = next(count for count, bits in zip(counts, complete, strict=True) if bits & bit)
        return True

    Req.check_match_stop_str_prefix = check_match_stop_str_prefix
    Req._check_str_based_finish = check_str_based_finish  # noqa: SLF001


def _matcher_of(req: Any) -> StopMatcher | None:
    """A request's matcher; None where it has no stop strings, or what no request of ours has."""
    params = req.sampling_params
    if not params.stop_strs or params.stop_regex_strs or "" in params.stop_strs:
        return None
    matcher: StopMatcher | None = getattr(req, "stop_matcher", None)
    if matcher is None:
        matcher = req.stop_matcher = StopMatcher(params.stop_strs, req.tokenizer.decode)
    return matcher
