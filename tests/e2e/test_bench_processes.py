"""What the benchmarks read from processes, on real ones."""

import sys
import time

import psutil
import pytest

from scripts.benchmarks.processes import ServerFailed, ServerProcess, _lives, free_port

SERVER = """
import http.server, subprocess, sys, threading, time
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
child = subprocess.Popen([sys.executable, "-c", '''
import time
from setproctitle import setproctitle
setproctitle("sglang::scheduler_TP0")
end = time.thread_time() + 0.2
while time.thread_time() < end:
    pass
time.sleep(60)
'''])
thread = threading.Thread(target=burn, args=(0.3,))
thread.start()
thread.join()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    """A server whose ended thread burnt 0.3 s, with a scheduler beside it that burns 0.2 s."""
    port = free_port()
    server = ServerProcess("x", [sys.executable, "-c", SERVER, str(port)], port, tmp_path / "log")
    server.start()
    try:
        server.wait_ready(timeout_s=30)
        yield server
    finally:
        server.stop()


def test_cpu_of_ended_threads_counts_and_the_scheduler_is_kept_apart(server):
    """The split goes by process title, and no thread's CPU is lost when it ends."""
    while server.cpu().engine_s < 0.2:
        time.sleep(0.01)
    used = server.cpu()
    assert used.serving_s >= 0.3
    assert 0.2 <= used.engine_s < used.serving_s


def test_a_frozen_tree_uses_no_cpu_and_goes_on_after_the_thaw(server):
    """SIGSTOP reaches children too; after SIGCONT the server answers again."""
    server.freeze()
    before = server.cpu()
    time.sleep(0.3)
    used = server.cpu() - before
    assert used.serving_s + used.engine_s < 0.005
    server.thaw()
    server.wait_ready(timeout_s=10)


def test_stop_leaves_no_process_behind(server):
    """The whole tree is gone, a frozen one too, and a second stop does nothing."""
    # Not all children of this process: a server that other tests share may be among them.
    root = psutil.Process(server._running().pid)
    children = [root, *root.children(recursive=True)]
    assert len(children) >= 2
    server.freeze()
    server.stop()
    server.stop()
    assert [child.pid for child in children if _lives(child)] == []


def test_a_server_that_ends_at_start_is_told_with_its_log(tmp_path):
    """The caller sees the server's own words instead of a time-out."""
    server = ServerProcess(
        "x", [sys.executable, "-c", "raise SystemExit('no model')"], free_port(), tmp_path / "log"
    )
    server.start()
    with pytest.raises(ServerFailed, match="no model"):
        server.wait_ready(timeout_s=30)
    server.stop()
