"""Runs schemathesis and raw-byte fuzzing against a server of its own, and looks at what is left of it.

Exits with 1 when anything did not hold. Raw bytes that hurt are saved for tests/fault/hostile/requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from scripts.crash.server import ROOT, Server
from scripts.fuzzing.raw import Fault, fuzz_raw, healthz_s

KEY = "fuzz-secret"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SLOW_S = 5.0
"""No answer may take longer while nothing else is asked: many times what a busy machine shows."""
SETTLE_S = 5.0
"""For connections and readers to end after the last request."""
GROWS_MB = 300
MB = 1 << 20
ENGINES = {
    "scripted": ["--engine", "scripted", "--scripted", "tokens=20,rate=2000"],
    "sglang": [],
}


def main() -> int:
    """Fuzz; the exit status."""
    arguments = _arguments()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tokenring-fuzz-") as directory:
        faults = asyncio.run(_fuzz(arguments, seed, Path(directory)))
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    print("everything held" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


async def _fuzz(arguments: argparse.Namespace, seed: int, directory: Path) -> list[str]:
    key = ["--api-key", KEY]  # of this run alone
    server = await Server.start(directory / "data", [*ENGINES[arguments.engine], *key])
    try:
        await server.ready()
        process = psutil.Process(server.pid)
        await healthz_s(server.port)
        rss, descriptors = process.memory_info().rss, process.num_fds()
        third_s = arguments.seconds / 3
        faults = await _schemathesis(arguments.schemathesis, server.port, third_s, seed, [KEY])
        faults += await _schemathesis(arguments.schemathesis, server.port, third_s, seed, [])
        rng = random.Random(seed)  # noqa: S311  # not for secrets: a seed repeats the run
        hurt = await fuzz_raw(server.port, KEY, third_s, rng, SLOW_S)
        faults += [_saved(fault, arguments.save) for fault in hurt]
        await asyncio.sleep(SETTLE_S)
        faults += _left(process, rss, descriptors)
    finally:
        await server.kill()
    tracebacks = [line for line in server.noise if "Traceback" in line]
    return [*faults, *(f"log: {line[:300]}" for line in (*server.faults, *tracebacks))]


def _left(process: psutil.Process, rss: int, descriptors: int) -> list[str]:
    """What the server still holds of the run."""
    grown_mb = (process.memory_info().rss - rss) / MB
    print(f"grown by {grown_mb:.0f} MB, descriptors {descriptors} -> {process.num_fds()}")
    faults = []
    if grown_mb > GROWS_MB:
        faults.append(f"the server grew by {grown_mb:.0f} MB")
    if process.num_fds() > descriptors + 5:
        faults.append(f"{process.num_fds() - descriptors} descriptors are left open")
    return faults


async def _schemathesis(program: str, port: int, seconds: float, seed: int, keys: Sequence[str]) -> list[str]:
    """Requests made from /openapi.json, with the key or without one."""
    headers = [argument for key in keys for argument in ("-H", f"Authorization: Bearer {key}")]
    command = [
        program,
        "run",
        f"http://127.0.0.1:{port}/openapi.json",
        "--max-time",
        f"{max(1, int(seconds))}",
    ]
    options = ["-c", CHECKS, "--max-response-time", f"{SLOW_S:g}", "--seed", str(seed), "--no-color"]
    phases = ["--phases", "coverage,fuzzing", "--continue-on-failure", "--warnings", "off"]
    process = await asyncio.create_subprocess_exec(
        *command, *options, *phases, *headers, cwd=tempfile.gettempdir(), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    text = output.decode(errors="replace")
    print(text[text.find("SUMMARY") :])
    return [] if process.returncode == 0 else [f"schemathesis: {text[-6000:]}"]


def _saved(fault: Fault, directory: Path) -> str:
    """Write what hurt as a case of the corpus; what it was."""
    path = directory / f"found_{time.time_ns()}.json"
    step = {"raw": fault.sent.decode("latin-1"), "allowed": [200, 400, 401, 403, 404, 405, 413, 429, 431]}
    path.write_text(json.dumps({"why": fault.what, "api_key": True, "steps": [step]}, indent=1) + "\n")
    return f"{fault.what}; saved as {path}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all together (default 300)")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="scripted", help="what generates")
    parser.add_argument("--seed", type=int, default=None, help="of the requests")
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    requests = ROOT / "tests/fault/hostile/requests"
    parser.add_argument("--save", type=Path, default=requests, help="where what hurts is written")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
