"""An answer that goes on at another server: its text is the undisturbed one's, wherever it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.continuation import (
    BROKEN,
    ContinuedText,
    Finish,
    Received,
    TextRules,
    check_resumable,
    replay,
    resumed_body,
)
from tests.support.false_sglang import ends_restarted

PROMPT = list(b"Say it.")
SPECIAL = 256
"""An id that has no text, but one for who looks for stop strings."""


def decode(token_ids: Sequence[int]) -> str:
    """A tokenizer with a token for each byte, as those of byte-level models in the worst case."""
    return bytes(token_id for token_id in token_ids if token_id < SPECIAL).decode(errors="replace")


def decode_all(token_ids: Sequence[int]) -> str:
    """The same with the special token spelled out."""
    return "".join("<end>" if token_id == SPECIAL else chr(token_id) for token_id in token_ids)


def rules(**changes: Any) -> TextRules:
    """The rules of a request without limits."""
    return TextRules(**({"decode": decode, "decode_all": decode_all, "max_tokens": 10_000} | changes))


def stepwise(sizes: Sequence[int], ids: Sequence[int]) -> list[Sequence[int]]:
    """Ids in steps of these sizes, over and over."""
    steps, at = [], 0
    for number in range(len(ids)):
        size = sizes[number % len(sizes)]
        steps.append(ids[at : at + size])
        at += size
    return [step for step in steps if step]


class Server:
    """What a server hands over: SGLang's text of each step, and what it does at a stop."""

    def __init__(self, received: Received) -> None:
        self.received = received
        self._ids: list[int] = []
        self._sent = ""

    def step(self, token_ids: Sequence[int]) -> str:
        """SGLang's own rule for half characters: of such text it sends what ends in a space."""
        self._ids += token_ids
        whole = decode([*PROMPT, *self._ids])[len(decode(PROMPT)) :]
        printable = whole if not whole.endswith(BROKEN) else whole[: whole.rfind(" ") + 1]
        text = printable[len(self._sent) :] if printable.startswith(self._sent) else ""
        self._sent += text
        self.received.add(token_ids, text)
        return text


TEXTS = st.text(alphabet="ab é€𝄞 漢", min_size=1, max_size=40)


