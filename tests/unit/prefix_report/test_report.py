"""The prefix report: twelve prepared breaks, each with its cause and position, and what is no break."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from app.core import ChatRequest, Counts, Prompt, RawPrompt
from app.prefix_report.report import MAX_EDITIONS, MAX_SERIES, PrefixReport
from app.prefix_report.series import CAUSES, Break, PromptSeries

WORDS = " ".join(f"rule{n} says to be brief and kind;" for n in range(40))
SYSTEM = f"You are the assistant of Acme. {WORDS}"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Looks up a {name} for the user."}}
    for name in ("order", "invoice", "parcel")
]


class Node:
    """A model's template, a prefix cache, and the report beside them. Ids are of words."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 100.0
        self.header = "<|begin|>"
        self.words_in_front = ""
        self.cached: list[tuple[str, list[int]]] = []
        self.report = PrefixReport(structlog.get_logger(), clock_s=lambda: self.now_s, **options)
        self.asked = 0

    def ask(
        self, system: str | None = SYSTEM, user: str | None = None, *, salt: str = "", **body: Any
    ) -> int:
        """A request goes its way; the tokens that the cache had."""
        self.asked += 1
        self.now_s += 1
        user = f"Question {self.asked}: what about number {self.asked}?" if user is None else user
        messages = [] if system is None else [{"role": "system", "content": system}]
        request = ChatRequest(
            f"req_{self.asked}",
            body.pop("owner", "ann"),
            "m",
            {"messages": [*messages, {"role": "user", "content": user}], **body},
            0,
        )
        operators = self._ids(self.words_in_front)
        prompt = Prompt(self._rendered(request), 100, None, unbilled_tokens=len(operators))
        cached = self._find(salt, list(prompt.token_ids))
        self.cached.append((salt, list(prompt.token_ids)))
        counts = prompt.as_billed(Counts(len(prompt.token_ids), 1, cached))
        self.report.record(request, prompt, counts, key_id="tr-a", salt=salt)
        return cached

    def _rendered(self, request: ChatRequest) -> list[int]:
        body = request.body
        thinks = "think" if body.get("chat_template_kwargs", {}).get("enable_thinking") else "plain"
        parts = [f"{thinks} {self.header} {self.words_in_front}"]
        parts += [str(tool["function"]) for tool in body.get("tools", ())]
        parts += [f"<|{m['role']}|> {m['content']} <|end|>" for m in body["messages"]]
        return [word for part in parts for word in self._ids(part)]

    @staticmethod
    def _ids(text: str) -> list[int]:
        return [int.from_bytes(hashlib.sha256(word.encode()).digest()[:3]) for word in text.split()]

    def _find(self, salt: str, ids: list[int]) -> int:
        most = 0
        for known_salt, known in self.cached:
            if known_salt == salt:
                same = next((i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), None)
                most = max(most, min(len(ids), len(known)) if same is None else same)
        return min(most, len(ids) - 1)

    def keep(self, tokens: int) -> None:
        """Evict all but so many tokens of every prompt."""
        self.cached = [(salt, ids[:tokens]) for salt, ids in self.cached] if tokens else []

    @property
    def series(self) -> PromptSeries:
        """The only system prompt there is."""
        [series] = self.report.series()
        return series

    @property
    def broken(self) -> Break:
        """The only break there was."""
        assert sum(self.report.breaks.values()) == 1
        [found] = self.series.last
        assert self.report.breaks[found.cause] == 1
        return found


@pytest.fixture
def node() -> Node:
    """A node that has served a prompt three times, and found it cached."""
    made = Node()
    for _ in range(3):
        made.ask()
    assert not made.report.breaks.total()
    return made


def where(found: Break) -> tuple[str, str, str, int]:
    """Cause, more of it, and the position."""
    return found.cause, found.what, found.unit, found.position


def test_break_1_evicted(node: Node) -> None:
    """Nothing differs and nothing was cached: evicted from token 0 on."""
    node.keep(0)
    node.ask()
    assert where(node.broken) == ("evicted", "", "token", 0)
    assert node.broken.expected_tokens == pytest.approx(290, abs=10)


def test_break_2_evicted_in_part(node: Node) -> None:
    """The first 100 tokens were still there: evicted from token 100 on."""
    node.keep(100)
    node.ask()
    assert where(node.broken) == ("evicted", "", "token", 100)


