"""The arguments that SGLang is started with."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.sglang import args
from app.engine.sglang.args import CPU_DEFAULTS, SGLangOptions, with_pool

WEIGHTS_SHARE, OTHERS_SHARE = 0.4, 0.3
"""Shares of the free memory that a large model and other processes of the machine take while it loads."""


def test_a_cpu_engine_starts_beside_others() -> None:
    """SGLang subtracts the complement of this share from what is left, and refuses to start at nothing."""
    left = 1 - WEIGHTS_SHARE - OTHERS_SHARE
    assert left - (1 - CPU_DEFAULTS["mem_fraction_static"]) > 0


@pytest.mark.parametrize(
    ("on_cpu", "passed", "expected"),
    [
        (True, {}, {"max_total_tokens": 7}),
        (True, {"max_total_tokens": 9}, {"max_total_tokens": 9}),
        (False, {}, {}),
    ],
    ids=["as before", "the operator's", "on a GPU"],
)
def test_a_restart_on_a_cpu_has_the_pool_of_the_run_before(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, passed: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Unless the operator has set one; a GPU's memory is not shared so."""
    monkeypatch.setattr(args, "needs_cpu_platform", lambda: on_cpu)
    options = with_pool(SGLangOptions(server_args=passed), 7)
    assert options.server_args == expected
    assert with_pool(options, 5).server_args == expected
