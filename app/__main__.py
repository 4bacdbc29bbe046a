"""`python -m app` and `tokenring`. The guard matters: SGLang's children import this module again."""

import os
import signal
import sys
from pathlib import Path

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run() -> None:
    """Run the command line and end the process.

    Once everything is closed, only the interpreter's own end remains, which takes seconds
    with SGLang imported, and would wait for a model that is still loading.
    """
    # The encoder's products are small: split over cores they take six times the CPU, from the engine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported, which is later
    _open_closed_streams()
    try:
        from app.cli.main import main  # takes its time, in which Ctrl-C is no error either

        status = main()
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _open_closed_streams() -> None:
    """Have standard streams that were closed, as by `>&-`, lead to nowhere."""
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # open to the end


if __name__ == "__main__":
    run()