def test_break_3_a_tool_was_added() -> None:
    """A third tool after two: tools, from tool 2 on."""
    node = Node()
    node.ask(tools=TOOLS[:2])
    node.ask(tools=TOOLS[:2])
    node.ask(tools=TOOLS)
    assert where(node.broken) == ("tools", "added", "tool", 2)


def test_break_4_tools_in_another_order() -> None:
    """The same tools, the last two exchanged: tools, from tool 1 on."""
    node = Node()
    node.ask(tools=TOOLS)
    node.ask(tools=TOOLS)
    node.ask(tools=[TOOLS[0], TOOLS[2], TOOLS[1]])
    assert where(node.broken) == ("tools", "order", "tool", 1)


def test_break_5_a_parameter_of_the_template(node: Node) -> None:
    """Thinking is switched on, and the template writes it first: the parameter's name, token 0."""
    node.ask(chat_template_kwargs={"enable_thinking": True})
    assert where(node.broken) == ("template", "chat_template_kwargs", "token", 0)


def test_break_6_the_template_writes_a_date(node: Node) -> None:
    """Llama 3's template has today's date in it; at midnight the same text becomes other tokens."""
    dated = Node()
    dated.header = "<|begin|> Today is 26 Jul 2026"
    dated.ask()
    dated.ask()
    dated.header = "<|begin|> Today is 27 Jul 2026"
    dated.ask()
    assert where(dated.broken) == ("template", "template", "token", 4)
    node.words_in_front = "Refuse what is unsafe."
    node.ask()
    assert where(node.broken)[:2] == ("template", "policy")


def test_break_7_a_clock() -> None:
    """A time of day to the second at character 37, named whole though only its end differs."""
    node = Node()
    begin = "You are an assistant. Current time: "
    assert len(begin) == 36
    for second in (1, 2):
        node.ask(f"{begin}\n2026-11-20T10:00:0{second}Z. {WORDS}")
    assert where(node.broken) == ("system", "clock", "character", 37)
    assert node.broken.length == len("2026-11-20T10:00:01Z")


def test_break_8_a_clock_in_words() -> None:
    """A date and time as people write them; and the seconds since 1970."""
    for first, then in (
        ("Friday, 20 November 2026, 10:04 PM", "Friday, 20 November 2026, 10:05 PM"),
        ("Nov 20, 2026 at 9:59", "Nov 20, 2026 at 10:00"),
        ("1790000000", "1790000061"),
    ):
        node = Node()
        node.ask(f"It is now {first}. {WORDS}")
        node.ask(f"It is now {then}. {WORDS}")
        assert where(node.broken) == ("system", "clock", "character", 10)
        assert node.broken.length == len(then)


def test_break_9_an_id() -> None:
    """A session's id, in three spellings, with text like any other before and behind it."""
    for first, then in (
        ("1b4e28ba-2fa1-11d2-883f-0016d3cca427", "1b4e28ba-2fa1-11d2-99aa-b9ab7c8d21ff"),
        ("req_8f3a2b99c0", "req_77aa01bd22"),
        ("482231", "482977"),
    ):
        node = Node()
        node.ask(f"Acme's assistant. Session {first}. {WORDS}")
        node.ask(f"Acme's assistant. Session {then}. {WORDS}")
        assert where(node.broken) == ("system", "id", "character", 26)
        assert node.broken.length == len(then)


def test_break_10_the_text_was_edited(node: Node) -> None:
    """A word in the middle is another one: system, where it stands."""
    node.ask(SYSTEM.replace("rule20 says", "rule20 means"))
    at = SYSTEM.index("rule20 says") + len("rule20 ")
    assert where(node.broken) == ("system", "text", "character", at)
    assert node.broken.shown == "mean"


def test_break_11_another_salt(node: Node) -> None:
    """The same prompt under another salt finds nothing: salt."""
    node.ask(salt="tenant-2")
    assert where(node.broken) == ("salt", "", "token", 0)


def test_break_12_a_restart(node: Node) -> None:
    """The engine began anew with an empty cache, and that explains an edited prompt's loss too."""
    node.report.restarted("m")
    node.keep(0)
    node.ask()
    assert where(node.broken) == ("restarted", "", "token", 0)
    node.report.restarted("m")
    node.keep(0)
    node.ask(SYSTEM + " Be quick.")
    assert node.report.breaks["restarted"] == 2
    assert node.report.breaks.total() == 2


