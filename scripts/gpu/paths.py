"""Stage `paths` of a dry run: the tests that take a GPU's paths on a CPU.

They run in the test suite, for minutes. Here each is looked for, so that the list stays true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from scripts.benchmarks.machine import ROOT
from scripts.gpu.state import Checkup
from scripts.gpu.tools import run_tool

CONTRACT = "tests/contract"
PATHS: Mapping[str, tuple[str, ...]] = {
    "overlap scheduler, chunked prefill": (
        f"{CONTRACT}/test_engine.py::test_counts_are_exact_and_cumulative[overlap]",
        f"{CONTRACT}/test_sglang_continued.py::test_prompts_that_are_read_in_between_change_no_penalty[overlap_engine]",
    ),
    "speculation and grammars": (
        f"{CONTRACT}/test_sglang_constraints.py::test_a_model_with_speculation_says_that_it_has_no_grammars",
        "tests/unit/engine/sglang/test_grammar.py::test_every_grammar_is_refused_by_its_parameter",
    ),
    "KV pool after a restart": (
        f"{CONTRACT}/test_sglang_layouts.py::test_a_smaller_pool_after_a_restart_cuts_no_answer_in_silence",
        "tests/unit/admission/test_controller.py::test_a_pool_that_is_smaller_after_a_restart_is_read_again",
    ),
    "first start": (
        f"{CONTRACT}/test_sglang_layouts.py::test_kernels_that_compile_longer_than_a_hang_are_none_and_a_failed_start_is_tried_again",
    ),
    "orderly stop": (
        f"{CONTRACT}/test_sglang_life.py::test_schedulers_that_are_asked_to_end_do_so_by_themselves",
    ),
    "tensor parallel 2": (
        f"{CONTRACT}/test_sglang_life.py::test_tensor_parallel_over_two_processes",
        f"{CONTRACT}/test_sglang_life.py::test_a_mask_that_stalls_ends_its_request_on_both_ranks",
        f"{CONTRACT}/test_sglang_life.py::test_a_killed_rank_costs_no_answer",
    ),
    "two nodes": (
        f"{CONTRACT}/test_sglang_layouts.py::test_a_rank_on_another_node_continues_answers_as_ours_do",
    ),
    "arguments of SGLang": (
        f"{CONTRACT}/test_sglang_allowed_args.py::test_every_argument_of_sglang_was_looked_at",
        f"{CONTRACT}/test_sglang_allowed_args.py::test_what_sglang_itself_refuses_is_a_settings_error",
    ),
    "data parallel 2": (
        f"{CONTRACT}/test_sglang_layouts.py::test_replicas_answer_where_they_are_asked_and_are_lost_together",
        "tests/unit/admission/test_replicas.py::test_a_conversation_goes_back_to_its_replica",
    ),
}
"""The tests in the suite by path, by the beginnings of their names."""
COLLECTED = re.compile(r"^tests/\S+::.*$", re.MULTILINE)


def run(check: Checkup) -> None:
    """See the module."""
    files = sorted({test.partition("::")[0] for tests in PATHS.values() for test in tests})
    files = [file for file in files if (ROOT / file).exists()]
    printed = run_tool(
        ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        check.left_s(),
        check.work / "collect.log",
    )
    collected = COLLECTED.findall(printed)
    for path, tests in PATHS.items():
        lacking = [test for test in tests if not any(name.startswith(test) for name in collected)]
        summary = "lacking: " + ", ".join(lacking) if lacking else ", ".join(tests)
        check.holds(path, summary, "in the suite", not lacking)
