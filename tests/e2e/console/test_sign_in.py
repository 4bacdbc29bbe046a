"""Signing in as a person in the browser: at a certified OpenID Connect provider, and at a proxy."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.support.console import ConsoleServer, Faults, axe
from tests.support.oidc_issuer import PROVIDER_SETTINGS, certified_provider, reserved_port

BUTTON = "Sign in with 127.0.0.1:"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The provider's port, also while there is no provider."""
    with reserved_port() as reserved:
        yield reserved


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[ConsoleServer]:
    """A server at which people sign in."""
    settings = {"oidc_issuer": f"http://127.0.0.1:{port}", "api_key": "root", **PROVIDER_SETTINGS}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    proxy = ["--trusted-proxies", "127.0.0.1", "--proxy-user-header", "X-Forwarded-Email"]
    started = ConsoleServer(tmp_path_factory.mktemp("console"), *flags, *proxy)
    try:
        started.start()
        started.key = "root"
        yield started
    finally:
        started.stop(signal.SIGKILL)


@pytest.fixture(autouse=True)
def without_a_key(faults: Faults) -> None:
    """Each page first asks who it is, and the browser notes that nobody is."""
    faults.allow("401 (Unauthorized)")


@pytest.fixture
def provider(server: ConsoleServer, port: int, faults: Faults) -> Iterator[str]:
    """The provider; its own pages may do what ours may not."""
    with certified_provider(port, server.url) as url:
        for text in (url, "fonts.googleapis.com", "ERR_NAME_NOT_RESOLVED", "404 (Not Found)"):
            faults.allow(text)
        yield url


def sign_in(page: Page, login: str) -> None:
    """Press the button, and fill the provider's two pages in."""
    page.get_by_role("button", name=BUTTON).click()
    page.get_by_placeholder("Enter any login").fill(login)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


def test_a_person_signs_in_and_returns_to_the_view_that_was_asked_for(
    context: BrowserContext, server: ConsoleServer, provider: str
):
    """Without a trace of the code in the address; a reload keeps them signed in, and another tab is too."""
    page = context.new_page()
    page.goto(f"{server.url}#/usage")
    expect(page.get_by_role("button", name=BUTTON)).to_be_enabled()
    assert axe(page) == []
    sign_in(page, "安妮")
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    assert page.url == f"{server.url}#/usage"
    page.reload()
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    expect(page.get_by_role("link", name="Admin")).to_have_count(0)
    other = context.new_page()
    other.goto(server.url)
    expect(other.get_by_role("navigation", name="Pages")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_sign_in_that_did_not_begin_here_is_refused(
    context: BrowserContext, server: ConsoleServer, provider: str
):
    """A link with somebody's code signs nobody in; what the provider says of a refusal is shown as text."""
    page = context.new_page()
    page.goto(f"{server.url}?code=evil&state=evil")
    expect(page.get_by_role("alert").filter(has_text="did not begin in this tab")).to_be_visible()
    assert page.url == server.url
    page.get_by_role("button", name=BUTTON).click()
    page.wait_for_url(f"{provider}/**")
    page.goto(server.url)
    begun = page.evaluate("JSON.parse(sessionStorage.getItem('tokenring.sign-in'))")
    page.goto(f"{server.url}?error=access_denied&error_description=<b>no</b>&state={begun['state']}")
    expect(page.get_by_role("alert").filter(has_text="The sign-in was ended: <b>no</b>")).to_be_visible()


def test_a_code_that_the_provider_refuses_is_explained(
    context: BrowserContext, server: ConsoleServer, provider: str, faults: Faults
):
    """The server's words are shown, and the sign-in can begin again."""
    faults.allow("403")
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("button", name=BUTTON).click()
    page.wait_for_url(f"{provider}/**")
    page.goto(server.url)
    begun = page.evaluate("JSON.parse(sessionStorage.getItem('tokenring.sign-in'))")
    page.goto(f"{server.url}?code=forged&state={begun['state']}")
    expect(page.get_by_role("alert").filter(has_text="refuses the code")).to_be_visible()
    expect(page.get_by_role("button", name=BUTTON)).to_be_enabled()


def test_an_issuer_that_is_away_leaves_keys(context: BrowserContext, server: ConsoleServer, port: int):
    """The button says so, and a key signs in."""
    page = context.new_page()
    page.route(
        "**/api/sign-in",
        lambda route: route.fulfill(
            json={"oidc": {"issuer": f"http://127.0.0.1:{port}", "authorization_endpoint": None}}
        ),
    )
    page.goto(server.url)
    expect(page.get_by_text("cannot be reached now")).to_be_visible()
    expect(page.get_by_role("button", name=BUTTON)).to_be_disabled()
    page.get_by_label("API key").fill("root")
    page.get_by_role("button", name="Sign in", exact=True).click()
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()


def test_whom_a_proxy_has_signed_in_needs_no_key(context: BrowserContext, server: ConsoleServer):
    """The console opens at once; who signed out there may continue."""
    context.set_extra_http_headers({"X-Forwarded-Email": "ann@example.org"})
    page = context.new_page()
    page.goto(server.url)
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