def test_another_model_s_restart_explains_nothing(node: Node) -> None:
    """Each has a cache of its own."""
    node.report.restarted("another")
    node.keep(0)
    node.ask()
    assert node.broken.cause == "evicted"


def test_what_is_expected_is_what_requests_share() -> None:
    """Whatever users say in common at first, the next that says otherwise is no break."""
    node = Node()
    node.ask(user="Translate this text from English to German please: one two three four five six seven")
    node.ask(user="Translate this text from English to German please: one two three four five six eight")
    node.ask(user="And now for something else")
    node.ask(user="Hello")
    assert not node.report.breaks.total()
    series = node.series
    assert series.requests == 4
    assert series.cached_tokens == series.expected_tokens > 600


def test_two_kinds_of_requests_with_one_prompt_break_nothing() -> None:
    """Each begins with words of its own and has a format of its own, which the template does not write."""
    node = Node()
    label = "Give the label of the text that follows, one of good, bad, mixed or none, and nothing else:"
    names = "List all names of persons and places that stand in this letter, in the order in which they are:"
    for number in range(6):
        node.ask(user=f"{label} text {number}", response_format={"type": "json_object"})
        node.ask(user=f"{label} text {number} again", response_format={"type": "json_object"})
        node.ask(user=f"{names} letter {number}", response_format={"type": "text"})
    assert not node.report.breaks.total()


def test_an_edition_seen_before_is_expected_as_itself(node: Node) -> None:
    """Two tool lists by turns are cached both; only the first request with the second one broke."""
    for _ in range(4):
        node.ask(tools=TOOLS)
        node.ask()
    assert node.report.breaks == {**dict.fromkeys(CAUSES, 0), "tools": 1}


def test_clocks_do_not_drive_out_what_stays(node: Node) -> None:
    """An edition with another clock takes the last one's place, so that the one without is known after."""
    for minute in range(10, 30):
        node.ask(f"It is 10:{minute}. {SYSTEM}")
    assert len(node.series.editions) == 2
    broken = node.report.breaks.total()
    node.ask()
    assert node.report.breaks.total() == broken


def test_two_prompts_of_a_key_are_two_series(node: Node) -> None:
    """A text that is not like any other is a new one, expected to find nothing."""
    node.ask("Translate to French. " + " ".join(f"Example{n}: chat is cat" for n in range(80)))
    assert len(list(node.report.series())) == 2
    assert not node.report.breaks.total()


def test_a_clock_at_the_end_is_named_without_a_break() -> None:
    """Nothing but the clock is lost, and it is known where it stands."""
    node = Node()
    for minute in range(5):
        node.ask(f"{SYSTEM} It is 10:0{minute}.")
    assert not node.report.breaks.total()
    varies = node.series.varies
    assert varies is not None
    assert (varies.kind, varies.position) == ("clock", len(SYSTEM) + len(" It is "))


def test_requests_at_the_same_time_expect_nothing_of_each_other() -> None:
    """Asked before another's prompt was in the cache, a request is judged by nothing."""
    node = Node()
    node.ask()
    node.ask()
    node.keep(0)
    body = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "me too"}]}
    request = ChatRequest("req_x", "ann", "m", body, 0)
    prompt = Prompt(range(300), 10, None)
    node.report.record(request, prompt, Counts(300, 1, 0), key_id="tr-a", sent_s=100.5)
    assert not node.report.breaks.total()


def test_without_a_system_prompt_nothing_is_expected() -> None:
    """A few tokens of template are less than a page."""
    node = Node()
    for _ in range(4):
        node.ask(None)
        node.keep(0)
    assert not node.report.breaks.total()


def test_a_prompt_without_a_template_is_in_no_series() -> None:
    """It has no system prompt, and its text is no user's turn of those that have none."""
    node = Node()
    body = {"messages": [{"role": "user", "content": "Once"}]}
    request = ChatRequest("cmpl-1", "ann", "m", body, 0, raw=RawPrompt("Once"))
    node.report.record(request, Prompt(range(300), 9, None), Counts(300, 1, 0))
    assert list(node.report.series()) == []


def test_owners_and_keys_are_apart(node: Node) -> None:
    """The same prompt of another owner is another's; the filter shows one owner's alone."""
    node.ask(owner="bob")
    assert not node.report.breaks.total()
    assert [series.series_key.owner for series in node.report.series()] == ["ann", "bob"]
    assert [series.requests for series in node.report.series("bob")] == [1]


