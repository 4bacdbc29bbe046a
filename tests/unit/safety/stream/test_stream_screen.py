"""The stream screen: what comes out of it, when, and with which counts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from app.core import Counts, Delta, FinishReason, ToolCall
from app.safety.policies.policy import Policy
from app.safety.stream.answer_context import AnswerContext, answer_context_of
from app.safety.stream.answer_review import Review, ReviewRequest
from app.safety.stream.stream_screen import Screening, StreamScreen
from app.safety.thresholds import MIN_SPAN_CHARS, SUSPICION_RATIO
from app.safety.verdict import Scores
from tests.support.policies import policy
from tests.support.screens import HARM, WordModel

SPAN = "canary song 42"
PROMPT_TOKENS = 9


class Deltas:
    """The deltas of one choice, a token each unless said otherwise."""

    def __init__(self, choice: int = 0) -> None:
        self._choice = choice
        self.tokens = 0

    def __call__(
        self,
        text: str,
        channel: Any = "text",
        *,
        tokens: int = 1,
        finish: FinishReason | None = None,
        tool: ToolCall | None = None,
        logprobs: Sequence[Mapping[str, Any]] | None = None,
        stop: str | int | None = None,
    ) -> Delta:
        """The next delta."""
        ids = tuple(range(self.tokens, self.tokens + tokens))
        self.tokens += tokens
        counts = Counts(PROMPT_TOKENS, self.tokens)
        return Delta(self._choice, channel, text, ids, counts, finish, logprobs, tool, stop)


def screening(
    *spans: str,
    n: int = 1,
    watched: bool = False,
    model: Any = None,
    prompt_harm: float = 0.0,
    rules: Policy | None = None,
    **screen: Any,
) -> Screening:
    """A screening by these hard-listed spans, and by a model if there is one."""
    rules = rules or policy({"hard_list": list(spans)})
    return StreamScreen(model or Heard(), same_score, **screen).for_request(n, watched, prompt_harm, rules)


def text_of(released: Sequence[Delta]) -> str:
    """What they say, in their order."""
    return "".join(delta.text for delta in released)


async def same_score(request: ReviewRequest, _owner: str) -> Scores:
    """A second stage that finds what the first one did."""
    return {"S2": request.running_score}


def feed(one: Screening, *deltas: Delta) -> list[Delta]:
    """What comes out of it for all these, reviewed by a second stage that waits for nothing."""
    return [released for delta in deltas for released in fed(one, delta)]


def fed(one: Screening, delta: Delta) -> Sequence[Delta]:
    """The same for one delta."""
    ready = one.feed(delta)
    if not one.in_review:
        return ready
    try:
        one.review().send(None)
    except StopIteration as done:
        released: Sequence[Delta] = done.value
        return released
    raise AssertionError("the second stage waits")


def said(text: str, deltas: Deltas | None = None, **options: Any) -> list[Delta]:
    """A text, word by word, a token each."""
    deltas = deltas or Deltas()
    return [deltas(part, **options) for part in text.replace(" ", " \0").split("\0")]


class Heard:
    """A model whose scores a test sets, one a token."""

    review_at = 0.5

    def __init__(self, *ps: float) -> None:
        self._ps = iter(ps)
        self._p = 0.0

    def start(self, _prompt_harm: float) -> Heard:
        """See AnswerClassifier."""
        return self

    def feed(self, text: str) -> float:
        """See ScoredAnswer; of several words the highest that two in a row reached."""
        heard = []
        for _ in range(max(1, len(text.split()))):
            self._p = next(self._ps, self._p)
            heard.append(self._p)
        return heard[0] if len(heard) == 1 else max(map(min, pairwise(heard)))


# Holding back


def test_each_answer_is_held_to_the_policy_that_it_came_under():
    """One screen, policies in turns: the spans and thresholds of none are those of another."""
    red, blue = policy({"hard_list": ["red apple"]}), policy({"hard_list": ["blue pear"]})
    screen = StreamScreen(Heard(), same_score)
    for rules, span, other in 2 * ((red, "red apple", "blue pear"), (blue, "blue pear", "red apple")):
        for text, halts in ((span, True), (other, False)):
            one = screen.for_request(1, False, 0.0, rules)
            feed(one, *said(f"a {text} here"))
            assert (one.halted is not None) is halts


def test_a_stricter_policy_and_a_watched_prompt_halt_sooner():
    """One screen: what one answer may say, the next may not."""
    loose = policy({})
    strict = loose.at_level("strict")
    screen = StreamScreen(Heard(*[0.55] * 100), same_score)
    for rules, watched, halts in 2 * ((loose, False, False), (loose, True, True), (strict, False, True)):
        one = screen.for_request(1, watched, 0.0, rules)
        feed(one, *said("a few words here"))
        assert (one.halted is not None) is halts


def test_the_first_token_goes_out_at_once():
    """It waits for no more than one pass over itself; however many tokens it comes with."""
    delta = Deltas()("Hello there", tokens=5)
    assert screening(model=WordModel()).feed(delta) == [delta]


def test_a_clean_stream_is_not_held_back():
    """Each token goes out in the pass that reads it."""
    one, deltas = screening(model=WordModel()), Deltas()
    assert [len(fed(one, deltas("x "))) for _ in range(60)] == [1] * 60


def test_a_watched_stream_holds_twelve_from_the_first():
    """Nothing goes out before there are more."""
    one, deltas = screening(watched=True), Deltas()
    out = [len(fed(one, deltas("x "))) for _ in range(100)]
    assert out == [0] * 12 + [1] * 88


@pytest.mark.parametrize(
    ("share", "watched", "held"),
    [(0.0, False, 0), (0.5, False, 40), (0.999, False, 79), (0.0, True, 12), (0.5, True, 92)],
)
def test_the_more_it_is_in_doubt_the_more_is_held(share, watched, held):
    """From where doubt begins to the threshold; a watched stream holds more in any case."""
    model = Heard(Heard.review_at * (SUSPICION_RATIO + (1 - SUSPICION_RATIO) * share) + 1e-9)
    one, deltas = screening(model=model, watched=watched), Deltas()
    feed(one, *(deltas("x ") for _ in range(350)))
    assert one.held_tokens == held


def test_what_was_held_in_doubt_is_let_go_two_for_one():
    """Not in a burst: the doubt may come back."""
    nearly = Heard.review_at - 1e-9
    one, deltas = screening(model=Heard(*[nearly] * 100, 0.0)), Deltas()
    feed(one, *(deltas("x ") for _ in range(100)))
    assert one.held_tokens == 79
    assert [len(fed(one, deltas("x "))) for _ in range(90)] == [2] * 79 + [1] * 11


def test_the_end_drains_what_is_held():
    """All of it, in order, with one final delta."""
    one, deltas = screening(watched=True), Deltas()
    everything = [deltas(f"{i} ") for i in range(30)] + [deltas("", tokens=0, finish="stop")]
    assert feed(one, *everything) == everything
    assert one.held_tokens == 0


def test_choices_are_held_apart():
    """One that ends drains its own tokens; the other waits on."""
    one = screening(n=2, watched=True)
    first, second = Deltas(0), Deltas(1)
    assert feed(one, first("a"), second("b"), first("c")) == []
    assert text_of(fed(one, first("", tokens=0, finish="stop"))) == "ac"
    assert one.held_tokens == 1


def test_hold_back_is_measured():
    """Of one token at a time, from when it came until it went."""
    now, seconds = [0.0], []
    one = screening(
        watched=True, on_held=lambda s, deltas: seconds.extend([s] * deltas), clock_s=lambda: now[0]
    )
    deltas = Deltas()
    for _ in range(90):
        fed(one, deltas("x "))
        now[0] += 0.5
    assert seconds == [6.0] * 6


def test_deltas_that_are_not_held_are_counted_together():
    """One call for all of them, at the latest with the last delta: none for each token."""
    calls = []
    one = screening(on_held=lambda s, deltas: calls.append((s, deltas)))
    deltas = Deltas()
    for _ in range(90):
        assert len(fed(one, deltas("x "))) == 1
    assert calls == []
    fed(one, deltas("", tokens=0, finish="stop"))
    assert calls[0] == (0.0, 90)
    assert sum(number for _, number in calls) == 91


def test_what_goes_out_is_what_came_in():
    """Ids, counts, logprobs, tools and finish reasons stay with their text, whatever the hold-back."""
    rng = random.Random(1)
    for _ in range(50):
        one = screening(SPAN, n=2, watched=rng.random() < 0.5)
        everything: dict[int, list[Delta]] = {0: [], 1: []}
        makers = Deltas(0), Deltas(1)
        out: list[Delta] = []
        for _ in range(80):
            choice = rng.randint(0, 1)
            delta = makers[choice](
                rng.choice(["can", "canary ", "song", " ", "x", ""]),
                rng.choice(["text", "text", "reasoning"]),
                tokens=rng.randint(0, 3),
                logprobs=rng.choice([None, [{"token": "y", "top_logprobs": []}]]),
            )
            everything[choice].append(delta)
            out += fed(one, delta)
        for choice, maker in enumerate(makers):
            everything[choice].append(maker("", tokens=0, finish="stop"))
            out += fed(one, everything[choice][-1])
        assert {c: [d for d in out if d.choice == c] for c in (0, 1)} == everything


# The hard list


def test_a_listed_span_halts_at_once():
    """Nothing of it goes out, nor of what comes after."""
    one = screening(SPAN)
    out = feed(one, *said(f"one two three {SPAN} four five"))
    assert one.halted is not None
    assert one.halted.stage == "hard_list"
    assert text_of(out) == "one two three "[: len(text_of(out))]
    assert one.held_tokens == 0
    assert one.leaked_tokens == 0


def test_the_beginning_of_a_span_waits_until_it_is_ruled_out():
    """However little is held back otherwise, and however long that takes."""
    one = screening(SPAN)
    deltas = Deltas()
    assert text_of(feed(one, deltas("a "))) == "a "
    for piece in ("can", "ary", " so", "ng", " 4"):
        assert feed(one, deltas(piece)) == []
    assert text_of(feed(one, deltas("1"))) == "canary song 41"
    assert one.halted is None


@pytest.mark.parametrize("channel", ["text", "reasoning", "tool"])
def test_every_channel_is_read(channel):
    """Answer, reasoning, and the arguments of tools."""
    tool = ToolCall(0) if channel == "tool" else None
    one = screening(SPAN)
    out = feed(one, *said(f"well {SPAN} then", channel=channel, tool=tool))
    assert one.halted is not None
    assert "canary" not in text_of(out)


@pytest.mark.parametrize("name", ["canary song 42", "get Canary Song 42"])
def test_a_tools_name_is_read(name):
    """A model can make one up."""
    one = screening(SPAN)
    assert feed(one, Deltas()("", "tool", tool=ToolCall(0, "call_1", name))) == []
    assert one.halted is not None


def test_escapes_in_arguments_do_not_hide_a_span():
    """Arguments are JSON: what they say counts, cut in the midst of an escape too."""
    one, deltas = screening(SPAN), Deltas()
    tool = ToolCall(0)
    pieces = ['{"q": "', "\\u00", "63anary", " song\\", "u002042"]
    out = feed(one, *(deltas(piece, "tool", tool=tool) for piece in pieces))
    assert one.halted is not None
    assert text_of(out) == '{"q": "'


def test_logprobs_do_not_tell_what_the_text_does_not():
    """Their tokens may be ahead of the text, which a parser holds."""
    one, deltas = screening(SPAN), Deltas()
    pieces = ["can", "ary ", "song ", "42"]
    out = feed(one, *(deltas("", logprobs=[{"token": piece, "top_logprobs": []}]) for piece in pieces))
    assert one.halted is not None
    assert out == []


def test_likely_tokens_are_read():
    """What the model nearly said is in the logprobs too."""
    one = screening("slur")
    entry = {"token": "nice", "top_logprobs": [{"token": "nice"}, {"token": " Slur"}]}
    assert feed(one, Deltas()("nice", logprobs=[entry])) == []
    assert one.halted is not None


def test_another_channel_rules_a_beginning_out():
    """An answer is not held to its end for the last word of the reasoning before it."""
    one, deltas = screening(SPAN), Deltas()
    assert feed(one, deltas("can", "reasoning")) == []
    assert text_of(feed(one, deltas("Hello"))) == "canHello"
    feed(one, deltas("ary song 42", "reasoning"))
    assert one.halted is not None


def test_a_halt_ends_all_choices():
    """Whatever they say, and however they end."""
    one = screening(SPAN, n=2)
    first, second = Deltas(0), Deltas(1)
    assert feed(one, second("fine"), first(SPAN)) == [
        second("fine")._replace(token_ids=(0,), counts=Counts(9, 1))
    ]
    assert feed(one, second("more"), second("", tokens=0, finish="stop")) == []
    assert one.halted_choice == 0


def test_a_last_delta_of_another_channel_rules_nothing_out():
    """Reasoning that was stopped in the midst of a span ends in a delta of the answer's channel."""
    one, deltas = screening(SPAN), Deltas()
    out = feed(one, *said("well canary", deltas, channel="reasoning"), deltas("", tokens=0, finish="abort"))
    assert text_of(out) == "well "


