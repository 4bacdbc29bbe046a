"""A run's pairs, spread over several starts of both servers.

Another start of the same program is some percent faster or slower for as long as it lives. The pairs
of one start share that, so that only whole starts may be drawn for an interval (`stats.paired_ratio`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

STARTS = 9


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option `--starts`."""
    parser.add_argument(
        "--starts",
        type=int,
        default=STARTS,
        help="how often both servers are started anew, the pairs spread over that; at most once a pair"
        f" (default: {STARTS})",
    )


def spread(pairs: int, starts: int) -> Iterator[range]:
    """The numbers of the pairs of each start. Ends the command where there would be none."""
    if pairs < 1 or starts < 1:
        raise SystemExit(f"{pairs} pairs over {starts} starts measure nothing; have at least one of each.")
    starts = min(starts, pairs)
    for start in range(starts):
        yield range(start * pairs // starts, (start + 1) * pairs // starts)
