"""The usage report: one object, the same over HTTP and on the command line."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import BadRequest
from app.metering.period import Period, number_of, text_of
from app.store.keys import names_of
from app.store.usage import METADATA, Group, UsageSums, usage

MAX_GROUPS = 10_000
"""Groups of a report by metadata, whose values the callers choose."""


def usage_report(
    c: sqlite3.Connection,
    period: Period,
    group_by: Sequence[str],
    *,
    owner: str | None = None,
    key_id: str | None = None,
) -> dict[str, Any]:
    """The answer of `GET /api/usage`, from one snapshot; `owner` and `key_id` None mean everyone's.

    Raises BadRequest for more groups than `MAX_GROUPS` by metadata.
    """
    days = number_of(period.first), number_of(period.last)
    [whole] = usage(c, *days, (), owner=owner, key_id=key_id)
    groups: Sequence[Group] = ()
    if group_by:
        limit = MAX_GROUPS + 1 if any(name.startswith(METADATA) for name in group_by) else -1
        groups = usage(c, *days, group_by, owner=owner, key_id=key_id, limit=limit)
        if 0 <= MAX_GROUPS < limit == len(groups):
            raise BadRequest(
                f"There are more than {MAX_GROUPS:,} groups; ask for a shorter period.", param="group_by"
            )
    names = names_of(c) if "key" in group_by else {}
    return {
        "object": "usage",
        "period": period.name,
        "from": str(period.first),
        "to": str(period.last),
        **sums_as_json(whole.sums),
        "budget_usd": None,
        "groups": [_by(group.by, names) | sums_as_json(group.sums) for group in groups],
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


def _by(by: Mapping[str, str | int | None], key_names: Mapping[str, str]) -> dict[str, Any]:
    """What a group is of; beside a key's id stands its name, which is null for a key that is not stored."""
    written: dict[str, Any] = {}
    for name, value in by.items():
        written[name] = text_of(value) if isinstance(value, int) else value
        if name == "key":
            written["key_name"] = key_names.get(str(value))
    return written
