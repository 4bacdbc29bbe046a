"""What is read of a conversation, how it weighs, and that slices leave nothing out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.safety.prompt.remembered import Judged, JudgedTexts
from app.safety.text.strings import request_text
from app.safety.text.turns import (
    BESIDE_CHARS,
    DECAY,
    EDITED_CHARS,
    MAX_AGE,
    MAX_UNJUDGED_TAIL,
    OVERLAP_CHARS,
    SENTENCE_CHARS,
    SHORT_CHARS,
    SLICE_CHARS,
    Read,
    conversation_of,
    read_request,
    sentences,
    slices,
    text_of,
    turns_of,
)


def user(text: object) -> dict[str, object]:
    """A user's message."""
    return {"role": "user", "content": text}


def answer(text: object, **fields: object) -> dict[str, object]:
    """An assistant's message."""
    return {"role": "assistant", "content": text, **fields}


@pytest.fixture
def known() -> JudgedTexts:
    """A memory of judged texts, empty."""
    return Judged().of("alice", "policy")


def test_the_newest_turn_counts_alone_and_joined(known):
    """The last turn, the last three joined, and each earlier one that was judged, fading with its age."""
    known.add_passed(["a", "b", "c", "d"])
    known.add_released(answer("x"))
    body = {"messages": [user("a"), answer("x"), user("b"), user("c"), user("d")]}
    newest, earlier, users, answers, recent, _ = read_request(body, known)
    assert newest == [Read("d"), Read("b\nc\nd"), Read("a\nb\nc\nd")]
    assert earlier == [Read("c", DECAY), Read("b", DECAY**2), Read("a", DECAY**3)]
    assert (users, answers, recent) == (["d", "b\nc\nd"], [], ["b", "c", "d"])


@pytest.mark.parametrize(
    ("roles", "weight"),
    [
        (("system",), 1.0),
        (("developer", "system"), 1.0),
        (("tool",), DECAY),
        (("assistant",), DECAY),
    ],
)
def test_messages_of_one_role_in_a_row_are_one_text_too(roles: tuple[str, ...], weight: float):
    """Pieces of a sentence say nothing, and the model reads them one behind the other."""
    pieces = [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(("p", " ", "q", "r"))]
    empty = [answer("", tool_calls=[]), {"role": "tool", "content": ""}, user("")]
    messages = [pieces[0], *empty, *pieces[1:], user("b")]
    watch = weight != 1.0
    assert turns_of(messages).earlier == [Read(text, weight, watch) for text in ("p", "q", "r", "p\nq\nr")]
    apart = [pieces[0], user("a"), *pieces[2:], user("b")]
    is_instructions = weight == 1.0  # which templates gather, and which stay in force
    assert (Read("p\nq\nr", weight, watch) in turns_of(apart).earlier) == is_instructions


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_names_and_ids_do_not_drown_what_is_said(role: str):
    """Contents are joined without what is beside them, and read alone where that is long."""
    name = "n" * (BESIDE_CHARS + 1)
    pieces = [{"role": role, "name": name, "content": "p"}, {"role": role, "name": "m", "content": "q"}]
    turns = turns_of([*pieces, user("a")] if role != "user" else pieces)
    texts = [read.text for read in (*turns.newest, *turns.earlier)]
    assert [text for text in texts if text[0] == "p"] == [f"p\n{name}", "p", "p\nq"] or role == "user"
    assert {f"p\n{name}", "p", "q\nm", "p\nq"} <= set(texts)
    assert "q" not in texts


def test_a_released_answer_sets_apart_and_is_not_joined(known):
    """What this server said between two of a client's answers stands between them."""
    known.add_released(answer("ours"))
    read = read_request({"messages": [answer("p"), answer("ours"), answer("q"), user("a")]}, known)
    assert read.earlier == [Read(text, DECAY, watch=True) for text in ("p", "q", "p\nq")]


def test_an_answer_to_go_on_with_is_joined_with_those_before_it():
    """The model goes on behind all of them, so they are read as a user's."""
    assert turns_of([user("a"), answer("p"), answer("q")]).earlier == [
        Read("p", DECAY, watch=True),
        Read("q"),
        Read("p\nq"),
    ]


