"""`tokenring top`: the live requests of a running server, refreshed on a terminal, else printed once."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.cli import client_options, tables
from app.cli.client_options import KEY_VARIABLE, Refused, Server, Unreachable, Unreadable
from app.cli.flags import Commands, command, flag
from app.cli.terminal import printable
from app.settings import SettingsError

if TYPE_CHECKING:
    from rich.console import Group

EXIT_OK = 0
MIN_INTERVAL_S = 0.2
_LIMIT = 100
_HEADS = (
    "id", "key", "model", "phase", "for", "age", "place", "in", "cached", "out", "tok/s", "readers", "note",
)  # fmt: skip
_ID_CHARS = 8
"""The end of an id, which a screen has room for; --once and --json have all of it."""
_MAX_CHARS = 20
_WORDS = 4
"""Columns that hold words; the others hold numbers, but the last."""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `top` to the parser of the command line."""
    top = command(commands, "top", "show the live requests of a running server", run)
    client_options.add_options(top)
    flag(top, "--json", "print one JSON object, and end", bool)
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
    """Show the requests until Ctrl-C, or once. Raises Unreachable, Refused, SettingsError."""
    server = Server.of(args)
    view = look(server)
    if args.json:
        print(json.dumps(view))
    elif args.once or not sys.stdout.isatty():
        rows = _rows(view)
        table = tables.text(_HEADS, rows, left=_WORDS) if rows else "no live requests"
        print(f"{printable(_summary(view))}\n\n{table}")
    else:
        _refresh(server, view, args.interval_s)
    return EXIT_OK


def look(server: Server) -> dict[str, Any]:
    """The load and the live requests of a server. Raises Unreachable, Refused, SettingsError."""
    try:
        live, requests = (
            server.call("GET", f"/api/admin/{name}") for name in ("live", f"requests?limit={_LIMIT}")
        )
    except Refused as refused:
        if refused.status == 403:
            raise SettingsError(f"{refused} Set {KEY_VARIABLE} to one, or use --api-key-file.") from None
        if refused.status == 404:
            raise SettingsError(f"{server.url} is no Tokenring server, or an older one.") from None
        raise
    return {"object": "top", "url": server.url, "live": live, "requests": requests}


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
                    view, lost = look(server), ""
                except (
                    Unreachable,
                    Unreadable,
                    Refused,
                    SettingsError,
                ) as error:  # it may be back after a restart
                    lost = f"{error}\nTrying again; what follows is old."
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
            Text(head),
            justify="left" if is_word else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=_MAX_CHARS if is_word else None,
        )
    rows = _rows(view)
    for request_id, *cells in rows:
        row = request_id[-_ID_CHARS:], *cells
        table.add_row(*(Text(printable(cell)) for cell in row))
    style = "bold red" if lost else ""
    body = table if rows else Text("no live requests")
    return Group(Text(printable(lost or _summary(view)), style=style), Text(), body)


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


def _joined(*words: str) -> str:
    return "  ".join(filter(None, words))


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
