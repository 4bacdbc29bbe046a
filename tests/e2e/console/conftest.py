"""The console in a real browser: one server process and one browser a module, a fresh profile a test."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.console import WAIT_S, ConsoleServer, Faults, open_signed_in

CHROMIUM = shutil.which("chromium")
expect.set_options(timeout=WAIT_S * 1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Chromium the tests of this folder are skipped."""
    for item in items:
        if CHROMIUM is None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="chromium is not installed (scripts/setup --dev)"))


@pytest.fixture(scope="module")
def server_flags() -> tuple[str, ...]:
    """Flags of the module's server; a module may override this."""
    return ()


@pytest.fixture(scope="module")
def server_script() -> str:
    """What the module's engine answers; a module may override this."""
    return "rate=200,tokens=40"


@pytest.fixture(scope="module")
def server_type() -> type[ConsoleServer]:
    """The kind of the module's server; a module may override this."""
    return ConsoleServer


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    server_type: type[ConsoleServer],
    server_flags: tuple[str, ...],
    server_script: str,
) -> Iterator[ConsoleServer]:
    """The module's server, with an admin key."""
    started = server_type(tmp_path_factory.mktemp("console"), *server_flags, script=server_script)
    try:
        started.start()
        started.key = started.new_key("root", scope="admin")
        yield started
    finally:
        started.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def faults() -> Iterator[Faults]:
    """The faults of all pages of the test; they fail it at its end."""
    noted = Faults()
    yield noted
    noted.check()


@pytest.fixture
def context(browser: Browser, faults: Faults, server: ConsoleServer) -> Iterator[BrowserContext]:
    """A fresh profile; its pages are watched for faults. `new_page` opens one without a key."""
    fresh = browser.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
    fresh.set_default_timeout(WAIT_S * 1000)
    fresh.on("page", lambda page: faults.watch(page, server.url))
    yield fresh
    fresh.close()


@pytest.fixture
def page(context: BrowserContext, server: ConsoleServer) -> Page:
    """A page of the console, signed in with the server's admin key."""
    opened = context.new_page()
    open_signed_in(opened, server.url, server.key)
    return opened