def test_all_that_users_said_and_nobody_has_judged_is_one_text_too(known):
    """However many answers stand between; not what was judged, nor twice what the last turns have."""
    said = [user("ok"), answer("x"), *(m for text in "pqrs" for m in (user(text), answer("x")))]
    known.add_passed(["ok"])
    assert read_request({"messages": [*said, user("t")]}, known).newest[:3] == [
        Read("t"),
        Read("r\ns\nt"),
        Read("p\nq\nr\ns\nt"),
    ]
    known.add_passed("pqrs")
    assert read_request({"messages": [*said, user("t")]}, known).newest == [Read("t"), Read("r\ns\nt")]


def test_what_nobody_has_judged_is_read_as_it_was_before_each_of_the_last_came(known):
    """So that harmless messages behind a request in pieces do not drown it; at most so many times."""
    said = [m for text in "pqrs" for m in (user(text), answer("x"))]
    newest = read_request({"messages": said}, known).newest
    assert newest[2:] == [Read("p\nq\nr\ns"), Read("p\nq\nr"), Read("p\nq")]
    many = [m for number in range(40) for m in (user(f"w{number}"), answer("x"))]
    assert len(read_request({"messages": many}, known).newest) == 3 + MAX_UNJUDGED_TAIL
    long = [m for _ in range(4) for m in (user("w" * SLICE_CHARS), answer("x"))]
    assert len(read_request({"messages": long}, known).newest) == 3


def test_turns_that_passed_apart_have_not_passed_as_one(known):
    """Messages in a row are one turn: remembered as such, and faded as such once they are."""
    known.add_passed("pqr")
    messages = [user("p"), user("q"), answer("x"), user("r")]
    first = read_request({"messages": messages}, known)
    assert Read("p\nq") in first.earlier
    assert first.users == ["r", "p\nq"]
    known.add_passed(first.users)
    later = read_request({"messages": messages}, known)
    assert Read("p\nq", DECAY) in later.earlier
    assert later.users == ["r"]
    stored = read_request({"messages": messages}, None, [False, False, True])
    assert Read("p\nq", DECAY) in stored.earlier


def test_one_turn_is_read_once():
    """There is nothing to join."""
    assert turns_of([user("a")])[:5] == ([Read("a")], [], ["a"], [], ["a"])


def test_what_nobody_has_judged_does_not_fade(known):
    """A client's own history counts in full, however far back a turn stands in it."""
    messages = [user("bad"), *(user(str(i)) for i in range(MAX_AGE + 5))]
    known.add_passed(str(i) for i in range(MAX_AGE + 5))
    turns = read_request({"messages": messages}, known)
    assert Read("bad") in turns.earlier
    assert "bad" in turns.users


def test_another_owner_and_another_policy_know_nothing_of_it():
    """Nobody's memory lets somebody else's turns fade."""
    judged = Judged()
    judged.of("alice", "policy").add_passed(["a"])
    assert judged.of("alice", "policy").is_passed("a")
    assert not judged.of("bob", "policy").is_passed("a")
    assert not judged.of("alice", "another").is_passed("a")
    assert not judged.of("alice", "policy").is_answer("a")


def test_what_no_user_says_is_read_too():
    """A client's system prompt, its tools' results and the answers that it says were given."""
    messages = [
        {"role": "system", "content": "s"},
        user("a"),
        answer("x"),
        {"role": "tool", "content": "t"},
        user("b"),
    ]
    assert turns_of(messages).earlier == [
        Read("s"),
        Read("x", DECAY, watch=True),
        Read("t", DECAY, watch=True),
        Read("a"),
    ]


def test_long_instructions_and_answers_are_watched_where_a_user_would_be_refused():
    """They are refused on stronger evidence, answers never."""
    text = "x" * (SHORT_CHARS + 1)
    turns = turns_of([{"role": "system", "content": text}, answer(text), user("a")])
    assert turns.earlier == [Read(text, DECAY, watch=True), Read(text, 0.0, watch=True)]


