"""What the stages of `scripts/gpu_check` make of reports, samples, outcomes and pairs."""

from __future__ import annotations

import copy
import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.engine.sglang.args import BUILTIN_MODEL
from scripts.benchmarks import engine_args
from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.report import run_record
from scripts.benchmarks.serve import our_command
from scripts.crash.kill_requests import server_flags
from scripts.gpu import bench, contract, kill, paths, random_llama, start, usage, workload
from scripts.gpu.state import Checkup, Options, StageRecord, State

REPORT = {
    "device": "cuda",
    "attention_backend": "flashinfer",
    "sampling_backend": "flashinfer",
    "disable_cuda_graph": False,
    "disable_overlap_schedule": False,
    "chunked_prefill_size": 8192,
    "max_running_requests": 2048,
    "dtype": "auto",
    "memory_usage": {"token_capacity": 262_144, "weight": 0.02, "kvcache": 0.4, "graph": {"decode": 0.0}},
    "startup_time": {"cuda_graph": {"decode": 3.1}},
}
"""SGLang's own report of an engine on a GPU."""


@pytest.fixture
def checkup(tmp_path: Path) -> Callable[..., Checkup]:
    """A stage's checkup, by its options."""

    def make(**options: Any) -> Checkup:
        work = tmp_path / "work"
        work.mkdir()
        return Checkup(State(tmp_path, Options(**options), {"x": StageRecord()}), "x", work, 60)

    return make


def missed(check: Checkup) -> list[str]:
    """The labels of what was not as it must be."""
    return [finding.label for finding in check.record.findings if finding.verdict == "missed"]


