"""The list of conversations in a browser: day groups, search, rename, delete and undo, the keyboard."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.support.console import WAIT_S, ConsoleServer, axe, module_of, open_signed_in

HOSTILE = "<img src=x onerror=alert(1)> & <b>bold</b>"
ARABIC = "كيف أصنع خبزًا"


@pytest.fixture(scope="module")
def server_flags() -> tuple[str, ...]:
    """Many conversations are made quickly."""
    return ("--max-reads-per-s", "0")


@pytest.fixture(scope="module")
def server_script() -> str:
    """An answer that takes longer than any test."""
    return "rate=20,tokens=4000"


@pytest.fixture(scope="module")
def owner(server: ConsoleServer) -> str:
    """A key of somebody with more conversations than a page has."""
    key = server.new_key("ann", owner="ann")
    titles = [*(f"Old question {i}" for i in range(56)), "A heron", HOSTILE, ARABIC, "Plan a trip to Kraków"]
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}) as client:
        for title in titles:
            message = {"role": "user", "content": f"Tell me about it, café {title}"}
            made = client.post("/api/conversations", json={"title": title, "messages": [message]})
            assert made.status_code == 201
    return key


def imported(server: ConsoleServer, key: str, title: str, *texts: str) -> str:
    """The id of a new conversation."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]
    made = server.call("POST", "/api/conversations", {"title": title, "messages": messages}, key)
    return str(made["id"])


@pytest.fixture
def ann(context: BrowserContext, server: ConsoleServer, owner: str) -> Page:
    """Ann's page of the console."""
    opened = context.new_page()
    open_signed_in(opened, server.url, owner)
    expect(rows(opened).first).to_be_visible()
    return opened


def rows(page: Page) -> Locator:
    """The entries of the list."""
    return page.get_by_role("region", name="Conversations").get_by_role("listitem")


def entry(page: Page, title: str) -> Locator:
    """The link to a conversation."""
    return page.get_by_role("region", name="Conversations").get_by_role("link", name=title)


def action(page: Page, title: str, name: str) -> None:
    """Choose from a conversation's menu."""
    entry(page, title).hover()
    page.get_by_role("button", name=f"Actions for {title}", exact=True).click()
    page.get_by_role("menuitem", name=name).click()


def test_titles_are_text(ann: Page):
    """Newest first; what a model or a user wrote is no HTML, and Arabic runs from the right."""
    expect(rows(ann).first).to_contain_text("Plan a trip to Kraków")
    expect(entry(ann, ARABIC)).to_have_css("direction", "rtl")
    expect(entry(ann, HOSTILE)).to_have_text(HOSTILE)
    assert ann.locator(".conversation-list img").count() == 0
    for scheme in ("light", "dark"):
        ann.emulate_media(color_scheme=scheme)
        assert axe(ann) == []


def test_the_list_ends_only_where_there_is_no_more(ann: Page):
    """Older conversations come as one scrolls; pages neither repeat nor skip."""
    entry(ann, "Old question 20").scroll_into_view_if_needed()
    rows(ann).last.scroll_into_view_if_needed()
    expect(rows(ann)).to_have_count(60)
    titles = rows(ann).all_inner_texts()
    assert len(set(titles)) == 60


def test_search_marks_what_it_finds(ann: Page):
    """Words of titles and of messages, whatever their accents; an empty search shows all again."""
    box = ann.get_by_role("searchbox", name="Search conversations")
    box.fill("cafe trip")
    expect(rows(ann)).to_have_count(1)
    expect(rows(ann).locator("mark")).to_have_text(["trip", "café", "trip"])
    expect(ann.get_by_role("status").filter(has_text=re.compile("^1 conversation found$"))).to_be_attached()
    assert axe(ann) == []
    box.fill("<b>bold")
    expect(rows(ann)).to_contain_text([HOSTILE])
    assert ann.locator(".conversation-list b").count() == 0
    box.fill("nowhere at all")
    expect(ann.get_by_text("No conversation has these words.")).to_be_visible()
    box.fill("")
    expect(rows(ann)).to_have_count(50)


def test_rename_in_place(ann: Page, server: ConsoleServer, owner: str):
    """Enter keeps the title, Escape does not; the server has it, and the focus returns."""
    conversation_id = imported(server, owner, "Wrong title", "hello")
    ann.reload()
    action(ann, "Wrong title", "Rename")
    ann.get_by_label("New title").fill("نص <i>")
    ann.keyboard.press("Escape")
    expect(entry(ann, "Wrong title")).to_be_focused()
    ann.keyboard.press("F2")
    ann.get_by_label("New title").fill("نص <i>")
    ann.keyboard.press("Enter")
    expect(entry(ann, "نص <i>")).to_be_focused()
    assert server.call("GET", f"/api/conversations/{conversation_id}", key=owner)["title"] == "نص <i>"
    server.call("DELETE", f"/api/conversations/{conversation_id}", key=owner)


