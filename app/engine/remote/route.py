"""What a choice is, and what the choices of an engine share on their way to its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.remote.continuation import TextRules
from app.engine.remote.faults import FaultLog
from app.engine.remote.resume_gate import ResumeGate
from app.engine.remote.server_pool import ServerPool

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a task that the engine ends at the latest when it is closed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one choice is: its id, its body for `/generate`, how its ids become text, its ids so far."""

    rid: str
    body: Mapping[str, Any]
    rules: Callable[[], TextRules]
    continued: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """What the choices of an engine share: the servers, the gate for those that move, the log of faults."""

    pool: ServerPool
    gate: ResumeGate
    faults: FaultLog
    resume_s: float
    spawn: Spawn
    carries_ids: bool = False
    """Whether the servers run our scheduler, and go on with any answer by its ids."""
