"""The chat in a browser: what is drawn of an answer, branches, images, tools, errors, keyboard, speed."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect

from tests.support.console import WAIT_S, Faults, axe, module_of
from tests.support.screens import HARM
from tests.support.speaking_server import QUICKLY, SLOWLY, SpeakingServer

COMPLETIONS = "**/api/chat/completions"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
LONG = " ".join(f"word{number}" for number in range(60))
MARKDOWN = [
    "# Title\n\nA *soft* and **hard** `code` line.\nAnd the next.\n\n---\n\nEnd",
    "- one\n- two\n  - nested\n  - more\n\n    text of it\n- three\n\n1. a\n2. b\n\nafter",
    "- [ ] open\n- [x] done\n- loose\n\n- item\n",
    "```python\ndef f(x):\n    return x  # <b>\n```\n\n~~~\nplain\n~~~\n\n````md\n```\ninner\n```\n````\n",
    "```js\nlet open = `fence",
    "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\n| 2 | **z** |\n\nafter <br> all",
    "> quote\n> - list in it\n>\n> ```sh\n> ls\n> ```\nlazy\n\nend",
    "Setext\n===\n\npara\n---\n\n    indented code\n\n* * *\n",
    "[late][ref] and ![image](https://other.example/x.png)\n\ntext\n\n[ref]: https://example.org 'T'\n",
    "مرحبا بالعالم **عريض**\n\n你好世界。`代码` 😀\n",
    "1. step\n\n   ```bash\n   echo hi\n   ```\n2. step\n\n10) other\n",
    "<div>\nraw <b>html</b>\n</div>\n\n&lt;escaped&gt; &amp; a<b>c</b>\n",
    "line  \nbreak\\\nhere https://example.org and www.example.org, a_b_c 2*3*4\n",
    "\n\n\n  leading\n\n\n\ntrailing   \n\n",
]
HOSTILE = (
    "<img src=x onerror=window.pwned=1> <script>window.pwned=1</script> [a](javascript:window.pwned=1) "
    "[b](data:text/html,x) [ok](https://example.org) ![p](https://other.example/p.png) "
    '<a href="javascript:pwned=1">c</a> <svg onload=window.pwned=1> <iframe src=//other.example></iframe> '
    "<style>*{display:none}</style> <form action=//other.example><input></form>"
)
WATCH_END = """() => { window.ended = new Promise((resolve) => {
    const answered = new MutationObserver(() => {
        if (document.querySelector(".answer[aria-busy=true]")) return;
        answered.disconnect();
        setTimeout(resolve, 500);
    });
    answered.observe(document.querySelector(".log"), { subtree: true, attributeFilter: ["aria-busy"] });
}); }"""
"""Notes the end of an answer. Looking all the time would cost the page more than the answer does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeakingServer]:
    """A server that answers a question with the question."""
    started = SpeakingServer(tmp_path_factory.mktemp("speaking"))
    yield started
    started.close()


PASTE = """(field, text) => {
    const clipboardData = new DataTransfer();
    clipboardData.setData("text/plain", text);
    field.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}"""


COPIED = """async ([text, waitMs]) => {
    const end = Date.now() + waitMs;
    for (;;) {
        const copied = (await navigator.clipboard.readText()).trim();
        if (copied.startsWith(text) || Date.now() > end) return copied;
        await new Promise(requestAnimationFrame);
    }
}"""
"""What was copied, once it is this or the time is over."""


def ask(page: Page, text: str) -> None:
    """Type a message and send it."""
    field = page.get_by_label("Message", exact=True)
    field.fill(text)
    field.press("Enter")


def answers(page: Page) -> Locator:
    """The answers that are drawn, oldest first."""
    return page.locator(".answer")


def wait_for_end(page: Page) -> None:
    """Until nothing is being answered."""
    expect(page.get_by_label("Send", exact=True)).to_be_visible()
    expect(page.locator(".answer[aria-busy=true]")).to_have_count(0)


def drawn(page: Page) -> list[str]:
    """The markup of all texts."""
    return page.locator(".md").evaluate_all("nodes => nodes.map((node) => node.innerHTML)")


