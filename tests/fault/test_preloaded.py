"""Forked processes are what those are in whose place they stand; `tests/support/preloaded.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.preloaded import ForkedPopen, ForkingAsyncio, Preloaded, popen
from tests.support.servers import ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

SPAWNING = """
import json, multiprocessing, os, setproctitle, sys
from app.engine.sglang.platform import ChildEntry
was_imported = "sglang.srt.managers.scheduler" in sys.modules
child = multiprocessing.get_context("spawn").Process(target=ChildEntry("time:sleep", {"A": "1"}), args=(90,))
child.start()
setproctitle.setproctitle("sglang::other")
facts = {
    "argv": sys.argv, "folder": os.getcwd(), "environ": os.environ["FACT"], "main": __name__,
    "child": child.pid, "imported": was_imported, "descriptors": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(facts), flush=True)
child.join()
sys.exit(-child.exitcode)
"""


@pytest.fixture
def forking(preloaded: Preloaded | None) -> Preloaded:
    """It, where there is one."""
    if preloaded is None:
        pytest.skip("beside a GPU nothing is forked")
    return preloaded


def started(forking: Preloaded | None, folder: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process that spawns another, and what it says of itself."""
    (folder / "spawning.py").write_text(SPAWNING)
    environ = {**os.environ, "FACT": "seen", "PYTHONPATH": f"{ROOT}:{folder}"}
    command, pipe = [sys.executable, "-m", "spawning", "word"], subprocess.PIPE
    process = popen(forking, command, env=environ, cwd=folder, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        return process, json.loads(process.stdout.readline())
    except ValueError:
        process.communicate()
        raise


def test_a_forked_process_is_as_one_that_python_starts(forking: Preloaded, tmp_path: Path) -> None:
    """Folder, environment, arguments and descriptors, but that SGLang is imported."""
    seen = {}
    for other in (forking, None):
        process, seen[other] = started(other, tmp_path)
        with process:
            spawned = psutil.Process(seen[other].pop("child"))
            itself = psutil.Process(process.pid)
            assert (itself.name(), itself.ppid()) == ("sglang::other", os.getpid())
            assert spawned.ppid() == process.pid
            spawned.kill()
            assert process.wait() == signal.SIGKILL
    # One to the process that forks its own, and one that SGLang's import opens.
    assert seen[forking].pop("descriptors") <= seen[None].pop("descriptors") + 2
    assert (seen[forking].pop("imported"), seen[None].pop("imported")) == (True, False)
    assert seen[forking] == seen[None]


def test_what_a_killed_process_has_spawned_ends_with_it(forking: Preloaded, tmp_path: Path) -> None:
    """Its children of SGLang, and the process that forks them; its status says how it ended."""
    process, seen = started(forking, tmp_path)
    with process:
        spawned = psutil.Process(process.pid).children(recursive=True)
        assert seen["child"] in {child.pid for child in spawned}
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert psutil.wait_procs(spawned, timeout=20)[1] == []


def test_a_process_that_cannot_begin_says_so(forking: Preloaded, tmp_path: Path) -> None:
    """Whoever asks gets its status, and the next process."""
    command, pipe = [sys.executable, "-m", "no_such_module"], subprocess.PIPE
    for _ in range(2):
        with ForkedPopen(forking, command, cwd=tmp_path, stderr=pipe, text=True) as process:
            assert "No module named no_such_module" in process.communicate()[1]
        assert process.returncode == 1


SERVER = """
import os, sys
print(sys.stdin.read(), os.getpgrp() == os.getpid(), flush=True)
sys.exit(3)
"""


async def test_a_server_beside_reads_its_input_in_a_group_of_its_own(
    forking: Preloaded, tmp_path: Path
) -> None:
    """As `app.engine.child_server` starts it; what it prints and its status are read."""
    script, pipe = tmp_path / "server.py", subprocess.PIPE
    script.write_text(SERVER)
    process = await ForkingAsyncio(forking).create_subprocess_exec(
        *(sys.executable, "-P", str(script)),
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(b"what is secret")
    await process.stdin.drain()
    process.stdin.close()
    assert await process.stdout.read() == b"what is secret True\n"
    assert await process.wait() == process.returncode == 3
