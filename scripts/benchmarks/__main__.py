"""`scripts/bench NAME`: one subcommand per benchmark; `scripts/bench --quick` has the rows that matter."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

from scripts.benchmarks import (
    bare,
    fairness,
    harm,
    herd,
    hostile,
    limits,
    overload,
    path,
    quick,
    serve,
    store,
)

BENCHMARKS = {
    "serve": (serve, "ours against SGLang's own server, interleaved: CPU per token, tokens/s, TTFT, ITL"),
    "path": (
        path,
        "everything that needs no engine: the path of a token, screens, settlements, streams, memory",
    ),
    "bare": (bare, "start the peer: SGLang's own server on the same model, platform and engine flags"),
    "store": (store, "a large store: usage, conversations, search, and settlements per second"),
    "overload": (overload, "five times the load that the node can serve: goodput, refusals, retries"),
    "fairness": (fairness, "a light key beside a flood; two keys that both want more than there is"),
    "herd": (herd, "2,000 requests within a second of a restart"),
    "hostile": (hostile, "one hostile caller: what another key's stream and /healthz still get"),
    "limits": (limits, "500 clients at once of a key that may have 10,000 tokens a minute"),
    "harm": (harm, "labelled prompts and replies through the server: how many come out"),
}


def main() -> int:
    """Run the named benchmark; its exit status is the command's."""
    signal.signal(signal.SIGTERM, _terminated)
    if sys.argv[1:2] == ["--quick"]:
        return quick.run(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, (module, text) in BENCHMARKS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__))
    arguments = parser.parse_args()
    status: int = BENCHMARKS[arguments.benchmark][0].run(arguments)
    return status


def _terminated(signum: int, _frame: object) -> NoReturn:
    """SIGTERM ends a run as an exception would: the servers under test are frozen and must not stay."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
