"""A restart of the engine, with runs that start at once."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.restarts import RestartLimits
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]


class Run:
    """A run that holds itself, as SGLang's tokenizer manager does; `made` are all that were made."""

    made: list[weakref.ref[Run]]

    def __init__(self, made: list[weakref.ref[Run]]) -> None:
        self.made, self.cycle, self.closed = made, self, False
        self.launched = SimpleNamespace(kv_capacity_tokens=1024)
        self.left: int | None = None
        made.append(weakref.ref(self))

    async def freeze(self) -> None:
        """See SGLangRun.freeze; counts the runs that a collection leaves."""
        gc.collect()
        self.left = sum(run() is not None for run in self.made)

    async def aclose(self) -> None:
        """See SGLangRun.aclose."""
        self.closed = True

    def serve(self, *_: Any) -> None:
        """See SGLangRun.serve."""


async def test_a_lost_run_is_gone_before_the_next_one_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is not collected before the next loss, and a run holds some megabytes."""
    made: list[weakref.ref[Run]] = []
    engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(hang_s=0))
    engine._run = Run(made)  # type: ignore[assignment]

    async def start_run() -> Run:
        return Run(made)

    monkeypatch.setattr(engine, "_start_run", start_run)
    for number in range(2, 4):
        await engine.restart()
        assert isinstance(engine._run, Run)
        assert (engine._run.left, len(made)) == (1, number)
    await engine.aclose()
