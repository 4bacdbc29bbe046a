"""The runtime says what its start is doing."""

from __future__ import annotations

from pathlib import Path

import structlog

from app.engine.scripted.engine import Script, ScriptedEngine
from app.runtime import Runtime
from app.settings import Settings


async def test_the_state_of_a_start_is_its_stage(tmp_path: Path) -> None:
    """Until the start is over: what comes after it is kept."""
    settings = Settings(data_dir=tmp_path, safety="off")
    runtime = Runtime(
        settings, structlog.get_logger(), lambda _settings, died: ScriptedEngine(Script(), on_death=died)
    )
    assert await runtime.note_start_stage() == "opening the store"
    assert runtime.state == "starting: opening the store"
    runtime.start_failed("no memory")
    await runtime.note_start_stage()
    assert runtime.state == "dead: no memory"
