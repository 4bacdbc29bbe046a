"""The guard in SGLang 0.5.20's scheduler: a request whose grammar holds up the step is ended, and alone.

Masks and accepted tokens are counted in CPU time (app.engine.grammar.cost). A step has so much time for
the masks of all; a grammar that takes more than its share for long is aborted, by the way that SGLang's
own time-outs take, which all tensor parallel ranks follow together. Masks are filled in a thread beside
the step: xgrammar releases the GIL, so that a mask that takes seconds is left behind
(app.engine.sglang.stall_limit).
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang.srt.constrained import xgrammar_backend
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from app.engine.grammar.cost import GRAMMAR_ENDED, CostMeter
from app.engine.sglang.stall_limit import STALL_S, StallLimit

REPLACED: Mapping[str, str] = {
    "constrained.xgrammar_backend:XGrammarGrammar.fill_vocab_mask": "2502ff7bbb5068dd",
    "constrained.xgrammar_backend:XGrammarGrammar.accept_token": "10ac43f0c3da49ef",
    "constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched": "f3afe29c6c70b50e",
    "constrained.base_grammar_backend:BaseGrammarBackend.__init__": "3cbfdbe2e8000e68",
    "managers.scheduler:Scheduler._poll_timeout_aborts": "18b8badab95c9fe5",
}
STEP_SHARES = 5
"""A step may spend five times a grammar's allowance on masks; more grammars than that share it."""
MIN_SHARE = 0.05
"""The least share of the allowance: ordinary masks take 3 to 60 us (128,000 tokens)."""
POLL_S = 0.1
"""Seconds between two checks whether the current mask has stalled."""
COMPILERS = 2
COMPILER_NICE = 10
MAX_COMPILED = 128
MAX_COMPILED_BYTES = 512 * 1024**2
POLL_ENVIRON = {
    # While a grammar compiles, SGLang holds each step of everyone back by this many seconds (0.005).
    "SGLANG_GRAMMAR_POLL_INTERVAL": "0.0005",
    # After so many steps it gives a grammar up; how long one may take is decided before it gets here.
    "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS": "1000000",
}


class GrammarGuard:
    """Counts what grammars cost in this scheduler; `install` puts it in SGLang's way."""

    def __init__(self, mask_ms: float, limit: StallLimit | None, *, poll_s: float = POLL_S) -> None:
        self._mask_ms = mask_ms
        self._share_ms = mask_ms
        self._limit = limit
        self._filler = None if limit is None else MaskFiller(limit, poll_s)
        self._any_exceeded = False

    def install(self) -> None:
        """Replace the methods that fill masks, accept tokens, and look for time-outs."""
        os.environ.update({name: os.environ.get(name, value) for name, value in POLL_ENVIRON.items()})
        fill, accept = XGrammarGrammar.fill_vocab_mask, XGrammarGrammar.accept_token
        poll = Scheduler._poll_timeout_aborts  # noqa: SLF001
        guard = self

        def fill_vocab_mask(self: Any, vocab_mask: Any, idx: int) -> None:
            guard.fill(self, lambda: fill(self, vocab_mask, idx))

        def accept_token(self: Any, token: int) -> None:
            guard.accept(self, lambda: accept(self, token))

        def poll_timeout_aborts(self: Any) -> list[AbortReq]:
            return [*poll(self), *guard.aborts(self)]

        XGrammarGrammar.fill_vocab_mask = fill_vocab_mask
        XGrammarGrammar.accept_token = accept_token
        BaseGrammarObject.fill_vocab_mask_batched = staticmethod(self.fill_batched)
        Scheduler._poll_timeout_aborts = poll_timeout_aborts  # noqa: SLF001
        _bound_compiling()

    def fill_batched(self, entries: list[Any], vocab_mask: Any) -> None:
        """Fill a step's rows; one that stalls is left behind, and its request will be ended."""
        shares = max(1.0, len(entries) / STEP_SHARES)
        self._share_ms = self._mask_ms * max(MIN_SHARE, 1.0 / shares)
        if self._limit is None or self._filler is None:
            for entry in entries:
                entry.grammar.fill_vocab_mask(vocab_mask, entry.row)
            return
        self._limit.begin_step()
        rows = []
        for entry in entries:
            if _meter(entry.grammar, self._mask_ms).stalled:
                self._limit.leave(entry.row)
            else:
                rows.append(entry)
        for entry in self._filler.fill(rows, vocab_mask):
            _meter(entry.grammar, self._mask_ms).stalled = True
            self._any_exceeded = True

    def fill(self, grammar: Any, fill: Callable[[], None]) -> None:
        """Fill one mask, and count it."""
        meter = _meter(grammar, self._mask_ms)
        began_s = time.thread_time()
        fill()
        meter.spend(1e3 * (time.thread_time() - began_s), self._share_ms)
        self._any_exceeded |= meter.exceeded

    def accept(self, grammar: Any, accept: Callable[[], None]) -> None:
        """Accept a token, and count it. Raises ValueError, without the caller's text, which SGLang logs."""
        meter = _meter(grammar, self._mask_ms)
        if meter.stalled:  # its matcher is still busy
            return
        began_s = time.thread_time()
        try:
            accept()
        except ValueError:
            raise ValueError("the grammar does not allow the token") from None
        meter.add(1e3 * (time.thread_time() - began_s))
        self._any_exceeded |= meter.exceeded

    def aborts(self, scheduler: Any) -> list[AbortReq]:
        """The requests to end now, as messages that SGLang sends to all ranks."""
        if not self._any_exceeded:
            return []
        aborts = []
        for req in scheduler.collect_inflight_reqs():
            meter = None if req.finished() else _meter_of(req.grammar)
            if meter is not None and (meter.exceeded or meter.stalled):
                message = GRAMMAR_ENDED + meter.in_words()
                aborts.append(AbortReq(rid=req.rid, abort_message=message))
        self._any_exceeded = bool(aborts)  # until they have ended: SGLang may skip receiving in a step
        return aborts


