"""The screens of a server, made of its settings and its classifiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from app.generation.safety_check import SafetyService
from app.generation.safety_recorder import SafetyRecorder
from app.safety.classifiers.bundled_models import Models
from app.safety.counters import SafetyCounters
from app.safety.guard.tier import GuardTier
from app.safety.policies.policy import Policies
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.stream.second_stage import SecondStage
from app.safety.stream.stream_screen import StreamScreen
from app.settings import Settings
from app.store.database import Database


def safety_service(
    settings: Settings,
    models: Models,
    counters: SafetyCounters,
    *,
    database: Database,
    log: FilteringBoundLogger,
    guard: Callable[[], GuardTier | None],
) -> SafetyService:
    """The screens and their policy. Raises SettingsError."""
    second_stage = SecondStage(models.second_stage, counters)
    path = Path(settings.safety_policy) if settings.safety_policy else None
    return SafetyService(
        PromptScreen(
            models.prompts, counters, sure_below=models.sure_below, fail_open=settings.safety_fail_open
        ),
        StreamScreen(models.answers, second_stage.review, counters.hold_back.observe),
        Policies(
            path,
            models.directory,
            settings.safety_country,
            settings.safety_contact,
            observe=settings.safety == "observe",
        ),
        counters,
        database=database,
        log=log,
        recorder=SafetyRecorder(database, log, settings.safety_records_days),
        second_stage=second_stage,
        guard=guard,
        fail_open=settings.safety_fail_open,
    )
