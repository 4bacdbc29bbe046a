"""What a process that SGLang spawns is told before it imports anything."""

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import pickle, signal
from app.engine.sglang.process import ChildEntry
pickle.loads(pickle.dumps(ChildEntry("m", "f", {})))
print([signal.getsignal(s) is signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)])
"""


def test_children_leave_stopping_to_the_server():
    """Ctrl-C and SIGTERM to the process group do not reach SGLang's processes."""
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}  # so that nothing else is to be prepared
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, True]"


ORPHAN = """
import multiprocessing, os, signal
from app.engine.sglang.process import ChildEntry
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=ChildEntry("time", "sleep", {}), args=(90,))
    child.start()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_whose_parent_is_killed_while_it_begins_ends_with_it(tmp_path):
    """Before its imports are done; it holds the output open that is read here to its end."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, timeout=40, check=False)
    assert done.returncode == -signal.SIGKILL


BAR = """
import multiprocessing, multiprocessing.resource_tracker as tracker
from app.engine.sglang.platform import prepare_process
multiprocessing.set_start_method("spawn")  # as SGLang's import does
registered = []
tracker.register = lambda name, kind: registered.append(kind)
prepare_process()
from tqdm.auto import tqdm
list(tqdm(range(3)))
print(registered)
"""


def test_a_progress_bar_makes_no_semaphore() -> None:
    """A process that ends without clean-up has none that multiprocessing would report as leaked."""
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
