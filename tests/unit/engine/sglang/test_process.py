"""What a process that SGLang spawns is told before it imports anything."""

import os
import subprocess
import sys

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