def test_what_streamed_is_what_a_reload_draws(page: Page):
    """An answer with all kinds of blocks; it is drawn by the same code from the stored text."""
    ask(page, "\n\n".join(MARKDOWN[:4]))
    expect(page).to_have_url(re.compile("#/chat/conv_"))
    wait_for_end(page)
    before = drawn(page)
    assert "<h3" in before[0]
    assert "hljs-keyword" in before[0]
    page.reload()
    expect(page.locator(".md h3").first).to_be_visible()
    assert drawn(page) == before
    assert axe(page) == []


def test_a_page_without_tls_chats(page: Page):
    """From another machine over plain HTTP a browser has less of `crypto`."""
    page.add_init_script("delete Crypto.prototype.randomUUID")
    page.reload()
    ask(page, "without TLS")
    expect(answers(page)).to_contain_text("without TLS")
    wait_for_end(page)


def test_markdown_in_pieces_is_the_same_as_whole(page: Page):
    """Every text of the corpus, in pieces of 1, 3 and 17 characters, ends in the markup of the whole."""
    differing = module_of(
        page,
        "js/chat/markdown.js",
        """({ MarkdownView }, texts) => {
            const wrong = [];
            for (const text of texts) {
                const whole = document.createElement("div");
                new MarkdownView(whole).draw(text, true);
                for (const step of [1, 3, 17]) {
                    const element = document.createElement("div");
                    const view = new MarkdownView(element);
                    for (let end = 0; end < text.length; end += step) view.draw(text.slice(0, end), false);
                    view.draw(text, false);
                    if (!text.includes("]:") && element.textContent !== whole.textContent)
                        wrong.push([step, text, element.innerHTML, whole.innerHTML]);
                    view.draw(text, true);
                    if (element.innerHTML !== whole.innerHTML)
                        wrong.push([step, text, element.innerHTML, whole.innerHTML]);
                }
            }
            return wrong;
        }""",
        [*MARKDOWN, HOSTILE],
    )
    assert not differing, "\n".join(map(repr, differing))


def test_what_no_markdown_reader_can_nest_is_shown_as_it_is(page: Page):
    """A model that repeats a quote or a number for ever: its text is there, streamed and whole."""
    wrong = module_of(
        page,
        "js/chat/markdown.js",
        """({ MarkdownView }, texts) => texts.filter((text) => {
            const element = document.createElement("div");
            const view = new MarkdownView(element);
            const isShown = () => element.textContent === text;
            view.draw("**so**\\n\\n", false);
            view.draw(text.slice(0, -9), false);
            view.draw(text, false);
            const streamed = isShown();
            view.draw(text, true);
            const whole = isShown();
            view.draw("**short**", true);
            return !(streamed && whole && element.innerHTML.includes("<strong>short</strong>"));
        })""",
        ["> " * 20_000, "1. " * 20_000],
    )
    assert wrong == []


def test_settings_that_this_browser_keeps_wrongly_are_none(page: Page):
    """Written by another version or another program: the console works, and asks without them."""
    for kept in ("{", "null", '{"system": null, "temperature": 7, "model": ["x"]}'):
        page.evaluate("kept => localStorage.setItem('tokenring.chat', kept)", kept)
        page.reload()
        ask(page, f"with {len(kept)}")
        expect(answers(page)).to_contain_text(f"with {len(kept)}")
        wait_for_end(page)
        page.goto(page.url.partition("#")[0])


def test_markup_in_answers_questions_and_titles_runs_nowhere(page: Page):
    """Scripts, handlers, frames and styles are text; a link leads to the web only, and says nothing of us."""
    ask(page, HOSTILE)
    wait_for_end(page)
    page.reload()
    expect(answers(page)).to_contain_text("<script>")
    text = page.locator(".md")
    assert text.locator("img, script, svg, iframe, style, form, [onerror], [onload]").count() == 0
    links = text.locator("a").evaluate_all("nodes => nodes.map(({ href, rel }) => [href, rel])")
    assert [href for href, _ in links] == ["https://example.org/", "https://other.example/p.png"]
    assert {rel for _, rel in links} == {"noopener noreferrer nofollow"}
    assert page.evaluate("window.pwned") is None


