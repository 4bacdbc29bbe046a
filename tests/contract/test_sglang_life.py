"""SGLang's start, death and configurations, in a process apart from the tests' (`sglang_scenarios.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core import Engine
from app.safety.categories import CATEGORIES
from tests.support.engines import ask, chat
from tests.support.preloaded import Preloaded, popen

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),
]


class Apart:
    """The process in which scenarios run one after another; after a failure the next has a new one.

    One for all, as importing SGLang takes longer than most of them.
    """

    def __init__(self, log: Path, preloaded: Preloaded | None) -> None:
        self.log = log
        self._preloaded = preloaded
        self._process: subprocess.Popen[str] | None = None

    def run(self, scenario: str, argument: object = "") -> dict[str, Any]:
        """What a scenario saw; its log when it failed."""
        if self._process is None:
            self._process = self._start()
        result = None
        try:
            self._process.stdin.write(f"{scenario} {argument}\n")
            self._process.stdin.flush()
            lines = (line.partition("RESULT ") for line in self._process.stdout)
            result = next((json.loads(told) for _, marked, told in lines if marked), None)
        finally:
            if result is None:
                self.close()
        assert result is not None, self.log.read_text()[-4000:]
        return result

    def close(self) -> None:
        """End it, and with it whatever it has started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.sglang_scenarios"]
        pipe = subprocess.PIPE
        with self.log.open("w") as log:
            return popen(
                self._preloaded, command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=HERE.parents[1]
            )


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded | None) -> Iterator[Apart]:
    """The process of this module."""
    process = Apart(tmp_path_factory.mktemp("apart") / "log", preloaded)
    yield process
    process.close()


@pytest.fixture(scope="module")
def restarts(apart: Apart) -> dict[str, Any]:
    """What one engine saw that lost its scheduler, its detokenizer, and a scheduler that only stood still."""
    return apart.run("restarts")


def test_answers_of_every_kind_go_on_as_if_nothing_had_happened(restarts: dict[str, Any]) -> None:
    """Ids, text, arguments, counts, logprobs and ends are those of the undisturbed run."""
    assert len(restarts["rounds"]) == 3
    for number, answers in enumerate(restarts["rounds"]):
        assert all(all(choices) for choices in answers), (number, answers)


def test_a_restart_leaves_nothing_behind(restarts: dict[str, Any]) -> None:
    """Descriptors, threads, shared memory and zombies after each are what they were."""
    first, *later = restarts["held"]
    for held in later:
        assert held["descriptors"] <= first["descriptors"]
        assert held["threads"] <= first["threads"] + 1  # one may be made at the first need
        assert held["shared memory"] <= first["shared memory"]
        assert held["zombies"] == 0


def test_losses_are_counted_and_the_one_too_many_is_the_end(restarts: dict[str, Any]) -> None:
    """Three are made good without a word to the owner; the fourth ends the streams truthfully."""
    losses, num_restarts, num_choices_continued, num_choices_lost, deaths = restarts["counts"]
    assert losses == {"exited": 2, "hung": 1, "failed": 0}
    assert (num_restarts, num_choices_continued, num_choices_lost, deaths) == (3, 24, 0, [])
    check_end(restarts["end"], "scheduler")


def check_end(seen: dict[str, Any], process: str) -> None:
    """The kill of that process was told within 2 s, once, and streams raised; nothing runs on."""
    assert seen["error"] == "EngineFailed"
    assert seen["noticed_s"] < 2
    assert seen["received"] >= 10
    [reason] = seen["deaths"]
    assert process in reason
    assert "-9" in reason
    assert seen["health"] == "dead"
    assert seen["render_error"] == "EngineNotReady"
    assert seen["children_left"] == 0


@pytest.fixture(scope="module")
def hung_starts(apart: Apart) -> dict[str, Any]:
    """What an engine saw two of whose starts stood still."""
    return apart.run("hung_starts")


def test_a_start_that_stands_still_is_given_up_and_followed_by_another(hung_starts: dict[str, Any]) -> None:
    """The answer goes on after it, and nothing is left of it."""
    assert all(hung_starts["same"])
    assert hung_starts["losses"] == {"exited": 1, "hung": 0, "failed": 1}
    assert hung_starts["reason"] is None
    first, later = hung_starts["held"]
    assert later["descriptors"] <= first["descriptors"]
    assert later["threads"] <= first["threads"] + 1
    assert later["zombies"] == 0


def test_a_warm_up_that_stands_still_is_a_start_that_failed(hung_starts: dict[str, Any]) -> None:
    """It is one loss too many: the stream ends truthfully, and the owner is told once, and why."""
    error, health, [reason] = hung_starts["last"]
    assert (error, health) == ("EngineFailed", "dead")
    assert "did not start: EngineFailed: no progress for" in reason
    assert hung_starts["children_left"] == 0


@pytest.fixture(scope="module")
def reasoning(apart: Apart) -> dict[str, Any]:
    """What an engine with a reasoning parser saw, which is not started again when it dies."""
    return apart.run("reasoning")


