"""The arguments that SGLang is started with."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from app.engine.sglang.args import CPU_DEFAULTS, SGLangOptions, as_started, with_ranks
from app.engine.sglang.platform import prepare_process
from app.settings import SettingsError

WEIGHTS_SHARE, OTHERS_SHARE = 0.4, 0.3
"""Shares of the free memory that a large model and other processes of the machine take while it loads."""


def test_a_cpu_engine_starts_beside_others() -> None:
    """SGLang subtracts the complement of this share from what is left, and refuses to start at nothing."""
    left = 1 - WEIGHTS_SHARE - OTHERS_SHARE
    assert left - (1 - CPU_DEFAULTS["mem_fraction_static"]) > 0


@pytest.mark.parametrize("passed", [{}, {"max_total_tokens": 9}], ids=["unset", "set larger"])
def test_a_restart_has_no_larger_pool_than_the_first_start(passed: dict[str, Any]) -> None:
    """On a GPU too, where memory may have become free since, and where the operator allows more."""
    assert as_started(SGLangOptions(server_args=passed), 1, 7).server_args == {"max_total_tokens": 7}


def test_ranks_on_two_nodes_keep_sizing_their_pools_alike() -> None:
    """A limit that the other node does not hear of would make their schedules part."""
    passed = {"nnodes": 2, "dist_init_addr": "10.0.0.1:9"}
    assert as_started(SGLangOptions(server_args=passed), 1, 7).server_args == passed


@pytest.mark.parametrize("passed", [{}, {"nnodes": 2}], ids=["one node", "two nodes"])
def test_a_restart_has_the_ranks_of_the_first_start(passed: dict[str, int]) -> None:
    """With tp = 0 a GPU that has fallen off would change their number in silence."""
    assert as_started(SGLangOptions(tp=0, server_args=passed), 4, 7).tp == 4


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")  # of what SGLang imports
@pytest.mark.parametrize(
    ("error", "seen"),
    [(ValueError("needs trust_remote_code"), SettingsError), (ConnectionError("the hub"), ConnectionError)],
)
def test_a_model_that_cannot_load_is_a_settings_error_and_a_lost_network_is_none(
    monkeypatch: pytest.MonkeyPatch, error: Exception, seen: type[Exception]
) -> None:
    """The first is the same at the next start, the second is not."""
    prepare_process()
    from sglang.srt.utils import hf_transformers_utils

    monkeypatch.setattr(hf_transformers_utils, "get_config", mock.Mock(side_effect=error))
    with pytest.raises(seen, match=str(error)) as refused:
        with_ranks(SGLangOptions(model="/srv/odd", tp=2))
    assert seen is not SettingsError or "[engine.sglang] cannot serve the model odd" in str(refused.value)
