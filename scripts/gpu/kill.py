"""Stage `kill`: the kill test, in few rounds: a process of the engine gets SIGKILL under live streams."""

from __future__ import annotations

import json

from scripts.benchmarks import engine_args
from scripts.benchmarks.findings import none_of, unjudged
from scripts.gpu.state import Checkup
from scripts.gpu.tools import run_tool
from scripts.gpu.workload import small_pool

FIGURES = (
    "rounds",
    "streams",
    "checks",
    "server_start_s",
    "pause_p50_s",
    "pause_p99_s",
    "outage_p50_s",
    "outage_max_s",
)
HANG_S = 120
"""`engine_hang_s`: as in production, because kernels may be compiled."""


def run(check: Checkup) -> None:
    """See the module."""
    dry = check.options.dry_run
    arguments = ["-m", "scripts.crash.engine_kills", "--json", "--no-bare", "--hang-s", str(HANG_S)]
    arguments += ["--rounds", "1" if dry else "4", "--streams", "2" if dry else "16"]
    arguments += ["--tokens", "60" if dry else "400", "--dtype", "float32" if dry else "bfloat16"]
    arguments += [] if dry else ["--mix"]
    arguments += engine_args.options(small_pool(check.options))
    printed = run_tool(arguments, check.left_s(), check.work / "kill.log", on_line=check.tell)
    result = json.loads(printed.strip().splitlines()[-1])
    check.keep("result", result)
    check.find(*(unjudged(name.replace("_", " "), result[name]) for name in FIGURES))
    check.find(none_of("violations", result["violations"]))
    check.find(none_of("streams that ended with an error", result["cut_off"]))
