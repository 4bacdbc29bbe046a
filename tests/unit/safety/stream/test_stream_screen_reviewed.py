"""Reviews: the first stage of the classifiers halts nothing, and what it flags waits for the second stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core import Counts, Delta, FinishReason
from app.safety.policies.policy import Policy
from app.safety.stream.answer_review import ReviewRequest
from app.safety.stream.stream_screen import Screening, StreamScreen
from app.safety.thresholds import RECHECK_LOGIT_STEP, REVIEWED_CHARS, SUSPICION_RATIO
from app.safety.verdict import Scores, ScreenBusy, ScreenFailed
from tests.support.policies import policy
from tests.support.screens import HARM, WordModel

REVIEW_AT = 0.5
SPAN = "canary song 42"
HARMLESS: Scores = {"S2": 0.05, "S3": 0.01}
HARMFUL: Scores = {"S2": 0.9, "S3": 0.02}


class Reviewer:
    """Finds what a test says, once each and the last for ever; keeps what it was asked."""

    def __init__(self, *found: Any) -> None:
        self._found = list(found)
        self.asked: list[ReviewRequest] = []

    async def review(self, request: ReviewRequest, _owner: str) -> Scores:
        """See answer_review.Review."""
        self.asked.append(request)
        found = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        if isinstance(found, Exception):
            raise found
        scores: Scores = found
        return scores


class FirstStage:
    """A model whose harm at each word a test sets, 0.01 after that."""

    review_at = REVIEW_AT

    def __init__(self, *harms: float) -> None:
        self._harms = list(harms)

    def start(self, _prompt_harm: float) -> FirstStage:
        """See AnswerClassifier."""
        return self

    def feed(self, text: str) -> float:
        """See ScoredAnswer; of several words the highest that two in a row reached."""
        harms = [self._harms.pop(0) if self._harms else 0.01 for _ in text.split()]
        return harms[0] if len(harms) == 1 else max(map(min, pairwise(harms)))


class Answer:
    """The deltas of one choice, a token each unless said otherwise."""

    def __init__(self, choice: int = 0) -> None:
        self._choice = choice
        self.tokens = 0

    def says(self, text: str, tokens: int = 1, finish: FinishReason | None = None) -> Delta:
        """The next delta."""
        self.tokens += tokens
        return Delta(self._choice, "text", text, (7,) * tokens, Counts(9, self.tokens), finish)

    def words(self, text: str) -> list[Delta]:
        """A text, word by word."""
        return [self.says(part) for part in text.replace(" ", " \0").split("\0") if part]

    def ends(self, finish: FinishReason = "stop") -> Delta:
        """The last delta, without a token."""
        return self.says("", 0, finish)


def screening(
    model: Any,
    reviewer: Reviewer,
    *,
    n: int = 1,
    watched: bool = False,
    prompt_harm: float = 0.0,
    rules: Policy | None = None,
    **options: Any,
) -> Screening:
    """A screening by both stages."""
    screen = StreamScreen(model, reviewer.review)
    return screen.for_request(n, watched, prompt_harm, rules or policy(), **options)


async def served(screen: Screening, *deltas: Delta) -> list[str]:
    """What comes out after each delta, as the pipeline asks for it."""
    out = []
    for delta in deltas:
        ready = screen.feed(delta)
        released = await screen.review() if screen.in_review else ready
        out.append("".join(each.text for each in released))
    return out


def harm_with(harm: float, more: float) -> float:
    """The harm whose logit is greater by `more`."""
    return 1 / (1 + math.exp(-(math.log(harm / (1 - harm)) + more)))


def text_of(released: Sequence[Delta]) -> str:
    """What they say."""
    return "".join(delta.text for delta in released)


# What is flagged


async def test_what_is_flagged_is_held_until_it_is_reviewed():
    """Nothing goes out before; after a harmless finding all that waited does, at once and in order."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(0.1, 0.6, 0.7), reviewer, prompt_harm=0.25)
    first, second, third = answer.words("one two three")
    assert (one.feed(first), one.in_review) == ([first], False)
    assert (one.feed(second), one.in_review, one.held_tokens) == ([], False, 1)
    assert (one.feed(third), one.in_review, one.held_tokens) == ((), True, 2)
    assert reviewer.asked == []
    assert await one.review() == [second, third]
    assert reviewer.asked == [ReviewRequest("one two three", 0.25, 0.7, "one two three")]
    assert (one.in_review, one.halted, one.held_tokens) == (False, None, 0)