@pytest.mark.parametrize(
    ("finish", "stop", "released"),
    [
        ("stop", None, "say canary so"),
        ("stop", 2, "say canary so"),
        ("tool_calls", None, "say canary so"),
        ("length", None, "say "),
        ("abort", None, "say "),
        ("stop", "ng", "say "),
    ],
)
def test_a_span_cut_off_in_its_midst_is_withheld(finish, stop, released):
    """Whoever cuts the answer there does not get its beginning; a model that ends there said it all."""
    one, deltas = screening(SPAN), Deltas()
    out = feed(one, *said("say canary so", deltas), deltas("", tokens=0, finish=finish, stop=stop))
    assert text_of(out) == released
    assert [delta.finish_reason for delta in out if delta.finish_reason] == [finish]
    assert sum(len(delta.token_ids) for delta in out) == out[-1].counts.completion_tokens
    assert out[-1].counts.prompt_tokens == PROMPT_TOKENS


def test_an_answer_of_which_all_is_withheld_has_the_counts_of_its_prompt():
    """Nothing was released that it could take them from."""
    one, deltas = screening(SPAN), Deltas()
    (end,) = feed(one, deltas("canary"), deltas("", tokens=0, finish="length"))
    assert (end.text, end.counts, end.finish_reason) == ("", Counts(PROMPT_TOKENS, 0), "length")


