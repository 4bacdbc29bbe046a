"""What commands over a store print on standard error."""

from __future__ import annotations


def without_store(err: str) -> str:
    """Standard error without the line that names the store."""
    return "".join(
        line for line in err.splitlines(keepends=True) if not line.startswith("tokenring: the store is ")
    )
