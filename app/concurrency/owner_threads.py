"""Threads for calls that would block the event loop. Owners alternate, call by call.

A gate (`fair_gate`) says whose call is next; of an owner's calls the smallest, then the oldest. Running time
and waiting time are counted apart: other owners' calls cause the wait. Used by one event loop at a time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from app.concurrency.fair_gate import FairGate

T = TypeVar("T")

EXIT_S = 1.0
"""Seconds that the end of the process waits for calls that still run; one that hangs is left behind."""

LARGE_BYTES = 64 * 1024
"""A larger request is parsed and taken apart in a thread. Python takes up to 0.2 us for each byte: 12 ms."""

_numbers = itertools.count()


class ThreadsClosed(RuntimeError):
    """Nothing more is run."""


class Overdue(TimeoutError):
    """The calls took too long, or all threads have a call that hangs."""


class WaitedTooLong(TimeoutError):
    """No thread was free in time: there is too much to run."""


class Work:
    """The work of one caller, in one call or in several, one at a time."""

    __slots__ = ("owner", "rank", "wait_s", "work_s")

    def __init__(
        self, owner: str, size: int = 0, *, work_s: float | None = None, wait_s: float | None = None
    ) -> None:
        """`size` is compared by powers of two, in any unit: an owner's small work goes before the large.

        All calls together may run for `work_s` seconds, and wait for `wait_s`; None is no limit.
        """
        self.owner = owner
        self.rank = (size.bit_length(), next(_numbers))
        self.work_s = work_s
        self.wait_s = wait_s

    def count(self, *, work_s: float = 0.0, wait_s: float = 0.0) -> None:
        """Subtract a call's work or waiting time from the remaining allowance."""
        self.work_s = None if self.work_s is None else self.work_s - work_s
        self.wait_s = None if self.wait_s is None else self.wait_s - wait_s


class OwnerThreads:
    """A few threads. Construct once; `close()` ends them."""

    def __init__(self, name: str, workers: int = 1, *, hangs_after_s: float | None = None) -> None:
        """A call that runs for `hangs_after_s` seconds hangs. While all threads do, calls are refused."""
        self._name = name
        self._workers = workers
        self._gate = FairGate(workers)
        self._hangs_after_s = hangs_after_s
        self._num_started = self._num_hanging = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False

    async def run(self, work: Work, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in a thread. Raises what that does, Overdue, WaitedTooLong, ThreadsClosed.

        A caller that leaves meanwhile leaves the call running: a thread cannot be stopped.
        """
        loop = asyncio.get_running_loop()
        await self._thread_for(work, loop)
        if self._closed:  # since the thread was given to it
            raise ThreadsClosed
        if self._num_started < self._workers:
            try:
                self._start()
            except BaseException:  # the system has no thread left now
                self._gate.release(work.owner)
                raise
        job = _Job(self, work.owner, loop, function, arguments)
        if self._hangs_after_s is not None:
            job.watch(self._hangs_after_s)
        begun_s = loop.time()
        self._jobs.put(job)
        try:
            async with asyncio.timeout(work.work_s) as limit:
                result: T = await job.result
        except TimeoutError:
            if limit.expired():
                raise Overdue from None
            raise
        finally:
            del job  # an error's traceback holds this frame, which would hold the error
        work.count(work_s=loop.time() - begun_s)
        return result

    def close(self) -> None:
        """Start nothing more; what runs is not stopped. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._gate.refuse_waiting(ThreadsClosed)
        for _ in range(self._num_started):
            self._jobs.put(None)

    def _start(self) -> None:
        _Thread(self._jobs, f"{self._name}_{self._num_started}").start()
        self._num_started += 1

    async def _thread_for(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            raise ThreadsClosed
        if self._num_hanging == self._workers:
            raise Overdue
        begun_s = loop.time()
        try:
            async with asyncio.timeout(work.wait_s) as limit:
                await self._gate.acquire(work.owner, work.rank)
        except TimeoutError:
            if limit.expired():
                raise WaitedTooLong from None
            raise
        work.count(wait_s=loop.time() - begun_s)

    def hangs(self) -> None:
        """A call has run too long; calls behind it fail, unless another thread serves them."""
        self._num_hanging += 1
        if self._num_hanging == self._workers:
            self._gate.refuse_waiting(Overdue)

    def ended(self, job: _Job, result: Any, error: BaseException | None) -> None:
        """A thread is done with a job; its caller may be gone."""
        self._num_hanging -= job.end_watch()
        if not job.result.done():
            if error is None:
                job.result.set_result(result)
            else:
                job.result.set_exception(error)
        # The caller gets its result before the place is released, so that its next call can already queue.
        job.loop.call_soon(self._gate.release, job.owner)


class _Job:
    """A call to a thread, and its result."""

    __slots__ = ("_arguments", "_function", "_hangs", "_threads", "_timer", "loop", "owner", "result")

    def __init__(
        self,
        threads: OwnerThreads,
        owner: str,
        loop: asyncio.AbstractEventLoop,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        self._threads = threads
        self._function = function
        self._arguments = arguments
        self.owner, self.loop = owner, loop
        self.result: asyncio.Future[Any] = loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._hangs = False

    def watch(self, hangs_after_s: float) -> None:
        """Tell the threads when the call has run for so long."""
        self._timer = self.loop.call_later(hangs_after_s, self._late)

    def end_watch(self) -> bool:
        """The call has ended; True if it was reported as hanging."""
        if self._timer is not None:
            self._timer.cancel()
        return self._hangs

    def _late(self) -> None:
        self._hangs = True
        self._threads.hangs()

    def run(self) -> None:
        """Call the function, and hand its result to the loop."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._function(*self._arguments)
        except StopIteration:  # no future takes it
            error = RuntimeError("the call raised StopIteration")
        except BaseException as exc:  # noqa: BLE001  # it is the caller's
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            self.loop.call_soon_threadsafe(self._threads.ended, self, result, error)
        del self, result, error  # for the same reason as in `OwnerThreads.run`


class _Thread(threading.Thread):
    """Runs jobs until it is given None."""

    def __init__(self, jobs: SimpleQueue[_Job | None], name: str) -> None:
        # A daemon: at exit the interpreter waits for all other threads, however long they run.
        super().__init__(name=name, daemon=True)
        self._jobs = jobs
        self.running = threading.Lock()
        """Held while a job runs."""

    def run(self) -> None:
        """Run jobs, in the thread."""
        while (job := self._jobs.get()) is not None:
            with self.running:
                job.run()
            del job  # its arguments are freed before the next job


@atexit.register
def _await_calls() -> None:
    """Wait for calls that run, and let none begin: the interpreter must not end under native code."""
    until_s = time.monotonic() + EXIT_S
    for thread in (each for each in threading.enumerate() if isinstance(each, _Thread)):
        thread.running.acquire(timeout=max(until_s - time.monotonic(), 0.0))
