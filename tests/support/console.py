"""The console in a browser: a server process, the faults of its pages, rules of accessibility."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Page, expect

from tests.support.held_answers import HOLD
from tests.support.servers import ROOT

WAIT_S = 30.0
"""The longest that a browser or a server may take for anything here."""


class ConsoleServer:
    """`python -m app serve` with the scripted engine; it can be stopped, and started on its port and data."""

    MODULE = "app"

    def __init__(
        self, folder: Path, *flags: str, script: str = "rate=200,tokens=40", start_s: float = WAIT_S
    ) -> None:
        self.folder = folder
        self._start_s = start_s
        self.flags = ["--engine", "scripted", "--scripted", script, "--safety", "off", *flags]
        self.port = 0
        self.key = ""
        """The admin key that requests and the fixture `page` use; empty while no key is needed."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the console."""
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Start it, and wait until it takes requests."""
        command = [
            sys.executable,
            "-m",
            self.MODULE,
            "serve",
            "--port",
            str(self.port),
            "--log-format",
            "json",
        ]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENRING_")}
        log = self.folder / f"{time.monotonic_ns()}.log"
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(self.folder / "data"), *self.flags],
                cwd=self.folder,
                env={**environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        end_s = time.monotonic() + self._start_s
        while not _logged(log, "ready"):
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.02)
        [listening] = _logged(log, "listening")
        self.port = int(listening["url"].rpartition(":")[2])

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Stop it as an administrator does, or by another signal."""
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(WAIT_S)
            self._process = None

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """The JSON that answers a request, with the server's admin key or another; fails on an error."""
        text = self.key if key is None else key
        headers = {"authorization": f"Bearer {text}"} if text else {}
        answer = httpx.request(
            method, self.url.rstrip("/") + path, json=body, headers=headers, timeout=WAIT_S
        )
        assert answer.is_success, (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def new_key(self, name: str, **terms: Any) -> str:
        """A new key's text. The first key ends open mode, so it should be an admin's."""
        return str(self.call("POST", "/api/admin/keys", {"name": name, **terms})["key"])


class HoldingServer(ConsoleServer):
    """A server whose answers can be held in their middle (tests.support.held_answers)."""

    MODULE = "tests.support.held_answers"

    def hold(self) -> None:
        """From now on an answer stops behind its first tokens, also after a restart."""
        (self.folder / HOLD).touch()

    def release(self) -> None:
        """All answers go on."""
        (self.folder / HOLD).unlink(missing_ok=True)


def _logged(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


class Faults:
    """What no page may do: errors in the browser's console, and requests to another host."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._allowed: list[str] = []

    def allow(self, text: str) -> None:
        """Let the test provoke faults whose text has this in it."""
        self._allowed.append(text)

    def watch(self, page: Page, url: str) -> None:
        """Note the faults of a page, for `check`."""
        page.on("console", lambda m: self.seen.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: self.seen.append(f"error: {error}"))
        page.on("request", lambda request: self._check_host(request.url, url))

    def _check_host(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:", "blob:")):
            self.seen.append(f"request to another host: {asked}")

    def check(self) -> None:
        """Fail with the faults that the test did not allow."""
        faults = [f for f in self.seen if not any(text in f for text in self._allowed)]
        assert not faults, faults


def open_signed_in(page: Page, url: str, key: str) -> None:
    """Open the console as somebody who told this browser their key earlier."""
    set_key = "sessionStorage.opened ??= localStorage['tokenring.key'] = "  # once: a sign-out is kept
    page.add_init_script(set_key + json.dumps(key))
    page.goto(url)
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()


def axe(page: Page) -> list[str]:
    """The violations of accessibility rules on the page as it is, one line each; there should be none."""
    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {node['html'][:120]} {node['failureSummary']}" for v in found for node in v["nodes"]]


def module_of(page: Page, path: str, expression: str, argument: Any = None) -> Any:
    """The value of a JavaScript function of `(module, argument)` over a module of the console's sources.

    On the page of `?sources` it is the page's own module, with its state; elsewhere it is loaded anew.
    """
    script = f"""async (argument) => {{
        const theme = document.querySelector("script[src$='theme.js']").src;
        const module = await import(new URL("{path}", theme).href);
        return await ({expression})(module, argument);
    }}"""
    return page.evaluate(script, argument)
