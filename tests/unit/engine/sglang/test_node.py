"""`tokenring node`: which ranks there are, and that they are started again until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from app.cli.main import parser
from app.engine.sglang import node
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.node import EXIT_REFUSED, check_rank, keep_running
from app.settings import SettingsError

TWO = SGLangOptions(server_args={"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"})


@pytest.mark.parametrize(("options", "rank"), [(TWO, 0), (TWO, 2), (TWO, -1), (SGLangOptions(), 1)])
def test_a_rank_that_does_not_exist_is_refused(options: SGLangOptions, rank: int) -> None:
    """The server itself is node 0, and one node has no other."""
    with pytest.raises(SettingsError, match=rf"rank {rank}: .* nnodes is [12]"):
        check_rank(options, rank)
    check_rank(TWO, 1)


def test_it_takes_the_settings_that_the_server_takes() -> None:
    """By flags too, and the rank besides."""
    args = parser().parse_args(["node", "--rank", "1", "--tp", "16", "--model", "/srv/m"])
    assert (args.rank, args.tp, args.model) == (1, "16", "/srv/m")


async def test_ranks_that_end_are_started_again_until_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third start is told to stop: the command ends with status 0."""
    starts = []

    async def run_once(options: SGLangOptions, rank: int, stopped: asyncio.Task[Any]) -> int:
        starts.append((options, rank))
        if len(starts) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            await stopped
        return -9

    monkeypatch.setattr(node, "_run_once", run_once)
    monkeypatch.setattr(node, "FIRST_PAUSE_S", 0.0)
    assert await keep_running(TWO, 1) == 0
    assert starts == [(TWO, 1)] * 3


async def test_settings_that_cannot_work_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start would end in the same way."""

    async def run_once(_options: SGLangOptions, _rank: int, _stopped: asyncio.Task[Any]) -> int:
        return EXIT_REFUSED

    monkeypatch.setattr(node, "_run_once", run_once)
    assert await keep_running(TWO, 1) == EXIT_REFUSED
