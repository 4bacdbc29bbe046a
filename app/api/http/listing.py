"""The query parameters that all lists have: which names there are, and how long a page is."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

from app.errors import BadRequest

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def check_names(request: Request, names: Collection[str]) -> None:
    """Raise BadRequest for a query parameter that is none of `names`."""
    for name in request.query_params:
        if name not in names:
            raise BadRequest(
                f"Unknown parameter {name!r}; this route takes {', '.join(names)}.",
                code="unknown_parameter",
                param=name,
            )


def limit_of(request: Request) -> int:
    """The length of a page, from `limit`. Raises BadRequest."""
    raw = request.query_params.get("limit")
    if raw is None:
        return DEFAULT_LIMIT
    if raw.isascii() and raw.isdigit() and len(raw) < 10 and 1 <= int(raw) <= MAX_LIMIT:
        return int(raw)
    raise BadRequest(f"limit must be a number from 1 to {MAX_LIMIT}, got {raw!r}.", param="limit")
