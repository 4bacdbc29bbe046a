"""Conversations listed page by page, found by their words, renamed, deleted and restored."""

from __future__ import annotations

import base64
import contextlib
import sqlite3
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadRequest, NotFound
from app.store import conversation_list
from app.store.conversation_list import (
    ConversationPage,
    _excerpt,
    delete,
    match_all,
    rename,
    restore,
)
from app.store.indexing import index
from app.store.words import folded
from tests.support.conversing import NOW_US, Chats

STORE = Chats()
"""One without conversations."""
RUN_ON = st.text(
    st.one_of(
        *(
            st.characters(min_codepoint=low, max_codepoint=high, categories=("L", "M", "Nd"))
            for low, high in (
                (0x0E00, 0x0EFF),
                (0x1000, 0x109F),
                (0x1780, 0x17DD),
                (0x3041, 0x3096),
                (0x30A1, 0x30FE),
                (0x4E00, 0x9FFF),
                (0xAC00, 0xD7A3),
                (0x20000, 0x2A6DF),
            )
        ),
        st.sampled_from("、。 !กข是的の한"),
    ),
    min_size=1,
    max_size=40,
)
"""Texts of Thai, Lao, Burmese, Khmer, Japanese, Chinese and Korean."""

WORDS = ['"', '""', "a AND", "NOT", "NEAR(a b", "(", "a*", "*", "col:a", "text:a", "^a", "-a", "a'b"]
WORDS += ["a\0b", "\0", "{a}: b", "+", "😀", "\u202e", "-- ;", "%", "\\", " ".join("abcdefghij" * 60)]


def page(
    c: sqlite3.Connection, owner: str, limit: int, cursor: str | None, words: str = ""
) -> ConversationPage:
    """A page of what is indexed, as the route has it."""
    while not index(c):
        pass
    return conversation_list.page(c, owner, limit, cursor, words=words)


def listed(chats: Chats, words: str = "", limit: int = 100) -> list[str]:
    """The ids of the first page."""
    return [found["id"] for found in page(chats.c, chats.owner, limit, None, words=words).conversations]


# Pages


def test_newest_comes_first():
    """The order is that of creation, whatever was said later and whatever the clock does."""
    chats = Chats()
    for i in range(3):
        chats.turn(f"conv_{i}")
    chats.turn("conv_0")
    chats.c.execute("UPDATE conversations SET created_at_us = 5 WHERE id = 'conv_2'")
    assert listed(chats) == ["conv_2", "conv_1", "conv_0"]


def test_listed_conversation():
    """What an entry of the list says; times are seconds."""
    chats = Chats()
    chats.turn("conv_1", asked="hello there")
    [found] = page(chats.c, "local", 20, None).conversations
    assert found == {
        "id": "conv_1",
        "title": "hello there",
        "model": "llama",
        "total_tokens": 15,
        "created_at": NOW_US // 1_000_000,
        "updated_at": NOW_US // 1_000_000,
    }


def test_pages_are_stable_while_rows_are_added():
    """Every conversation that was there at the first page comes once, and none that came since."""
    chats = Chats()
    for i in range(7):
        chats.turn(f"conv_{i}", asked="word")
    for words in ("", "word"):
        seen, cursor = [], None
        while True:
            found = page(chats.c, "local", 3, cursor, words=words)
            seen += [c["id"] for c in found.conversations]
            chats.turn(f"conv_new_{len(seen)}{words}", asked="word")
            chats.turn("conv_0", asked="word")
            if (cursor := found.next_cursor) is None:
                break
        assert [c for c in seen if "new" not in c] == [f"conv_{i}" for i in range(6, -1, -1)]
        assert len(seen) == len(set(seen))


def test_full_last_page_has_no_cursor():
    """A page that ends with the last conversation says so."""
    chats = Chats()
    chats.turn("conv_1")
    chats.turn("conv_2")
    assert page(chats.c, "local", 2, None).next_cursor is None
    assert page(chats.c, "local", 1, None).next_cursor is not None


@pytest.mark.parametrize("cursor", ["", "x", "AAAA", "é" * 8, "////////", "A" * 16, "AAAA\nAAAA", "\0" * 8])
def test_malformed_cursor_is_refused(cursor: str):
    """A cursor that no page had is an error of its own, not an empty page."""
    with pytest.raises(BadRequest) as refused:
        page(Chats().c, "local", 20, cursor)
    assert (refused.value.code, refused.value.param) == ("invalid_cursor", "cursor")


