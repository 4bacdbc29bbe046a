"""Stage `contract`: the suite that every engine must pass, on the GPU with the GPU's own defaults.

In a dry run the scripted engine takes the suite: the real one takes it in the whole test suite.
"""

from __future__ import annotations

import json
import re
from collections import Counter

from scripts.benchmarks.findings import none_of, unjudged
from scripts.gpu.state import Checkup
from scripts.gpu.tools import ToolFailed, run_tool
from scripts.gpu.workload import small_pool

SUITES = ("tests/contract/test_engine.py", "tests/contract/test_sglang_engine.py")
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)")
REASON = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.+?) - (.*)$")
ARGS_VARIABLE = "GPU_CHECK_ENGINE_ARGS"
"""Arguments of SGLang, as JSON, for the engines of tests/contract/conftest.py."""
NOT_ENDED = 2
"""pytest's status where it was interrupted."""


def run(check: Checkup) -> None:
    """See the module."""
    seen, reasons = Counter[str](), dict[str, str]()

    def on_line(line: str) -> None:
        if outcome := OUTCOME.match(line):
            name, how = outcome.groups()
            seen[how] += 1
            if how in ("FAILED", "ERROR"):
                reasons[name] = ""
                check.tell(f"{how} {name}")
            elif sum(seen.values()) % 20 == 0:
                check.tell(f"{sum(seen.values())} tests so far")
        elif reason := REASON.match(line):
            reasons[reason[1]] = reason[2]

    arguments = ["-m", "pytest", *SUITES, "-v", "-p", "no:cacheprovider", "--color=no", "--tb=short"]
    # A GPU's own defaults are those that the engine `overlap` of the suite has on a CPU.
    arguments += ["-k", "not overlap", "-m", "not sglang" if check.options.dry_run else "sglang"]
    env = {ARGS_VARIABLE: json.dumps(small_pool(check.options)), "COLUMNS": "300"}
    try:
        run_tool(arguments, check.left_s(), check.work / "pytest.log", on_line=on_line, env=env)
    except ToolFailed as exc:
        check.holds("the suite comes to its end", str(exc).partition("\n")[0][-200:], "yes", holds=False)
        raise
    finally:
        check.keep("outcomes", dict(seen))
        check.keep("failures", reasons)
        check.find(unjudged("tests that were skipped", seen["SKIPPED"]))
        check.find(none_of("tests that failed", seen["FAILED"] + seen["ERROR"]))
        for name, reason in reasons.items():
            check.add_row("Failures", ("test", "reason"), (name, reason.replace("|", "/")[:300]))
    check.holds("tests that passed", seen["PASSED"], "more than 0", seen["PASSED"])
