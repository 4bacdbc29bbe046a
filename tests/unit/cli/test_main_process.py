"""The process of the command line: what is set before anything is imported."""

from __future__ import annotations

import os

import pytest

from app import __main__ as entry


@pytest.mark.parametrize(("own", "used"), [(None, "1"), ("4", "4")])
def test_a_matrix_product_takes_one_core(monkeypatch: pytest.MonkeyPatch, own: str | None, used: str):
    """Before NumPy is imported, which reads it once; the operator's own number wins."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", own or "")
    if own is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    seen: list[str | None] = []

    def main() -> int:
        seen.append(os.environ.get("OPENBLAS_NUM_THREADS"))
        return 0

    monkeypatch.setattr(entry, "main", main)
    monkeypatch.setattr(os, "_exit", seen.append)
    entry.run()
    assert seen == [used, 0]
