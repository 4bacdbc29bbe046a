"""What can only be known on a GPU, in stages: the engine's own report, the contract suite, kills, speed.

Writes state.json, report.md and logs.txt into the folder. A second run with the same options goes on where
the first one ended. Exits with 1 where a stage did not pass. docs/gpu.md says what each stage checks.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from scripts.benchmarks import engine_args
from scripts.benchmarks.machine import commit
from scripts.gpu import report
from scripts.gpu.driver import LEAST_S, Driver, Plan, adopt_orphans
from scripts.gpu.random_llama import NAME as RANDOM_LLAMA
from scripts.gpu.state import Options, State

STAGE_S = 600.0


def main() -> int:
    """Run the check; the exit status."""
    arguments = _arguments()
    options = Options(
        dry_run=arguments.dry_run,
        model=arguments.model or ("scripted" if arguments.dry_run else RANDOM_LLAMA),
        engine_args=engine_args.parse(arguments.engine_args),
        pairs=arguments.pairs,
        commit=arguments.commit or commit(),
    )
    if not (options.dry_run or has_gpu()):
        print("torch sees no GPU here: --dry-run does what can be done without one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _terminated)
    adopt_orphans()
    state = State.resumed(arguments.out.resolve(), options)
    asked_for = bool(arguments.stages)
    stages = arguments.stages or [stage for stage in LEAST_S if stage != "paths" or options.dry_run]
    plan = Plan([s for s in stages if s != "report"], asked_for, arguments.seconds, arguments.budget)
    state.save()
    status = Driver(state, plan).run()
    print(report.page(State.load(state.out)))
    return status


def has_gpu() -> bool:
    """Whether torch sees an accelerator of NVIDIA's or AMD's."""
    import torch

    return bool(torch.cuda.is_available())


def _stages(text: str) -> list[str]:
    names = text.split(",")
    stages = [*LEAST_S, "report"]
    for name in names:
        if name not in stages:
            raise argparse.ArgumentTypeError(f"{name}: must be one of {', '.join(stages)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the same stages, small, without a GPU")
    parser.add_argument(
        "--stages",
        type=_stages,
        metavar="A,B",
        help=f"only these, finished or not: {', '.join(LEAST_S)}; or report",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for results (default: gpu-check)"
    )
    parser.add_argument(
        "--seconds", type=float, default=STAGE_S, help=f"limit of each stage (default: {STAGE_S:.0f})"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds for all stages; one that does not fit is skipped (default: no limit)",
    )
    parser.add_argument(
        "--model",
        default="",
        help=f"of load and bench: builtin, {RANDOM_LLAMA}, scripted, a path or hub id "
        f"(default: {RANDOM_LLAMA}; with --dry-run scripted)",
    )
    engine_args.add_argument(parser)
    parser.add_argument("--pairs", type=int, default=4, help="measured pairs per load of bench (default: 4)")
    parser.add_argument("--commit", default="", help="name of the commit, where there is no git")
    return parser.parse_args()


def _terminated(signum: int, _frame: object) -> NoReturn:
    """SIGTERM ends a run as an exception would: no process must stay."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