async def test_what_is_found_harmful_is_halted_by_the_finding():
    """Its category, score and threshold are the verdict's; what the model itself heard is not."""
    answer = Answer()
    one = screening(FirstStage(0.1, 0.1, 0.6, 0.7), Reviewer(HARMFUL))
    assert await served(one, *answer.words("one two three four five")) == ["one ", "two ", "", "", ""]
    assert one.halted is not None
    assert (one.halted.action, one.halted.category, one.halted.score) == ("block", "S2", 0.9)
    assert (one.halted.stage, one.halted.scores) == ("stream", HARMFUL)
    assert one.halted.threshold == policy().judge_output(HARMFUL, watched=False).threshold
    assert (one.halted_choice, one.hit_at, one.halted.lag_tokens, one.leaked_tokens) == (0, 3, 1, 0)
    assert (one.take_withheld_text(), one.take_withheld_text()) == ("three four ", "")
    assert one.verdicts() == [one.halted]
    assert one.peaks() == [HARMFUL]


async def test_tokens_that_were_out_before_the_model_was_sure_of_nothing_are_counted_as_leaked():
    """It was in doubt of them, and let them go as the doubt was small."""
    doubt = SUSPICION_RATIO * REVIEW_AT + 0.001
    answer = Answer()
    one = screening(FirstStage(0.1, doubt, doubt, 0.6, 0.7), Reviewer(HARMFUL))
    out = await served(one, *answer.words("one two three four five"))
    assert out[:3] == ["one ", "two ", "three "]
    assert one.halted is not None
    assert (one.hit_at, one.leaked_tokens) == (4, 2)


async def test_one_hit_is_not_reviewed():
    """What is harmless again at the next look goes out."""
    reviewer, answer = Reviewer(HARMFUL), Answer()
    one = screening(FirstStage(0.6, 0.1, 0.6, 0.1), reviewer)
    assert "".join(await served(one, *answer.words("a b c d"), answer.ends())) == "a b c d"
    assert (reviewer.asked, one.halted) == ([], None)


async def test_what_was_found_harmless_is_flagged_again_once_clearly_more_is_heard():
    """Up to there nothing waits; then two hits are needed as before."""
    more = harm_with(0.7, RECHECK_LOGIT_STEP)
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(0.6, 0.7, 0.6, more - 0.001, more + 0.001, 0.9, 0.9), reviewer)
    out = await served(one, *answer.words("a b c d e f g"))
    assert out == ["", "a b ", "c ", "d ", "", "e f ", "g"]
    assert reviewer.asked == [
        ReviewRequest("a b ", 0.0, 0.7, "a b "),
        ReviewRequest("a b c d e f ", 0.0, 0.9, "a b c d e f "),
    ]


async def test_each_finding_moves_the_flag_on():
    """The next one is due where a whole step more is heard than at the last, not at the first."""
    second = harm_with(0.6, RECHECK_LOGIT_STEP) + 0.001
    third = harm_with(second, RECHECK_LOGIT_STEP) + 0.001
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(0.6, 0.6, second, second, second, third - 0.01, third, third), reviewer)
    await served(one, *answer.words("a b c d e f g h"))
    assert [asked.running_score for asked in reviewer.asked] == [0.6, second, third]
    assert [asked.text for asked in reviewer.asked] == ["a b ", "a b c d ", "a b c d e f g h"]


