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
from dataclasses import asdict
from functools import partial
from typing import Any

from app.engine.parent_death import die_with_parent, run_and_exit
from app.engine.sglang.args import SGLangOptions
from app.engine.supervise import Backoff, supervise
from app.settings import EXIT_CONFIG, SettingsError

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
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()

    def end(value: int) -> None:
        if not status.done():
            status.set_result(value)

    async def run_once() -> bool:
        ended, had_joined = await _run_once(options, rank)
        if ended == EXIT_CONFIG:
            end(EXIT_CONFIG)
        sys.stderr.write(f"tokenring: the ranks of node {rank} ended with status {ended}\n")
        return had_joined

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end, 0)
    running = asyncio.create_task(supervise(run_once, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)))
    try:
        either: tuple[asyncio.Future[Any], ...] = running, status
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        await asyncio.wait({running})
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
    return status.result() if status.done() else running.result()


async def _run_once(options: SGLangOptions, rank: int) -> tuple[int, bool]:
    """One start of the ranks, until they end: the status of its process, and whether they had joined.

    The process is gone then, also where this is cancelled.
    """
    joined, joined_end = os.pipe()
    os.set_blocking(joined, False)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.engine.sglang.node"),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=[joined_end],
        )
        shown = asdict(options) | {"server_args": dict(options.server_args)}
        spec = json.dumps({"options": shown, "rank": rank, "parent": os.getpid(), "joined": joined_end})
        try:
            await process.communicate(spec.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group: its ranks end with it
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        with contextlib.suppress(BlockingIOError):
            return process.returncode or 0, bool(os.read(joined, 1))
        return process.returncode or 0, False
    finally:
        os.close(joined)
        os.close(joined_end)


def main() -> None:
    """Start the ranks that standard input asks for; ends with the first of them."""
    spec = json.load(sys.stdin)
    die_with_parent(spec["parent"])
    os.set_inheritable(spec["joined"], False)
    run_and_exit(partial(_run, spec))


def _run(spec: dict[str, Any]) -> int:
    try:
        from app.engine.sglang.platform import prepare_process

        prepare_process()
        from app.engine.sglang.launch import run_ranks

        run_ranks(SGLangOptions(**spec["options"]), spec["rank"], partial(os.write, spec["joined"], b"1"))
    except SettingsError as error:
        sys.stderr.write(f"tokenring: {error}\n")
        return EXIT_CONFIG
    return 1


if __name__ == "__main__":
    main()
