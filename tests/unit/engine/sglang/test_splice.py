"""Splicing past runs into a rendered prompt, with the built-in model's real tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from app.engine.sglang.splice import Splice, splice

BUILTIN = Path(__file__).parents[4] / "app" / "engine" / "builtin"
END = "<|im_end|>"


class Text:
    """The tokenizer alone, as `splice` wants it."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
        self.vocabulary = self._tokenizer.get_vocab_size()
        self.encoded: list[str] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


class SpaceLosing(Text):
    """One that, as some do, drops the space that a text begins with."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.removeprefix(" "))


TEXT = Text()
Chat = list[tuple[str, str]]


def render(messages: Chat) -> str:
    """A prompt in the built-in model's format, ready for an answer."""
    turns = [f"<|im_start|>{role}\n{content}{END}\n" for role, content in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def in_tokens(pieces: Sequence[str]) -> list[int]:
    """Text as a model may say it: cut into tokens where the tokenizer would not."""
    return [token_id for piece in pieces for token_id in TEXT.encode(piece)]


def spliced(chat: Chat, past: Sequence[Sequence[int]], text: Text = TEXT) -> Splice:
    """The splice into a chat's prompt; checks that it says what the prompt says."""
    prompt = render(chat)
    result = splice(TEXT.encode(prompt), past, text)
    assert TEXT.decode(result.token_ids) == prompt
    return result


characters = st.characters(exclude_categories=["Cs"])
contents = st.text(characters, max_size=30)
awkward = st.sampled_from(
    [END, "<|im_", "end|>", "<th", "ink>", "\u05e9\u05dc\u05d5\u05dd", "\U0001f9ff", "  ", "\n\n"]
)
pieces = st.lists(st.text(characters, min_size=1, max_size=4) | awkward, min_size=1, max_size=12)


@given(st.lists(st.tuples(contents, pieces, st.booleans()), min_size=1, max_size=4), contents)
def test_whatever_was_said_is_taken_over_token_for_token(
    turns: list[tuple[str, list[str], bool]], question: str
):
    """Any text, cut anyhow, with or without its end token: ids begin with the runs, the text is the same."""
    chat: Chat = []
    runs: list[list[int]] = []
    for asked, answer, ended in turns:
        before = "" if not chat else render(chat).removesuffix("<|im_start|>assistant\n")
        said_before = [token_id for run in runs for token_id in run]
        chat.append(("user", asked))
        unsaid = (before + render(chat[-1:]))[len(TEXT.decode(said_before)) :]
        runs.append(TEXT.encode(unsaid) + in_tokens(answer) + (TEXT.encode(END) if ended else []))
        chat.append(("assistant", "".join(answer)))
    result = spliced([*chat, ("user", question)], runs)
    whole = next((n for n, run in enumerate(runs) if TEXT.decode(run).endswith("\ufffd")), len(runs))
    ids = [token_id for run in runs[:whole] for token_id in run]
    assert result.past_runs == whole
    assert list(result.token_ids[: len(ids)]) == ids
    assert (result.rerendered is None) is (whole == len(runs))


@given(st.lists(st.lists(st.integers(-5, 11_000), max_size=20), max_size=3), contents)
def test_runs_of_anything_never_change_the_text(runs: list[list[int]], question: str):
    """Random ids, of no vocabulary even: the prompt says what was rendered, or fewer runs are in it."""
    result = spliced([("user", question)], runs)
    assert result.past_runs == len(runs) or result.rerendered


FIRST: Chat = [("user", "Which rings?")]
ANSWER = ["<th", "ink>\nru", "nes\n</think>\n\n", "Th", "re", "e ri", "ngs. "]
RUN = TEXT.encode(render(FIRST)) + in_tokens(ANSWER) + TEXT.encode(END)
AS_SAID = "".join(ANSWER)


def second_turn(answer: str = AS_SAID) -> Chat:
    """The chat after the answer, as a template or a client may give it back."""
    return [*FIRST, ("assistant", answer), ("user", "Which?")]


def test_an_answer_is_not_tokenized_anew():
    """Only what comes after the run is tokenized, and rendering alone would have cut the answer otherwise."""
    text = Text()
    result = spliced(second_turn(), [RUN], text)
    assert list(result.token_ids[: len(RUN)]) == RUN != TEXT.encode(render(second_turn()))[: len(RUN)]
    assert text.encoded == ["\n<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"]


def test_without_a_past_nothing_is_done():
    """A first turn is what was rendered, untouched."""
    text, rendered = Text(), [1, 2, 3]
    assert splice(rendered, [], text).token_ids is rendered
    assert text.encoded == []


@pytest.mark.parametrize(
    "answer",
    [AS_SAID.partition("</think>\n\n")[2], AS_SAID.strip(), AS_SAID + "!", AS_SAID[:-9], ""],
    ids=["reasoning stripped", "trimmed", "longer", "stop string", "gone"],
)
def test_a_past_that_the_template_changed_is_rendered_anew(answer: str):
    """What the model said is not what stands in the prompt: its ids are not used, and the reason says so."""
    result = spliced(second_turn(answer), [RUN])
    assert (result.past_runs, result.rerendered) == (0, "template changed turn 1")
    assert result.token_ids == TEXT.encode(render(second_turn(answer)))


def test_runs_before_the_changed_one_are_taken_over():
    """A change in turn 2 leaves turn 1 as it was said."""
    middle = "\n" + render([("user", "Which?")])
    runs = [RUN, TEXT.encode(middle + "Nenya")]
    result = spliced([*second_turn(), ("assistant", "Vilya"), ("user", "Why?")], runs)
    assert (result.past_runs, result.rerendered) == (1, "template changed turn 2")
    assert list(result.token_ids[: len(RUN)]) == RUN


def test_an_answer_cut_within_a_character_is_rendered_anew():
    """Ids that end in half a character cannot be continued, although their text is in the prompt."""
    cut = TEXT.encode(render(FIRST)) + TEXT.encode("\U0001f9ff")[:-1]
    assert TEXT.decode(cut).endswith("\ufffd")
    result = spliced(second_turn("\ufffd"), [cut])
    assert (result.past_runs, result.rerendered) == (0, "half a character ends turn 1")


@pytest.mark.parametrize("token_id", [-1, TEXT.vocabulary])
def test_ids_of_another_model_are_not_taken_over(token_id: int):
    """An id that the model does not have would end its process."""
    result = spliced(second_turn(), [[*RUN, token_id]])
    assert (result.past_runs, result.rerendered) == (0, "unknown token in turn 1")


def test_a_tokenizer_that_loses_text_at_a_seam_takes_nothing_over():
    """Where the parts do not decode to the whole, the rendered ids stay."""
    chat = [("user", "Say on"), ("assistant", "Three rings")]
    run = TEXT.encode(render(chat[:1]) + "Three")
    assert spliced(chat, [run]).past_runs == 1
    result = spliced(chat, [run], SpaceLosing())
    assert (result.past_runs, result.rerendered) == (0, "tokenizer cannot join turns")
