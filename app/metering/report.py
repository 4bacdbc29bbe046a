"""The usage report: one object, the same over HTTP and on the command line."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from app.metering.period import Period, number_of, text_of
from app.store.usage import GroupBy, UsageSums, usage


def usage_report(
    c: sqlite3.Connection, period: Period, group_by: Sequence[GroupBy], owner: str | None
) -> dict[str, Any]:
    """The answer of `GET /api/usage`, from one snapshot; `owner` None means everyone's."""
    days = number_of(period.first), number_of(period.last)
    [whole] = usage(c, *days, (), owner=owner)
    groups = usage(c, *days, group_by, owner=owner) if group_by else []
    return {
        "object": "usage",
        "period": period.name,
        "from": str(period.first),
        "to": str(period.last),
        **sums_as_json(whole.sums),
        "budget_usd": None,
        "groups": [_by(group.by) | sums_as_json(group.sums) for group in groups],
    }


def sums_as_json(sums: UsageSums) -> dict[str, int | float]:
    """Sums under the names of the API. `cost_usd` has six decimals, which are all there are."""
    return {
        "requests": sums.requests,
        "input_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "output_tokens": sums.completion_tokens,
        "reasoning_tokens": sums.reasoning_tokens,
        "withheld_tokens": sums.withheld_tokens,
        "cost_usd": round(sums.cost_micro_usd / 1_000_000, 6),
        "cost_micro_usd": sums.cost_micro_usd,
    }


def _by(by: dict[GroupBy, str | int]) -> dict[str, Any]:
    return {name: text_of(value) if isinstance(value, int) else value for name, value in by.items()}