@given(st.binary(min_size=6, max_size=6))
def test_any_cursor_is_a_page_or_refused(raw: bytes):
    """No cursor is too large for the store."""
    cursor = base64.urlsafe_b64encode(raw).decode()
    for words in ("", "word"):
        with contextlib.suppress(BadRequest):
            assert page(STORE.c, "local", 20, cursor, words).conversations == []


def test_owner_sees_their_own():
    """Lists and searches hold nothing of another owner's."""
    chats = Chats()
    chats.turn("conv_mine", asked="word")
    chats.owner = "other"
    chats.turn("conv_theirs", asked="word")
    assert listed(chats) == listed(chats, "word") == ["conv_theirs"]


# Search


def test_the_work_of_a_search_is_its_owners_alone():
    """A word that another owner has costs what a word that nobody has costs, in pages and in steps."""
    chats = Chats()
    for i in range(200):
        chats.owner = "other"
        chats.turn(f"conv_theirs_{i}", asked="zebrafish swim in schools", answered=f"only{i}")
        chats.owner = "local"
        chats.turn(f"conv_mine_{i}", asked="what else is there", answered="dogs")
    page(chats.c, "local", 20, None)
    cost(chats, "first")  # which prepares the statement
    nobodys = cost(chats, "qqqqqqqqq")
    assert [cost(chats, theirs) for theirs in ("zebrafish", "zebra", "only7", "SCHOOLS")] == [nobodys] * 4
    assert cost(chats, "schools swim") == cost(chats, "qqqq wwww")
    assert listed(chats, "what dogs") == []
    assert len(listed(chats, "what else")) == 100


def cost(chats: Chats, words: str) -> int:
    """Steps of SQLite's machine that a search takes; what the index yields is gone through in steps."""
    steps: list[int] = []
    chats.c.set_progress_handler(lambda: steps.append(1), 1)
    assert conversation_list.page(chats.c, "local", 20, None, words=words).conversations == []
    chats.c.set_progress_handler(None, 0)
    return len(steps)


def test_no_term_of_the_index_is_of_two_owners():
    """The same text of two owners has no term in common; so no list of rows is read past another's."""
    chats = Chats()
    chats.turn("conv_mine", asked="the same words")
    page(chats.c, "local", 20, None)
    chats.c.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab(main, search, 'row')")
    mine = set(chats.c.execute("SELECT term FROM temp.terms"))
    chats.owner = "other"
    chats.turn("conv_theirs", asked="the same words")
    page(chats.c, "other", 20, None)
    assert len(mine) == 4
    assert chats.c.execute("SELECT max(doc) FROM temp.terms").fetchone() == (2,)  # title and question
    assert len(mine & set(chats.c.execute("SELECT term FROM temp.terms WHERE doc > 2"))) == 0
    assert chats.c.execute("SELECT count(*) FROM temp.terms").fetchone() == (8,)


def test_a_conversation_of_many_messages_that_match_is_one_step():
    """However often it says the word, the next conversation comes after it."""
    chats = Chats()
    chats.turn("conv_old", asked="word")
    chats.turn("conv_long", asked="word")
    for _ in range(500):
        chats.turn("conv_long", asked="word word")
    while not index(chats.c):
        pass
    steps: list[int] = []
    chats.c.set_progress_handler(lambda: steps.append(1), 100)
    assert [found["id"] for found in page(chats.c, "local", 2, None, words="word").conversations] == [
        "conv_long",
        "conv_old",
    ]
    assert len(steps) < 20


def test_search_finds_titles_questions_and_answers():
    """All three are searched, in order of creation, each conversation once."""
    chats = Chats()
    chats.finish(chats.begin("conv_title", "x", title="A parrot"), "y")
    chats.turn("conv_asked", asked="Is it a parrot?", answered="A parrot, yes.")
    chats.turn("conv_answered", asked="What is it?", answered="It is a parrot.")
    chats.turn("conv_none", asked="cat", answered="dog")
    assert listed(chats, "parrot") == ["conv_answered", "conv_asked", "conv_title"]


