"""The first start of an engine: tried again where it fails, and not for ever."""

from __future__ import annotations

import pytest

from app.core import Health
from app.engine.sglang import engine as engine_module
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.engine import SGLangEngine
from app.engine.supervise import RestartLimits
from app.errors import EngineFailed
from app.settings import SettingsError


class Starting:
    """An engine whose first starts end as a test says, without pauses in between."""

    def __init__(self, patch: pytest.MonkeyPatch, *ends: Exception | None, restarts: int = 3) -> None:
        self.engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(restarts=restarts))
        self.num_starts = 0
        self._ends = ends
        patch.setattr(engine_module, "FIRST_PAUSE_S", 0.0)
        patch.setattr(self.engine, "_start_first", self._start)

    async def _start(self) -> None:
        end = self._ends[self.num_starts]
        self.num_starts += 1
        if end is not None:
            raise end


async def test_a_first_start_that_failed_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is counted as a loss that was made good."""
    starting = Starting(monkeypatch, RuntimeError("no GPU"), None)
    await starting.engine.start()
    history = starting.engine.restarts
    assert starting.engine.health() is Health.READY
    assert (history.losses["failed"], history.num_restarts, history.reason) == (1, 1, None)
    await starting.engine.aclose()


async def test_a_first_start_that_works_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted."""
    starting = Starting(monkeypatch, None)
    await starting.engine.start()
    assert starting.engine.restarts.num_restarts == sum(starting.engine.restarts.losses.values()) == 0
    await starting.engine.aclose()


@pytest.mark.parametrize(("restarts", "num_starts"), [(3, 3), (9, 3), (1, 2), (0, 1)])
async def test_starts_that_fail_in_a_row_are_the_end(
    monkeypatch: pytest.MonkeyPatch, restarts: int, num_starts: int
) -> None:
    """Three, or as many as `engine_restarts` allows; the last reason is told."""
    ends = [RuntimeError(f"failure {number}") for number in range(1, 4)]
    starting = Starting(monkeypatch, *ends, restarts=restarts)
    with pytest.raises(EngineFailed, match=f"failure {num_starts}") as failed:
        await starting.engine.start()
    assert starting.num_starts == num_starts
    assert (f"{num_starts} starts in a row failed" in failed.value.message) == (num_starts > 1)
    assert starting.engine.health() is Health.DEAD
    await starting.engine.aclose()


async def test_settings_that_cannot_work_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same at the next start."""
    starting = Starting(monkeypatch, SettingsError("tp"))
    with pytest.raises(SettingsError):
        await starting.engine.start()
    assert starting.num_starts == 1
    await starting.engine.aclose()