@pytest.mark.parametrize("between", [0.1, REVIEW_AT - 0.001])
async def test_once_less_is_heard_the_models_own_flag_is_reviewed_anew(between: float):
    """Where the harm falls below what it flags, what it found before is over."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(0.6, 0.7, between, REVIEW_AT, 0.6), reviewer)
    assert "".join(await served(one, *answer.words("a b c d e "), answer.ends())) == "a b c d e "
    assert [asked.text for asked in reviewer.asked] == ["a b ", "a b c d e "]
    assert [asked.running_score for asked in reviewer.asked] == [0.7, 0.6]


@pytest.mark.parametrize("certain", [0.0, 1.0])
async def test_a_model_at_the_end_of_its_scale_is_reviewed(certain: float):
    """No harm is greater by a step than certainty, and none is less than none."""
    reviewer, answer = Reviewer(HARMLESS, HARMFUL), Answer()
    one = screening(FirstStage(certain, certain, 1.0, 1.0), reviewer, scores_wanted=True)
    await served(one, *answer.words("a b c d"), answer.ends())
    assert one.halted is not None or certain == 0.0
    assert [asked.running_score for asked in reviewer.asked][-1] == 1.0


async def test_harm_as_high_as_numbers_go_is_reviewed_once():
    """Nothing is higher, so that only a longer answer is reviewed again: one thread serves all streams."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(*[1.0] * 20), reviewer)
    await served(one, *answer.words("a b c d e f g h i j k l m n o p q r s t"))
    assert len(reviewer.asked) == 1


async def test_a_cut_of_what_hardly_more_was_heard_in_loses_nothing():
    """It was reviewed, and no two hits are open."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(0.6, 0.7, 0.7, 0.7), reviewer)
    out = await served(one, *answer.words("a b c d"), answer.ends("length"))
    assert "".join(out) == "a b c d"
    assert len(reviewer.asked) == 1


async def test_a_word_that_was_found_harmless_is_flagged_again_where_it_is_said_again():
    """In between the model had forgotten it; as long as it hears it, it asks once."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(WordModel(), reviewer)
    text = f"a {HARM} thing and so on to the end of it, a {HARM} thing again and on it goes"
    assert "".join(await served(one, *answer.words(text), answer.ends())) == text
    assert len(reviewer.asked) == 2


async def test_a_second_flag_has_a_place_of_its_own():
    """Where the harm began, and how late it was found, do not count from what was found harmless."""
    answer = Answer()
    one = screening(FirstStage(0.6, 0.7, *[0.1] * 6, 0.6, 0.7), Reviewer(HARMLESS, HARMFUL))
    await served(one, *answer.words("a b c d e f g h i j"))
    assert one.halted is not None
    assert (one.hit_at, one.halted.lag_tokens, one.leaked_tokens) == (9, 1, 0)


async def test_the_end_of_an_answer_that_was_asked_for_counts_from_itself():
    """Not from an earlier flag that was found harmless."""
    answer = Answer()
    one = screening(FirstStage(0.6, 0.7), Reviewer(HARMLESS, HARMFUL), scores_wanted=True)
    await served(one, *answer.words("a b c d e f g h"), answer.ends())
    assert one.halted is not None
    assert (one.hit_at, one.halted.lag_tokens) == (8, 0)


