"""Structured logs on standard error: one canonical line per request, never prompts or answers.

https://www.structlog.org/en/stable/logging-best-practices.html ("canonical log lines").
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger

MAY_LOG_CONTENT = ("sglang", "transformers", "xgrammar")
"""Libraries whose log messages may quote what they work on."""


def configure(level: str, fmt: str) -> FilteringBoundLogger:
    """Set up logging for the process and return the root logger.

    `level` is a standard level name; `fmt` is json, console or auto (console on a terminal).
    """
    console = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _adopt_stdlib(shared, renderer)
    return cast(FilteringBoundLogger, structlog.get_logger())


def _adopt_stdlib(shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor) -> None:
    """Give library log records (uvicorn, SGLang) the same shape; only warnings and worse.

    SGLang's parsers log what the model wrote, at any level: of its records only the place is
    kept, and of any exception only what `safe_traceback` says.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, _without_text],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def _without_text(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A library's record without anything that could quote a prompt or an answer."""
    record: logging.LogRecord = event["_record"]
    exc_info = event.pop("exc_info", None) or record.exc_info
    if isinstance(exc_info, tuple) and exc_info[1] is not None:
        event["error"] = safe_traceback(exc_info[1])
    record.exc_info = record.exc_text = None
    if record.name.split(".")[0] in MAY_LOG_CONTENT:
        event["event"] = f"{record.module}.{record.funcName}:{record.lineno}"
    return event


def safe_traceback(exc: BaseException) -> str:
    """An exception as its type and code positions, without its message.

    Messages of foreign exceptions may quote a prompt, which must never reach a log.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    steps = " > ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in frames[-6:])
    return f"{type(exc).__name__} at {steps}" if steps else type(exc).__name__