def test_a_few_letters_are_no_beginning():
    """An answer that is as long as it may be keeps its last word, though some span begins likewise."""
    one, deltas = screening(SPAN), Deltas()
    assert text_of(feed(one, *said("a can", deltas), deltas("", tokens=0, finish="length"))) == "a can"


def test_an_answer_that_was_stopped_keeps_no_letter_of_a_span():
    """The next token may have made it certain."""
    one, deltas = screening(SPAN), Deltas()
    assert text_of(feed(one, *said("a c", deltas), deltas("", tokens=0, finish="abort"))) == "a "


def test_an_answer_that_breaks_off_is_drained():
    """Where the engine fails, what was held is as harmless as what was released."""
    one, deltas = screening(SPAN, model=Heard(0.45, 0.45, 0.0)), Deltas()
    assert feed(one, *said("all is well, canary", deltas)) == []
    assert text_of(one.take_releasable()) == "all is well, "
    assert one.held_tokens == 0


# The scored model


def test_two_hits_in_a_row_halt():
    """The first is held, like all that comes after it."""
    one = screening(model=WordModel())
    out = feed(one, *said(f"a b c d {HARM} e f g"))
    assert one.halted is not None
    assert (one.halted.stage, one.halted.category) == ("stream", "S2")
    assert HARM not in text_of(out)
    assert (one.leaked_tokens, one.halted.lag_tokens > 0) == (0, True)