class RequestMeter(CostMeter):
    """The cost of one request's grammar; `stalled` once a mask took so long that it was left behind."""

    stalled = False

    def in_words(self) -> str:
        # A mask that was left behind is not in the sums.
        if self.stalled:
            return f"choosing one of its tokens took more than {STALL_S:g} s of the scheduler's time"
        return super().in_words()


class MaskFiller:
    """Fills a step's masks in a thread, and starts another thread where that stays in one mask."""

    def __init__(self, limit: StallLimit, poll_s: float) -> None:
        self._limit = limit
        self._look_s = poll_s
        self._thread = _FillThread()

    def fill(self, rows: list[Any], vocab_mask: Any) -> list[Any]:
        """Fill the rows, but for those that are returned: their masks are still being computed."""
        stalled: list[Any] = []
        while rows:
            self._thread.begin(rows, vocab_mask)
            number = self._left_behind(rows)
            if number is None:
                if self._thread.error is not None:
                    raise self._thread.error
                break
            self._thread = _FillThread()
            stalled.append(rows[number])
            rows = rows[number + 1 :]
        return stalled

    def _left_behind(self, rows: list[Any]) -> int | None:
        """The number of the row that the thread was left with; None once it has filled all."""
        thread = self._thread
        while not thread.done.wait(self._look_s):
            number = thread.number
            row = rows[number].row
            if self._limit.is_over(row, thread.current_s()) and thread.leave(number):
                self._limit.leave(row)
                return number
        return None


class _FillThread:
    """A thread that fills the rows that it is given, one by one."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self.number = 0
        self._row_began_s = 0.0
        self._left = False
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[list[Any], Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammar-masks", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def begin(self, rows: list[Any], vocab_mask: Any) -> None:
        self.done.clear()
        self.number, self.error = 0, None
        self._row_began_s = time.clock_gettime(self._clock)
        self._jobs.put((rows, vocab_mask))

    def leave(self, number: int) -> bool:
        """End the thread after that row, if it still works on it; True if it does."""
        with self._lock:
            self._left = self.number == number
            return self._left

    def current_s(self) -> float:
        """CPU time that the present row has taken."""
        return time.clock_gettime(self._clock) - self._row_began_s

    def _run(self) -> None:
        while True:
            rows, vocab_mask = self._jobs.get()
            try:
                for number, entry in enumerate(rows):
                    with self._lock:
                        if self._left:
                            return
                        self._row_began_s, self.number = time.thread_time(), number
                    entry.grammar.fill_vocab_mask(vocab_mask, entry.row)
            except Exception as exc:  # noqa: BLE001  # raised in the step, as without a thread
                self.error = exc
            if self._left:
                return
            self.done.set()


def _meter_of(grammar: Any) -> RequestMeter | None:
    """The meter of a request's grammar, if it has one; a reasoner's grammar is inside."""
    inner = getattr(grammar, "grammar", None) or grammar
    return getattr(inner, "request_meter", None)


def _meter(grammar: Any, mask_ms: float) -> RequestMeter:
    meter = _meter_of(grammar)
    if meter is None:
        meter = RequestMeter(mask_ms)
        (getattr(grammar, "grammar", None) or grammar).request_meter = meter
    return meter


def _bound_compiling() -> None:
    """Compile a few at a time, below everything else, and forget what was not used for long."""
    begin = BaseGrammarBackend.__init__

    def init(self: Any) -> None:
        begin(self)
        self.executor = ThreadPoolExecutor(COMPILERS, initializer=_be_nice)
        self.cache = _Recent()

    BaseGrammarBackend.__init__ = init
    xgrammar_backend.GrammarCompiler = functools.partial(
        xgrammar_backend.GrammarCompiler, cache_limit_bytes=MAX_COMPILED_BYTES
    )


def _be_nice() -> None:
    """Lower the priority of this thread and of those that xgrammar starts in it."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILER_NICE)


class _Recent(OrderedDict[Any, Any]):
    """The compiled grammars used last; SGLang keeps every one for ever."""

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_COMPILED:
            self.popitem(last=False)