def test_regenerated_and_edited_turns_are_branches(page: Page):
    """Arrows lead from version to version; a reload shows the newest."""
    ask(page, "first question")
    wait_for_end(page)
    page.get_by_label("Regenerate").click()
    expect(page.locator(".answer .siblings")).to_contain_text("2/2")
    wait_for_end(page)
    page.get_by_label("Previous version").click()
    expect(page.locator(".answer .siblings")).to_contain_text("1/2")
    page.locator(".asked").hover()
    page.get_by_label("Edit", exact=True).click()
    page.get_by_label("Edit your message").fill("second question")
    page.keyboard.press("Enter")
    expect(page.locator(".asked .siblings")).to_contain_text("2/2")
    wait_for_end(page)
    expect(answers(page)).to_contain_text("second question")
    page.locator(".asked").hover()
    page.get_by_label("Previous version").click()
    expect(answers(page)).to_contain_text("first question")
    page.reload()
    expect(answers(page)).to_contain_text("second question")
    ask(page, "third question")
    wait_for_end(page)
    expect(answers(page)).to_have_count(2)


def test_a_cut_answer_is_continued_in_place(page: Page, server: SpeakingServer):
    """The model goes on behind the text that there is; both are drawn as one answer, and stay so."""
    page.get_by_label("Settings of the chat").click()
    page.get_by_label("Tokens of an answer").fill("20")
    page.get_by_label("Settings of the chat").click()
    ask(page, LONG)
    wait_for_end(page)
    expect(page.locator(".ending")).to_contain_text("token limit")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_contain_text("word39")
    wait_for_end(page)
    assert [m["role"] for m in server.engine.prompts[-1]] == ["user", "assistant"]
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_contain_text("word59")
    wait_for_end(page)
    assert [m["role"] for m in server.engine.prompts[-1]] == ["user", "assistant"]
    assert page.locator(".md").inner_text() == LONG
    page.reload()
    expect(page.locator(".md")).to_have_text(LONG)


def test_escape_stops_an_answer(page: Page, server: SpeakingServer):
    """The engine ends, and the text so far stays."""
    server.engine.aborts.clear()
    with server.holding():
        ask(page, LONG)
        expect(page.locator(".md")).to_contain_text("word3")
        page.keyboard.press("Escape")
        expect(page.locator(".ending")).to_contain_text("Stopped")
    assert server.engine.aborts
    page.reload()
    expect(page.locator(".ending")).to_contain_text("Stopped")
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_a_halted_answer_says_so(page: Page):
    """The text before the harm, and who stopped it; also later."""
    ask(page, " ".join([*(f"fine{number}" for number in range(40)), HARM, LONG]))
    wait_for_end(page)
    expect(page.locator(".ending")).to_contain_text("safety policy")
    page.reload()
    expect(page.locator(".ending")).to_contain_text("safety policy")
    expect(answers(page)).not_to_contain_text(HARM)


def test_thoughts_are_folded_and_tools_are_shown(page: Page):
    """Both while they stream and after a reload."""
    ask(page, "think and call")
    wait_for_end(page)
    for _ in range(2):
        expect(page.locator(".tool")).to_contain_text('get_weather {"city": "Paris"}')
        expect(page.get_by_text("thinking about it")).to_be_hidden()
        page.get_by_text("Thoughts").click()
        expect(page.get_by_text("thinking about it")).to_be_visible()
        page.reload()


def with_vision(route: Route) -> None:
    """The list of models, as one that sees would be in it."""
    answer = route.fetch()
    body = answer.json()
    body["data"][0]["capabilities"].append("vision")
    route.fulfill(response=answer, json=body)


