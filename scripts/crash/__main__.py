"""Kills the server with SIGKILL at random moments under load, and checks what is left each time.

Exits with 1 when anything did not hold. docs/inside/crash-safety.md says what is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from scripts.crash.rounds import SCRIPTED, SGLANG, Rounds, report


def main() -> int:
    """Run the test; the exit status."""
    arguments = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="tokenring-crash-"))
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, data in {directory}", flush=True)
    engine = SGLANG if arguments.engine == "sglang" else SCRIPTED
    longest_s = arguments.longest_s or engine.longest_s
    rounds = Rounds(
        engine, directory, arguments.streams, seed, margin_s=arguments.margin_s, longest_s=longest_s
    )
    began_s = time.monotonic()
    asyncio.run(rounds.run(arguments.kills))
    settings = {
        "kills": arguments.kills,
        "streams": arguments.streams,
        "engine": arguments.engine,
        "seed": seed,
        "margin_s": arguments.margin_s,
    }
    result = report(rounds, settings, time.monotonic() - began_s)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
    for name, value in result.items():
        if name not in ("checks", "violations"):
            print(f"{name.replace('_', ' '):32} {value}")
    if rounds.findings.violations:
        print(
            f"{len(rounds.findings.violations)} VIOLATIONS; the data is kept in {directory}", file=sys.stderr
        )
        return 1
    shutil.rmtree(directory)
    print("everything held")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/crashtest", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="how often (default 300)")
    parser.add_argument("--streams", type=int, default=20, help="clients at once (default 20)")
    parser.add_argument("--seed", type=int, default=None, help="of the mix; the timing is never the same")
    parser.add_argument("--engine", choices=("scripted", "sglang"), default="scripted", help="what generates")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--margin-s",
        type=float,
        default=0.5,
        help="how late a checkpoint may be: the commit, and a busy machine (default 0.5)",
    )
    parser.add_argument(
        "--longest-s", type=float, default=None, help="when the latest kill comes (default 3; SGLang 6)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
