"""The process of a child server: SGLang's own HTTP server, for a model beside the one in the main process.

`python -m app.engine.sglang.child`, with JSON on standard input: its model's options, its port, its API key
and its parent process. It dies with its parent, and no grammar can end its scheduler
(app.engine.sglang.scheduler).
"""

from __future__ import annotations

import json
import os
import sys

from app.engine.child_server import LOOPBACK, ChildCommand
from app.engine.parent_death import die_with_parent, run_and_exit
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.platform import (
    ChildEntry,
    prepare_process,
    scheduler_entry,
    without_collections,
)


def child_command(options: SGLangOptions, api_key: str, port: int) -> ChildCommand:
    """The command that starts a child serving `options` on `port`."""
    spec = {"options": options.as_dict(), "port": port, "parent": os.getpid(), "api_key": api_key}
    argv = [sys.executable, "-m", "app.engine.sglang.child"]
    return ChildCommand(argv, json.dumps(spec).encode())


def main() -> None:
    """Serve until killed."""
    spec = json.load(sys.stdin)
    die_with_parent(spec["parent"])  # SGLang's own end with this one
    with without_collections():
        prepare_process()
        from sglang.srt.entrypoints import http_server

        from app.engine.sglang.launch import prepared_environ, resolved_args
        from app.engine.sglang.patches.builtin_tools import load_sglang

    load_sglang()
    options = SGLangOptions(**spec["options"])
    own = {"host": LOOPBACK, "port": spec["port"], "api_key": spec["api_key"]}
    server_args = resolved_args(options, **own)
    environ = prepared_environ(options, server_args)
    detokenizer = "sglang.srt.managers.detokenizer_manager:run_detokenizer_process"

    def serve() -> int:
        http_server.launch_server(
            server_args,
            run_scheduler_process_func=scheduler_entry(environ, options.grammar_mask_ms),
            run_detokenizer_process_func=ChildEntry(detokenizer, environ),
        )
        return 1

    run_and_exit(serve)  # a server that could not bind would wait for its scheduler, which waits for requests


if __name__ == "__main__":
    main()
