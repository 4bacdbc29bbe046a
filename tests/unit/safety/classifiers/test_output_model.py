"""The model of answers: n-grams of a text that grows, however it is cut."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from app.safety.classifiers.output_model import (
    BITS,
    STEP_BYTES,
    Answer,
    Grams,
    OutputModel,
    plain_bytes,
)

TEXT = (
    "Sure, the FIRST thing you'd want — naïvely — is a plan:\n\n 1.  walk in, 2. out… Über-easy, isn't it? "
)


def read(text: str, cuts: list[int]) -> list[int]:
    """The places of a text that comes in pieces."""
    grams = Grams()
    ends = [*cuts, len(text)]
    starts = [0, *cuts]
    return [
        place
        for start, end in zip(starts, ends, strict=True)
        for place in grams.read(plain_bytes(text[start:end]))
    ]


@pytest.fixture
def model() -> OutputModel:
    """A model for which `poison` is harmful, and everything else slightly harmless."""
    harm = np.full(1 << BITS, -0.05, np.float16)
    harm[read(" poison ", [])] = 2
    return OutputModel(harm, drift=0.1, line=(1.0, -4.0))


def say(answer: Answer, text: str) -> list[float]:
    """The scores after each word."""
    return [answer.feed(f" {word}") for word in text.split()]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_make_no_difference_to_what_is_read(seed: int):
    """The same n-grams come of a text in pieces as of the whole."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(TEXT)), 12))
    assert sorted(read(TEXT, cuts)) == sorted(read(TEXT, []))


def test_case_and_look_alikes_make_no_difference():
    """What looks the same reads the same."""
    assert plain_bytes("\u0420\u03bf\u0456son \uff29\uff34!") == plain_bytes("poison it.")


def test_a_word_without_end_is_cut():
    """A word of 100 KB costs no more than words of 64 bytes."""
    grams = Grams()
    for _ in range(20_000):
        grams.read(b"abcde")
    assert len(grams._word) < 70


def test_nothing_said_scores_nothing(model: OutputModel):
    """No text, and text of which nothing is complete, has no score."""
    answer = model.start(0.0)
    assert answer.feed("") == 0.0
    assert answer.feed("!") == 0.0


def test_harm_is_heard_as_it_is_said(model: OutputModel):
    """The score rises with the word."""
    answer = model.start(0.0)
    before = say(answer, "here is what you do with it")[-1]
    after = say(answer, "poison poison poison it")[-1]
    assert before < 0.2
    assert after > 0.8


def test_a_long_harmless_beginning_hides_nothing(model: OutputModel):
    """Harm is heard after it as it is at the very beginning."""
    early, late = model.start(0.0), model.start(0.0)
    say(late, "all is well and good " * 400)
    say(late, "it")
    said = say(early, "it is poison poison poison it")[-1]
    assert said > 0.8
    assert say(late, "is poison poison poison it")[-1] == pytest.approx(said, abs=0.05)


def test_what_is_over_is_over(model: OutputModel):
    """Harmless text takes the score down again."""
    answer = model.start(0.0)
    assert say(answer, "poison poison poison it")[-1] > 0.8
    assert say(answer, "all is well and good " * 20)[-1] < 0.2


def test_what_is_said_again_counts_half(model: OutputModel):
    """A word that an answer repeats says less than one that is new."""
    answer = model.start(0.0)
    answer.feed("it poison ")
    first = answer.logit
    answer.feed("it poison ")
    assert answer.logit - first < first + 4


def test_what_is_remembered_is_bounded(model: OutputModel):
    """An answer without end keeps a bounded number of n-grams."""
    answer = model.start(0.0)
    for number in range(20_000):
        answer.feed(f" word{number}")
    assert len(answer._known) < 5_000


def test_much_at_once_is_read_in_steps(model: OutputModel):
    """Harm in the middle of one long piece is heard as if it had come by itself."""
    text = "all is well and good " * 40
    answer = model.start(0.0)
    assert answer.feed(f"{text} poison poison poison it {text}") > 0.8
    assert len(text) > STEP_BYTES


def test_a_harmful_prompt_weighs_on_the_answer(model: OutputModel):
    """The prompt's score is the prior of what is said."""
    calm, warned = model.start(0.0), model.start(0.9)
    assert calm.feed("one two three ") < warned.feed("one two three ")


def test_one_step_that_is_high_is_not_enough(model: OutputModel):
    """Of much at once the score is what two steps in a row have reached."""
    calm = "all is well and good and so on and on " * 6
    at_once, in_words = model.start(0.0), model.start(0.0)
    highest = max(say(in_words, f"{calm} poison poison poison {calm}"))
    assert at_once.feed(f"{calm} poison poison poison {calm}") <= highest


def test_a_file_of_another_size_is_refused(tmp_path: Path):
    """A table that does not fit is not taken for a model."""
    path = tmp_path / "output.npz"
    one = np.zeros(1, np.float32)
    np.savez(path, harm=one, drift=one[0], line=[1, 0], suspect_at=one[0])
    with pytest.raises(ValueError, match="another size"):
        OutputModel.load(path)
