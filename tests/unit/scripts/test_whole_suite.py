"""The stages of the suite are run, told apart, and no failure of one is lost."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.support.whole_suite import OTHERS, SERVERS, SGLANG, TIMED, WHOLE_SERVERS, Stage, summary

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from scripts.support.whole_suite import Stage, run
stages = [Stage(str(number), (sys.executable, "-c", code)) for number, code in enumerate(sys.argv[1:], 1)]
shown, *kept, alone = stages
sys.exit(run(shown, kept, alone))
"""


def start(*codes: str) -> subprocess.Popen[str]:
    """Run these as the stages 1, 2 and so on: what is shown first, what runs alone last."""
    command = [sys.executable, "-c", RUN, *codes]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("statuses", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 2, 0), (2, 2, 0, 5)])
def test_the_suite_passes_when_all_stages_do(statuses: tuple[int, ...]):
    """The status is 0 where all pass and 1 for anything else, and the last lines say which stage it was."""
    with start(*(f"raise SystemExit({status})" for status in statuses)) as process:
        said, _ = process.communicate(timeout=40)
    assert process.returncode == (1 if any(statuses) else 0)
    words = ["failed" if status else "passed" for status in statuses]
    assert said.splitlines()[-4:] == [f"the tests {n}: {word}" for n, word in enumerate(words, 1)]
    assert re.fullmatch(r"the whole suite took \d+ s", said.splitlines()[-5])


def test_what_is_timed_runs_alone(tmp_path: Path):
    """The last stage starts when the others have ended."""
    ends = [str(tmp_path / name) for name in "abc"]
    alone = f"import pathlib; assert all(pathlib.Path(end).exists() for end in {ends})"
    with start(*(f"import pathlib; pathlib.Path({end!r}).touch()" for end in ends), alone) as process:
        said, _ = process.communicate(timeout=40)
    assert said.splitlines()[-1] == "the tests 4: passed"


@pytest.mark.parametrize(("failures", "word"), [(1, "passed"), (2, "passed"), (3, "failed")])
def test_a_time_that_is_missed_is_measured_up_to_three_times(tmp_path: Path, failures: int, word: str):
    """What failed of the last stage is run again; it fails when it fails each time."""
    marks = str(tmp_path / "marks")
    alone = f"""
import pathlib, sys
marks = pathlib.Path({marks!r})
marks.open("a").write("1")
measured = len(marks.read_text())
assert ("--last-failed" in sys.argv) == (measured > 1)
sys.exit(measured <= {failures})
"""
    with start("", "", alone) as process:
        said, _ = process.communicate(timeout=40)
    assert said.splitlines()[-1] == f"the tests 3: {word}"
    assert process.returncode == (word == "failed")
    assert len(Path(marks).read_text()) == min(failures + 1, 3)


def test_each_test_is_in_one_stage():
    """Whether it starts SGLang or not, is timed or not, and wherever it lies."""
    sglang, servers, others, timed = (
        stage.command[stage.command.index("-m", 2) + 1] for stage in (SGLANG, SERVERS, OTHERS, TIMED)
    )
    assert servers == others
    for marks in itertools.product((True, False), repeat=2):
        known = dict(zip(("sglang", "timed"), marks, strict=True))
        assert [eval(selection, {}, known) for selection in (sglang, others, timed)].count(True) == 1
    assert {part for part in SERVERS.command if part.startswith("tests/")} == set(WHOLE_SERVERS)
    assert {part for part in OTHERS.command if "=tests/" in part} == {
        f"--ignore={folder}" for folder in WHOLE_SERVERS
    }
    assert all((ROOT / folder).is_dir() for folder in WHOLE_SERVERS)


@pytest.mark.parametrize(("stage", "mark"), [(SGLANG, "sglang"), (TIMED, "timed")])
def test_no_marked_test_is_left_out(stage: Stage, mark: str):
    """The mark is used in test files and conftest.py alone, and each of these is collected."""
    for path in (ROOT / "tests").rglob("*.py"):
        if f"mark.{mark}" in path.read_text("utf-8"):
            assert path.name == "conftest.py" or path.name.startswith("test_")
            collected = path.parent if path.name == "conftest.py" else path
            assert str(collected.relative_to(ROOT)) in stage.command


def test_what_a_kept_stage_says_comes_whole_after_the_one_that_is_shown():
    """Output and errors of the stage that is kept follow the other's, under its name."""
    kept = "import sys; print('k1', flush=True); print('k2', file=sys.stderr, flush=True)"
    with start("print('s1')", kept, "print('a1')") as process:
        said, _ = process.communicate(timeout=40)
    lines = [line for line in said.splitlines() if line]
    assert lines[:6] == ["s1", "==== the tests 2 ====", "k1", "k2", "==== the tests 3 ====", "a1"]


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


def test_sigterm_lets_all_stages_tell_their_end(tmp_path: Path):
    """Stopped from outside, all are interrupted as by Ctrl-C and say so; the last is not started."""
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
        "slowest of the 4 tests of the rest:",
        "    12.3 s  tests.a::slow",
    ]
    assert lines[-1] == "SKIPPED 2 of the tests of the rest: no nginx"


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
