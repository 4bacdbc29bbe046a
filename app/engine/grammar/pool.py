"""The processes that check grammars (app.engine.grammar.worker): started, asked, killed, restarted.

One owner has one of them at a time, so that slow grammars delay only the next ones of their owner. Knows
nothing of SGLang, nor of what a grammar is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass

from app.concurrency.fair_gate import FairGate
from app.engine.grammar.cost import GrammarBudget
from app.errors import EngineNotReady, Overloaded, Unavailable

WORKERS = 2
"""60 MiB each, with 128,000 tokens 120 MiB. The second starts when the first is busy."""
MAX_WAITING = 64
MAX_WAITING_PER_OWNER = 8
START_S = 60.0
CLOCK_FACTOR = 4
"""Times the CPU time that a grammar may take: the longest by the clock, for one that waits for the CPU."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to every worker. `serialized` is xgrammar's `TokenizerInfo` as JSON."""

    serialized: str
    any_whitespace: bool
    stop_token_ids: tuple[int, ...] | None
    budget: GrammarBudget

    def line(self) -> bytes:
        """The message as a line of JSON."""
        setup = {
            "parent": os.getpid(),
            "serialized": self.serialized,
            "any_whitespace": self.any_whitespace,
            "stop_token_ids": self.stop_token_ids,
            "mask_ms": self.budget.mask_ms,
            "limit_s": self.budget.check_s,
        }
        return json.dumps(setup).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """The verdict on a grammar; `reason` is for the caller, where it did not pass.

    `outcome` is passed, invalid, empty, slow, or late: slow by the clock, which may be the machine's fault.
    """

    outcome: str
    reason: str = ""


class WorkerPool:
    """Checks grammars in processes of their own, `WORKERS` at a time."""

    def __init__(self, setup: WorkerSetup, workers: int = WORKERS) -> None:
        self._setup = setup
        self._gate = FairGate(
            workers,
            "new grammars",
            max_per_owner=MAX_WAITING_PER_OWNER,
            max_total=MAX_WAITING,
            one_each=True,
        )
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._refilling: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start one worker, so that the first grammar does not wait for it."""
        self._idle.append(await self._spawn())

    async def aclose(self) -> None:
        """Kill the workers; a second call does nothing."""
        self._closed = True
        if self._refilling is not None:
            await asyncio.wait([self._refilling])  # not cancelled: its process may be starting
        idle, self._idle = self._idle, []
        for process in idle:
            await self._kill(process)
        for process in list(self._all):  # those that are asked something; who asked closes them
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def check(self, owner: str, kind: str, source: str, tokens: int) -> GrammarVerdict:
        """Compile and walk a grammar.

        Raises RateLimited where too many of the owner wait for that already, Overloaded where too many wait
        in all or it waited too long, EngineNotReady once the pool is closed.
        """
        try:
            async with asyncio.timeout(self._setup.budget.check_s) as waiting, self._gate.place(owner):
                waiting.reschedule(None)
                self._check_open()
                verdict = await self._ask(kind, source, tokens)
                if verdict.outcome != "passed":
                    self._check_open()  # the worker was killed with the pool, and not for its grammar
                return verdict
        except TimeoutError:
            raise Overloaded(
                "The grammars before this one took too long to check; send the request again.",
                retry_after_s=2,
            ) from None

    # --- inside

    def _check_open(self) -> None:
        if self._closed:
            raise EngineNotReady("The engine is being stopped.", retry_after_s=5)

    async def _ask(self, kind: str, source: str, tokens: int) -> GrammarVerdict:
        process = await self._worker()
        assert process.stdout is not None
        reply, is_late, clock_s = b"", False, CLOCK_FACTOR * self._setup.budget.check_s
        try:
            asked = json.dumps({"kind": kind, "source": source, "tokens": tokens}).encode() + b"\n"
            reply = await _reply(process, asked, clock_s)
            is_late = not (reply or process.stdout.at_eof())
        finally:
            if reply:
                self._idle.append(process)
            else:
                await self._kill(process)
                if not (self._closed or self._idle or self._refilling):
                    self._refilling = asyncio.create_task(self._refill(), name="grammar-worker")
        if is_late:
            reason = f"it was not through after {clock_s:g} s; if this machine was busy, send it again"
            return GrammarVerdict("late", reason)
        if not reply:
            return self._died(process)
        fields = json.loads(reply)
        return GrammarVerdict(fields["outcome"], fields["reason"])

    async def _refill(self) -> None:
        """Have a worker ready for the next grammar."""
        with contextlib.suppress(Unavailable, OSError):  # the next grammar tries again
            self._idle.append(await self._spawn())
        self._refilling = None

    async def _worker(self) -> asyncio.subprocess.Process:
        if not self._idle and self._refilling is not None:
            await asyncio.wait([self._refilling])  # a caller that leaves does not stop it
            self._check_open()
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._all.discard(process)
        return await self._spawn()

    def _died(self, process: asyncio.subprocess.Process) -> GrammarVerdict:
        """A worker ends with the grammar that it had: out of time, out of memory, or xgrammar crashed."""
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            limit_s = self._setup.budget.check_s
            return GrammarVerdict(
                "slow", f"compiling and following it took over the {limit_s:g} s that a grammar may take"
            )
        return GrammarVerdict("slow", "the compiler ran out of memory, or failed")

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.engine.grammar.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # xgrammar's warnings quote the grammar
            start_new_session=True,  # a group of its own, which Ctrl-C does not reach
        )
        self._all.add(process)
        ready = b""
        try:
            ready = await _reply(process, self._setup.line(), START_S)
        finally:
            if not ready:
                await self._kill(process)
        if not ready:
            raise Unavailable("The process that checks grammars did not start; try again.", retry_after_s=2)
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        await process.stdout.read()  # to its end, which closes the pipe
        await process.wait()


async def _reply(process: asyncio.subprocess.Process, message: bytes, timeout_s: float) -> bytes:
    """The line that a worker answers a message with; empty where it ends or takes longer."""
    assert process.stdin is not None
    assert process.stdout is not None
    reply = b""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            process.stdin.write(message)
            await process.stdin.drain()
            reply = await process.stdout.readline()
    return reply if reply.endswith(b"\n") else b""
