"""An engine's ranks on another node than the server's: `tokenring node --rank N`.

SGLang has a process start the ranks of each node. Those that SGLang's own program would start have another
scheduler than ours: they could not continue an answer, and bound no grammar, while all ranks must take
the same steps. So they are started here, from the settings that the server has.

When one rank of an engine ends, all others are stuck. The server then starts its own ranks again, and this
module does so on its node: each start is a process, and its end is followed by another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from app.engine.parent import end_with
from app.engine.restart import Backoff
from app.engine.sglang.args import SGLangOptions
from app.settings import SettingsError

EXIT_REFUSED = 78
"""The status of a process whose settings cannot work; another start would not help."""
STEADY_S = 60.0
"""Seconds after which ranks had joined the engine, so that their end is a new one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


def check_rank(options: SGLangOptions, rank: int) -> None:
    """Raise SettingsError unless the settings are of an engine that has ranks on that node."""
    nodes = int(options.server_args.get("nnodes", 1))
    if not 1 <= rank < nodes:
        have = f"{options.where} nnodes is {nodes}"
        raise SettingsError(
            f"rank {rank}: the server is node 0, and {have}: give a rank from 1 to nnodes - 1"
        )


async def keep_running(options: SGLangOptions, rank: int) -> int:
    """Start the ranks, again after each end, until SIGTERM or SIGINT; returns the exit status."""
    check_rank(options, rank)
    stop, backoff = asyncio.Event(), Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    stopped = asyncio.create_task(stop.wait())
    while not stop.is_set():
        began_s = time.monotonic()
        status = await _run_once(options, rank, stopped)
        if status == EXIT_REFUSED or stop.is_set():
            break
        if time.monotonic() - began_s >= STEADY_S:
            backoff.reset()
        pause_s = backoff.next_s()
        sys.stderr.write(f"tokenring: the ranks of node {rank} ended; next start in {pause_s:g} s\n")
        await asyncio.wait([stopped], timeout=pause_s)
    stopped.cancel()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(signum)
    return 0 if stop.is_set() else EXIT_REFUSED


async def _run_once(options: SGLangOptions, rank: int, stopped: asyncio.Task[Any]) -> int:
    """One start of the ranks, until they end or are to; the status of its process, which is gone."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app.engine.sglang.node", stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    shown = asdict(options) | {"server_args": dict(options.server_args)}
    spec = json.dumps({"options": shown, "rank": rank, "parent": os.getpid()})
    ended = asyncio.create_task(process.communicate(spec.encode()))
    try:
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the whole group: its ranks end with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        ended.cancel()
    return process.returncode or 0


def main() -> None:
    """Start the ranks that standard input asks for; ends with the first of them."""
    spec = json.load(sys.stdin)
    end_with(spec["parent"])
    options = SGLangOptions(**spec["options"])
    status = 1
    try:
        from app.engine.sglang.platform import prepare_process

        prepare_process()
        from app.engine.sglang.launch import run_ranks

        run_ranks(options, spec["rank"])
    except SettingsError as error:
        sys.stderr.write(f"tokenring: {error}\n")
        status = EXIT_REFUSED
    finally:
        sys.stderr.flush()
        os._exit(status)  # whoever started this process ends what is left of the ranks


if __name__ == "__main__":
    main()
