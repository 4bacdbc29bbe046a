"""The stage of a start, by the names of its processes."""

from __future__ import annotations

import pytest

from app.engine.sglang.start_stage import COMPILE, IMPORT, LOAD, stage_by_names


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ([], IMPORT),
        (["python"], IMPORT),
        (["python", "sglang::schedul"], LOAD),
        (["sglang::scheduler_TP0", "sglang::detoken"], LOAD),
        (["sglang::schedul", "ninja", "cicc"], COMPILE),
    ],
)
def test_the_stage_is_told_by_names(names: list[str], stage: str) -> None:
    """A scheduler takes its title when its imports are done; compilers are its children."""
    assert stage_by_names(names) == stage
