"""Processes that have imported SGLang when they begin: forked from one that has.

It imports it once, which takes ten seconds, and forks for whatever is asked of it: in the place of
`python -m MODULE`, or of a process that multiprocessing spawns, with the environment, folder, arguments and
descriptors of that. Each is a child of whoever asks, so that parent, exit status and process tree are the
same. The server that most tests share, and those whose start is the subject, are started by `python`; beside
a GPU all are, as its driver does not outlive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import importlib
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple, NoReturn

import psutil
import setproctitle

from app.engine.parent_death import die_with_parent
from app.engine.sglang.platform import needs_cpu_platform, prepare_process

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
ENVIRON = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""What the server gives SGLang's processes on a CPU, and OpenMP reads as it is loaded."""
MODULES = (
    "app.engine.sglang.launch",
    "app.engine.sglang.engine",
    "app.engine.sglang.remote",
    "app.engine.sglang.scheduler",
    "app.engine.sglang.patches.cpu_platform",
    "app.engine.sglang.patches.detokenizer",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
)
MAX_DESCRIPTORS = 253
"""As many as the kernel takes with one message."""
FREE_DESCRIPTORS = 500
"""No process of the suite has numbers beyond."""


class Start(NamedTuple):
    """A process to be: the command line, and what it has of whoever asks."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    numbers: Sequence[int]
    """Its descriptors' numbers, in the order in which they are sent."""
    new_session: bool = False


