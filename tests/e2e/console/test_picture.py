"""The pictures of the README: the console when the server was restarted in the middle of an answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from tests.support.console import ConsoleServer
from tests.support.servers import ROOT

MAX_BYTES = 120_000
START_S = 900.0
QUESTIONS = ("What is Tokenring?", "How do I pick up a stream?")
BEGUN = "document.querySelectorAll('.md')[1]?.textContent.length > 12"

pytestmark = [
    pytest.mark.timeout(2 * START_S + 300),
    pytest.mark.skipif(
        "CONSOLE_PICTURES" not in os.environ, reason="writes docs/pictures; CONSOLE_PICTURES=1 asks for it"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """Real SGLang and the built-in model, stopped without a chance to finish what runs."""
    started = ConsoleServer(tmp_path_factory.mktemp("pictures"), start_s=START_S)
    started.flags = ["--drain-timeout-s", "0"]
    try:
        started.start()
        yield started
    finally:
        started.stop(signal.SIGKILL)


def test_the_picture_is_of_an_answer_that_resumes(browser: Browser, server: ConsoleServer):
    """The page keeps the question, and says at which event the answer went on."""
    page = browser.new_page(viewport={"width": 1120, "height": 640}, reduced_motion="reduce")
    page.goto(server.url)
    field = page.get_by_label("Message", exact=True)
    for question in QUESTIONS:
        expect(page.get_by_label("Send", exact=True)).to_be_visible(timeout=60_000)
        field.fill(question)
        field.press("Enter")
        expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    page.wait_for_function(BEGUN)  # the built-in model has written all of it within half a second
    server.stop(signal.SIGTERM)
    server.start()
    expect(page.locator(".resumed")).to_be_visible(timeout=60_000)
    expect(page.get_by_label("Send", exact=True)).to_be_visible(timeout=60_000)
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        path = ROOT / f"docs/pictures/console-{scheme}.png"
        page.screenshot(path=path)
        assert path.stat().st_size <= MAX_BYTES