def test_a_whole_answer_at_once_is_halted():
    """Several tokens in one delta are several in a row."""
    one, deltas = screening(model=Heard(0.99)), Deltas()
    assert feed(one, deltas("a whole answer", tokens=3, finish="stop")) == []
    assert one.halted is not None


def test_one_hit_does_not_halt():
    """What is harmless again at the next look goes out."""
    one, deltas = screening(model=Heard(0.1, 0.99, 0.1, 0.1, 0.99, 0.1)), Deltas()
    everything = [*said("a b c d e", deltas), deltas("", tokens=0, finish="stop")]
    assert feed(one, *everything) == everything


def test_a_watched_stream_leaks_nothing():
    """It is judged long before its first token goes out."""
    one = screening(model=WordModel(), watched=True)
    assert feed(one, *said(f"{HARM} and more of it, and on and on")) == []
    assert one.halted is not None
    assert one.leaked_tokens == 0


def test_the_prompts_harm_is_the_models_prior():
    """For every choice."""
    model = WordModel()
    screening(n=2, model=model, prompt_harm=0.5)
    assert model.prompt_harms == [0.5] * 2


def test_verdicts_say_how_each_choice_stands():
    """For OpenAI's `moderation` object; the halted one is the verdict that halted."""
    one = screening(n=2, model=WordModel())
    feed(one, *said("all is well", Deltas(0)))
    feed(one, *said(f"{HARM} {HARM} {HARM}", Deltas(1)))
    first, second = one.verdicts()
    assert (first.action, second) == (None, one.halted)