def test_an_image_goes_with_the_message(page: Page, faults: Faults):
    """A model that sees gets it; of one that does not the page says so, and asks nothing."""
    image = {"name": "a.png", "mimeType": "image/png", "buffer": PIXEL}
    page.locator("input[type=file]").set_input_files(image)
    expect(page.get_by_text("reads no images")).to_be_visible()
    expect(page.locator(".thumb")).to_have_count(0)
    page.route("**/api/models", with_vision)
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("scripted")
    page.locator("input[type=file]").set_input_files(image)
    expect(page.locator(".thumb")).to_have_count(1)
    faults.allow("400")
    with page.expect_request(COMPLETIONS) as sent:
        ask(page, "what is it?")
    parts = sent.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url"]
    assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,")
    expect(page.get_by_role("alert")).to_contain_text("image")
    expect(page.locator(".asked img")).to_be_visible()


def test_a_refusal_is_counted_down_and_asked_again(page: Page, faults: Faults):
    """429 with Retry-After; the same question is sent at a click, once it is time."""
    refusal = {"error": {"message": "Too many tokens.", "type": "tokens", "code": "rate_limit_exceeded"}}
    page.route(
        COMPLETIONS,
        lambda route: route.fulfill(status=429, json=refusal, headers={"Retry-After": "600"}),
        times=1,
    )
    faults.allow("429")
    page.clock.install()
    ask(page, "again, please")
    again = page.get_by_role("button", name="Try again")
    expect(again).to_be_disabled()
    expect(page.get_by_role("alert")).to_contain_text("Too many tokens.")
    page.clock.fast_forward(600_000)
    again.click()
    expect(answers(page)).to_contain_text("again, please")
    wait_for_end(page)
    expect(page.locator(".asked")).to_have_count(1)


def test_the_keyboard_writes_sends_and_edits(page: Page):
    """Shift+Enter is a new line, Enter of a composed word is not sent, a draft survives a reload."""
    field = page.get_by_label("Message", exact=True)
    field.fill("one")
    field.press("Shift+Enter")
    field.press_sequentially("two")
    expect(field).to_have_value("one\ntwo")
    field.evaluate(
        """node => node.dispatchEvent(
            new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true }))"""
    )
    page.reload()
    expect(field).to_have_value("one\ntwo")
    field.press("Enter")
    expect(field).to_have_value("")
    expect(page.locator(".asked p")).to_have_text("one\ntwo")
    wait_for_end(page)
    field.press("ArrowUp")
    expect(page.get_by_label("Edit your message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Edit your message")).to_have_count(0)


def test_a_refused_question_can_be_changed(page: Page, faults: Faults):
    """What was refused is in no store: it is edited in place, and there is one branch."""
    refusal = {"error": {"message": "No.", "type": "invalid_request_error", "code": "content_filter"}}
    page.route(COMPLETIONS, lambda route: route.fulfill(status=400, json=refusal), times=1)
    faults.allow("400")
    ask(page, "something refused")
    expect(page.get_by_role("alert")).to_contain_text("No.")
    page.locator(".asked").hover()
    page.get_by_label("Edit", exact=True).click()
    page.get_by_label("Edit your message").fill("something else")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("something else")
    wait_for_end(page)
    expect(page.locator(".asked")).to_have_count(1)
    expect(page.locator(".siblings")).to_have_count(0)


def test_text_and_code_are_copied(page: Page, context: BrowserContext):
    """An answer as the Markdown that it is, code without its fence."""
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, MARKDOWN[3][:40])
    wait_for_end(page)
    for button, text in (
        (answers(page).get_by_label("Copy", exact=True), MARKDOWN[3][:40].strip()),
        (page.get_by_role("button", name="Copy").filter(has_text="Copy"), "def f(x):\n    return x"),
    ):
        button.click()
        assert page.evaluate(COPIED, [text, WAIT_S * 1000]).startswith(text)


def test_a_system_prompt_begins_a_new_chat(page: Page, server: SpeakingServer):
    """It is sent, and shown above the first question."""
    page.get_by_label("Settings of the chat").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Settings of the chat").click()
    ask(page, "hello")
    wait_for_end(page)
    assert server.engine.prompts[-1][0] == {"role": "system", "content": "Be brief."}
    expect(page.locator(".aside")).to_contain_text("System prompt")