async def test_the_end_of_a_long_answer_is_reviewed():
    """More of it than the encoder reads."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(*[0.1] * 300, 0.6, 0.7), reviewer)
    text = "".join(f"w{number:03} " for number in range(302))
    await served(one, *answer.words(text))
    assert [asked.text for asked in reviewer.asked] == [text[-REVIEWED_CHARS:]]


@pytest.mark.parametrize(("found", "out"), [(HARMLESS, "one two three"), (HARMFUL, "one ")])
async def test_a_last_delta_that_comes_with_the_flag(found: Scores, out: str):
    """It waits as well, with its text; it is the last to go out, or is dropped."""
    answer = Answer()
    one = screening(FirstStage(0.1, 0.6, 0.7), Reviewer(found))
    first, second = answer.words("one two ")
    last = answer.says("three", 1, "stop")
    assert text_of([*one.feed(first), *one.feed(second)]) == "one "
    assert one.feed(last) == ()
    released = await one.review()
    assert "one " + text_of(released) == out
    assert [each.finish_reason for each in released] == ([None, "stop"] if found is HARMLESS else [])
    if found is HARMFUL:
        assert one.take_withheld_text() == "two three"


@pytest.mark.parametrize("finish", ["length", "abort"])
async def test_a_cut_of_what_was_found_harmless_loses_nothing(finish: FinishReason):
    """There is no doubt left."""
    answer = Answer()
    one = screening(FirstStage(0.1, 0.6, 0.7), Reviewer(HARMLESS))
    out = await served(one, *answer.words("one two three"), answer.ends(finish))
    assert out == ["one ", "", "two three", ""]


async def test_of_two_choices_the_flagged_one_is_reviewed():
    """Of the other nothing is asked; halted is the one in which it was found."""
    reviewer, first, second = Reviewer(HARMLESS, HARMFUL), Answer(0), Answer(1)
    model = WordModel()
    one = screening(model, reviewer, n=2)
    out = await served(one, first.says("all is "), second.says(f"a {HARM} "), first.says("well, "))
    assert out == ["all is ", "", "well, "]
    assert await served(one, second.says("thing "), first.says("and on")) == [f"a {HARM} thing ", "and on"]
    between = "which is all there is to say of it, as far as anybody knows, "
    assert "".join(await served(one, *second.words(between))) == between
    assert await served(one, second.says(f"one {HARM} "), second.says("more")) == ["", ""]
    assert one.halted is not None
    assert (one.halted_choice, one.take_withheld_text()) == (1, f"one {HARM} more")
    assert [asked.text for asked in reviewer.asked] == [
        f"a {HARM} thing ",
        f"a {HARM} thing {between}one {HARM} more",
    ]
    verdicts = one.verdicts()
    assert (verdicts[0].action, verdicts[1]) == (None, one.halted)


async def test_a_finding_below_the_policys_threshold_lets_pass_and_is_recorded():
    """The policy decides; of what any could make something the scores are kept."""
    found: Scores = {"S2": 0.55, "S3": 0.1}
    answer = Answer()
    one = screening(FirstStage(0.6, 0.7), Reviewer(found))
    assert "".join(await served(one, *answer.words("a b c"), answer.ends())) == "a b c"
    assert one.peaks() == [found]
    (verdict,) = one.verdicts()
    assert (verdict.action, verdict.category, verdict.scores) == (None, "S2", found)


async def test_the_worst_finding_speaks_for_the_answer():
    """Later ones that are milder do not hide it."""
    worse, better = {"S2": 0.55}, {"S2": 0.45}
    answer = Answer()
    reviewer = Reviewer(worse, better)
    one = screening(FirstStage(0.6, 0.7, 0.1, 0.6, 0.7), reviewer)
    await served(one, *answer.words("a b c d e"), answer.ends())
    assert len(reviewer.asked) == 2
    assert one.peaks() == [worse]
    assert [verdict.scores for verdict in one.verdicts()] == [worse]


async def test_a_hard_listed_span_halts_without_a_review():
    """Though the model flags the answer as well."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(0.1, 0.1, 0.6, 0.7), reviewer, rules=policy({"hard_list": [SPAN]}))
    await served(one, *answer.words(f"so {SPAN}"))
    assert one.halted is not None
    assert (one.halted.stage, reviewer.asked) == ("hard_list", [])


async def test_a_span_that_may_have_begun_waits_though_the_text_was_found_harmless():
    """What the second stage says does not rule it out."""
    answer = Answer()
    one = screening(FirstStage(0.1, 0.6, 0.7), Reviewer(HARMLESS), rules=policy({"hard_list": [SPAN]}))
    assert await served(one, *answer.words("so canary song and")) == ["so ", "", "", "canary song and"]


