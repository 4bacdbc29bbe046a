"""SGLang's own HTTP server on our platform and flags: the peer that the benchmarks measure against.

`bare_server.py --threads N JSON`, JSON being SGLang's server arguments. Nothing of this product runs in it
but the CPU platform, its attention, the built-in model's tool calls and the start of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from app.engine.sglang.args import SGLangOptions, cpu_threads, server_arguments
from app.engine.sglang.platform import ChildEntry, child_environ, controller_entry, prepare_process
from app.settings import SettingsError


def bare_server_command(options: SGLangOptions, port: int) -> list[str]:
    """The argv of SGLang's own HTTP server on the same model, platform and engine flags.

    The last is SGLang's arguments as JSON. Raises SettingsError.
    """
    if port < 1:
        raise SettingsError(f"port: must be at least 1, got {port}")
    arguments = server_arguments(options) | {"host": "127.0.0.1", "port": port}
    threads = cpu_threads(options, len(os.sched_getaffinity(0)))
    return [sys.executable, "-P", __file__, "--threads", str(threads), json.dumps(arguments)]


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="bare_server")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("server_args", type=json.loads)
    options = parser.parse_args(argv)
    prepare_process()
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.server_args import ServerArgs

    from app.engine.sglang.patches.builtin_tools import load_sglang

    load_sglang()
    server_args = ServerArgs(**options.server_args)
    environ = child_environ(options.threads, server_args.tp_size * server_args.dp_size)
    engine.run_data_parallel_controller_process = controller_entry(environ)
    managers = "sglang.srt.managers"
    http_server.launch_server(
        server_args,
        run_scheduler_process_func=ChildEntry(f"{managers}.scheduler:run_scheduler_process", environ),
        run_detokenizer_process_func=ChildEntry(
            f"{managers}.detokenizer_manager:run_detokenizer_process", environ
        ),
    )


if __name__ == "__main__":
    main()
