"""Whatever stands in a body, a file or a query is read, or refused with a message; it is never a fault.

Each test takes a second or two; HYPOTHESIS_EXAMPLES has them run for longer.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.schema.chat_request import parse_chat_request
from app.api.schema.key_terms import TERMS, read_new, read_overlap_us, read_terms
from app.api.schema.moderations import parse_moderation
from app.api.schema.parameters import PARAMETERS
from app.engine.sglang.splice import splice
from app.errors import ServingError
from app.intake.json_body import parse_body
from app.metering.pricing import PriceTable
from app.safety.policies import policy_file
from app.safety.text.escapes import unescape
from app.safety.text.hard_list import HardList
from app.safety.text.normalize import views
from app.settings import SettingsError, load, table
from app.store.conversation_list import match_all
from tests.support.servers import chat

NOW_US = 1_790_000_000_000_000
NORMALIZE_CAP_S = 2.0
"""For a thousand characters: a hundred times what the slowest took."""
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FEW = settings(max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")), deadline=None)


@FEW
@given(st.binary(max_size=200) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_body_is_an_object_or_refused(raw: bytes):
    """Bytes are read as an object, or are a 4xx."""
    with suppress(ServingError):
        assert isinstance(parse_body(raw), dict)


@FEW
@given(st.dictionaries(st.sampled_from(sorted(PARAMETERS)) | st.text(max_size=8), JSON, max_size=4))
def test_any_chat_request_is_read_or_refused(changed: dict[str, Any]):
    """A valid request with any values in place of its own is checked without a fault."""
    try:
        parse_chat_request(chat() | changed, "chatcmpl-1", "local")
    except ServingError as exc:
        refusal: ServingError | None = exc
    else:
        refusal = None
    assert refusal is None or 400 <= refusal.status < 500


@FEW
@given(
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON), max_size=3)
)
def test_any_messages_are_read_or_refused(messages: list[Any]):
    """The same of what stands in `messages`."""
    with suppress(ServingError):
        parse_chat_request(chat() | {"messages": messages}, "chatcmpl-1", "local")


@FEW
@given(st.dictionaries(st.sampled_from([*TERMS, "owner", "overlap_s"]), JSON, max_size=5))
def test_any_terms_of_a_key_are_read_or_refused(terms: dict[str, Any]):
    """Terms, a new key and a rotation take JSON of any kind."""
    for read in (lambda: read_terms(terms, NOW_US), lambda: read_new(terms, NOW_US)):
        with suppress(ServingError):
            read()
    with suppress(ServingError):
        read_overlap_us(terms)


@FEW
@given(st.dictionaries(st.sampled_from(["input", "model"]), JSON))
def test_any_moderation_request_is_read_or_refused(body: dict[str, Any]):
    """A moderation request takes JSON of any kind."""
    with suppress(ServingError):
        assert all(isinstance(text, str) for text in parse_moderation(body))


@FEW
@given(st.text(max_size=100))
def test_any_words_are_a_query_of_sqlite(words: str):
    """FTS5 takes what becomes of any words."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE VIRTUAL TABLE t USING fts5(x)")
        with suppress(UnicodeEncodeError):  # lone surrogates never leave the HTTP parser
            if query := match_all(words, "ann"):
                connection.execute("SELECT rowid FROM t WHERE t MATCH ?", (query,)).fetchall()
    finally:
        connection.close()


SECTIONS = st.sampled_from(
    ["default", "categories", "alignment", "messages", "hard_list", "S1", "block", "x"]
)


@FEW
@given(st.dictionaries(SECTIONS, JSON | st.dictionaries(SECTIONS, JSON, max_size=3), max_size=4))
def test_any_policy_is_read_or_refused(document: dict[str, Any]):
    """A policy file with anything in it is a policy, or an error that says what is wrong."""
    with suppress(policy_file.PolicyError):
        policy_file.parse(document)


@FEW
@given(st.lists(st.dictionaries(st.sampled_from(["model", "from", "cached_input", "input", "output"]), JSON)))
def test_any_prices_are_read_or_refused(entries: list[dict[str, Any]]):
    """Prices with anything in them are a table, or an error that says what is wrong."""
    with suppress(SettingsError):
        PriceTable.parse(entries)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=200),
    env=st.dictionaries(st.sampled_from([s.env for s in table()]), st.text(max_size=12), max_size=3),
)
def test_any_settings_are_read_or_refused(text: str, env: dict[str, str], tmp_path_factory: Any):
    """A settings file and an environment with anything in them are settings, or an error that says why."""
    path: Path = tmp_path_factory.mktemp("settings") / "tokenring.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(SettingsError):
        load({}, env, path)


ESCAPED = st.text(alphabet='\\u0041dD89abn"/x', max_size=60) | st.text(max_size=60)


@FEW
@given(ESCAPED)
def test_any_json_text_is_unescaped(text: str):
    """Escapes are read, and what may go on with the next token is left over."""
    read, rest = unescape(text)
    assert text.endswith(rest)
    assert len(read) <= len(text)


@FEW
@given(st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=5), st.text(max_size=30), st.data())
def test_a_hard_list_finds_its_own_spans(spans: list[str], around: str, data: st.DataObject):
    """Any span is found where it stands between spaces, whatever is around it."""
    spans = [span for span in spans if any(c.isalnum() for c in span)]
    if spans:
        span = data.draw(st.sampled_from(spans))
        assert HardList(spans).found_in(f"{around} {span} {around}")


@FEW
@given(st.text(alphabet="a%41&#x41;\\u0041=YWFh.1234-_\u0301\u200b", max_size=1000))
def test_normalizing_takes_bounded_time(text: str):
    """A thousand characters of any disguise are read in bounded time."""
    began_s = time.thread_time()
    views(text)
    assert time.thread_time() - began_s < NORMALIZE_CAP_S


class Letters:
    """A vocabulary whose tokens are letters and pairs of letters."""

    vocabulary = 52

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(97 + i) if i < 26 else chr(97 + i - 26) * 2 for i in token_ids)

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]


IDS = st.lists(st.integers(0, 51), max_size=20)


@FEW
@given(IDS, st.lists(IDS, max_size=4))
def test_splicing_never_changes_the_text(rendered: list[int], past: list[list[int]]):
    """The prompt decodes to what the template wrote, whatever runs are stored."""
    text = Letters()
    assert text.decode(splice(rendered, past, text).token_ids) == text.decode(rendered)
