"""`python -m scripts.gpu.observed FILE serve …`: our server, which writes SGLang's own report into FILE.

The server is the product's, started as a user starts it; only the engine's start has an end of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from app.__main__ import run
from app.engine.sglang.engine import SGLangEngine

Start = Callable[[SGLangEngine], Coroutine[Any, Any, None]]


def reporting(start: Start, file: Path) -> Start:
    """The engine's start, which then writes what its scheduler reports of itself."""

    async def started(engine: SGLangEngine) -> None:
        await start(engine)
        manager = engine._running().launched.manager  # noqa: SLF001
        (report, *_) = await manager.get_internal_state()
        await asyncio.to_thread(file.write_text, json.dumps(report, default=str))

    return started


def main() -> None:
    """Serve. The guard below matters: SGLang's children import this module again."""
    file = Path(sys.argv.pop(1))
    SGLangEngine.start = reporting(SGLangEngine.start, file)  # type: ignore[assignment, method-assign]
    run()


if __name__ == "__main__":
    main()