def test_a_rate_that_falls_by_half_is_logged_once() -> None:
    """After twenty requests with hits a clock is put in; the log names cause and series_key, never text."""
    node = Node()
    with capture_logs() as lines:
        for _ in range(20):
            node.ask()
        for minute in range(20):
            node.ask(f"Time: 2026-11-20T10:{minute + 10}. {SYSTEM}")
    [line] = [line for line in lines if line["event"] == "prefix_hit_rate_fell"]
    assert (line["cause"], line["what"], line["unit"], line["position"]) == (
        "system",
        "clock",
        "character",
        6,
    )
    assert line["usual"] > 0.7
    assert line["recent"] <= line["usual"] / 2
    assert "rule" not in str(lines)
    assert "2026" not in str(lines)


def test_memory_is_bounded() -> None:
    """Editions of a prompt, prompts of a key, and bytes in all have their bounds; the oldest go."""
    node = Node(max_bytes=200_000)
    for n in range(30):
        node.ask(f"{SYSTEM} Version {n}.")
    assert len(node.series.editions) == MAX_EDITIONS
    for n in range(2 * MAX_SERIES):
        node.ask(" ".join(f"p{n}x{i}" for i in range(50)))
        node.cached.clear()
    kept = list(node.report.series())
    assert len(kept) <= MAX_SERIES
    in_use = sum(edition.size_bytes for series in kept for edition in series.editions)
    assert in_use == node.report.size_bytes <= 200_000
    for n in range(20):
        node.ask("x" * 50_000 + f" {n}", owner=f"owner{n}")
    assert node.report.size_bytes <= 200_000
    node.now_s += 100_000
    node.ask("short", owner="last")
    assert [series.series_key.owner for series in node.report.series()] == ["last"]


def test_what_cannot_be_read_is_logged_and_fails_nothing() -> None:
    """A body of a shape that no request has is an error line without text."""
    node = Node()
    with capture_logs() as lines:
        request = ChatRequest("req_x", "ann", "m", {"messages": [{"content": "secret"}]}, 0)
        node.report.record(request, Prompt([1], 1, None), Counts(1, 1, 0))
    assert [line["event"] for line in lines] == ["prefix_report_broke"]
    assert "secret" not in str(lines)


WORD = st.text(st.sampled_from("abé世"), min_size=1, max_size=3)
USERS = st.builds("{}{}".format, st.sampled_from(("", " ", "\n")), st.lists(WORD, max_size=6).map(" ".join))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), USERS), max_size=30))
def test_a_cache_that_forgets_nothing_is_never_broken(asked: list[tuple[int, bool, str]]) -> None:
    """Whatever users say: with prompts and tools seen before, the report finds no fault."""
    prompts = [f"Assistant {name}. {WORDS}" for name in ("one", "two", "three")]
    node = Node()
    for system in prompts:
        for with_tools in (False, True):
            node.ask(system, **({"tools": TOOLS} if with_tools else {}))
    broken = node.report.breaks.total()
    for which, with_tools, user in asked:
        node.ask(prompts[which], user, **({"tools": TOOLS} if with_tools else {}))
    assert node.report.breaks.total() == broken


@settings(deadline=None)
@given(st.lists(USERS, min_size=3, max_size=10), st.integers(0, 200))
def test_what_was_evicted_is_called_evicted(users: list[str], kept: int) -> None:
    """At any series_key, whatever was asked before."""
    node = Node()
    for user in users:
        node.ask(user=user)
    node.keep(kept)
    node.ask(user="anything else")
    assert where(node.broken) == ("evicted", "", "token", kept)


def test_a_request_that_breaks_nothing_costs_microseconds() -> None:
    """2,000 characters of system prompt; the best of many runs, with room for a slow machine."""
    node = Node()
    system = SYSTEM[:2000]
    node.ask(system)
    node.ask(system)
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]}
    request = ChatRequest("req_x", "ann", "m", body, 0)
    prompt = Prompt(list(range(400)), 10, None)
    counts = Counts(400, 1, 390)
    best = 1.0
    for _ in range(50):
        started_s = time.thread_time()
        for _ in range(20):
            node.report.record(request, prompt, counts, key_id="tr-a")
        best = min(best, (time.thread_time() - started_s) / 20)
    assert best < 30e-6, f"{best * 1e6:.1f} µs"
    assert not node.report.breaks.total()
