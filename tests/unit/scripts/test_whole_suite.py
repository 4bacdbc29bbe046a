"""The stages of the suite are run, told apart, and no failure of one is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.support.whole_suite import OTHERS, SGLANG, TIMED, Stage, summary

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from scripts.support.whole_suite import Stage, run
names = ("one", "two", "three")
sys.exit(run(*(Stage(name, (sys.executable, "-c", code)) for name, code in zip(names, sys.argv[1:]))))
"""


def start(kept: str, shown: str, alone: str = "") -> subprocess.Popen[str]:
    """Run these three as the stages."""
    command = [sys.executable, "-c", RUN, kept, shown, alone]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("statuses", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 2, 5)])
def test_the_suite_passes_when_all_stages_do(statuses: tuple[int, int, int]):
    """The status is 0 for three passes and 1 for anything else, and the last lines say which stage it was."""
    kept, shown, alone = (f"raise SystemExit({status})" for status in statuses)
    with start(kept, shown, alone) as process:
        said, _ = process.communicate(timeout=40)
    assert process.returncode == (1 if any(statuses) else 0)
    one, two, three = ("failed" if status else "passed" for status in statuses)
    told = [f"the tests two: {two}", f"the tests one: {one}", f"the tests three: {three}"]
    assert said.splitlines()[-3:] == told
    assert re.fullmatch(r"the whole suite took \d+ s", said.splitlines()[-4])


def test_what_is_timed_runs_alone(tmp_path: Path):
    """The third stage starts when both halves have ended."""
    ends = [tmp_path / "one", tmp_path / "two"]
    kept, shown = (f"import pathlib; pathlib.Path({str(end)!r}).touch()" for end in ends)
    alone = f"import pathlib; assert all(map(pathlib.Path.exists, map(pathlib.Path, {[*map(str, ends)]})))"
    with start(kept, shown, alone) as process:
        said, _ = process.communicate(timeout=40)
    assert said.splitlines()[-1] == "the tests three: passed"


def test_each_test_is_in_one_stage():
    """Whether it starts SGLang or not, and is timed or not."""
    selections = [stage.command[stage.command.index("-m", 2) + 1] for stage in (SGLANG, OTHERS, TIMED)]
    for sglang in (True, False):
        for timed in (True, False):
            marks = {"sglang": sglang, "timed": timed}
            assert [eval(selection, {}, marks) for selection in selections].count(True) == 1


def test_what_one_half_says_comes_whole_after_the_other():
    """Output and errors of the half that is kept follow the other's, under its name."""
    kept = "import sys; print('k1', flush=True); print('k2', file=sys.stderr, flush=True)"
    with start(kept, "print('s1')") as process:
        said, _ = process.communicate(timeout=40)
    lines = [line for line in said.splitlines() if line]
    assert lines[:5] == ["s1", "==== the tests one ====", "k1", "k2", "==== the tests three ===="]


ENDLESS = """
import pathlib, time
try:
    pathlib.Path({mine!r}).touch()
    while not pathlib.Path({other!r}).exists():
        time.sleep(0.01)
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print("stopped", flush=True)
    raise SystemExit(2)
"""


def test_sigterm_lets_both_halves_tell_their_end(tmp_path: Path):
    """Stopped from outside, both are interrupted as by Ctrl-C and say so; the third stage is not started."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    codes = [ENDLESS.format(mine=one, other=two), ENDLESS.format(mine=two, other=one), "print('third')"]
    with start(*codes) as process:
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        said, _ = process.communicate(timeout=40)
    assert process.returncode == 1
    assert said.count("stopped") == 2
    assert "third" not in said


REPORT = """
<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="quick" time="0.01"/>
<testcase classname="tests.a" name="slow" time="12.3"/>
<testcase classname="tests.n" name="one" time="0"><skipped type="pytest.skip" message="no nginx"/></testcase>
<testcase classname="tests.n" name="two" time="0"><skipped type="pytest.skip" message="no nginx"/></testcase>
</testsuite></testsuites>
"""


def test_the_end_names_the_slowest_tests_and_what_was_skipped(tmp_path: Path) -> None:
    """The slowest first; a reason for skips is one line, however many tests have it."""
    (tmp_path / "report.xml").write_text(REPORT)
    lines = list(summary(OTHERS, tmp_path / "report.xml"))
    assert lines[:2] == [
        "slowest of the 4 tests without SGLang:",
        "    12.3 s  tests.a::slow",
    ]
    assert lines[-1] == "SKIPPED 2 of the tests without SGLang: no nginx"


def test_no_more_than_ten_tests_are_slowest(tmp_path: Path) -> None:
    """However many there are."""
    cases = "".join(f'<testcase classname="t" name="{n}" time="{n}"/>' for n in range(30))
    (tmp_path / "report.xml").write_text(f"<testsuites>{cases}</testsuites>")
    assert [line.split("::")[1] for line in summary(OTHERS, tmp_path / "report.xml") if "::" in line] == [
        str(n) for n in range(29, 19, -1)
    ]


def test_a_stage_without_a_report_says_so(tmp_path: Path) -> None:
    """It was killed before it could write one."""
    assert list(summary(Stage("x", ()), tmp_path / "none.xml")) == [
        "the tests x left no report: they were ended before it"
    ]
