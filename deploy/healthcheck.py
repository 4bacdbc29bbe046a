"""The container's health check: asks the server for /healthz, at the port it was started with.

That is the last `--port` of process 1, which is the server or, with `docker run --init`, has it as arguments;
else TOKENRING_PORT.
"""

import os
import sys
from pathlib import Path
from urllib.request import urlopen

TIMEOUT_S = 4  # less than the Dockerfile's, so that the reason is shown


def port(command_line: list[str], environ: dict[str, str]) -> str:
    """The port as `serve` reads it: the last flag wins, then the variable."""
    found = environ.get("TOKENRING_PORT", "8000")
    for argument, following in zip(command_line, [*command_line[1:], ""], strict=True):
        if argument == "--port":
            found = following
        elif argument.startswith("--port="):
            found = argument.removeprefix("--port=")
    return found


if __name__ == "__main__":
    arguments = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    url = f"http://127.0.0.1:{port(arguments, dict(os.environ))}/healthz"
    try:
        urlopen(url, timeout=TIMEOUT_S).close()
    except OSError as error:
        sys.exit(f"{url}: {error}")
