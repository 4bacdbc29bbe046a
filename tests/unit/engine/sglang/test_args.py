"""The arguments that SGLang is started with."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.sglang.args import CPU_DEFAULTS, SGLangOptions, with_pool

WEIGHTS_SHARE, OTHERS_SHARE = 0.4, 0.3
"""Shares of the free memory that a large model and other processes of the machine take while it loads."""


def test_a_cpu_engine_starts_beside_others() -> None:
    """SGLang subtracts the complement of this share from what is left, and refuses to start at nothing."""
    left = 1 - WEIGHTS_SHARE - OTHERS_SHARE
    assert left - (1 - CPU_DEFAULTS["mem_fraction_static"]) > 0


@pytest.mark.parametrize("passed", [{}, {"max_total_tokens": 9}], ids=["unset", "set larger"])
def test_a_restart_has_no_larger_pool_than_the_first_start(passed: dict[str, Any]) -> None:
    """On a GPU too, where memory may have become free since, and where the operator allows more."""
    assert with_pool(SGLangOptions(server_args=passed), 7).server_args == {"max_total_tokens": 7}


def test_ranks_on_two_nodes_keep_sizing_their_pools_alike() -> None:
    """A limit that the other node does not hear of would make their schedules part."""
    passed = {"nnodes": 2, "dist_init_addr": "10.0.0.1:9"}
    assert with_pool(SGLangOptions(server_args=passed), 7).server_args == passed