def test_every_word_must_be_there_and_the_last_may_be_begun():
    """Words are joined by and; the one being typed matches by its beginning."""
    chats = Chats()
    chats.turn("conv_1", asked="the quick brown fox")
    chats.turn("conv_2", asked="the slow brown dog")
    assert listed(chats, "brown quick") == ["conv_1"]
    assert listed(chats, "the brow") == ["conv_2", "conv_1"]
    assert listed(chats, "brow the") == []
    assert listed(chats, "BRÖWN FOX") == ["conv_1"]
    assert listed(chats, "brown slow brown") == ["conv_2"]
    assert listed(chats, "brown quick brown slo") == []


@pytest.mark.parametrize(
    ("text", "words"), [("你好世界", "你"), ("Привет мир", "приве"), ("שלום עולם", "עולם")]
)
def test_search_in_other_scripts(text: str, words: str):
    """Words of any script are found, by their beginning too."""
    chats = Chats()
    chats.turn("conv_1", asked=text)
    assert listed(chats, words) == ["conv_1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("我下个月想去北京旅游。有什么推荐", ["北京", "旅游", "我", "京", "旅游 北京", "去北京旅", "游有"]),
        ("来月、東京タワーへ行きたい", ["タワー", "東京", "来月", "へ", "ﾀﾜｰ"]),
        ("ฉันอยากไปเที่ยวเชียงใหม่เดือนหน้า", ["เชียงใหม่", "เที่ยว", "ฉัน", "ยงให"]),
        ("다음 달에 부산으로 여행을 가고 싶어요", ["부산", "여행", "부산 여행"]),
        ("هذا كِتَابٌ جميل مرحـبا", ["كتاب", "كِتَاب", "مرحبا", "جميــل"]),
        ("עִבְרִית־קלה", ["עברית", "עִבְרִית", "קלה"]),
        ("मुझे एक किताब चाहिए", ["किताब", "एक चाहिए"]),
    ],
)
def test_words_are_found_inside_sentences_and_without_their_marks(text: str, words: list[str]):
    """Where a script has no spaces, every part of a text is found; vowel points do not matter."""
    chats = Chats()
    chats.turn("conv_1", asked="前に " + text)
    assert [listed(chats, word) for word in words] == [["conv_1"]] * len(words)


@pytest.mark.parametrize(
    ("text", "words"), [("कौन तू बे", "किताब"), ("东面的北京", "东京"), ("我去南京", "北京"), ("ไป", "ปไ")]
)
def test_letters_in_another_order_are_another_word(text: str, words: str):
    """The letters must stand together, and vowel signs are letters."""
    chats = Chats()
    chats.turn("conv_1", asked=text)
    assert listed(chats, words) == []


@settings(deadline=None, max_examples=40)
@given(RUN_ON, st.data())
def test_every_part_of_a_text_without_spaces_finds_it(text: str, data: st.DataObject):
    """As an input method writes it; a part of punctuation alone finds nothing."""
    text = unicodedata.normalize("NFKC", text)
    start = data.draw(st.integers(0, len(text) - 1))
    part = text[start : data.draw(st.integers(start + 1, len(text)))]
    chats = Chats()
    chats.turn("conv_1", asked=text)
    assert listed(chats, part) == (["conv_1"] if folded(part) else [])


def test_a_long_question_without_spaces_finds_itself():
    """1,000 letters are one phrase, and the longest `q`."""
    chats = Chats()
    text = "".join(chr(0x4E00 + 7 * number % 2000) for number in range(1000))
    chats.turn("conv_1", asked=text)
    assert listed(chats, text) == ["conv_1"]


def test_a_letter_repeated_is_no_long_search():
    """A phrase of 1,000 frequent letters took minutes: it is sought in pieces, and equal ones once."""
    assert match_all("的" * 1000, "local").count("的") == 16 + 1000 % 16
    assert match_all("de-" * 300, "local").count("de") == 16 + 300 % 16


def test_a_short_word_is_looked_for_as_it_stands():
    """Up to three letters are no beginning: those of `th` would be most of the index."""
    chats = Chats()
    chats.turn("conv_1", asked="the quick brown fox")
    assert listed(chats, "fox") == ["conv_1"]
    assert listed(chats, "bro") == []


@pytest.mark.parametrize("words", WORDS)
def test_no_query_is_a_syntax_error(words: str):
    """Whatever the user types is looked for as it stands."""
    assert listed(Chats(), words) == []


