"""Stage `paths` of a dry run: the tests that take a GPU's paths on a CPU.

They run in the test suite, for minutes. Here each is looked for, so that the list stays true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from scripts.gpu.state import Checkup
from scripts.gpu.tools import run_tool

PATHS: Mapping[str, tuple[str, ...]] = {
    "tensor parallel 2": ("tests/contract/test_sglang_life.py::test_tensor_parallel",),
}
COLLECTED = re.compile(r"^(tests/\S+?)(?:\[.*)?$", re.MULTILINE)


def run(check: Checkup) -> None:
    """See the module."""
    wanted = sorted({test.partition("::")[0] for tests in PATHS.values() for test in tests})
    printed = run_tool(
        ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *wanted],
        check.left_s(),
        check.work / "collect.log",
    )
    collected = set(COLLECTED.findall(printed))
    for path, tests in PATHS.items():
        lacking = [test for test in tests if not any(name.startswith(test) for name in collected)]
        check.holds(path, ", ".join(lacking) or ", ".join(tests), "in the suite", not lacking)