def test_a_released_answer_is_known_however_a_client_writes_it(known):
    """Nulls added, white space trimmed, arguments with other escapes and spaces; no more than it said."""
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"q": "caf\\u00e9", "n": "m"}'},
    }
    known.add_released({"role": "assistant", "content": "x ", "reasoning_content": "r", "tool_calls": [call]})
    again = {**call, "function": {"name": "f", "arguments": '{"q":"café","n":"m"}'}}
    sent = answer("x", refusal=None, tool_calls=[again], reasoning="r")
    assert read_request({"messages": [sent, user("a")]}, known).earlier == []
    forged = answer("x", tool_calls=[again | {"id": "evil"}])
    assert read_request({"messages": [forged, user("a")]}, known).answers == ["evil\nf\nq\ncafé\nn\nm"]


def test_the_lines_of_a_known_answer_are_known_in_their_order_alone(known):
    """A client that has an answer's lines in another order has written another text."""
    known.add_released(answer("buy the bread\nthen\nread the book"))
    turned = answer("read the book\nthen\nbuy the bread")
    assert read_request({"messages": [turned, user("a")]}, known).answers == [turned["content"]]


def test_stored_turns_were_judged_and_stored_answers_released_unless_a_client_brought_them():
    """A conversation of the store may begin with an answer that a client made up."""
    messages = [user("a"), answer("forged"), user("b"), answer("ours"), user("c")]
    turns = read_request({"messages": messages}, None, [False, False, False, True])
    assert turns.earlier == [Read("forged", DECAY, watch=True), Read("b", DECAY), Read("a", DECAY**2)]


def test_an_answer_to_go_on_with_is_read_in_full():
    """The model would go on with words put into its mouth."""
    assert turns_of([user("a"), {"role": "assistant", "content": "Sure:"}]).earlier == [Read("Sure:", 1.0)]


def test_what_has_faded_is_left_out():
    """Beyond MAX_AGE a score could reach no threshold."""
    turns = read_request({"messages": [user(str(i)) for i in range(50)]}, None, [False] * 49)
    assert len(turns.earlier) == MAX_AGE
    assert turns.earlier[-1].weight == pytest.approx(DECAY**MAX_AGE)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        (5, ""),
        (
            [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {}},
                {"type": "text", "text": "b"},
            ],
            "a\nb\nab",
        ),
        ([{"type": "text", "text": None}, "x"], ""),
        ([{"type": "text", "text": "a bo"}, {"type": "text", "text": "mb"}], "a bo\nmb\na bomb"),
    ],
)
def test_the_text_of_a_message(content, text):
    """A string, or the text parts; what is no text is left out."""
    assert text_of(content) == text


def test_a_conversation_without_text_has_nothing_to_read():
    """An image alone, white space, no messages."""
    for messages in ([], [user(None), user(" \n")]):
        assert turns_of(messages)[:5] == ([], [], [], [], [])


def test_users_messages_can_be_edited():
    """Text alone, also in parts; one of which nothing is left is none. Others and images stay."""

    def edit(text: str) -> str:
        return text.replace("a", "")

    messages = [user("ab"), {"role": "system", "content": "a"}, user([{"type": "text", "text": "a"}])]
    image = user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "a"}}])
    edited = turns_of(messages).edited(edit)
    assert edited is not None
    assert (edited.newest, edited.earlier) == ([Read("b")], [Read("a")])
    assert turns_of([user("b"), answer("a"), image]).edited(edit) is None
    assert turns_of([user("a"), user("b" * EDITED_CHARS)]).edited(edit) is None


def test_every_string_beside_the_messages_is_read():
    """Names, keys, enumerations, defaults and variables, in order; not the protocol's words."""
    schema = {
        "type": "object",
        "title": "t1",
        "properties": {"p1": {"type": "string", "enum": ["e1", "e2"], "default": "d1", "const": "c1"}},
        "required": ["r1"],
        "$defs": {"k1": {"examples": ["x1"]}},
    }
    tool = {"type": "function", "function": {"name": "n1", "description": "d2", "parameters": schema}}
    body = {
        "messages": [user("a")],
        "model": "m",
        "stop": ["s"],
        "temperature": 1,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "n2"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n3", "schema": {"pattern": "p2"}},
        },
        "chat_template_kwargs": {"v1": "v2", "deep": [{"v3": 4}]},
    }
    words = "n1 d2 t1 p1 e1 e2 d1 c1 r1 k1 x1 n2 n3 p2 v1 v2 deep v3"
    assert request_text(body).split("\n") == words.split()
    assert turns_of([]).earlier == []
    assert read_request(body).earlier == [Read("\n".join(words.split()))]
    assert request_text({"messages": [], "model": "m", "tool_choice": "auto", "tools": None}) == ""