@given(TEXTS, st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_no_character_is_lost_or_doubled_at_a_cut(text: str, data: Any, sizes: list[int]) -> None:
    """Text handed over before the cut, behind it and at the end is all of the text, and each part once."""
    ids = list(text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    server = Server(Received())
    before = "".join(server.step(step) for step in stepwise(sizes, ids[:cut]))
    continued = server.received.continued(rules(), PROMPT)
    after = ""
    for number, token_id in enumerate(ids[cut:], start=cut + 1):
        finish = {"type": "length"} if number == len(ids) else None
        after += continued.take(token_id, finish)[0]
    if cut == len(ids):
        after = continued.end({"type": "length"})
    assert before + after == text
    assert list(continued.token_ids) == ids


@given(TEXTS, st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_any_number_of_cuts_is_one_text(text: str, cuts: list[int]) -> None:
    """A choice may lose several servers, one after the other."""
    ids = list(text.encode())
    continued = Received().continued(rules(), PROMPT)
    pieces = []
    for number, token_id in enumerate(ids):
        if number in cuts:
            continued.cut()
        pieces.append(continued.take(token_id, None)[0])
    assert "".join(pieces) + continued.end({"type": "length"}) == text


def cut_before(sent: bytes, **changes: Any) -> ContinuedText:
    """The text behind what was sent, a byte a step."""
    received = Received()
    server = Server(received)
    for token_id in sent:
        server.step([token_id])
    return received.continued(rules(**changes), PROMPT)


def run(text: ContinuedText, rest: bytes) -> tuple[str, Finish | None]:
    """All that is handed over until the end."""
    pieces, finish = "", None
    for token_id in rest:
        piece, finish = text.take(token_id, None)
        pieces += piece
        if finish is not None:
            break
    return pieces, finish


@pytest.mark.parametrize(("keeps", "expected"), [(False, "one STO"), (True, "one STOP")])
@pytest.mark.parametrize("cut", [5, 6, 7])
def test_a_stop_string_across_the_cut_ends_the_answer(cut: int, expected: str, *, keeps: bool) -> None:
    """Its last character does, wherever the stop was cut; what was sent of it before stays sent."""
    whole = b"one STOP two"
    text = cut_before(whole[:cut], stops=["no", "STOP"], stop_tokens=4, keeps_stop=keeps)
    pieces, finish = run(text, whole[cut:])
    assert finish == {"type": "stop", "matched": "STOP"}
    assert text.num_tokens == len(b"one STOP")
    assert whole[:cut].decode() + pieces == expected


def test_a_stop_behind_the_cut_is_left_to_the_server() -> None:
    """As soon as no older token can be part of it: the server sees all of it, and says so."""
    text = cut_before(b"one ", stops=["two"], stop_tokens=3)
    assert run(text, b"and two") == ("and two", None)


def test_a_stop_in_the_token_that_ends_it_is_left_out() -> None:
    """A token may hold the text before a stop, the stop, and more."""
    words = {1: "Say", 2: " so", 3: " or. STOP it"}

    def of(token_ids: Sequence[int]) -> str:
        return "".join(words[token_id] for token_id in token_ids)

    received = Received()
    received.add([2], " so")
    text = received.continued(rules(decode=of, decode_all=of, stops=["STOP"], stop_tokens=1), [1])
    assert text.take(3, None) == (" or. ", {"type": "stop", "matched": "STOP"})


def test_a_stop_that_the_server_finds_is_left_out() -> None:
    """Behind the window of the cut the server looks for stops itself, and says which it found."""
    text = cut_before(b"abc", stops=["END"], stop_tokens=3)
    pieces = "".join(text.take(token_id, None)[0] for token_id in b"defgEN")
    last, finish = text.take(ord("D"), {"type": "stop", "matched": "END"})
    assert (pieces + last, finish) == ("defgEN", {"type": "stop", "matched": "END"})


def test_a_stop_spelled_with_special_tokens_is_seen() -> None:
    """SGLang looks for stops in the text with special tokens; nothing of them is handed over."""
    text = cut_before(b"ab", stops=["b<end>"], stop_tokens=2)
    assert text.take(SPECIAL, None) == ("", {"type": "stop", "matched": "b<end>"})


@pytest.mark.parametrize(("keeps", "expected"), [(False, "a"), (True, "ab")])
def test_the_token_that_ends_an_answer_is_not_its_text(expected: str, *, keeps: bool) -> None:
    """As with a server of its own."""
    text = cut_before(b"x", keeps_stop=keeps)
    pieces = text.take(ord("a"), None)[0]
    assert pieces + text.take(ord("b"), {"type": "stop", "matched": ord("b")})[0] == expected


def test_characters_that_never_end_cannot_go_on() -> None:
    """Where it cannot be told which text has come, the answer ends instead of being wrong."""
    with ends_restarted():
        cut_before(b"\xe2\x82" * 60)


@pytest.mark.parametrize("cut", range(6))
def test_reasoning_is_counted_across_the_cut(cut: int) -> None:
    """Up to its end, which may have more tokens than one and be cut in two."""
    whole = b"ab/cde"
    text = cut_before(whole[:cut], think_end_ids=list(b"/c"))
    thinks = [text.thinks]
    for token_id in whole[cut:]:
        text.take(token_id, None)
        thinks.append(text.thinks)
    assert text.reasoning_tokens == 4
    assert thinks[0] == (cut < 4)
    assert thinks[-1] is False


def test_the_rest_is_asked_for_with_what_is_left() -> None:
    """Ids behind the prompt, fewer tokens to generate at most and at least, reasoning as far as it goes."""
    text = cut_before(b"abc", max_tokens=10, think_end_ids=[ord("c")])
    sampling = {"max_new_tokens": 10, "min_new_tokens": 5, "temperature": 0}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "require_reasoning": True, "priority": 3}
    assert resumed_body(body, text) == {
        "input_ids": [1, 2, *b"abc"],
        "sampling_params": {"max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0},
        "require_reasoning": False,
        "priority": 3,
    }
    assert body["input_ids"] == [1, 2]
    assert sampling["min_new_tokens"] == 5


@pytest.mark.parametrize(
    "sampling",
    [{"regex": "a*"}, {"json_schema": "{}"}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}],
)
def test_what_lives_in_a_server_alone_cannot_go_on(sampling: dict[str, Any]) -> None:
    """A grammar's place, and penalties for what was generated."""
    with ends_restarted():
        check_resumable(sampling)


def test_neutral_parameters_hinder_nothing() -> None:
    """As SGLang's conversion spells them."""
    check_resumable(
        {"regex": None, "presence_penalty": 0.0, "repetition_penalty": 1.0, "frequency_penalty": None}
    )


@given(TEXTS)
def test_an_earlier_run_has_its_text_again(text: str) -> None:
    """The same text as then; what comes behind joins on, half a character included."""
    ids = list(text.encode())
    for cut in range(len(ids)):
        continued, pieces, finish = replay(rules(), PROMPT, ids[:cut])
        assert (list(continued.token_ids), finish) == (ids[:cut], None)
        for token_id in ids[cut:]:
            pieces += continued.take(token_id, None)[0]
        assert pieces + continued.end({"type": "length"}) == text


@pytest.mark.parametrize(
    ("changes", "finish", "text"),
    [
        ({"max_tokens": 4}, {"type": "length", "length": 4}, "abcd"),
        ({"end_ids": frozenset(b"c")}, {"type": "stop", "matched": ord("c")}, "ab"),
        ({"stops": ["cd"], "stop_tokens": 2}, {"type": "stop", "matched": "cd"}, "abc"),
    ],
)
def test_an_earlier_run_that_had_ended_ends_again(changes: Any, finish: Finish, text: str) -> None:
    """Its last token says how: one that ends answers, a stop string, or the number of tokens."""
    assert replay(rules(**changes), PROMPT, list(b"abcdef"))[1:] == (text, finish)
