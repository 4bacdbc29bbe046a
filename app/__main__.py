"""`python -m app` and `tokenring`. The guard matters: SGLang's children import this module again."""

import os
import sys

from app.cli.main import main


def run() -> None:
    """Run the command line and end the process.

    Once everything is closed, only the interpreter's own end remains, which takes seconds
    with SGLang imported, and would wait for a model that is still loading.
    """
    # The encoder's products are small: split over cores they take six times the CPU, from the engine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported, which is later
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
