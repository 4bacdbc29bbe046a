"""An answer in the browser goes on after a reload, a lost network, and restarts of the server."""

from __future__ import annotations

import re
import signal
import sqlite3
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from app.engine.scripted.engine import scripted_text
from tests.support.console import WAIT_S, Faults, HoldingServer, module_of, open_signed_in
from tests.support.held_answers import HELD_TOKENS

TOKENS = 60
TEXT = " ".join("".join(scripted_text(0, 0, TOKENS)).split())
"""What every answer here says, with single spaces, as the page shows it."""


@pytest.fixture(scope="module")
def server_type() -> type[HoldingServer]:
    """Its answers stay in their middle until they are released."""
    return HoldingServer


@pytest.fixture(scope="module")
def server_script() -> str:
    """An answer of several sentences."""
    return f"rate=200,tokens={TOKENS}"


@pytest.fixture(scope="module")
def server_flags() -> tuple[str, ...]:
    """A stop suspends what is running."""
    return ("--drain-timeout-s", "0.2")


@pytest.fixture(autouse=True)
def released(server: HoldingServer) -> Iterator[None]:
    """What a test holds is held no longer than the test."""
    yield
    server.release()


def begin(page: Page, server: HoldingServer) -> Locator:
    """Ask, and wait until the answer is in its middle, where it stays; returns its text."""
    server.hold()
    page.get_by_label("Message", exact=True).fill("go on")
    page.keyboard.press("Enter")
    text = page.locator(".md")
    expect(text).to_contain_text(TEXT[:40])
    return text


def read(text: Locator) -> str:
    """A text as the page shows it, with single spaces."""
    return " ".join(text.inner_text().split())


def check_whole(page: Page, server: HoldingServer) -> None:
    """The answer goes on, ends, and is that of an undisturbed stream, now and after a reload."""
    server.release()
    expect(page.get_by_label("Send", exact=True)).to_be_visible()
    expect(page.locator(".md")).to_have_text(TEXT)
    expect(page.locator(".ending")).to_have_count(0)
    page.reload()
    expect(page.locator(".md")).to_have_text(TEXT)


def check_resumed(page: Page, server: HoldingServer) -> None:
    """The answer goes on, and says at which event."""
    server.release()
    expect(page.locator(".resumed")).to_have_text(re.compile(r"Resumed at event [1-9]\d*"))


def test_a_reload_in_mid_answer_goes_on_at_the_last_event(page: Page, server: HoldingServer):
    """What was there is there at once, and the rest follows."""
    text = begin(page, server)
    page.reload()
    expect(text).to_contain_text(TEXT[:40])
    check_resumed(page, server)
    check_whole(page, server)


def test_another_tab_reads_along(page: Page, context: BrowserContext, server: HoldingServer):
    """A tab that opens the conversation attaches to the answer from its first event."""
    begin(page, server)
    other = context.new_page()
    open_signed_in(other, page.url, server.key)
    expect(other.locator(".answer[aria-busy=true] .md")).to_contain_text(TEXT[:40])
    check_whole(other, server)
    check_whole(page, server)


def test_the_network_goes_and_comes(
    page: Page, context: BrowserContext, server: HoldingServer, faults: Faults
):
    """The page says that it is offline; back online it goes on by itself."""
    faults.allow("ERR_INTERNET_DISCONNECTED")
    begin(page, server)
    context.set_offline(True)
    expect(page.locator(".progress")).to_contain_text("offline")
    shown = read(page.locator(".md"))
    context.set_offline(False)
    check_resumed(page, server)
    check_whole(page, server)
    assert TEXT.startswith(shown)


def test_a_question_whose_connection_failed_is_asked_under_its_key_again(
    page: Page, server: HoldingServer, faults: Faults
):
    """The same question is answered once: the second request attaches to the first."""
    faults.allow("ERR_FAILED")
    keys = []
    page.on(
        "request", lambda r: keys.append(r.headers.get("idempotency-key")) if r.method == "POST" else None
    )
    page.route("**/api/chat/completions", lambda route: route.abort(), times=1)
    begin(page, server)
    check_whole(page, server)
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert page.locator(".asked").count() == 1