def test_a_screen_reader_hears_sentences(page: Page):
    """Not tokens: the list is silent, and a region of its own says whole sentences."""
    page.evaluate(
        """() => {
            const region = document.querySelector(".chat > [aria-live]");
            window.spoken = [];
            new MutationObserver(() => window.spoken.push(region.textContent))
                .observe(region, { childList: true, characterData: true, subtree: true });
        }"""
    )
    ask(page, f"{SLOWLY} one two. Three four! Five")
    wait_for_end(page)
    expect(page.locator(".chat > [aria-live]")).to_have_text(re.compile("Answer ended"))
    spoken = [text for text in page.evaluate("window.spoken") if text]
    assert "".join(spoken).replace(" Answer ended.", "") == f"{SLOWLY} one two. Three four! Five"
    assert len(spoken) <= 3
    assert all(text.endswith((". ", "! ", "Answer ended.")) for text in spoken)
    assert page.get_by_role("log").get_attribute("aria-live") == "off"


def long_chat(server: SpeakingServer, messages: int) -> str:
    """The id of a conversation of so many messages, written into the store."""
    first = server.call(
        "POST",
        "/api/chat/completions",
        {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]},
    )
    conversation_id = str(first["conversation_id"])
    path = server.served.runtime.settings.data_dir / "tokenring.db"
    with sqlite3.connect(path, timeout=20) as store:
        (seq,) = store.execute("SELECT seq FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
        (last,) = store.execute("SELECT max(seq) FROM messages").fetchone()
        text = f"{LONG}\n\n**bold**\n\n{LONG}".replace(" ", ",")  # the engine counts words
        store.executemany(
            "INSERT INTO messages (seq, id, conversation_seq, parent_seq, role, text, created_at_us, status,"
            " choice) VALUES (?, ?, ?, ?, ?, ?, 0, 'complete', 0)",
            [
                (last + n, f"msg_long_{n}", seq, last + n - 1, ("assistant", "user")[n % 2], text)
                for n in range(1, messages)
            ],
        )
    return conversation_id


def test_200_tokens_a_second_into_10_000_messages(page: Page, server: SpeakingServer, browser: Browser):
    """No task takes 50 ms of processor time while the answer is drawn, and few messages are in the page."""
    conversation_id = long_chat(server, 9_990)
    page.goto(f"{server.url}#/chat/{conversation_id}")
    expect(page.locator("article").last).to_contain_text("word59")
    text = "\n\n".join(MARKDOWN[:3] * 6)
    with server.holding():
        ask(page, f"{QUICKLY}\n\n{text}")
        expect(answers(page).last).to_contain_text("Title")
        browser.start_tracing(page=page, categories=["toplevel"])
        page.evaluate(WATCH_END)
    page.evaluate("window.ended")
    trace = json.loads(browser.stop_tracing())["traceEvents"]
    tasks_ms = [
        event["tdur"] / 1000 for event in trace if event["name"].endswith("RunTask") and "tdur" in event
    ]
    assert len(tasks_ms) > 100
    assert max(tasks_ms) < 50
    assert page.locator("article").count() < 60


def test_what_is_too_long_is_edited(page: Page, faults: Faults):
    """Asking again would not help: the question goes back to where it was written, to be cut."""
    refusal = {"error": {"message": "Too long.", "code": "context_length_exceeded"}}
    page.route(COMPLETIONS, lambda route: route.fulfill(status=400, json=refusal), times=1)
    faults.allow("400")
    ask(page, "a long question")
    page.get_by_role("alert").get_by_role("button", name="Edit").click()
    field = page.get_by_label("Message", exact=True)
    expect(field).to_have_value("a long question")
    expect(field).to_be_focused()
    expect(page.locator(".asked")).to_have_count(0)
    expect(page.get_by_role("button", name="Try again")).to_have_count(0)


def test_a_paste_that_no_model_here_reads_is_refused(page: Page):
    """Before the browser inserts it, which would take minutes; nothing is kept as a draft."""
    expect(page.get_by_label("Model", exact=True)).to_have_value("scripted")
    field = page.get_by_label("Message", exact=True)
    field.evaluate(PASTE, "word word word\n" * 600_000)
    expect(page.get_by_role("alert")).to_contain_text("This text is too long: scripted reads")
    expect(field).to_have_value("")
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('draft'))") == []