def test_reasoning_goes_on_with_its_count(reasoning: dict[str, Any]) -> None:
    """Wherever it is cut: the parser says the same, and the scheduler goes on counting reasoning tokens."""
    seen = reasoning
    text, answer, token_ids, counts = seen["whole"]
    assert len(text) > 40
    assert answer == ""
    assert len(token_ids) == counts[3] == 40
    assert seen["again"] == [seen["whole"]] * 4


def test_a_killed_child_ends_streams_and_not_the_server(reasoning: dict[str, Any]) -> None:
    """Without restarts kill -9 of a child is told within 2 s, once; streams raise; nothing runs on."""
    check_end(reasoning["end"], "detokenizer")


def test_an_engine_can_be_started_again_in_the_same_process(
    restarts: dict[str, Any], reasoning: dict[str, Any]
) -> None:
    """A life that ended leaves no descriptor and no thread to the next one, which serves."""
    first, second = restarts["after"], reasoning["after"]
    assert second["descriptors"] <= first["descriptors"]
    assert second["threads"] <= first["threads"] + 1  # one may be made at the first need


@pytest.fixture(scope="module")
def two_ranks(apart: Apart) -> dict[str, Any]:
    """What an engine with tp=2 and the scheduler of a GPU did, and what it and its processes logged."""
    return apart.run("tensor_parallel", "gpu") | {"log": apart.log.read_text()}


async def test_tensor_parallel_over_two_processes(two_ranks: dict[str, Any], sglang_engine: Engine) -> None:
    """With tp=2 two schedulers share the model over gloo; counts are exact, the answer that of one."""
    seen = two_ranks
    assert seen["schedulers"] == 2
    assert [counts[1] for counts in seen["counts"]] == [16, 16]
    assert seen["ids"][0] == seen["ids"][1]
    single = await ask(sglang_engine, chat(temperature=0, max_tokens=16, ignore_eos=True))
    assert seen["ids"][0] == single.token_ids()


def test_a_mask_that_stalls_ends_its_request_on_both_ranks(two_ranks: dict[str, Any]) -> None:
    """It ends as documented, the stream beside it is what it was, and grammars are still followed."""
    stalled = two_ranks["stalled"]
    name, said = stalled["end"]
    assert name == "GrammarTooSlow"
    assert "its grammar is too slow" in said
    assert all(stalled["same"])
    assert len(stalled["formed"]) == 8
    assert set(stalled["formed"]) <= set("abcde")
    assert stalled["losses"] == 0


def test_a_killed_rank_costs_no_answer(two_ranks: dict[str, Any]) -> None:
    """Penalties and grammars of answers that go on are in the same state on both ranks."""
    assert two_ranks["losses"]["exited"] == 1
    assert len(two_ranks["same"]) == 2
    assert all(all(choices) for choices in two_ranks["same"])


def test_schedulers_that_are_asked_to_end_do_so_by_themselves(two_ranks: dict[str, Any]) -> None:
    """Both have released what they held, and ended with status 0, before anything is killed."""
    assert two_ranks["exit_codes"] == [0, 0]
    assert two_ranks["children_left"] == 0


def test_what_every_process_has_at_its_start_is_not_collected_again(two_ranks: dict[str, Any]) -> None:
    """Both ranks and the detokenizer freeze it: to look at it all again would stop everyone for 0.4 s."""
    log = two_ranks["log"]
    frozen = [log.count(f"Freezing GC in {name} process") for name in ("Scheduler", "Detokenizer Manager")]
    assert frozen == [4, 2]  # it was started twice


def test_a_failed_start_says_why_and_leaves_the_process_alive(apart: Apart, tmp_path: Path) -> None:
    """A missing model, torn weights and an unknown argument are exceptions with the reason."""
    seen = apart.run("bad_start", tmp_path)
    (missing, missing_why), (torn, torn_why), (unknown, unknown_why) = seen["outcomes"]
    assert (missing, torn, unknown) == ("EngineFailed", "EngineFailed", "SettingsError")
    assert "nothing-here" in missing_why
    assert "scheduler" in torn_why
    assert "max_total_tokens" in unknown_why
    assert seen["children_left"] == 0


def test_images_are_counted_and_bad_ones_refused(apart: Apart, tmp_path: Path) -> None:
    """Image tokens are part of prompt_tokens, repeats hit the cache, and only sent bytes are ever read."""
    seen = apart.run("vision", tmp_path)
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
    assert seen["refused"]["data:image/png;base64,AAAA"][0] == "messages[0].content[0]"
    where, why = seen["refused"]["bomb"]
    assert where == "messages[0].content[0]"
    assert "30000 x 28000" in why
    for url in ("file:///etc/hosts", "http://127.0.0.1:9/x.png", "/etc/x.png"):
        assert seen["refused"][url][0] == "messages[0].content"


def test_guards_of_every_format_are_asked_and_read(apart: Apart, tmp_path: Path) -> None:
    """A tiny model with each guard's template: the words arrive, a probability comes back, none runs on."""
    seen = apart.run("guards", tmp_path)
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
