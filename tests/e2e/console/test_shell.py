"""The console's frame: signing in, what the server is doing, themes, keyboard, sizes."""

from __future__ import annotations

import re
import signal
from importlib import metadata
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from app.store.keys import ID_CHARS
from tests.support.console import ConsoleServer, Faults, axe, module_of

PHONE = {"width": 390, "height": 780}


def pages_of(page: Page) -> list[str]:
    """The names of the views that the top offers."""
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    expect(links.first).to_be_visible()
    return links.all_inner_texts()


def wait_until_read(page: Page) -> None:
    """Until what a chat page asks for at first has been answered."""
    expect(page.get_by_label("Model", exact=True)).to_have_value("scripted")
    expect(page.get_by_text("Your conversations will be listed here.")).to_be_visible()


def open_sign_in(context: BrowserContext, server: ConsoleServer, address: str = "") -> Page:
    """The console in a browser that has no key."""
    page = context.new_page()
    page.goto(server.url + address)
    expect(page.get_by_label("API key")).to_be_focused()
    return page


def sign_in(page: Page, key: str) -> None:
    """Give the form a key."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_frame_breaks_no_rule_of_accessibility(page: Page, faults: Faults, scheme: str):
    """In both themes: what lies over the page, the width of a phone, and the sign-in."""
    faults.allow("status of 401")
    page.emulate_media(color_scheme=scheme)
    page.get_by_role("button", name="Menu").click()
    assert axe(page) == []
    page.get_by_role("button", name="Keyboard and version").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"Tokenring {metadata.version('tokenring')}")
    assert axe(page) == []
    page.keyboard.press("Escape")
    page.set_viewport_size(PHONE)
    expect(page.get_by_role("complementary", name="Conversations")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_role("complementary", name="Conversations")).to_be_visible()
    assert axe(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert axe(page) == []


def test_a_key_opens_what_was_asked_for(context: BrowserContext, server: ConsoleServer, faults: Faults):
    """The address is kept over the sign-in; a key of the scope chat sees no page of administrators."""
    faults.allow("status of 401")
    page = open_sign_in(context, server, "#/usage")
    sign_in(page, f"  export KEY={server.new_key('Ayşe <b>王</b> 🎡', owner='ann')}\n")
    expect(page.get_by_role("heading", name="Usage")).to_be_visible()
    assert pages_of(page) == ["Chat", "Usage"]
    page.get_by_role("button", name="Menu").click()
    expect(page.locator("#menu")).to_contain_text("Ayşe <b>王</b> 🎡")
    page.evaluate("location.hash = '#/admin'")
    expect(page.get_by_text("This page needs an admin key")).to_be_visible()


def test_a_wrong_key_is_refused_with_a_reason(context: BrowserContext, server: ConsoleServer, faults: Faults):
    """Nothing is kept, and the next key can be typed at once."""
    faults.allow("status of 401")
    page = open_sign_in(context, server)
    for key, problem in {
        "wrong": "The API key is not valid: unknown, expired, or revoked.",
        "schlüssel": "That is no key",
        "two words": "That is no key",
        "a" * 100_000: "That is no key: it is too long.",
    }.items():
        sign_in(page, key)
        expect(page.get_by_role("alert").filter(has_text=problem)).to_be_visible()
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert axe(page) == []
    sign_in(page, server.key)
    expect(page.get_by_role("link", name="Admin")).to_be_visible()


def test_a_remembered_key_is_for_every_tab(context: BrowserContext, server: ConsoleServer, faults: Faults):
    """A second tab is signed in, and signed out with the first; nothing stays for the next person."""
    faults.allow("status of 401")
    page = open_sign_in(context, server)
    page.evaluate("localStorage.setItem('tokenring.draft', 'of somebody else')")
    sign_in(page, server.key)
    expect(page.get_by_role("link", name="Admin")).to_be_visible()
    assert page.evaluate("localStorage.getItem('tokenring.draft')") is None
    page.get_by_role("textbox", name="Message").fill("a secret")
    second = context.new_page()
    second.goto(server.url)
    expect(second.get_by_role("link", name="Admin")).to_be_visible()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("button", name="Sign out").click()
    for tab in (page, second):
        expect(tab.get_by_label("API key")).to_be_visible()
    assert page.evaluate("localStorage.length") == 0


def test_nobody_sees_what_the_one_before_them_did(
    context: BrowserContext, server: ConsoleServer, faults: Faults
):
    """Another owner signs in at the same tab and address: no chat, draft or system prompt is left."""
    faults.allow("status of 401")
    faults.allow("status of 404")
    page = open_sign_in(context, server)
    sign_in(page, server.new_key("ann"))
    page.get_by_label("Settings of the chat").click()
    page.get_by_label("System prompt").fill("secret of Ann")
    page.keyboard.press("Escape")
    field = page.get_by_label("Message", exact=True)
    field.fill("secret of Ann")
    field.press("Enter")
    expect(page).to_have_url(re.compile("#/chat/conv_"))
    expect(page.get_by_label("Send", exact=True)).to_be_visible()
    page.route("**/api/chat/completions", lambda _route: None)  # an answer that is still awaited
    field.fill("secret of Ann")
    field.press("Enter")
    expect(page.get_by_label("Stop", exact=True)).to_be_visible()
    field.fill("secret of Ann")
    address = page.url
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_focused()
    assert "secret of Ann" not in page.evaluate("JSON.stringify([localStorage, sessionStorage])")
    sign_in(page, server.new_key("bob"))
    missing = page.get_by_role("alert").filter(has_text="It may belong to another key.")
    expect(missing.get_by_role("button", name="New chat")).to_be_visible()
    assert page.url == address
    page.get_by_label("Settings of the chat").click()
    page.goto(f"{server.url}#/chat")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    assert "secret of Ann" not in page.content()
    assert "secret of Ann" not in page.evaluate("JSON.stringify([localStorage, sessionStorage])")


def test_a_question_that_was_refused_without_a_key_is_kept(
    context: BrowserContext, server: ConsoleServer, faults: Faults
):
    """Over the sign-in of the same owner; another owner does not see it."""
    faults.allow("status of 401")
    ann = [server.new_key("ann", owner="ann") for _ in range(2)]
    page = open_sign_in(context, server)
    sign_in(page, ann[0])
    field = page.get_by_label("Message", exact=True)
    refusal = {"error": {"message": "Revoked.", "code": "invalid_api_key"}}
    for key, text in ((ann[1], "of Ann"), (server.new_key("bob"), "")):
        field.fill("of Ann")
        page.route("**/api/chat/completions", lambda route: route.fulfill(status=401, json=refusal), times=1)
        field.press("Enter")
        expect(page.get_by_label("API key")).to_be_focused()
        sign_in(page, key)
        expect(field).to_have_value(text)


def test_a_question_that_made_a_key_necessary_is_kept(
    context: BrowserContext, faults: Faults, tmp_path: Path
):
    """Where no key was needed its writer had no name; the first who signs in at this tab has it."""
    faults.allow("status of 401")
    faults.allow("another host")
    server = ConsoleServer(tmp_path)
    server.start()
    try:
        page = context.new_page()
        page.goto(server.url)
        field = page.get_by_label("Message", exact=True)
        field.fill("asked too late")
        wait_until_read(page)
        key = server.new_key("root", scope="admin")
        field.press("Enter")
        expect(page.get_by_label("API key")).to_be_focused()
        sign_in(page, key)
        expect(field).to_have_value("asked too late")
        assert "question" not in page.evaluate("JSON.stringify(sessionStorage)")
    finally:
        server.stop(signal.SIGKILL)


def test_a_key_for_one_tab_is_gone_with_it(context: BrowserContext, server: ConsoleServer, faults: Faults):
    """A reload keeps it, a second tab does not have it."""
    faults.allow("status of 401")
    page = open_sign_in(context, server)
    page.get_by_label("Remember").uncheck()
    sign_in(page, server.key)
    expect(page.get_by_role("link", name="Admin")).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="Admin")).to_be_visible()
    open_sign_in(context, server)


def test_a_revoked_key_leads_back_to_the_form(context: BrowserContext, server: ConsoleServer, faults: Faults):
    """With the next request, whichever view makes it; the key is forgotten, the address is not."""
    faults.allow("status of 401")
    key = server.new_key("leaver")
    page = open_sign_in(context, server, "?sources#/usage")
    sign_in(page, key)
    expect(page.locator("[aria-busy=false]")).to_be_visible()
    expect(page.get_by_text("Your conversations will be listed here.")).to_be_visible()
    server.call("DELETE", f"/api/admin/keys/{key[:ID_CHARS]}")
    module_of(page, "js/api.js", "(api) => void api.getJson('/api/models').catch(() => {})")  # it reloads
    expect(page.get_by_role("alert")).to_contain_text("no longer takes your key")
    assert page.evaluate("[localStorage.getItem('tokenring.key'), location.hash]") == [None, "#/usage"]


def test_the_keyboard_reaches_everything(page: Page):
    """The first tab stop skips to the content; a shortcut opens the help, Escape gives the focus back."""
    page.get_by_role("link", name="Usage").click()
    page.reload()
    expect(page).to_have_title("Usage · Tokenring")  # it is set with the shortcuts
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog")).to_contain_text("Ctrl+Shift+O")
    page.keyboard.press("Escape")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Control+Shift+S")
    expect(page.get_by_role("complementary")).to_be_hidden()


def test_the_conversations_lie_over_a_narrow_page(page: Page):
    """They take the focus, keep it from the page below, and give it back."""
    page.set_viewport_size(PHONE)
    button, side = page.get_by_role("button", name="Conversations"), page.get_by_role("complementary")
    expect(side).to_be_hidden()
    button.click()
    expect(side.get_by_role("link", name="New chat")).to_be_focused()
    expect(page.locator("main")).to_have_attribute("inert", "")
    page.keyboard.press("Escape")
    expect(side).to_be_hidden()
    expect(button).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_theme_is_kept_and_shown_before_anything_is_drawn(page: Page):
    """Dark on a light system."""
    page.get_by_role("button", name="Menu").click()
    page.get_by_label("Theme").select_option("dark")
    page.reload()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_a_server_that_goes_away_is_waited_for(context: BrowserContext, faults: Faults, tmp_path: Path):
    """Without keys there is no sign-in. The page says that the server is away, and goes on by itself."""
    faults.allow("ERR_CONNECTION_REFUSED")
    faults.allow("status of 503")
    faults.allow("another host")
    server = ConsoleServer(tmp_path)
    server.start()
    try:
        page = context.new_page()
        page.goto(server.url)
        assert pages_of(page) == ["Chat", "Usage", "Admin"]
        wait_until_read(page)
        banner = page.locator(".banner")
        server.stop(signal.SIGKILL)
        page.evaluate("window.dispatchEvent(new Event('online'))")  # look now, and not in 20 s
        expect(banner).to_contain_text("The server cannot be reached")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the list is read again
        expect(page.get_by_role("alert").filter(has_text="cannot be reached")).to_be_visible()
        assert axe(page) == []
        server.start()
        expect(banner).to_be_empty()
        expect(page.get_by_text("Your conversations will be listed here.")).to_be_visible()
    finally:
        server.stop(signal.SIGKILL)


def test_a_server_that_starts_is_waited_for(context: BrowserContext, server: ConsoleServer, faults: Faults):
    """The page says at which stage the start is, and signs in by itself when it is over."""
    faults.allow("status of 503")
    page = context.new_page()
    phase = {"status": "not_ready", "phase": "starting: loading the weights"}
    page.route("**/readyz", lambda route: route.fulfill(status=503, json=phase))
    page.route(
        "**/api/me", lambda route: route.fulfill(status=503, json={"error": {"code": "engine_not_ready"}})
    )
    page.add_init_script(f"localStorage.setItem('tokenring.key', '{server.key}')")
    page.goto(server.url)
    expect(page.locator(".banner")).to_have_text("The model is loading (loading the weights).")
    page.unroute_all()
    expect(page.locator(".banner")).to_be_empty()
    assert pages_of(page) == ["Chat", "Usage", "Admin"]


def test_a_view_that_fails_leaves_the_others(page: Page, server: ConsoleServer, faults: Faults):
    """It says so in its place, and can be tried again."""
    faults.allow("it broke")
    broken = "export function UsageView() { throw new Error('it broke'); }"
    page.route(
        "**/js/lists/usage.js", lambda route: route.fulfill(body=broken, content_type="text/javascript")
    )
    page.goto(f"{server.url}?sources#/usage")
    expect(page.get_by_role("alert")).to_contain_text("it broke")
    page.get_by_role("link", name="Admin").click()
    expect(page.get_by_role("heading", name="Admin")).to_be_visible()


INJECT = """() => {
    const box = document.createElement("div");
    box.innerHTML = "<img src='data:,' onerror='window.hit = 1'><img src='https://example.org/x.png'>";
    const script = Object.assign(document.createElement("script"), {textContent: "window.hit = 1"});
    document.body.append(box, script);
}"""


def test_an_injected_script_does_not_run(page: Page, faults: Faults):
    """Nor is a picture of another host asked for: the policy stops whatever got into the page."""
    faults.allow("Content Security Policy")
    faults.allow("another host: https://example.org/x.png")
    with page.expect_event("requestfailed", lambda request: "example.org" in request.url) as failed:
        page.evaluate(INJECT)
    assert failed.value.failure == "csp"
    assert page.evaluate("window.hit") is None


NONE = "\N{EN DASH}"
EVENTS = """({EventParser}, chunks) => {
    const parser = new EventParser();
    return chunks.flatMap((chunk) => parser.feed(chunk)).map(({id, data}) => [id, data]);
}"""


def test_a_stream_of_events_is_read_however_it_is_cut(page: Page):
    """Comments of a heartbeat have no blank line after them; an id stays until the next."""
    text = ': ping\nid: 1\ndata: {"a":\ndata: "é🎡"}\n\n: ping\r\nid: 2\r\ndata: [1]\r\n\r\n'
    text += "data: [DONE]\n\ndata: cut"
    for size in (1, 3, 1000):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        events = module_of(page, "js/api.js", EVENTS, chunks)
        assert events == [["1", {"a": "é🎡"}], ["2", [1]], ["2", "[DONE]"]]


def test_amounts_times_and_keys_are_written_for_people(page: Page):
    """Small amounts keep the digits that matter; what is missing is a dash; a key is cut out of a copy."""
    format_all = "(f) => [f.money(0), f.money(0.00634), f.money(1234.5), f.money(null), f.duration(0.35),"
    format_all += " f.duration(4.2), f.duration(185), f.duration(93600), f.bytes(1234567), f.number(12345)]"
    assert module_of(page, "js/format.js", format_all) == [
        *(
            "$0.00",
            "$0.0063",
            "$1,234.50",
            NONE,
            "350 ms",
            "4.2 s",
            "3 min 5 s",
            "1 d 2 h",
            "1.2 MB",
            "12,345",
        )
    ]
    copied = ["tr-a.b ", "KEY=tr-a.b", "export KEY='tr-a.b'", "Authorization: Bearer tr-a.b", "bearer tr-a.b"]
    clean = "(session, texts) => texts.map(session.cleanKey)"
    assert module_of(page, "js/session.js", clean, copied) == ["tr-a.b"] * 5


HIGHLIGHT = """({default: hljs}, [code, language]) => {
    const box = document.createElement("div");
    box.innerHTML = hljs.highlight(code, {language}).value;
    return [...box.querySelectorAll(".hljs-string")].map((part) => part.textContent);
}"""
CODE = {
    "rust": ("fn f<'a>(x: &'a str) -> char { 'x' }", ["'x'"]),
    "typescript": ("const f = (x: string) => 'it is' + `y`;", ["'it is'", "`y`"]),
    "sql": ("SELECT 'O''Brien' -- 'no'", ["'O''Brien'"]),
}


def test_our_short_grammars_find_the_strings(page: Page):
    """A lifetime of Rust is none, nor is what a comment has in quotes."""
    for language, (code, strings) in CODE.items():
        coloured = module_of(page, "vendor/highlight.js", HIGHLIGHT, [code, language])
        assert coloured == strings
