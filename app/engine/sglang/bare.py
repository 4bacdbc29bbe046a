"""SGLang's own HTTP server on our platform and flags: the peer that the benchmarks measure against.

`python -m app.engine.sglang.bare --threads N JSON`, JSON being SGLang's server arguments. Nothing of
this product runs in it but the CPU platform and the start of each process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from app.engine.sglang.platform import prepare_process
from app.engine.sglang.process import child_environ, controller_entry, detokenizer_entry, scheduler_entry


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="app.engine.sglang.bare")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("server_args", type=json.loads)
    options = parser.parse_args(argv)
    prepare_process()
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from app.engine.sglang.tools import register

    load_plugins()
    register()
    server_args = ServerArgs(**options.server_args)
    environ = child_environ(options.threads, server_args.tp_size * server_args.dp_size)
    engine.run_data_parallel_controller_process = controller_entry(environ)
    http_server.launch_server(
        server_args,
        run_scheduler_process_func=scheduler_entry(environ),
        run_detokenizer_process_func=detokenizer_entry(environ),
    )


if __name__ == "__main__":
    main()
