"""Answers that wait in their middle until a test lets them go on, however quick or slow the machine is.

`python -m tests.support.held_answers` is `python -m app` with such answers: they wait while there is a file
`HOLD` where it was started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from app import engine_factory
from app.__main__ import run as run_command_line
from app.core import Delta
from app.engine.scripted.engine import ScriptedEngine

HELD_TOKENS = 20
"""So many tokens of an answer come before it waits."""
HOLD = "hold"


class HeldEngine(ScriptedEngine):
    """Holds each answer behind its first tokens, until it is let go, aborted or suspended."""

    def is_held(self) -> bool:
        """Whether answers have to wait now."""
        return Path(HOLD).exists()

    async def _generate(self, rid: str, run: Any, answer: Any) -> AsyncIterator[Delta]:
        made = 0
        async with aclosing(super()._generate(rid, run, answer)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta
                made += len(delta.token_ids)
                while made >= HELD_TOKENS and not (run.aborted or run.error) and self.is_held():
                    await asyncio.sleep(0.01)


if __name__ == "__main__":
    vars(engine_factory)["ScriptedEngine"] = HeldEngine
    run_command_line()