@given(st.text())
def test_any_text_finds_itself_or_nothing(words: str):
    """A message is found by its own text unless that holds no letter or digit."""
    chats = Chats()
    chats.turn("conv_1", asked="nothing of it 7f3a")
    assert listed(chats, words + " 7f3a") in ([], ["conv_1"])


def test_punctuation_is_ignored():
    """A word without letters or digits leaves the others to decide; alone it finds nothing."""
    chats = Chats()
    chats.turn("conv_1", asked="hello, world")
    assert listed(chats, "hello -- world !") == ["conv_1"]
    assert listed(chats, "--") == []


# Changes


def test_renamed_conversation_is_found_by_its_new_title():
    """And no longer by the old one."""
    chats = Chats()
    chats.finish(chats.begin("conv_1", "x", title="old"), "y")
    assert rename(chats.c, "local", "conv_1", "new\0title", at_us=NOW_US)["title"] == "new\0title"
    assert listed(chats, "new title") == ["conv_1"]
    assert listed(chats, "old") == []


def test_deleted_conversation_is_hidden_until_restored():
    """Not listed, not found, not renamed, not deleted again; then as it was."""
    chats = Chats()
    chats.turn("conv_1", asked="word")
    delete(chats.c, "local", "conv_1", NOW_US)
    assert listed(chats) == listed(chats, "word") == []
    with pytest.raises(NotFound):
        delete(chats.c, "local", "conv_1", NOW_US)
    with pytest.raises(NotFound):
        rename(chats.c, "local", "conv_1", "title", at_us=NOW_US)
    assert restore(chats.c, "local", "conv_1")["id"] == "conv_1"
    assert listed(chats) == listed(chats, "word") == ["conv_1"]
    assert restore(chats.c, "local", "conv_1")["id"] == "conv_1"


def test_foreign_conversation_can_be_neither_deleted_nor_restored():
    """To others it does not exist."""
    chats = Chats()
    chats.turn("conv_1")
    with pytest.raises(NotFound):
        delete(chats.c, "other", "conv_1", NOW_US)
    delete(chats.c, "local", "conv_1", NOW_US)
    with pytest.raises(NotFound):
        restore(chats.c, "other", "conv_1")
    assert listed(chats) == []


def test_many_conversations_are_listed_and_searched_quickly():
    """The work goes with the page, not with what is stored: 20,000 that all match."""
    chats = Chats()
    chats.c.execute("BEGIN")
    rows = [(f"conv_{i}", "local", f"word {i}", "llama", i, i) for i in range(20_000)]
    chats.c.executemany(
        "INSERT INTO conversations (id, owner, title, model, created_at_us, updated_at_us)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        rows,
    )
    while not index(chats.c):
        pass
    chats.c.execute("COMMIT")
    steps = []
    chats.c.set_progress_handler(lambda: steps.append(1), 1000)
    started_s = time.thread_time()
    for words in ("", "word", "word 1999"):
        assert len(page(chats.c, "local", 10, None, words=words).conversations) == 10
    assert len(steps) < 20
    assert time.thread_time() - started_s < 0.5


def test_a_search_shows_where_its_words_are():
    """Some of the message that matches; nothing where only the title does."""
    chats = Chats()
    chats.turn("conv_1", asked="x " * 300 + "a HERON stands\nin the river " + "y " * 300, answered="yes")
    chats.c.execute("UPDATE conversations SET title = 'Kingfisher'")
    index(chats.c)
    [found] = page(chats.c, chats.owner, 5, None, words="heron").conversations
    assert found["excerpt"].startswith("…x ")
    assert " a HERON stands in the river y " in found["excerpt"]
    assert found["excerpt"].endswith("…")
    [titled] = page(chats.c, chats.owner, 5, None, words="kingfisher").conversations
    assert titled["excerpt"] is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ß" * 900 + " heron", "heron"),
        ("x " * 900 + "Café au lait", "café"),
        ("东京和上海。" * 90 + "我想去北京旅游", "北京"),
    ],
)
def test_an_excerpt_has_the_word_whatever_its_letters_are(text: str, word: str):
    """Letters that fold to two do not move it out of the text, and accents are found as they are sent."""
    assert word in _excerpt(text, word).casefold()