# Watched answers


async def test_a_watched_answer_is_reviewed_each_time_it_has_doubled():
    """First before anything goes out, and at its end."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(), reviewer, watched=True)
    out = await served(one, *(answer.says("x ") for _ in range(100)))
    assert out[:12] == [""] * 12
    assert [len(asked.text) // 2 for asked in reviewer.asked] == [12, 24, 48, 96]
    await served(one, answer.ends())
    assert [len(asked.text) // 2 for asked in reviewer.asked] == [12, 24, 48, 96, 100]


async def test_a_watched_answer_that_is_harmful_at_its_beginning_releases_nothing():
    """Though the model that hears every token flags nothing."""
    answer = Answer()
    one = screening(FirstStage(), Reviewer(HARMFUL), watched=True)
    assert await served(one, *(answer.says("x ") for _ in range(20))) == [""] * 20
    assert one.halted is not None
    assert (one.hit_at, one.leaked_tokens, one.halted.lag_tokens) == (12, 0, 0)
    assert one.take_withheld_text() == "x " * 12


async def test_a_short_watched_answer_is_reviewed_at_its_end():
    """Before any of it goes out."""
    for found, out in ((HARMLESS, "a b c"), (HARMFUL, "")):
        reviewer, answer = Reviewer(found), Answer()
        one = screening(FirstStage(), reviewer, watched=True)
        assert "".join(await served(one, *answer.words("a b c"), answer.ends())) == out
        assert [asked.text for asked in reviewer.asked] == ["a b c"]


async def test_a_watched_answer_that_was_reviewed_to_its_end_is_not_reviewed_again():
    """The last delta says nothing new."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(), reviewer, watched=True)
    out = await served(one, *(answer.says("x ") for _ in range(12)), answer.ends())
    assert "".join(out) == "x " * 12
    assert len(reviewer.asked) == 1


async def test_a_watched_answer_that_comes_in_one_piece_has_to_double_from_there():
    """It is not reviewed at every token until it has caught up."""
    reviewer, answer = Reviewer(HARMLESS), Answer()
    one = screening(FirstStage(), reviewer, watched=True)
    await served(one, answer.says("x " * 90, 90), *(answer.says("x ") for _ in range(5)))
    assert len(reviewer.asked) == 1


async def test_a_watched_answer_is_held_to_its_own_threshold():
    """A finding that would let another one pass."""
    found: Scores = {"S2": 0.55}
    for watched, halted in ((False, False), (True, True)):
        answer = Answer()
        one = screening(FirstStage(0.6, 0.7), Reviewer(found), watched=watched)
        await served(one, *answer.words("a b c"), answer.ends())
        assert (one.halted is not None) is halted


async def test_the_end_is_reviewed_where_the_moderation_was_asked_for():
    """So that there are scores to tell; of an answer without text there is nothing to examine."""
    for asked_for, scores in ((True, HARMLESS), (False, {})):
        reviewer, answer = Reviewer(HARMLESS), Answer()
        one = screening(FirstStage(), reviewer, scores_wanted=asked_for)
        assert await served(one, *answer.words("a b"), answer.ends()) == ["a ", "b", ""]
        assert len(reviewer.asked) == asked_for
        assert [verdict.scores for verdict in one.verdicts()] == [scores]
    reviewer = Reviewer(HARMLESS)
    silent = screening(FirstStage(), reviewer, scores_wanted=True)
    await served(silent, Answer().ends())
    assert reviewer.asked == []


# Failures and ends