def test_a_large_paste_is_sent_with_the_question_and_not_put_into_the_field(page: Page, faults: Faults):
    """It goes before what is typed, can be removed, and comes back beside the field when it was refused."""
    field, chips = page.get_by_label("Message", exact=True), page.locator(".pasted")
    pasted = ("word word word\n" * 10_000).rstrip()
    refusal = {"error": {"message": "Too long.", "code": "context_length_exceeded"}}
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.post_data_json["messages"][-1]["content"])
        route.fulfill(status=400, json=refusal)

    page.route(COMPLETIONS, refuse)
    faults.allow("400")
    field.evaluate(PASTE, pasted)
    field.evaluate(PASTE, pasted)
    expect(chips).to_have_text([re.compile("^150K pasted characters")] * 2)
    page.get_by_role("button", name="Remove pasted text 2").click()
    expect(chips).to_have_count(1)
    expect(field).to_have_value("")
    ask(page, "What is it?")
    page.get_by_role("alert").get_by_role("button", name="Edit").click()
    assert asked == [f"{pasted}\n\nWhat is it?"]
    expect(chips).to_have_count(1)
    expect(field).to_have_value("")
    assert axe(page) == []
    page.get_by_label("Send", exact=True).click()
    page.get_by_role("alert").get_by_role("button", name="Edit").wait_for()
    assert asked[1] == asked[0]


def test_what_is_said_of_an_answer_stays_over_a_reload(page: Page):
    """Its model, its time, its tokens."""
    ask(page, "three words here")
    wait_for_end(page)
    facts = page.locator(".answer .facts")
    expect(facts).to_have_text(re.compile(r"^scripted · .+ · \d+ in, \d+ out"))
    before = facts.inner_text()
    page.reload()
    expect(facts).to_have_text(before)


def hold(page: Page, addresses: str) -> Callable[[], None]:
    """Requests to these addresses go nowhere until the function is called that is returned."""
    held: list[Route] = []
    goes_on = threading.Event()
    page.route(addresses, lambda route: route.continue_() if goes_on.is_set() else held.append(route))

    def let_go() -> None:
        goes_on.set()
        for route in held:
            route.continue_()

    return let_go


def test_a_question_waits_for_the_list_of_models(page: Page):
    """Who is quicker than the network is no reason for an error."""
    let_go = hold(page, "**/api/models")
    page.reload()
    ask(page, "quick question")
    expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    let_go()
    expect(answers(page)).to_contain_text("quick question")
    wait_for_end(page)


def test_a_question_waits_for_the_conversation_in_which_it_is_asked(page: Page):
    """Sent before the messages are there, it would begin another branch at the top."""
    ask(page, "first question")
    wait_for_end(page)
    let_go = hold(page, "**/api/conversations/*")
    page.reload()
    ask(page, "second question")
    expect(page.get_by_label("Send", exact=True)).to_be_disabled()
    let_go()
    expect(answers(page)).to_contain_text("first question")
    page.get_by_label("Send", exact=True).click()
    expect(answers(page).last).to_contain_text("second question")
    wait_for_end(page)
    expect(page.locator(".asked")).to_have_count(2)
    expect(page.locator(".siblings")).to_have_count(0)


def test_a_turn_of_another_tab_is_waited_for(page: Page, faults: Faults):
    """The message says so, and the question is kept."""
    ask(page, "first question")
    wait_for_end(page)
    refusal = {"error": {"message": "Busy.", "code": "conversation_busy"}}
    page.route(COMPLETIONS, lambda route: route.fulfill(status=409, json=refusal), times=1)
    faults.allow("409")
    ask(page, "second question")
    expect(page.get_by_role("alert")).to_contain_text("is being answered in another tab; send again")
    expect(page.get_by_label("Message", exact=True)).to_have_value("second question")
    box, composer = page.locator(".notices").bounding_box(), page.locator(".composer").bounding_box()
    assert box is not None
    assert composer is not None
    assert box["y"] + box["height"] <= composer["y"]
    page.get_by_role("link", name="Usage").click()
    expect(page.locator(".notice")).to_have_count(0)