def test_a_reload_before_the_first_event_asks_again(page: Page, server: HoldingServer):
    """The question and its key outlive the page; it is asked once."""
    keys = []
    page.on(
        "request", lambda r: keys.append(r.headers.get("idempotency-key")) if r.method == "POST" else None
    )
    page.route("**/api/chat/completions", lambda _route: None, times=1)  # no answer comes
    page.get_by_label("Message", exact=True).fill("go on")
    page.keyboard.press("Enter")
    expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    page.reload()
    check_whole(page, server)
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_a_stopped_server_goes_on_after_its_restart(page: Page, server: HoldingServer, faults: Faults):
    """SIGTERM suspends the answer; the next process continues it in the same page."""
    faults.allow("ERR_")
    faults.allow("503")
    begin(page, server)
    server.stop(signal.SIGTERM)
    expect(page.locator(".progress")).to_contain_text("connection was lost")
    server.start()
    check_resumed(page, server)
    check_whole(page, server)


def test_a_page_reloaded_after_a_restart_goes_on(page: Page, server: HoldingServer, faults: Faults):
    """The page that asked is gone, and so is the server that was asked."""
    faults.allow("ERR_")
    faults.allow("503")
    begin(page, server)
    server.stop(signal.SIGTERM)
    server.start()
    page.reload()
    check_whole(page, server)


def wait_until_stored(server: HoldingServer) -> None:
    """Until the answer is stored as far as it has come, which happens once a second."""
    end_s = time.monotonic() + WAIT_S
    with sqlite3.connect(server.folder / "data/tokenring.db") as store:
        stored = "SELECT 1 FROM requests WHERE state = 'reserved' AND completion_tokens >= ?"
        while not store.execute(stored, (HELD_TOKENS,)).fetchone():
            assert time.monotonic() < end_s
            time.sleep(0.02)


def test_a_killed_server_leaves_a_truthful_end(page: Page, server: HoldingServer, faults: Faults):
    """What had been sent stays, the page says that the rest is lost, and the answer can be continued."""
    faults.allow("ERR_")
    faults.allow("503")
    begin(page, server)
    wait_until_stored(server)
    server.stop(signal.SIGKILL)
    server.start()
    expect(page.locator(".ending")).to_be_visible()
    assert TEXT.startswith(read(page.locator(".md")))
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    server.release()
    expect(page.get_by_label("Send", exact=True)).to_be_visible()
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.locator(".md")).to_contain_text(TEXT)
    shown = read(page.locator(".md"))
    page.reload()
    expect(page.locator(".md")).to_have_text(shown)


def test_a_silent_engine_is_told(page: Page, server: HoldingServer, faults: Faults):
    """The stream is kept while the engine is restarted, and the page says what for."""
    faults.allow("503")
    body = {
        "status": "not ready",
        "phase": "restarting: SGLang's scheduler_0 process ended with exit code -9",
    }
    page.route("**/readyz", lambda route: route.fulfill(status=503, json=body))
    begin(page, server)
    page.evaluate("window.dispatchEvent(new Event('online'))")  # the page looks at the server again
    expect(page.locator(".banner")).to_have_text("The engine is restarting.")
    check_whole(page, server)


SILENT = """async ({ follow }) => {
    const [original, opened, states] = [window.fetch, [], []];
    const leave = new AbortController();
    window.fetch = (url, options) => {
        if (!String(url).includes("/completions")) return original(url, options);
        opened.push(Date.now());
        const { signal } = options;
        const start = (stream) => signal.addEventListener("abort", () => stream.error(signal.reason));
        const cut = new TypeError("cut");
        if (opened.length === 1) return new Promise((_, fail) => setTimeout(fail, 1500, cut));
        const headers = { "x-request-id": "chatcmpl-1" };
        return Promise.resolve(new Response(new ReadableStream({ start }), { headers }));
    };
    const answer = { id: "chatcmpl-1", lastEventId: 0 };
    await follow(answer, { key: "k" }, {
        signal: leave.signal, change() {}, resumed() {},
        state(state) {
            states.push(state);
            if (state?.kind === "quiet") leave.abort();
        },
    });
    window.fetch = original;
    return states.at(-1).since - opened.at(-1);
}"""


def test_silence_is_counted_from_the_last_connection_on(page: Page):
    """An outage is none of the model's."""
    assert 0 <= module_of(page, "js/chat/stream.js", SILENT) < 2_000  # it is silent for 2.5 s then
