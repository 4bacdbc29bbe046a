"""Which of SGLang's server arguments can be set, and what becomes of those that cannot."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.engine.sglang.allowed_args import LIMITED, REFUSALS, check, refusal_of
from app.engine.sglang.args import BUILTIN_DEFAULTS, CPU_DEFAULTS, DEFAULTS, SGLangOptions
from app.engine.sglang.platform import prepare_process
from app.settings import SettingsError

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]


DIGEST = "0cb19147e77ed992"
"""Of all names of SGLang 0.5.20's arguments, and whether each is allowed."""


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """Every public server argument of the installed SGLang, with its default."""
    prepare_process()
    import msgspec
    from sglang.srt.server_args import ServerArgs

    every = msgspec.structs.fields(ServerArgs)
    return {field.name: field.default for field in every if not field.name.startswith("_")}


def kind_of(name: str) -> str:
    """The kind of an argument, as docs/engine-arguments.md names it."""
    return "refused" if refusal_of(name) else "limited" if name in LIMITED else "allowed"


def test_every_argument_of_sglang_was_looked_at(fields: dict[str, Any]) -> None:
    """A new SGLang that adds, renames or drops one fails here.

    It may be allowed once somebody has seen that it breaks nothing that this server promises. Then the digest
    is replaced.
    """
    looked_at = "".join(f"{name} {kind_of(name)}\n" for name in sorted(fields))
    assert hashlib.sha256(looked_at.encode()).hexdigest()[:16] == DIGEST


def test_each_pattern_refuses_an_argument(fields: dict[str, Any]) -> None:
    """None is left over from an older SGLang, and limited arguments can be set."""
    for names in REFUSALS.values():
        for pattern in names.split():
            assert fnmatch.filter(fields, pattern), pattern
    assert {kind_of(name) for name in LIMITED} == {"limited"}


def test_our_own_defaults_are_arguments_of_sglang(fields: dict[str, Any]) -> None:
    """Those of every engine, of one on the CPU, and of the built-in model."""
    assert {*DEFAULTS, *CPU_DEFAULTS, *BUILTIN_DEFAULTS} <= set(fields)


def test_what_may_be_set_may_be_set_to_its_default(fields: dict[str, Any]) -> None:
    """SGLang's own defaults have the types that are asked for."""
    import msgspec

    for name, default in fields.items():
        if kind_of(name) == "allowed" and default not in (None, msgspec.NODEFAULT):
            check({name: default})


def test_each_refused_argument_says_why(fields: dict[str, Any]) -> None:
    """Whatever its value, by its name."""
    for name, default in fields.items():
        reason = refusal_of(name)
        if reason is not None:
            with pytest.raises(SettingsError, match=rf"^\[engine.sglang\] {name}: ") as refused:
                check({name: default})
            assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_total_token": 1}, "did you mean 'max_total_tokens'"),
        ({"max_total_tokens": "many"}, "max_total_tokens: Expected"),
        ({"attention_backend": "nonsense"}, "attention_backend: expected one of"),
        ({"stream_interval": 4}, "stream_interval: not available here"),
        ({"detokenizer_worker_num": 2}, "the hand-over reads from one detokenizer"),
        ({"disaggregation_mode": "prefill"}, "set `engine` to remote"),
        ({"lora_paths": ["a=/b"]}, "merge it into the weights"),
        ({"mm_feature_transport": "cuda_ipc"}, "only cpu works here"),
        ({"grammar_backend": "outlines"}, "only xgrammar or none works here"),
        ({"speculative_algorithm": "EAGLE", "grammar_backend": "xgrammar"}, "leave this or speculative_algo"),
        ({"nnodes": 2}, "nnodes: set dist_init_addr too"),
        ({"port": 1}, "set `host` and `port`"),
        ({"_radix_eviction_policy_explicitly_set": True}, "no such server argument"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_server_argument_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    """Unknown, mistyped and server-owned arguments of `[engine.sglang]` never reach SGLang."""
    prepare_process()
    with pytest.raises(SettingsError, match=r"^\[engine.sglang\]") as refused:
        check(given)
    assert message in str(refused.value)


@pytest.mark.parametrize("backend", [{}, {"grammar_backend": "none"}])
def test_speculation_goes_without_grammars(backend: dict[str, Any]) -> None:
    """Alone it is allowed, and so is any backend without it."""
    prepare_process()
    check({"speculative_algorithm": "EAGLE"} | backend)
    check({"grammar_backend": "xgrammar"})


REFUSED_TOGETHER = {
    "schedule_policy": {"schedule_policy": "lpm"},
    "retraction_policy, enable_priority_scheduling": {
        "retraction_policy": "priority",
        "enable_priority_scheduling": False,
    },
    "nnodes, dist_init_addr": {"nnodes": 2, "dist_init_addr": "127.0.0.1:9"},
    "chunked_prefill_size, page_size": {"chunked_prefill_size": 7, "page_size": 16},
    "dp_size": {"dp_size": 3, "enable_dp_attention": True},
    "json_model_override_args": {"json_model_override_args": "{"},
    "model_impl": {"model_impl": "mindspore"},
}


@pytest.mark.parametrize("named", REFUSED_TOGETHER)
def test_what_sglang_itself_refuses_is_a_settings_error(fields: dict[str, Any], named: str) -> None:
    """Its assertions and value errors name what was set, in its own words; the process goes on."""
    del fields
    from app.engine.sglang.launch import resolved_args

    with pytest.raises(SettingsError, match=rf"^\[engine.sglang\] {named}: SGLang refuses it: .") as refused:
        resolved_args(SGLangOptions(server_args=REFUSED_TOGETHER[named]))
    assert not str(refused.value).endswith(": ")


def test_without_priorities_every_policy_of_sglang_can_be_had(fields: dict[str, Any]) -> None:
    """Longest prefix first, for one; the tiers of keys then count in admission alone."""
    del fields
    from app.engine.sglang.launch import resolved_args

    asked = {"schedule_policy": "lpm", "enable_priority_scheduling": False}
    assert resolved_args(SGLangOptions(server_args=asked)).schedule_policy == "lpm"


def test_the_page_counts_the_arguments_of_each_kind(fields: dict[str, Any]) -> None:
    """docs/engine-arguments.md says how many are allowed, limited and refused."""
    text = (Path(__file__).parents[2] / "docs/engine-arguments.md").read_text("utf-8")
    counts = Counter(kind_of(name) for name in fields)
    for kind, number in counts.items():
        assert re.findall(rf"^\| {kind} \| (\d+) \|", text, re.MULTILINE) == [str(number)]
    assert f"SGLang 0.5.20's {counts.total()} arguments" in text
