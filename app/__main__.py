"""`python -m app` and `tokenring`. The guard matters: SGLang's children import this module again."""

import os
import sys

from app.cli.main import main


def run() -> None:
    """Run the command line and end the process.

    Once everything is closed, what is left is the interpreter's own end, which takes seconds
    with SGLang imported, and would wait for a model that is still loading.
    """
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
