"""A restart of the engine, with runs that start at once."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.engine import SGLangEngine
from app.engine.supervise import RestartLimits

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]


class Run:
    """A run that holds itself, as SGLang's tokenizer manager does."""

    def __init__(self, made: list[weakref.ref[Run]], left: list[int]) -> None:
        """`made` gets the run, and `left` how many of these are there when one is frozen."""
        self._made, self._left, self._cycle = made, left, self
        self.closed = False
        self.launched = SimpleNamespace(kv_capacity_tokens=1024, tp=4)
        made.append(weakref.ref(self))

    async def freeze(self) -> None:
        """See SGLangRun.freeze."""
        gc.collect()
        self._left.append(sum(run() is not None for run in self._made))

    async def aclose(self) -> None:
        """See SGLangRun.aclose."""
        self.closed = True

    def serve(self, *_: Any) -> None:
        """See SGLangRun.serve."""

    def watch_for_hangs(self, hang_s: float, name: str) -> None:
        """See SGLangRun.watch_for_hangs."""


async def test_a_lost_run_is_gone_before_the_next_one_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is not collected before the next loss, and a run holds some megabytes."""
    made: list[weakref.ref[Run]] = []
    left: list[int] = []
    engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(hang_s=0))
    monkeypatch.setattr(engine, "_run", Run(made, left))

    async def start_run(_max_s: float) -> Run:
        return Run(made, left)

    monkeypatch.setattr(engine, "_start_run", start_run)
    await engine.restart()
    await engine.restart()
    assert (left, len(made)) == ([1, 1], 3)
    await engine.aclose()


async def test_restarts_have_the_ranks_that_the_first_start_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tp = 0` is settled once."""
    engine = SGLangEngine(SGLangOptions(tp=0), limits=RestartLimits(hang_s=0))

    async def start_run(_max_s: float) -> Run:
        return Run([], [])

    async def no_check(_: Any) -> None:
        return None

    monkeypatch.setattr(engine, "_start_run", start_run)
    monkeypatch.setattr(engine, "_start_grammar_check", no_check)
    await engine._start_first()
    assert (engine._options.tp, engine._options.server_args) == (4, {"max_total_tokens": 1024})
    await engine.aclose()
