"""An engine's ranks on another node than the server's: `tokenring node --rank N`.

SGLang has a process start the ranks of each node. Those that SGLang's own program would start have another
scheduler than ours: they could not continue an answer, and bound no grammar, while all ranks must take
the same steps. So they are started here, from the settings that the server has.

When one rank of an engine ends, all others are stuck. The server then starts its own ranks again, and this
module does so on its node: each start is a process, and its end is followed by another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

from app.engine.parent_death import die_with_parent, run_and_exit
from app.engine.sglang.args import SGLangOptions
from app.settings import EXIT_CONFIG, SettingsError

PAUSE_S = 5.0
"""Seconds between the end of the ranks and their next start, which takes longer than that to fail."""


def check_rank(options: SGLangOptions, rank: int) -> None:
    """Raise SettingsError unless the settings are of an engine that has ranks on that node."""
    nodes = int(options.server_args.get("nnodes", 1))
    if not 1 <= rank < nodes:
        have = f"{options.where} nnodes is {nodes}"
        raise SettingsError(
            f"rank {rank}: the server is node 0, and {have}: give a rank from 1 to nnodes - 1"
        )


def keep_running(options: SGLangOptions, rank: int) -> int:
    """Start the ranks, again after each end; returns the status of a start whose settings cannot work.

    SIGTERM and SIGINT end this process with status 0. Raises SettingsError.
    """
    check_rank(options, rank)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))
    while (status := _run_once(options, rank)) != EXIT_CONFIG:
        sys.stderr.write(f"tokenring: the ranks of node {rank} ended with status {status}\n")
        time.sleep(PAUSE_S)
    return status


def _run_once(options: SGLangOptions, rank: int) -> int:
    """One start of the ranks, in a process that ends with the first of them: its status."""
    spec = {"options": options.as_dict(), "rank": rank, "parent": os.getpid()}
    command = [sys.executable, "-m", "app.engine.sglang.node"]
    # In a group of its own, which Ctrl-C does not reach. Where this is interrupted, it is killed.
    return subprocess.run(  # noqa: S603  # this program
        command, input=json.dumps(spec).encode(), start_new_session=True, check=False
    ).returncode


def main() -> None:
    """Start the ranks that standard input asks for; ends with the first of them."""
    spec = json.load(sys.stdin)
    die_with_parent(spec["parent"])
    run_and_exit(partial(_run, spec))


def _run(spec: dict[str, Any]) -> int:
    try:
        from app.engine.sglang.platform import prepare_process, without_collections

        with without_collections():
            prepare_process()
            from app.engine.sglang.launch import run_ranks

        run_ranks(SGLangOptions(**spec["options"]), spec["rank"])
    except SettingsError as error:
        sys.stderr.write(f"tokenring: {error}\n")
        return EXIT_CONFIG
    return 1


if __name__ == "__main__":
    main()