def test_what_a_halt_withheld_is_told_once():
    """To be hashed; it is not kept."""
    one = screening(SPAN)
    out = feed(one, *said(f"one two three {SPAN} four"))
    assert text_of(out) + one.take_withheld_text() == f"one two three {SPAN} "
    assert one.take_withheld_text() == ""


def test_tokens_that_are_held_anyway_are_read_four_at_once():
    """What is released has been read all the same, to the last one."""
    read: list[str] = []

    class Reader(Heard):
        def feed(self, text: str) -> float:
            read.append(text)
            return 0.0

    one, deltas = screening(model=Reader(), watched=True), Deltas()
    released = [d for _ in range(100) for d in feed(one, deltas("x "))]
    assert len(released) == 88
    assert {len(text) for text in read} == {8}
    feed(one, deltas("end", finish="stop"))
    assert "".join(read) == "x " * 100 + "end"


def test_what_is_unread_of_an_answer_that_broke_off_is_read_before_it_goes_out():
    """And is dropped where it would be reviewed."""
    scores = [*[0.49] * 20, *[0.0] * 5, 0.99, 0.99]
    one, deltas = screening(model=Heard(*scores)), Deltas()
    out = feed(one, *(deltas("x ") for _ in scores))
    assert text_of([*out, *one.take_releasable()]) == "x " * 25


# Ends that the caller chose


def with_context(*spans: str, model: Any = None, review: Review = same_score, **context: Any) -> Screening:
    """A screening of an answer to a request with these parameters."""
    screen = StreamScreen(model or Heard(), review)
    return screen.for_request(
        1, False, 0.0, policy({"hard_list": list(spans)}), context=AnswerContext(**context)
    )


@pytest.mark.parametrize(
    ("prefix", "answer"),
    [
        ("I say: canary so", "ng 42"),
        ("canary ", " song 42"),
        ("canary song 42 and canary", " song 42"),
        ("can\u200bary&#32;so", "ng 42"),
        ("**canary** song ", "42"),
        ("can\\u00", "61ry song 42"),
    ],
)
def test_a_span_that_the_prefix_begins_is_withheld_whole(prefix, answer):
    """The client reads the answer after what it asked to be continued."""
    for channel in ("text", "reasoning"):
        one = with_context(SPAN, preceding_text=prefix, continues=True)
        assert feed(one, *(Deltas()(char, channel) for char in answer)) == []
        assert one.halted is not None


def test_a_prefix_with_a_whole_span_halts_nothing_by_itself():
    """Its caller wrote it; the answer is judged for what it adds."""
    one = with_context(SPAN, preceding_text=SPAN, continues=True)
    assert text_of(feed(one, *said(" is a fine title"))) == " is a fine title"


def test_harm_that_the_prefix_began_counts():
    """The model of answers hears the prefix first."""
    one = with_context(model=WordModel(), preceding_text=f"so {HARM}", continues=True)
    assert feed(one, *said("and on it goes")) == []
    assert one.halted is not None


