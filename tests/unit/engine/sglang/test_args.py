"""The arguments that SGLang is started with."""

from __future__ import annotations

from app.engine.sglang.args import CPU_DEFAULTS

WEIGHTS_SHARE, OTHERS_SHARE = 0.4, 0.3
"""Shares of the free memory that a large model and other processes of the machine take while it loads."""


def test_a_cpu_engine_starts_beside_others() -> None:
    """SGLang subtracts the complement of this share from what is left, and refuses to start at nothing."""
    left = 1 - WEIGHTS_SHARE - OTHERS_SHARE
    assert left - (1 - CPU_DEFAULTS["mem_fraction_static"]) > 0
