"""Engines whose starts fail, whose pools shrink, that have replicas or another node (`sglang_layouts.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.preloaded import Preloaded, popen
from tests.support.sglang_layouts import COMPILES_S, SMALL_POOL

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]


def run(scenario: str, folder: Path, preloaded: Preloaded | None) -> dict[str, Any]:
    """What a scenario saw, in a process of its own; its log where it failed."""
    command = [sys.executable, "-m", "tests.support.sglang_layouts", scenario, str(folder)]
    pipe = subprocess.PIPE
    with popen(preloaded, command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            process.kill()
            raise
    results = [line.removeprefix("RESULT ") for line in stdout.splitlines() if line.startswith("RESULT ")]
    assert results, stderr[-4000:]
    seen: dict[str, Any] = json.loads(results[-1])
    assert seen["children_left"] == 0
    return seen


def test_a_smaller_pool_after_a_restart_cuts_no_answer_in_silence(
    tmp_path: Path, preloaded: Preloaded | None
) -> None:
    """What has no room ends with a reason, now or where the pool ends; what fits goes on; admission hears."""
    seen = run("smaller_pool", tmp_path, preloaded)
    first, limit, then = seen["pools"]
    assert (limit, then) == (first, SMALL_POOL)
    assert first > SMALL_POOL
    code, message = seen["too_long"]["error"]
    assert (code, seen["too_long"]["end"]) == ("engine_restarted", None)
    assert f"KV memory for {SMALL_POOL} tokens only" in message
    assert seen["too_long"]["tokens"] >= SMALL_POOL
    assert seen["later"]["error"][0] == "engine_restarted"
    assert SMALL_POOL / 2 < seen["later"]["tokens"] < SMALL_POOL
    assert seen["same"] == [True, None, "length"]
    assert seen["new"]["end"] == "length"
    assert SMALL_POOL / 2 < seen["new"]["tokens"] < SMALL_POOL
    assert seen["lost"] == 1


def test_kernels_that_compile_longer_than_a_hang_are_none_and_a_failed_start_says_why(
    tmp_path: Path, preloaded: Preloaded | None
) -> None:
    """In the warm-up and in a later request; a first start that fails is the end."""
    seen = run("slow_starts", tmp_path, preloaded)
    assert (seen["starts"], seen["answer"]) == (1, 4)
    assert seen["took_s"] > COMPILES_S
    assert seen["losses"] == {"exited": 0, "hung": 0, "failed": 0}
    starts, [kind, message] = seen["failed"]
    assert (starts, kind) == (1, "EngineFailed")
    assert "exit code: 7" in message


def test_replicas_answer_where_they_are_asked_and_are_lost_together(
    tmp_path: Path, preloaded: Preloaded | None
) -> None:
    """A prompt is cached at its own replica alone; where one replica ends, all answers go on."""
    seen = run("replicas", tmp_path, preloaded)
    assert seen["model"] == [2, 2 * seen["pool"]]
    first, again, other, other_again = seen["hits"]
    assert again > first
    assert again == other_again > other
    assert all(tokens > 20 for tokens in seen["used"])
    assert "scheduler_DP1" in seen["lost"]
    assert seen["same"] == [True] * 4
    assert seen["errors"] == [None] * 4
    assert seen["left_to_kill"] == []
    assert seen["losses"] == {"exited": 1, "hung": 0, "failed": 0}


def test_a_rank_on_another_node_continues_answers_as_ours_do(
    tmp_path: Path, preloaded: Preloaded | None
) -> None:
    """Plain, with a penalty, with a grammar: each rank may be lost under them, and both start again."""
    seen = run("two_nodes", tmp_path, preloaded)
    for theirs, ours in seen["ranks"]:
        assert [name[-3:] for name in (*theirs, *ours)] == ["TP1", "TP0"]
    assert seen["tokens"][:2] == [300, 300]
    assert seen["same"] == [[True] * 3] * 2
    assert (seen["restarts"], seen["status"]) == (2, 0)