class Preloaded:
    """The asker's end of a process that forks."""

    def __init__(self, forking: socket.socket) -> None:
        self._socket = forking
        self._lock = threading.Lock()

    def start(self, start: Start, descriptors: Sequence[int]) -> int:
        """The id of the new process, a child of this one."""
        libc = ctypes.CDLL(None)
        with self._lock:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # the one between ends, and leaves it to this one
            try:
                socket.send_fds(self._socket, [pickle.dumps((os.getpid(), start))], descriptors)
                pid, done = self._socket.recv(100), self._socket.recv(100)
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert done == b"done", "the process that forks has ended"
        return int(pid)

    def spawn(self, path: str, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        """In place of `multiprocessing.util.spawnv_passfds`."""
        argv = [os.fsdecode(word) for word in args]
        if "--multiprocessing-fork" not in argv:
            return _spawnv_passfds(path, args, passfds)
        numbers = sorted({0, 1, 2, *passfds})
        return self.start(Start(argv, dict(os.environ), str(Path.cwd()), numbers), numbers)

    def spawn_here(self) -> None:
        """From now on, fork what multiprocessing spawns in this process."""
        vars(multiprocessing.util)["spawnv_passfds"] = self.spawn


_spawnv_passfds = multiprocessing.util.spawnv_passfds


@contextlib.contextmanager
def importing() -> Iterator[Preloaded | None]:
    """A process that imports SGLang, which takes seconds, and then forks; None beside an accelerator."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = os.environ | ENVIRON | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.preloaded"]
    with theirs:
        process = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, cwd=ROOT, env=environ
        )
    try:
        state = ours.recv(100)
        assert state in (b"ready", b"unfit")
        yield Preloaded(ours) if state == b"ready" else None
    finally:
        ours.close()
        process.wait()


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` of a module, `[python, "-m", NAME, ...]`, or of a script, forked."""

    def __init__(self, forking: Preloaded, argv: Sequence[str], **options: Any) -> None:
        self._forking = forking
        super().__init__(argv, **options)

    def _execute_child(self, argv: Sequence[str], *options: Any) -> None:
        """In place of fork and exec, once the pipes are made."""
        _executable, _preexec, _close, _pass, folder, environ, _info, _flags, _shell, *pipes = options[:15]
        new_session, _group = options[-2:]
        own = [end if end >= 0 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            start = Start(
                argv, dict(environ or os.environ), str(folder or Path.cwd()), (0, 1, 2), new_session
            )
            self.pid = self._forking.start(start, own)
            vars(self)["_child_created"] = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def popen(forking: Preloaded | None, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Forked where that is possible."""
    if forking is None:
        return subprocess.Popen(argv, **options)
    return ForkedPopen(forking, argv, **options)


def named(name: str, pid: int) -> list[psutil.Process]:
    """Processes below `pid` with that in their name; those between, which end at once, have none."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in process.name():
                found.append(process)
    return found


class Input:
    """A process's standard input, which takes less than its pipe holds."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self.write = pipe.write
        self.close = pipe.close

    async def drain(self) -> None:
        """Send what was written. Raises OSError when nobody reads it any more."""
        self._pipe.flush()


class Output(asyncio.StreamReaderProtocol):
    """A pipe that is closed at its end."""

    def eof_received(self) -> bool:
        """Tell the reader; uvloop would keep it open."""
        super().eof_received()
        return False


class ForkedProcess:
    """What `asyncio.subprocess.Process` is to whoever started it, forked."""

    def __init__(self, process: ForkedPopen) -> None:
        self.pid = process.pid
        self.stdin = None if process.stdin is None else Input(process.stdin)
        self.stdout = self.stderr = asyncio.StreamReader()
        self.send_signal, self.terminate, self.kill = process.send_signal, process.terminate, process.kill
        self._process = process
        self._waiting = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, forking: Preloaded, *argv: str, **options: Any) -> ForkedProcess:
        """As `asyncio.create_subprocess_exec` with `python`; one of its outputs at most is a pipe."""
        process = ForkedPopen(forking, argv, **options)
        forked, loop = cls(process), asyncio.get_running_loop()
        [pipe] = [output for output in (process.stdout, process.stderr) if output is not None]
        await loop.connect_read_pipe(lambda: Output(forked.stdout), pipe)
        return forked

    @property
    def returncode(self) -> int | None:
        """The exit status; None before `wait` has seen the end."""
        return self._process.returncode

    async def wait(self) -> int:
        """The exit status, once it has ended."""
        return await asyncio.shield(self._waiting)

    async def _wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._process.wait()


class ForkingAsyncio(ModuleType):
    """The module `asyncio` for one that starts SGLang with it: its processes are forked."""

    def __init__(self, forking: Preloaded) -> None:
        super().__init__(asyncio.__name__)
        self._forking = forking

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def create_subprocess_exec(self, *argv: str, **options: Any) -> ForkedProcess:
        """In place of asyncio's."""
        return await ForkedProcess.start(self._forking, *argv, **options)


def main() -> None:
    """Import SGLang, then fork for whoever has the other end of standard input."""
    setproctitle.getproctitle()  # it finds where a title goes in an environment that nobody has changed
    asker = socket.socket(fileno=os.dup(0))
    if not needs_cpu_platform():
        asker.send(b"unfit")
        return
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare_process()
        for name in MODULES:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "threads do not outlive a fork"
    asker.send(b"ready")
    _fork_for(asker)


def _fork_here() -> Preloaded:
    """A process of its own that forks this one as it is now, until this one ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        die_with_parent(parent)
        ours.close()
        _fork_for(theirs)
    theirs.close()
    return Preloaded(ours)


def _fork_for(asker: socket.socket) -> NoReturn:
    """Fork for each message, until the asker has closed its end; a new process ends as its module does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(asker, 1 << 20, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        if not (between := os.fork()):
            between = os.getpid()
            if pid := os.fork():
                asker.send(str(pid).encode())
                os._exit(0)
            asker.close()
            _become(between, descriptors, *pickle.loads(message))
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        asker.send(b"done")


def _become(between: int, descriptors: Sequence[int], parent: int, start: Start) -> NoReturn:
    """Be the process that was asked for, from its first line to its end."""
    while os.getppid() == between:
        time.sleep(0.001)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FREE_DESCRIPTORS) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, start.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if start.new_session:
        os.setsid()
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environ)
    sys.modules["__main__"] = ModuleType("__main__")
    _python, option, code, *words = start.argv
    if "--multiprocessing-fork" in words:
        option, code, *words = start.argv[start.argv.index("-c") :]
        sys.argv = [option, *words]
        exec(code, vars(sys.modules["__main__"]))  # multiprocessing's own
    else:
        sys.argv = [code, *words]
        sys.path[:0] = filter(None, start.environ.get("PYTHONPATH", "").split(os.pathsep))
        _fork_here().spawn_here()
        if option == "-m":
            sys.path.insert(0, start.folder)
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            assert option == "-P", start.argv
            runpy.run_path(code, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    # Its own name, as `__main__` is another module in each process that is forked.
    importlib.import_module("tests.support.preloaded").main()