@pytest.mark.parametrize(
    "text",
    [
        "\\u0063anary song 42",
        "c\\\\u0061nary song 42",
        "canary\\nsong 42",
        "&#99;anary&nbsp;song 42",
        "can&shy;ary song 42",
        "canary &amp;#115;ong 42",
        "can**ary** _song_ 42",
        "\\ud835\\udc1canary song 42",
    ],
)
@pytest.mark.parametrize("channel", ["text", "reasoning", "tool"])
def test_a_span_that_a_client_would_show_is_found(text, channel):
    """Escapes of JSON, entities and marks of Markdown are undone, in every channel and any pieces."""
    tool = ToolCall(0) if channel == "tool" else None
    for pieces in ([text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
        one, deltas = screening(SPAN), Deltas()
        out = feed(one, *(deltas(piece, channel, tool=tool) for piece in pieces))
        assert one.halted is not None
        assert text_of(out) == ""


def test_a_span_with_marks_of_its_own_is_found_escaped():
    """Marks that a listed span has are read as they are."""
    one = screening("sk_live_")
    assert feed(one, *(Deltas()(char) for char in "sk\\u005flive_")) == []
    assert one.halted is not None


def test_a_span_over_two_channels_is_found():
    """Reasoning that an answer goes on with, and names of calls one after the other."""
    one, deltas = screening(SPAN), Deltas()
    assert feed(one, deltas("canary so", "reasoning"), deltas("ng "), deltas("42")) == []
    assert one.halted is not None
    one, deltas = screening("canarysong"), Deltas()
    calls = [
        deltas("", "tool", tool=ToolCall(i, f"call_{i}", name)) for i, name in enumerate(("canary", "song"))
    ]
    assert feed(one, *calls) == []
    assert one.halted is not None


def test_a_likely_token_that_ends_a_span_is_read():
    """It is told as a token that was not chosen."""
    one, deltas = screening(SPAN), Deltas()
    feed(one, deltas("canary song", logprobs=[{"token": "canary song", "top_logprobs": []}]))
    entry = {"token": " 41", "top_logprobs": [{"token": " 41"}, {"token": " 42"}]}
    assert feed(one, deltas(" 41", logprobs=[entry])) == []
    assert one.halted is not None


@pytest.mark.parametrize("context", [{"stop_ids": frozenset({7})}, {"has_forced_end": True}])
def test_a_stop_id_or_a_forced_end_tells_nothing_of_a_span(context):
    """Neither its beginning nor, as what matched, its next token."""
    one, deltas = with_context(SPAN, **context), Deltas()
    out = feed(one, *said("say canary so", deltas), deltas("", tokens=0, finish="stop", stop=7))
    assert text_of(out) == "say "
    assert (out[-1].finish_reason, out[-1].matched_stop) == ("stop", None)


def test_a_stop_in_no_span_is_told():
    """An ordinary stop id or string stays what the client expects."""
    for stop in (7, "END"):
        one, deltas = with_context(SPAN, stop_ids=frozenset({7})), Deltas()
        out = feed(one, *said("say no more!", deltas), deltas("", tokens=0, finish="stop", stop=stop))
        assert (text_of(out), out[-1].matched_stop) == ("say no more!", stop)


@pytest.mark.parametrize("stop", ["so", "ng 42", SPAN])
def test_a_stop_string_within_a_span_is_not_told(stop):
    """It would say that the model went on with it."""
    one, deltas = screening(SPAN), Deltas()
    out = feed(one, *said("say canary ", deltas), deltas("", tokens=0, finish="stop", stop=stop))
    assert (text_of(out), out[-1].matched_stop) == ("say ", None)


async def harmful(_request: ReviewRequest, _owner: str) -> Scores:
    """A second stage that lets nothing pass."""
    return {"S2": 0.9}


class Noting(Heard):
    """Notes up to which word a reading left no doubt."""

    def __init__(self, doubt: float, scores: Sequence[float]) -> None:
        super().__init__(*scores)
        self._doubt = doubt
        self._words = self.doubtless = 0

    def feed(self, text: str) -> float:
        """See Heard."""
        self._words += len(text.split())
        p = super().feed(text)
        self.doubtless = self._words if p < self._doubt else self.doubtless
        return p


@pytest.mark.parametrize(
    ("finish", "stop"), [("length", None), ("abort", None), ("stop", "END"), ("stop", 7)]
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_no_cut_reads_further_than_the_model_was_in_no_doubt(finish, stop, chunk):
    """Cut anywhere, an answer ends where the uncut one had come to by then, or where there was no doubt."""
    floor = Heard.review_at
    rng = random.Random(chunk)
    words = [f"w{at} " for at in range(60)]
    for _ in range(8):
        scores = [rng.choice([0.1, 0.6, 0.7, 0.9, 0.99]) * floor for _ in range(20)] + [0.99] * 40
        uncut, whole = Deltas(), with_context(model=Heard(*scores), review=harmful)
        out_by: list[int] = []
        for at in range(0, 60, chunk):
            out = fed(whole, uncut("".join(words[at : at + chunk]), tokens=chunk))
            out_by.append((out_by[-1] if out_by else 0) + sum(len(delta.token_ids) for delta in out))
        assert whole.halted is not None
        for cut in range(chunk, 61, chunk):
            model, deltas = Noting(SUSPICION_RATIO * floor, scores), Deltas()
            one = with_context(model=model, review=harmful, stop_ids=frozenset({7}))
            out = []
            for at in range(0, cut, chunk):
                out += fed(one, deltas("".join(words[at : at + chunk]), tokens=chunk))
            out += fed(one, deltas("", tokens=0, finish=finish, stop=stop))
            tokens = sum(len(delta.token_ids) for delta in out)
            assert text_of(out) == "".join(words[:tokens])
            assert tokens <= max(out_by[cut // chunk - 1], model.doubtless)
            if one.halted is None:
                assert tokens == out[-1].counts.completion_tokens


def test_no_cut_reads_into_a_span():
    """In any pieces, cut anywhere and however: but for a few letters, nothing beyond what came first."""
    text = f"well, {SPAN} and on"
    for size in (1, 2, 5):
        for cut in range(1, len(text)):
            for finish, stop in (("length", None), ("abort", None), ("stop", "x"), ("stop", 7)):
                one, deltas = with_context(SPAN, stop_ids=frozenset({7})), Deltas()
                pieces = [text[at : min(at + size, cut)] for at in range(0, cut, size)]
                out = feed(one, *map(deltas, pieces), deltas("", tokens=0, finish=finish, stop=stop))
                assert len(text_of(out)) < len("well, ") + MIN_SPAN_CHARS
                assert text_of(out) == text[: len(text_of(out))]


def test_a_cut_in_no_doubt_loses_nothing():
    """What is held of a watched answer, or on its way out after a doubt, goes out with a cut."""
    nearly = Heard.review_at - 1e-9
    for watched, model in ((True, WordModel()), (False, Heard(*[nearly] * 30, 0.0))):
        one, deltas = screening(model=model, watched=watched), Deltas()
        everything = [*(deltas("x ") for _ in range(35)), deltas("", tokens=0, finish="length")]
        assert feed(one, *everything) == everything


def test_harm_over_many_short_calls_adds_up():
    """All that a choice says is read by one model, names and arguments in their order."""
    heard: list[str] = []

    class Counting(Heard):
        def feed(self, text: str) -> float:
            heard.append(text)
            return 0.0 if len("".join(heard).split("bad")) < 6 else 0.99

    one, deltas = screening(model=Counting()), Deltas()
    for call in range(8):
        feed(one, deltas("", "tool", tool=ToolCall(call, f"call_{call}", f"tool{call}")))
        feed(one, deltas('{"q": "bad"}', "tool", tool=ToolCall(call)))
    assert one.halted is not None
    assert "tool0" in "".join(heard)
    one = screening(model=WordModel())
    deltas = Deltas()
    names = [deltas("", "tool", tool=ToolCall(i, f"c{i}", name)) for i, name in enumerate((HARM, HARM, HARM))]
    feed(one, *names)
    assert one.halted is not None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, AnswerContext()),
        ({"response_format": {"type": "json_object"}}, AnswerContext()),
        ({"stop_token_ids": [7]}, AnswerContext(stop_ids=frozenset({7}))),
        ({"regex": ".{10}"}, AnswerContext(has_forced_end=True)),
        ({"min_tokens": 9, "logit_bias": {"2": 100}}, AnswerContext(has_forced_end=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, AnswerContext(has_forced_end=True)),
        ({"tool_choice": "required"}, AnswerContext(has_forced_end=True)),
    ],
)
def test_parameters_that_can_force_an_end_are_seen(body, expected):
    """A grammar, a bias for the end, a stop id: the model did not choose to end there."""
    assert answer_context_of(body, [{"role": "user", "content": "hi"}]) == expected


def test_what_an_answer_goes_on_with_is_all_parts_of_the_last_assistant_message():
    """And the last turn is told, where a user asks to go on."""
    parts = [{"type": "text", "text": "canary"}, {"type": "text", "text": " so"}]
    last = {"role": "assistant", "content": parts}
    assert answer_context_of({}, [last]) == AnswerContext("canary so", continues=True)
    assert answer_context_of({}, [last, {"role": "user", "content": "go on"}]) == AnswerContext("canary so")


def test_a_prompt_without_a_template_is_continued_by_its_answer():
    """A span that begins in it and ends in the answer is found."""
    message = {"role": "user", "content": "Project Xylo"}
    assert answer_context_of({}, [message], is_raw=True) == AnswerContext("Project Xylo", continues=True)
