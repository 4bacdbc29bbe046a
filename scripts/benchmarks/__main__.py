"""`scripts/bench NAME`: one subcommand per benchmark."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

from scripts.benchmarks import (
    bare,
    connections,
    fairness,
    harm,
    herd,
    hostile,
    ledger,
    limits,
    overload,
    path,
    screen,
    serve,
    start,
    store,
)

BENCHMARKS = {
    "bare": (bare, "start the peer: SGLang's own server on the same model, platform and engine flags"),
    "serve": (serve, "ours against the peer, interleaved: CPU per token, tokens/s, TTFT, TPOT, ITL"),
    "path": (path, "our full path with a scripted engine against a bare ASGI app, one core each"),
    "connections": (connections, "10,000 open streams, one event per second each: delivery, delay, memory"),
    "start": (start, "time until ready against SGLang's own server, and until the port answers"),
    "store": (store, "a large store: usage, conversations, search, and settlements per second"),
    "overload": (overload, "five times the load that the node can serve: goodput, refusals, retries"),
    "fairness": (fairness, "a light key beside a flood; two keys that both want more than there is"),
    "herd": (herd, "2,000 requests within a second of a restart"),
    "hostile": (hostile, "one hostile caller: what another key's stream and /healthz still get"),
    "limits": (limits, "500 clients at once of a key that may have 10,000 tokens a minute"),
    "harm": (harm, "labelled prompts and replies through the server: how many come out"),
    "screen": (screen, "our server with the screens on and off, interleaved: TTFT, ITL, total time, CPU"),
    "ledger": (ledger, "our server with the ledger on and off, interleaved: TTFT, CPU per token"),
}


def main() -> int:
    """Run the named benchmark; its exit status is the command's."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, (module, text) in BENCHMARKS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    status: int = BENCHMARKS[arguments.benchmark][0].run(arguments)
    return status


def _terminated(signum: int, _frame: object) -> NoReturn:
    """SIGTERM ends a run as an exception would: the servers under test are frozen and must not stay."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
