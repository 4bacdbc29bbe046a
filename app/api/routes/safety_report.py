"""GET /api/admin/safety/report: what policies make of the server's own traffic, as `tokenring safety report`.

Another process computes it, since two hundred thousand records take it a minute; one at a time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import check_names, json_response
from app.errors import Conflict, InternalError
from app.intake.caller import Caller
from app.metering.usage import Period, period_of
from app.settings import Settings

TIMEOUT_S = 300.0
MAX_ENTRIES = 50
"""Entries of each grouping, those with the most refused prompts."""
_OF_SETTINGS = ("data_dir", "safety", "safety_policy")
_PREFIX = "TOKENRING_"


class SafetyReportRoutes:
    """The handler of `/api/admin/safety/report`. It has no text of prompts or answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._busy = asyncio.Lock()

    async def report(self, request: Request, _caller: Caller) -> Response:
        """GET: the report over a period; this UTC month when none is asked for."""
        check_names(request, ("period", "from", "to"))
        query = request.query_params
        today = datetime.now(UTC).date()
        period = period_of(query.get("period"), query.get("from"), query.get("to"), today)
        if self._busy.locked():
            raise Conflict("A report is being computed already; ask again when it is done.")
        async with self._busy:
            body = await self._computed(period)
        for grouping, entries in body["by"].items():
            body["by"][grouping] = sorted(entries, key=_refused, reverse=True)[:MAX_ENTRIES]
        return json_response(body, confidential=True)

    async def _computed(self, period: Period) -> dict[str, Any]:
        """What the command prints. Raises InternalError."""
        days = f"--from={period.first}", f"--to={period.last}"
        command = sys.executable, "-m", "app", "safety", "report", "--json", "--config", os.devnull, *days
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=self._environment()
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, problems = await process.communicate()
        except TimeoutError:
            raise InternalError(f"The report took more than {TIMEOUT_S:g} s; ask for fewer days.") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            last = problems.decode(errors="replace").strip().rpartition("\n")[2]
            raise InternalError(f"The report cannot be made: {last}")
        report: dict[str, Any] = orjson.loads(out)
        return report

    def _environment(self) -> dict[str, str]:
        """The process's variables with the settings in force, and without the secrets among them."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
        return others | {
            f"{_PREFIX}{name.upper()}": str(getattr(self._settings, name)) for name in _OF_SETTINGS
        }


def _refused(entry: Mapping[str, Any]) -> int:
    refused: int = entry["prompts"]["refused"]
    return refused