def test_every_field_of_a_message_is_read():
    """Its name too, and whatever a client adds to it; media are no text, their addresses are."""
    message = user(
        [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "dd"}},
            {"type": "image_url", "image_url": {"url": "http://x/y"}},
        ]
    )
    [read] = turns_of([{**message, "name": "n", "odd": {"k": "v"}}]).newest
    assert read.text.split("\n") == ["a", "dd", "http://x/y", "n", "k", "v"]


def test_what_looks_like_media_in_a_schema_is_read():
    """Only an image's own address is left out."""
    text = "data:image/png;base64,do bad things"
    assert text in request_text({"messages": [], "tools": [{"function": {"description": text}}]})


def test_a_guard_is_shown_what_nobody_has_judged_in_the_last_users_turn(known):
    """It judges that turn, and would not see tools, system prompts and a client's own history."""
    known.add_passed(["b"])
    body = {
        "messages": [
            {"role": "system", "content": "s"},
            user("a"),
            answer("x"),
            user("b"),
            answer(None, tool_calls=[{"function": {"name": "f", "arguments": '{"q": "v"}'}}]),
            {"role": "tool", "content": "t"},
            user("c"),
        ],
        "tools": [{"function": {"name": "f"}}],
    }
    shown = [(turn["role"], turn["content"]) for turn in conversation_of(body, known)]
    assert shown == [("user", "b"), ("user", "f\n\ns\n\na\n\nx\n\nf\nq\nv\n\nt\n\nc")]
    known.add_released(answer("x"))
    shown = [(turn["role"], turn["content"]) for turn in conversation_of(body, known)]
    assert shown[:2] == [("assistant", "x"), ("user", "b")]
    stored = conversation_of(
        {"messages": [user("a"), answer("x"), user("b"), answer("y")]}, None, [False, True]
    )
    assert [turn["content"] for turn in stored] == ["a", "x", "b", "y"]


@pytest.mark.parametrize("length", [0, 1, SLICE_CHARS, SLICE_CHARS + 1, 10 * SLICE_CHARS + 7])
@pytest.mark.parametrize("unit", ["x", "word ", "é\n"])
def test_slices_leave_nothing_out(length, unit):
    """Together they are the text; each is bounded, and begins with the end of the one before."""
    text = "".join(unit[i % len(unit)] if i % 7 else str(i % 10) for i in range(length))
    pieces = slices(text)
    joined = pieces[0] + "".join(piece[OVERLAP_CHARS:] for piece in pieces[1:])
    assert joined == text
    assert all(len(piece) <= SLICE_CHARS for piece in pieces)
    for before, after in pairwise(pieces):
        assert before[-OVERLAP_CHARS:] == after[:OVERLAP_CHARS]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("One line", ["One line"]),
        ("It is late, he said. Go home now! Why so?", ["It is late, he said.", "Go home now! Why so?"]),
        ("Who did it?\nNobody knows\n\n- the end of it", ["Who did it?", "Nobody knows", "- the end of it"]),
        ("\u6211\u60f3\u53bb\u3002\u4f60\u5462\uff1f", ["\u6211\u60f3\u53bb\u3002 \u4f60\u5462\uff1f"]),
        (
            "\u6211\u60f3\u53bb\u3002\u4f60\u4e5f\u53bb\u5417",
            ["\u6211\u60f3\u53bb\u3002", "\u4f60\u4e5f\u53bb\u5417"],
        ),
    ],
)
def test_a_text_is_parted_into_sentences(text: str, found: list[str]) -> None:
    """At marks and at line ends; one of hardly a word goes with the one before it."""
    assert sentences(text) == found


@given(st.text(alphabet='ab \u4e2d.,!?\n"', max_size=900))
def test_sentences_leave_nothing_out_and_are_short(text: str) -> None:
    """Each letter of a text is in one of them, in order."""
    found = sentences(text)
    letters = [char for char in text if char.isalnum()]
    assert [char for sentence in found for char in sentence if char.isalnum()] == letters
    assert all(len(sentence) <= SENTENCE_CHARS for sentence in found)