async def test_a_review_that_fails_ends_the_answer():
    """Nothing that is held goes out, nor anything later; it is reported once."""
    broken: list[Exception] = []
    answer = Answer()
    one = screening(FirstStage(0.1, 0.6, 0.7), Reviewer(ScreenFailed()), on_broken=broken.append)
    first, second, third, fourth = answer.words("one two three four")
    assert await served(one, first, second) == ["one ", ""]
    assert one.feed(third) == ()
    with pytest.raises(ScreenFailed):
        await one.review()
    with pytest.raises(ScreenFailed):
        one.feed(fourth)
    assert (one.broken, len(broken), one.held_tokens, one.in_review) == (True, 1, 0, False)
    assert (one.take_releasable(), one.verdicts()) == ((), [])


async def test_a_server_that_fails_open_releases_what_was_to_be_reviewed():
    """Whole and in order, with its last delta; so it does with what follows."""
    answer = Answer()
    one = screening(FirstStage(0.1, 0.6, 0.7), Reviewer(ScreenFailed()), fail_open=True)
    assert await served(one, *answer.words("one two three four")) == ["one ", "", "two three ", "four"]
    answer = Answer()
    ending = screening(FirstStage(0.1, 0.6, 0.7), Reviewer(ScreenFailed()), fail_open=True)
    await served(ending, *answer.words("one two "))
    assert ending.feed(answer.says("three", 1, "stop")) == ()
    released = await ending.review()
    assert [(each.text, each.finish_reason) for each in released] == [("two ", None), ("three", "stop")]


async def test_a_flood_of_reviews_lets_nothing_pass():
    """A server that fails open does so for failures; what waited too long ends, and nothing follows."""
    answer, broken = Answer(), list[Exception]()
    busy = Reviewer(ScreenBusy())
    one = screening(FirstStage(0.1, 0.6, 0.7), busy, fail_open=True, on_broken=broken.append)
    first, second, third, fourth = answer.words("one two three four")
    assert await served(one, first, second) == ["one ", ""]
    assert one.feed(third) == ()
    with pytest.raises(ScreenBusy):
        await one.review()
    with pytest.raises(ScreenBusy):
        one.feed(fourth)
    assert ([type(exc) for exc in broken], one.held_tokens) == ([ScreenBusy], 0)


@pytest.mark.parametrize("watched", [False, True])
async def test_what_was_flagged_is_not_drained(watched: bool):
    """The answer broke off before it was reviewed: only what no review was wanted of goes out."""
    answer = Answer()
    model = FirstStage() if watched else FirstStage(0.1, 0.6, 0.7)
    one = screening(model, Reviewer(HARMLESS), watched=watched)
    for delta in answer.words("one two three" if not watched else "x " * 12):
        one.feed(delta)
    assert one.in_review
    assert text_of(one.take_releasable()) == ""
    assert one.held_tokens == 0


# Any pieces


def pieces(text: str, sizes: Sequence[int]) -> list[Delta]:
    """The words of a text, so many to a delta, over and over; with a last delta."""
    words = text.replace(" ", " \0").split("\0")
    answer, deltas, at, turn = Answer(), [], 0, 0
    while at < len(words):
        size = sizes[turn % len(sizes)]
        chunk = words[at : at + size]
        deltas.append(answer.says("".join(chunk), len(chunk)))
        at, turn = at + size, turn + 1
    return [*deltas, answer.ends()]


LONG = " ".join(f"{HARM if number in (9, 70) else 'word'}{number}" for number in range(120))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), watched=st.booleans())
async def test_in_any_pieces_the_same_is_released(sizes: list[int], watched: bool):
    """All of what is found harmless, in order; of what is found harmful nothing of the harm."""
    whole = screening(WordModel(), Reviewer(HARMLESS), watched=watched)
    assert "".join(await served(whole, *pieces(LONG, sizes))) == LONG
    assert (whole.halted, whole.held_tokens) == (None, 0)
    halted = screening(WordModel(), Reviewer(HARMFUL), watched=watched)
    released = "".join(await served(halted, *pieces(LONG, sizes)))
    assert halted.halted is not None
    assert LONG.startswith(released)
    assert HARM not in released
    assert LONG.startswith(released + halted.take_withheld_text())
