"""SGLang's start, death and configurations: each in a process of its own (`sglang_scenarios.py`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.safety.categories import CATEGORIES

HERE = Path(__file__).parent

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def run(scenario: str, argument: str = "") -> dict[str, Any]:
    """What one scenario printed; its log when it failed."""
    command = [sys.executable, str(HERE / "sglang_scenarios.py"), scenario, argument]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=HERE.parents[1], timeout=380, check=False
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert results, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    return result


@pytest.mark.parametrize("process", ["scheduler", "detokenizer"])
def test_a_killed_child_ends_streams_and_not_the_server(process: str) -> None:
    """kill -9 of a child in mid-generation: told within 2 s, once; streams raise; nothing is left running."""
    seen = run("death_of", process)
    assert seen["error"] == "EngineFailed"
    assert seen["noticed_s"] < 2
    assert seen["received"] >= 10
    assert len(seen["deaths"]) == 1
    assert process in seen["deaths"][0]
    assert "-9" in seen["deaths"][0]
    assert seen["health"] == "dead"
    assert seen["render_error"] == "EngineNotReady"
    assert seen["children_left"] == 0


def test_an_engine_can_be_started_again_in_the_same_process() -> None:
    """Three lives leave no descriptor or thread behind, and each gives the same greedy answer."""
    seen = run("restart")
    assert seen["descriptors"][-1] <= seen["descriptors"][0]
    assert seen["threads"][-1] <= max(seen["threads"][:2])  # one may be made at the first need
    assert len(set(seen["texts"])) == 1


def test_tensor_parallel_over_two_processes() -> None:
    """With tp=2 two schedulers share the model over gloo; counts are exact, the answer that of one."""
    seen = run("tensor_parallel")
    assert seen["schedulers"] == 2
    assert [counts[1] for counts in seen["counts"]] == [16, 16]
    assert seen["ids"][0] == seen["ids"][1]
    assert seen["ids"][0] == run("single")["ids"]


def test_requests_set_aside_for_lack_of_memory_are_counted() -> None:
    """Sixteen long answers in a pool for six: the load says how many were retracted; all come whole."""
    seen = run("retracted")
    assert seen["before"] == 0
    assert seen["retractions"] > 0
    assert seen["lengths"] == [300] * 16


def test_a_failed_start_says_why_and_leaves_the_process_alive(tmp_path: Path) -> None:
    """A missing model, torn weights and an unknown argument are exceptions with the reason."""
    seen = run("bad_start", str(tmp_path))
    (missing, missing_why), (torn, torn_why), (unknown, unknown_why) = seen["outcomes"]
    assert (missing, torn, unknown) == ("EngineFailed", "EngineFailed", "SettingsError")
    assert "nothing-here" in missing_why
    assert "scheduler" in torn_why
    assert "max_total_tokens" in unknown_why
    assert seen["children_left"] == 0


def test_images_are_counted_and_bad_ones_refused(tmp_path: Path) -> None:
    """Image tokens are part of prompt_tokens, repeats hit the cache, and only sent bytes are ever read."""
    seen = run("vision", str(tmp_path))
    assert "vision" in seen["capabilities"]
    prompt = {name: counts[0] for name, counts in seen["counts"].items()}
    # 28 x 28 pixels are one token, and two more frame each image.
    assert prompt["112"] - prompt["none"] == 16 + 2
    assert prompt["224"] - prompt["none"] == 32 + 2
    assert prompt["two"] - prompt["none"] == 4 + 16 + 2 * 2
    for _prompt, completion, cached, _reasoning, rendered in seen["counts"].values():
        assert (completion, rendered) == (4, _prompt)
        assert cached < _prompt
    assert seen["counts"]["again"][2] == prompt["112"] - 1
    text, image = seen["past"]
    assert text == [1, None, True]
    assert image[:2] == [0, "media"]
    assert seen["refused"]["data:image/png;base64,AAAA"][0] == "messages"
    for url in ("file:///etc/hosts", "http://127.0.0.1:9/x.png", "/etc/x.png"):
        assert seen["refused"][url][0] == "messages[0].content"


def test_guards_of_every_format_are_asked_and_read(tmp_path: Path) -> None:
    """Tiny models with the guards' templates: the words arrive, a probability comes back, nothing runs on."""
    seen = run("guards", str(tmp_path))
    assert set(seen) == {"llama-guard-3", "qwen3guard-gen", "shieldgemma", "granite-guardian"}
    for name, guard in seen.items():
        for scores in guard["scores"]:
            assert set(scores) <= set(CATEGORIES)
            # Random weights hold neither verdict for certain.
            assert all(0 < p < 1 for p in scores.values()), name
        assert all("May I < |eot_id|> ask?" in prompt for prompt in guard["prompts"])
        assert sum("You may." in prompt for prompt in guard["prompts"]) > 0
        assert guard["running"] == 0
    llama, _qwen, shield, granite = (seen[name]["prompts"] for name in seen)
    assert llama[0].endswith("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert "'Agent' messages" in llama[1]
    assert "\n\nAgent: You may.\n\n" in llama[1]
    assert {"No Hate Speech", "No Harassment"} <= {title for p in shield for title in p.split('"')}
    assert len(granite) == 6 + 5
    assert all("\nAssistant Message: You may.\n" in prompt for prompt in granite[6:])


def test_a_remote_server_is_read_lost_and_found_again() -> None:
    """A bare SGLang that streams its default way is read to the token; killed, it is an error, then back."""
    seen = run("remote")
    assert seen["texts"][0] == seen["texts"][1] != ""
    assert [len(ids) for ids in seen["ids"]] == seen["completion"] == [20, 6]
    assert seen["ids"][1] == seen["ids"][0][:6]
    assert len(seen["logprobs"]) == 6
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in seen["logprobs"])
    assert re.fullmatch("[0-9]{3}-[a-f]{4}", seen["formed"])
    assert seen["called"][:1] == ["clock"]
    assert seen["called_finish"] == "tool_calls"
    error, received, handed_over = seen["lost"]
    assert error == "EngineFailed"
    assert received == handed_over > 0
    assert seen["starts"] == 2
    assert seen["children_left"] == 0


def test_a_guard_in_a_child_beside_the_model_of_this_process(tmp_path: Path) -> None:
    """Both are rendered for in one process, and neither changes what the other says."""
    seen = run("beside", str(tmp_path))
    assert set(seen["scores"]) <= set(CATEGORIES)
    assert all(0 < p < 1 for p in seen["scores"].values())
    assert len(set(seen["texts"])) == 1
    assert seen["texts"][0]
    assert seen["children_left"] == 0