def test_delete_and_undo(ann: Page, server: ConsoleServer, owner: str):
    """It leaves the list and the server's list, the open page too; Undo brings back both."""
    conversation_id = imported(server, owner, "To be deleted", "hello", "hi")
    ann.reload()
    entry(ann, "To be deleted").click()
    expect(entry(ann, "To be deleted")).to_have_attribute("aria-current", "page")
    action(ann, "To be deleted", "Delete")
    expect(entry(ann, "To be deleted")).to_have_count(0)
    assert ann.url.endswith("#/chat")
    ann.get_by_role(
        "button", name="Undo"
    ).hover()  # it is there once the server knows, and stays under the mouse
    listed = server.call("GET", "/api/conversations?limit=1", key=owner)["data"]
    assert listed[0]["id"] != conversation_id
    assert axe(ann) == []
    ann.get_by_role("button", name="Undo").click()
    expect(entry(ann, "To be deleted")).to_have_attribute("aria-current", "page")
    assert ann.url.endswith(conversation_id)
    entry(ann, "To be deleted").focus()
    ann.keyboard.press("Delete")
    expect(entry(ann, "Plan a trip")).to_be_focused()
    ann.get_by_text("Deleted in this tab (1)").click()
    ann.get_by_role("button", name="Restore To be deleted").click()
    expect(entry(ann, "To be deleted")).to_be_visible()
    server.call("DELETE", f"/api/conversations/{conversation_id}", key=owner)


def test_the_keyboard_is_enough(ann: Page):
    """Arrows go from the search through the list and its menus; Escape returns to the button."""
    ann.get_by_role("searchbox").focus()
    ann.keyboard.press("ArrowDown")
    expect(entry(ann, "Plan a trip")).to_be_focused()
    ann.keyboard.press("ArrowDown")
    expect(entry(ann, ARABIC)).to_be_focused()
    ann.keyboard.press("Tab")
    ann.keyboard.press("ArrowDown")
    expect(ann.get_by_role("menuitem", name="Rename")).to_be_focused()
    ann.keyboard.press("ArrowUp")
    expect(ann.get_by_role("menuitem", name="Delete")).to_be_focused()
    ann.keyboard.press("Escape")
    expect(ann.get_by_role("button", name=f"Actions for {ARABIC}")).to_be_focused()
    expect(ann.get_by_role("menu")).to_have_count(0)
    button = ann.get_by_role("button", name=f"Actions for {ARABIC}")
    button.click()
    expect(ann.get_by_role("menuitem", name="Rename")).to_be_focused()
    button.click()
    expect(ann.get_by_role("menu")).to_have_count(0)
    button.click()
    ann.get_by_role("main").click()
    expect(button).to_have_attribute("aria-expanded", "false")


def test_a_conversation_that_is_being_answered_is_marked(ann: Page, server: ConsoleServer, owner: str):
    """Wherever it was asked; the mark leaves when the answer has ended."""
    mark = rows(ann).first.get_by_label("being answered")
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Something long"}], "stream": True}
    headers = {"authorization": f"Bearer {owner}"}
    with httpx.stream(
        "POST", server.url + "api/chat/completions", json=body, headers=headers, timeout=WAIT_S
    ) as answer:
        ann.reload()
        expect(mark).to_be_visible()
        assert axe(ann) == []
        request_id = answer.headers["x-request-id"]
        server.call("DELETE", f"/api/chat/completions/{request_id}", key=owner)
    expect(mark).to_have_count(0, timeout=WAIT_S * 1000)
    server.call("DELETE", f"/api/conversations/{answer.headers['x-conversation-id']}", key=owner)


def test_another_tab_s_changes_are_seen(ann: Page, server: ConsoleServer, owner: str):
    """When this one is looked at again: what is new comes, what was deleted goes."""
    conversation_id = imported(server, owner, "From another tab", "hello")
    look = "document.dispatchEvent(new Event('visibilitychange'))"
    ann.evaluate(look)
    expect(entry(ann, "From another tab")).to_be_visible()
    server.call("DELETE", f"/api/conversations/{conversation_id}", key=owner)
    ann.evaluate(look)
    expect(entry(ann, "From another tab")).to_have_count(0)


def test_days_have_names(ann: Page):
    """Today, yesterday, the days of the week, then months; in order, each once."""
    day_s, now_s = 86_400, time.time()
    ages = [0, 0, 1, 3, 12, 29, 200]
    entries = [{"id": str(i), "created_at": now_s - age * day_s} for i, age in enumerate(ages)]
    names = "(module, entries) => module.grouped(entries).map(({name, entries}) => [name, entries.length])"
    groups = module_of(ann, "js/lists/conversations.js", names, entries)
    assert [count for _, count in groups] == [2, 1, 1, 2, 1]
    assert [groups[0][0], groups[1][0], groups[3][0]] == ["Today", "Yesterday", "Last 30 days"]
    assert re.fullmatch(r"\w+day", groups[2][0])


HITS = [
    ("Crème brûlée, CREME", "creme", ["Crème", "CREME"]),
    ("A theatre", "the", []),
    ("A theatre", "theat", ["theatre"]),
    ("什么是环", "什么", ["什么是环"]),
    ("كيف أصنع خبزًا", "أصنع", ["أصنع"]),
    ("a.b*c", ".*", []),
]
"""A text, what is searched for, and what of the text is marked."""


def test_hits_are_those_of_the_server(ann: Page):
    """Without case and accents; the last word may be a beginning if it is long enough."""
    find = "(module, all) => all.map(([text, query]) => module.highlighted(text, query))"
    found = module_of(ann, "js/lists/words.js", find, [case[:2] for case in HITS])
    assert [[run["text"] for run in runs if run["isHit"]] for runs in found] == [case[2] for case in HITS]
    assert ["".join(run["text"] for run in runs) for runs in found] == [case[0] for case in HITS]
