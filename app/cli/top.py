"""`tokenring top`: the live requests of a running server, refreshed on a terminal, else printed once."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app import settings
from app.cli import flags, tables
from app.cli.flags import Commands, command, flag
from app.settings import SettingsError

if TYPE_CHECKING:
    from rich.console import Group

EXIT_OK = 0
TIMEOUT_S = 10.0
MIN_INTERVAL_S = 0.2
_LIMIT = 100
_HEADS = (
    "id", "key", "model", "phase", "for", "age", "place", "in", "cached", "out", "tok/s", "readers", "note",
)  # fmt: skip
_WORDS = 4
"""Columns that hold words; the others hold numbers, but the last."""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `top` to the parser of the command line."""
    top = command(
        commands, "top", "show the live requests of a running server", run, flags.common(data_dir=False)
    )
    flag(top, "--url", "address of the server (default: http://127.0.0.1 and the port of the settings)")
    flag(top, "--once", "print once and end, as without a terminal", bool)
    flag(top, "--interval-s", "seconds between two looks (default: 2)", _interval_s, "SECONDS", default=2.0)


def _interval_s(text: str) -> float:
    """Seconds. Raises ArgumentTypeError."""
    try:
        interval_s = float(text)
    except ValueError:
        interval_s = 0.0
    if not MIN_INTERVAL_S <= interval_s <= 3600:
        raise argparse.ArgumentTypeError(f"expected {MIN_INTERVAL_S:g} to 3600, got {text!r}")
    return interval_s


def run(args: argparse.Namespace) -> int:
    """Show the requests until Ctrl-C, or once. Raises SettingsError."""
    server = Server(args.url, settings.load({}, os.environ, args.config))
    view = server.look()
    if args.json:
        print(json.dumps(view))
    elif args.once or not sys.stdout.isatty():
        print(f"{_summary(view)}\n\n{tables.text(_HEADS, _rows(view), left=_WORDS)}")
    else:
        _refresh(server, view, args.interval_s)
    return EXIT_OK


class Server:
    """A running server, as an admin key sees it."""

    def __init__(self, url: str | None, in_force: settings.Settings) -> None:
        """The server at `url`, or the one of these settings. Raises SettingsError."""
        parts = urlsplit(url or f"http://127.0.0.1:{in_force.port}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise SettingsError(f"--url: expected an address as http://127.0.0.1:8000, got {url!r}")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._headers = {"Authorization": f"Bearer {in_force.api_key or 'none'}"}

    def look(self) -> dict[str, Any]:
        """The load, and the live requests. Raises SettingsError where the server does not tell."""
        live, requests = (self._get(f"/api/admin/{name}") for name in ("live", f"requests?limit={_LIMIT}"))
        return {"object": "top", "url": self.url, "live": live, "requests": requests}

    def _get(self, path: str) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException) as exc:
            why = str(exc) or type(exc).__name__
            raise SettingsError(
                f"no server answers at {self.url} ({why}); start one, or give its --url"
            ) from None
        except ValueError:
            raise SettingsError(
                f"what answers at {self.url} is no Tokenring server, or a proxy in front"
            ) from None
        finally:
            connection.close()
        if response.status != 200 or not isinstance(body, dict):
            raise SettingsError(_refusal(self.url, response.status, body))
        return body


def _refusal(url: str, status: int, body: Any) -> str:
    if status in (401, 403):
        return (
            f"{url} wants an admin key: set TOKENRING_API_KEY to one (`tokenring keys create --scope admin`)"
        )
    if status == 404:
        return f"{url} has no live requests: it is no Tokenring server, or an older one"
    error = body.get("error") if isinstance(body, dict) else None
    said = error.get("message", "") if isinstance(error, dict) else ""
    return f"{url} answers {status} {said}".strip()


def _refresh(server: Server, view: dict[str, Any], interval_s: float) -> None:
    """Show the requests again and again, until Ctrl-C or SIGTERM; then the terminal is as it was."""
    from rich.live import Live

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lost = ""
    try:
        with Live(_screen(view, lost), screen=True, auto_refresh=False) as live:
            while True:
                live.update(_screen(view, lost), refresh=True)
                time.sleep(interval_s)
                try:
                    view, lost = server.look(), ""
                except SettingsError as error:  # it may be back soon: restarts are no end of the streams
                    lost = f"{error}; trying again"
    except KeyboardInterrupt:
        return


def _screen(view: Mapping[str, Any], lost: str) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for number, head in enumerate(_HEADS):
        is_word = number < _WORDS or head == "note"
        table.add_column(
            Text(head), justify="left" if is_word else "right", no_wrap=True, overflow="ellipsis"
        )
    for row in _rows(view):
        table.add_row(*map(Text, row))
    style = "bold red" if lost else ""
    return Group(Text(lost or _summary(view), style=style), Text(), table)


def _summary(view: Mapping[str, Any]) -> str:
    """The server's state in a few lines."""
    live, requests = view["live"], view["requests"]
    samples = live["samples"]
    rate = f"{samples[-1]['tokens_per_s']:,.0f} tokens/s" if samples else ""
    degraded = live["degraded"]
    mode = "" if degraded is None or degraded["step"] == "normal" else f"degraded: {degraded['step']}"
    restarts = live["engine"]["restarts"]
    again = f"{restarts} restarts of the engine" if restarts else ""
    lines = [_joined(view["url"], live["state"], f"{requests['total']} live", rate, mode, again)]
    for model in live["models"]:
        kv = model["kv"]
        share = 100 * kv["used_tokens"] / max(kv["max_tokens"], 1)
        queued = [f"{t} {q['requests']}" for t, q in model["queued"].items() if q["requests"]]
        lines.append(
            _joined(
                model["model"] if model["ready"] else f"{model['model']} (not ready)",
                f"{model['running']} running",
                f"waiting: {', '.join(queued) or 'none'}",
                f"KV {share:.0f}% of {kv['max_tokens']:,}",
                _spread("TTFT", model["ttft_s"], 1, "s"),
                _spread("TPOT", model["tpot_s"], 1000, "ms"),
                "" if model["hit_rate"] is None else f"cache {100 * model['hit_rate']:.0f}%",
            )
        )
    if requests["has_more"]:
        lines.append(f"The oldest {len(requests['data'])} of {requests['total']}:")
    return "\n".join(lines)


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _spread(name: str, percentiles: Mapping[str, float] | None, factor: int, unit: str) -> str:
    if percentiles is None:
        return ""
    return f"{name} p50 {factor * percentiles['p50']:.3g} p99 {factor * percentiles['p99']:.3g} {unit}"


def _rows(view: Mapping[str, Any]) -> list[Sequence[str]]:
    return [_row(request) for request in view["requests"]["data"]]


def _row(request: Mapping[str, Any]) -> Sequence[str]:
    stops_in_s = request["stops_in_s"]
    note = "" if stops_in_s is None else f"stops in {stops_in_s:.0f} s"
    return (
        request["id"],
        request["key_name"] or request["owner"],
        request["model"],
        request["phase"],
        _duration(request["phase_s"]),
        _duration(request["age_s"]),
        _number(request["position"]),
        _number(request["prompt_tokens"]),
        _number(request["cached_tokens"]),
        _number(request["completion_tokens"]),
        _number(request["tokens_per_s"]),
        _number(request["readers"]),
        f"stopping: {request['cancelled']}" if request["cancelled"] else note,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _duration(seconds: float) -> str:
    """As `0.4s`, `12s`, `3m05s` or `2h07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest_s = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest_s}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest_s:02}s"
