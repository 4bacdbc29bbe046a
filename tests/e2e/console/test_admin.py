"""The page of admin keys: a live request seen and stopped, keys made and revoked, and whom it is not for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import APIResponse, BrowserContext, Page, Route, expect

from tests.support.console import WAIT_S, ConsoleServer, Faults, axe, open_signed_in

MARKUP = "<img src=x onerror=alert(1)><b>phone</b>"


@pytest.fixture(scope="module")
def server_script() -> str:
    """Answers that last for longer than a test."""
    return "rate=20,tokens=4000"


@pytest.fixture
def answer(server: ConsoleServer) -> Iterator[threading.Thread]:
    """A client whose key has markup in its name, reading an answer."""
    key, opened = server.new_key(MARKUP, tier="interactive"), threading.Event()

    def read() -> None:
        body = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {key}"}
        url = server.url + "api/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as response:
            for _ in response.iter_lines():
                opened.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert opened.wait(WAIT_S)
    yield reader
    for live in server.call("GET", "/api/admin/requests")["data"]:
        server.call("POST", f"/api/admin/requests/{live['id']}/cancel")
    reader.join(WAIT_S)


def go(page: Page, server: ConsoleServer, tab: str) -> None:
    """Open a part of the admin page."""
    page.goto(f"{server.url}#/admin/{tab}")
    expect(page.get_by_role("tabpanel")).to_be_visible()


def test_a_live_request_is_seen_and_stopped(page: Page, server: ConsoleServer, answer: threading.Thread):
    """It ends for its reader too, after a question. The name of its key is text, never HTML."""
    go(page, server, "now")
    row = page.get_by_role("row").filter(has_text=MARKUP)
    expect(row).to_contain_text("decode")
    expect(row).to_contain_text("interactive")
    assert axe(page) == []
    row.get_by_role("button").click()
    dialog = page.get_by_role("dialog", name="Stop this request?")
    expect(dialog).to_contain_text(MARKUP)
    assert axe(page) == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(row.get_by_role("button")).to_be_focused()
    row.get_by_role("button").click()
    dialog.get_by_role("button", name="Stop it").click()
    answer.join(WAIT_S)
    assert not answer.is_alive()
    expect(page.get_by_text("No request is being answered.")).to_be_visible()
    expect(page.get_by_role("heading", name="Live requests")).to_be_focused()
    page.locator("summary", has_text="Ended lately").click()
    ended = page.get_by_role("row").filter(has_text=MARKUP)
    expect(ended).to_contain_text("abort: stopped by an admin")


def test_a_key_is_made_changed_and_revoked(page: Page, server: ConsoleServer, faults: Faults):
    """Its secret is shown once and works; a wrong term is said at its field; revoked, it is refused."""
    faults.allow("status of 400")
    go(page, server, "keys")
    page.get_by_role("button", name="New key").click()
    form = page.get_by_role("dialog", name="New key")
    form.get_by_label("Name").fill("مفتاح 🔑 key")
    form.get_by_label("Requests a minute").fill("60")
    form.get_by_label("Budget a month, US dollars").fill("0.0000001")
    form.get_by_label("Ends").fill("2099-12-31T18:00")
    with page.expect_response(lambda response: response.request.method == "POST") as refused:
        form.get_by_role("button", name="Create key").click()
    assert refused.value.status == 400
    expect(form.get_by_role("alert")).to_contain_text("at most 6 decimals")
    expect(form.get_by_label("Budget a month, US dollars")).to_be_focused()
    assert axe(page) == []
    form.get_by_label("Budget a month, US dollars").fill("12.5")
    form.get_by_role("button", name="Create key").click()
    secret = page.get_by_role("dialog", name="The key of مفتاح 🔑 key").get_by_label("The key").input_value()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert secret not in page.content()
    known = next(k for k in server.call("GET", "/api/admin/keys")["data"] if k["id"] == secret[:15])
    assert (known["rpm"], known["tpm"], known["budget_usd"], known["scope"]) == (60, None, 12.5, "chat")
    assert server.call("GET", "/api/me", key=secret)["key"]["id"] == known["id"]
    row = page.get_by_role("row").filter(has_text=known["id"])
    expect(row).to_contain_text("$12.50")
    row.get_by_role("button").click()
    page.get_by_role("dialog").get_by_label("Requests a minute").fill("")
    page.get_by_role("button", name="Change it").click()
    expect(row).not_to_contain_text("requests/min")
    row.get_by_role("button").click()
    page.get_by_role("button", name="Revoke…").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(row).to_contain_text("revoked")
    assert httpx.get(server.url + "api/me", headers={"authorization": f"Bearer {secret}"}).status_code == 401


def test_a_rotated_key_shows_its_new_secret(page: Page, server: ConsoleServer):
    """The old one ends when it was said to."""
    old = server.new_key("tablet")
    go(page, server, "keys")
    page.get_by_label("Find").fill("tablet")
    page.get_by_role("button", name="Change tablet").click()
    page.get_by_role("button", name="Rotate…").click()
    page.get_by_label("The old secret ends").select_option("at once")
    page.get_by_role("button", name="Rotate it").click()
    new = page.get_by_label("The key", exact=True).input_value()
    assert new != old
    assert server.call("GET", "/api/me", key=new)["key"]["name"] == "tablet"
    assert httpx.get(server.url + "api/me", headers={"authorization": f"Bearer {old}"}).status_code == 401


def test_a_list_that_was_asked_for_before_a_change_is_read_again(page: Page, server: ConsoleServer):
    """Its answer may come after that of the change."""
    server.new_key("laptop")
    go(page, server, "keys")
    row = page.get_by_role("row").filter(has_text="laptop")
    expect(row).to_contain_text("active")
    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append((route, route.fetch()))

    page.route("**/api/admin/keys", hold)
    with page.expect_request("**/api/admin/keys"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    row.get_by_role("button").click()
    page.get_by_role("button", name="Revoke…").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_text("Revoked laptop.")).to_be_visible()
    [(route, old)] = held
    route.fulfill(response=old)
    expect(row).to_contain_text("revoked")


def test_safety_and_prefixes_are_shown(page: Page, server: ConsoleServer):
    """With what there is to say where there is nothing; the tabs are moved through by arrows."""
    go(page, server, "safety")
    expect(page.get_by_text("This server runs with safety off")).to_be_visible()
    expect(page.get_by_text("No key looks abused.")).to_be_visible()
    page.get_by_role("button", name="Compute").click()
    expect(page.get_by_role("region", name="By policy")).to_be_visible()
    assert axe(page) == []
    page.get_by_role("tab", name="Safety").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Prefix cache")).to_be_focused()
    expect(page.get_by_text("System prompts, those first that lost most tokens")).to_be_visible()


def test_a_key_for_chats_is_told_that_it_needs_another(context: BrowserContext, server: ConsoleServer):
    """And nothing of the admin routes is asked for."""
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    open_signed_in(page, server.url, server.new_key("reader"))
    page.goto(f"{server.url}#/admin/keys")
    expect(page.get_by_text("This page needs an admin key.")).to_be_visible()
    assert [url for url in asked if "/api/admin" in url] == []


def test_a_hidden_tab_asks_for_nothing(page: Page, server: ConsoleServer):
    """It goes on when it is shown again."""
    page.clock.install()
    go(page, server, "now")
    expect(page.get_by_text("Live requests")).to_be_visible()
    asked: list[str] = []
    show = "hidden => { Object.defineProperty(document, 'hidden', {configurable: true, value: hidden});"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(20_000)
    assert [url for url in asked if "/api/admin" in url] == []
    with page.expect_request("**/api/admin/live"):
        page.evaluate(show, False)