def test_a_report_of_a_gpus_defaults_holds(checkup: Any):
    """Graphs, overlap, chunked prefill, a GPU's attention: nothing is missed, and the facts are kept."""
    check = checkup()
    start.check_report(check, REPORT)
    assert missed(check) == []
    assert check.record.facts["engine"]["memory_usage"]["token_capacity"] == 262_144


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"device": "cpu"}, "device"),
        ({"attention_backend": "torch_native"}, "attention backend"),
        ({"disable_cuda_graph": True}, "disable cuda graph"),
        ({"disable_overlap_schedule": True}, "disable overlap schedule"),
        ({"chunked_prefill_size": -1}, "chunked prefill size"),
        ({"dtype": "float32"}, "dtype"),
        ({"startup_time": {"cuda_graph": {"decode": 0.0}}}, "capture of CUDA graphs for decode, s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_report_of_something_else_is_missed(checkup: Any, changed: dict[str, Any], label: str):
    """Each of the GPU's own paths that is off is named."""
    check = checkup()
    start.check_report(check, {**copy.deepcopy(REPORT), **changed})
    assert missed(check) == [label]


def test_an_argument_that_was_asked_for_must_be_in_force(checkup: Any):
    """`attention_backend=triton` is missed in a report of FlashInfer; graphs that are off were wanted."""
    check = checkup(engine_args={"attention_backend": "triton", "disable_cuda_graph": True})
    start.check_report(check, {**REPORT, "disable_cuda_graph": True})
    assert missed(check) == ["attention backend"]


def test_arguments_of_sglang_pass_through_every_tool(tmp_path: Path):
    """Options, configuration file and parser agree; without a value the command ends."""
    passed = {"attention_backend": "triton", "disable_cuda_graph": True, "max_total_tokens": 4096, "x": ["a"]}
    assert engine_args.parse(engine_args.options(passed)[1::2]) == passed
    assert engine_args.parse(["attention_backend=triton"]) == {"attention_backend": "triton"}
    assert tomllib.loads(engine_args.config(passed)) == {"engine": {"sglang": passed}}
    command = our_command(1, tmp_path / "data", model="", server_args=passed)
    written = Path(command[command.index("--config") + 1]).read_text()
    assert tomllib.loads(written) == {"engine": {"sglang": passed}}
    arguments = {"dtype": "bfloat16", "mix": False, "overlap": False, "phase": "decode", "safety": "off"}
    flags = server_flags(tmp_path, arguments | {"engine_args": ["attention_backend=triton"]}, [])
    written = Path(flags[flags.index("--config") + 1]).read_text()
    assert tomllib.loads(written)["engine"]["sglang"] == {
        "dtype": "bfloat16",
        "attention_backend": "triton",
    }
    for wrong in ("attention_backend", "=triton"):
        with pytest.raises(SystemExit, match="NAME=VALUE"):
            engine_args.parse([wrong])


def test_engines_that_share_a_gpu_have_pools_that_fit():
    """The command line's arguments win; a dry run leaves the CPU's own pool."""
    assert workload.small_pool(Options())["max_total_tokens"] == workload.SMALL_POOL_TOKENS
    assert workload.small_pool(Options(engine_args={"max_total_tokens": 9})) == {"max_total_tokens": 9}
    assert workload.small_pool(Options(dry_run=True)) == {}
    arguments = workload.model_args(Options(model=random_llama.NAME), 7)
    assert arguments == {"max_total_tokens": 7, "load_format": "dummy"}


def test_a_random_llama_reads_prompts_as_the_built_in_model_and_each_id_is_text(tmp_path: Path):
    """Padding adds words that no prompt is cut into; every id of the vocabulary has a text."""
    folder = random_llama.make(tmp_path / "model", random_llama.TINY_SHAPE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert tokenizer.get_vocab_size() == size > ours.get_vocab_size()
    text = "How do I resume a stream? r11999 and on."
    assert tokenizer.encode(text).ids == ours.encode(text).ids
    assert tokenizer.decode([size - 1]) == f" r{size - 1}"


def test_the_random_llama_has_eight_billion_parameters():
    """Embeddings and head, attention and MLP of each layer, as Llama 3.1 8B has them."""
    shape = random_llama.SHAPE
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    attention = 2 * width * heads * shape["head_dim"]
    norms = 2 * width
    total = 2 * shape["vocab_size"] * width + layers * (attention + 3 * width * inner + norms) + width
    assert total == 8_030_261_248


def test_samples_of_the_gpu_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines without numbers are left out; the tool ends with the block; without it nothing is known."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '50, 1000, 300.5'\necho '[N/A], 1, 1'\necho '70, 2000, 400.5'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with usage.sampled() as use:
        pass
    while use.samples < 2:  # it may have been ended before it printed
        with usage.sampled() as use:
            assert tool.exists()
    assert use == usage.GpuUse(2, 60.0, 70.0, 2000.0, 350.5)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with usage.sampled() as use:
        pass
    assert use.samples == 0


def test_outcomes_of_the_contract_suite_are_counted_by_name(checkup: Any, monkeypatch: pytest.MonkeyPatch):
    """A failure is told with its reason; the suite gets the arguments of SGLang as JSON."""
    seen: dict[str, Any] = {}
    lines = [
        "tests/contract/test_engine.py::test_a[sglang] PASSED  [ 10%]",
        "tests/contract/test_engine.py::test_b[remote] FAILED  [ 20%]",
        "FAILED tests/contract/test_engine.py::test_b[remote] - AssertionError: 1 | 2",
    ]

    def pretend(arguments: Any, _limit_s: float, _log: Path, *, on_line: Any, env: Any) -> str:
        seen.update(arguments=arguments, env=env)
        for line in lines:
            on_line(line)
        return ""

    monkeypatch.setattr(contract, "run_tool", pretend)
    check = checkup(engine_args={"attention_backend": "triton"})
    contract.run(check)
    assert missed(check) == ["tests that failed"]
    assert check.record.facts["outcomes"] == {"PASSED": 1, "FAILED": 1}
    assert check.record.tables["Failures"][1] == [
        "tests/contract/test_engine.py::test_b[remote]",
        "AssertionError: 1 / 2",
    ]
    assert seen["arguments"][-2:] == ["-m", "sglang"]
    assert json.loads(seen["env"][contract.ARGS_VARIABLE])["attention_backend"] == "triton"


def test_a_path_without_its_test_is_missed(checkup: Any, monkeypatch: pytest.MonkeyPatch):
    """What the suite collects holds; a test that was renamed is named."""
    every = [test for tests in paths.PATHS.values() for test in tests]
    lost = paths.PATHS["orderly stop"][0]
    printed = "".join(f"{test}[sglang]\n" for test in every if test != lost)
    monkeypatch.setattr(paths, "run_tool", lambda *_: printed)
    check = checkup(dry_run=True)
    paths.run(check)
    assert missed(check) == ["orderly stop"]
    assert f"lacking: {lost}" in [finding.value for finding in check.record.findings]


def test_a_violation_of_the_kill_test_is_missed(checkup: Any, monkeypatch: pytest.MonkeyPatch):
    """Its last line is the result; the dtype is the GPU's."""
    seen: list[str] = []
    result = {**dict.fromkeys(kill.FIGURES, 1), "violations": 2, "cut_off": 0}

    def pretend(arguments: list[str], *_: Any, **__: Any) -> str:
        seen.extend(arguments)
        return "something\n" + json.dumps(result) + "\n"

    monkeypatch.setattr(kill, "run_tool", pretend)
    check = checkup()
    kill.run(check)
    assert missed(check) == ["violations"]
    assert seen[seen.index("--dtype") + 1] == "bfloat16"


def test_pairs_of_a_benchmark_that_was_cut_short_are_compared(checkup: Any):
    """The interval is over pairs; a ratio that is wholly beyond its bound is missed."""
    numbers = {field.name: 1.0 for field in dataclasses.fields(RunResult)}
    lists = {"text_sha256": [], "ttft_ms": [], "e2e_ms": []}
    runs = []
    for pair in range(3):
        for server, cpu_us in (("ours", 90.0), ("bare", 100.0)):
            run = RunResult(**{**numbers, **lists, "server": server, "streams": 64})
            runs.append(run_record(pair, dataclasses.replace(run, serving_cpu_us_per_token=cpu_us)))
    check = checkup(model="builtin")
    bench.keep(check, {"runs": json.loads(json.dumps(runs)), "commands": {}})
    assert missed(check) == ["CPU per output token, us, 64 streams, ours/bare"]
    rows = check.record.tables["Ours against bare SGLang"]
    assert rows[1] == ["64", "CPU per output token, us", "90", "100", "0.900 [0.900, 0.900]"]
