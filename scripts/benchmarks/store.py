"""`bench store`: queries on a large store, and durable settlements per second.

The file is built anew in a temporary folder: a month of requests of 200 keys, conversations of made-up words
of one key, and one very long conversation. Queries go through the product's readers, settlements through its
writer, on that same file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from app.store.database import FILE_NAME, Database
from scripts.benchmarks import report
from scripts.benchmarks import store_settlements as settlements
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import machine_busy_s
from scripts.benchmarks.store_queries import Timed, ask, questions, table
from scripts.benchmarks.store_rows import Filled, fill

OWNERS = 200
ONE_EACH = "one each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench store`."""
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="requests of the month (default: 1000000)"
    )
    parser.add_argument(
        "--conversations", type=int, default=100_000, help="conversations of three messages (default: 100000)"
    )
    parser.add_argument(
        "--long",
        type=int,
        default=10_000,
        metavar="N",
        help="messages of the long conversation (default: 10000)",
    )
    parser.add_argument("--repeat", type=int, default=31, help="times each query runs (default: 31)")
    parser.add_argument("--pairs", type=int, default=9, help="rounds of settlements, each way (default: 9)")
    parser.add_argument(
        "--settlements", type=int, default=4096, help="settlements in a round (default: 4096)"
    )
    parser.add_argument(
        "--in-flight", default="64,256,1024", help="settlements in flight at once (default: 64,256,1024)"
    )
    parser.add_argument("--folder", type=Path, help="build it below this folder (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every round")


def run(arguments: argparse.Namespace) -> int:
    """Build, measure, print both tables, write what was asked for."""
    machine = describe_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        data_dir = Path(folder)
        began_s, busy_s, cpu_s = time.monotonic(), machine_busy_s(), time.process_time()
        filled = fill(data_dir / FILE_NAME, arguments.rows, OWNERS, arguments.conversations, arguments.long)
        took_s, megabytes = time.monotonic() - began_s, (data_dir / FILE_NAME).stat().st_size / 1e6
        print(f"built in {took_s:.0f} s: {megabytes:.0f} MB", file=sys.stderr)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            timed, pairs = runner.run(_measure(arguments, data_dir, filled))
    span_s = time.monotonic() - began_s
    others = max(0.0, machine_busy_s() - busy_s - time.process_time() + cpu_s) / span_s
    _tell(arguments, machine, timed, pairs)
    print(f"{megabytes:.0f} MB, built in {took_s:.0f} s; other processes used {others:.2f} CPUs")
    return 0


async def _measure(
    arguments: argparse.Namespace, data_dir: Path, filled: Filled
) -> tuple[list[Timed], list[tuple[bool, settlements.Pairs]]]:
    database = Database(data_dir)
    await database.open()
    try:
        timed = await ask(database, questions(filled), arguments.repeat)
        print(table(timed), file=sys.stderr)
        pairs = []
        for answers in (False, True):
            for in_flight in map(int, arguments.in_flight.split(",")):
                measured = await settlements.measure_pairs(
                    database, data_dir, in_flight, arguments.pairs, arguments.settlements, answers=answers
                )
                pairs.append((answers, measured))
    finally:
        await database.aclose()
    return timed, pairs


def _tell(
    arguments: argparse.Namespace,
    machine: dict[str, object],
    timed: list[Timed],
    pairs: list[tuple[bool, settlements.Pairs]],
) -> None:
    comparisons = [
        comparison
        for answers, measured in pairs
        for comparison in report.compare(
            settlements.WITH_ANSWERS if answers else settlements.FIGURES, *settlements.columns(measured)
        )
    ]
    print(table(timed), end="\n\n")
    print(report.markdown_table(comparisons, ONE_EACH, ours="together", load="in flight"))
    if not arguments.json:
        return
    options = ("rows", "conversations", "long", "repeat", "pairs", "settlements", "in_flight")
    settings: dict[str, Any] = {
        "benchmark": "store",
        "machine": machine,
        "options": {name: getattr(arguments, name) for name in options},
        "questions": [{**asdict(item), "verdict": item.verdict} for item in timed],
        "comparisons": [report.comparison_record(item) for item in comparisons],
    }
    runs = [
        {"pair": number, "with_answers": answers, **asdict(run)}
        for answers, measured in pairs
        for number, pair in enumerate(measured)
        for run in pair
    ]
    report.write_json(arguments.json, settings, runs)
