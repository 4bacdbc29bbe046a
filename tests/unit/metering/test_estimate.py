"""Prompts estimated before they are rendered: by the model's own merges, or by bytes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.core import ChatRequest
from app.metering.estimate import (
    IMAGE_TOKENS,
    MESSAGE_TOKENS,
    TextCounter,
    bytes_estimate,
    encoding_of,
    prompt_estimate,
    sampled_bytes_estimate,
    text_counter,
    texts_estimate,
)

ROOT = Path(__file__).parents[3]
BUILTIN = (ROOT / "app/engine/builtin/tokenizer.json").read_text("utf-8")
TEXTS = [
    (ROOT / "README.md").read_text("utf-8"),
    (ROOT / "app/pipeline/serve.py").read_text("utf-8"),
    "你好世界今天天气怎么样。" * 9,
    "😀🎉 naïve e\u0301 \u05e9\u05dc\u05d5\u05dd\n\n\t\t x" * 7,
    "a" * 500,
    "1234567890 " * 20,
    "",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tiktoken_counts_what_the_models_tokenizer_does(text: str) -> None:
    """Its own merges, token for token."""
    count, exact = text_counter(BUILTIN)
    assert exact
    assert count(text) == len(Tokenizer.from_str(BUILTIN).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram", "vocab": []}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [["▁", "a"]]}},
    ],
    ids=["no BPE", "not split by bytes", "not split", "text is changed", "not of bytes"],
)
def test_other_tokenizers_are_estimated_by_bytes(change: dict[str, Any]) -> None:
    """Rather that than a count of something else."""
    assert encoding_of(json.loads(BUILTIN) | change) is None
    count, exact = text_counter(json.dumps(json.loads(BUILTIN) | change))
    assert (count, exact) == (sampled_bytes_estimate, False)
    assert text_counter(None) == (sampled_bytes_estimate, False)


def test_gpt2s_own_splitting_is_known() -> None:
    """A ByteLevel pre-tokenizer that splits by itself."""
    changed = json.loads(BUILTIN) | {
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }
    }
    count, exact = text_counter(json.dumps(changed))
    assert exact
    tokenizer = Tokenizer.from_str(json.dumps(changed))
    for text in TEXTS:
        assert count(text) == len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS[:5], ids=range(5))
def test_by_bytes_is_never_far_below(text: str) -> None:
    """At least a third of what a small vocabulary makes of it, and more than it on prose."""
    tokens = len(Tokenizer.from_str(BUILTIN).encode(text).ids)
    assert bytes_estimate(text) >= tokens / 3
    assert bytes_estimate(TEXTS[0]) > len(Tokenizer.from_str(BUILTIN).encode(TEXTS[0]).ids)


def test_a_long_text_is_sampled() -> None:
    """Within a tenth, and in no time: the loop waits for it."""
    count, _ = text_counter(BUILTIN)
    text = TEXTS[0] * 300
    began_s = time.thread_time()
    estimate = count(text)
    assert time.thread_time() - began_s < 0.2
    assert estimate == pytest.approx(300 * count(TEXTS[0]), rel=0.1)


def test_many_texts_are_sampled_as_one() -> None:
    """Splitting a prompt into messages costs the loop nothing more."""
    count, _ = text_counter(BUILTIN)
    messages = [{"role": "user", "content": TEXTS[0]}] * 300
    began_s = time.thread_time()
    estimate = prompt_estimate(ChatRequest("r", "ann", "m", {"messages": messages}, 0), count)
    assert time.thread_time() - began_s < 0.2
    assert estimate == pytest.approx(300 * count(TEXTS[0]), rel=0.1)


def test_every_part_of_the_prompt_counts() -> None:
    """Text parts, tool calls, names, ids, tools and schemas; images by a constant, never by their bytes."""

    def estimate(messages: list[Any], **body: Any) -> int:
        request = ChatRequest("r", "ann", "m", {"messages": messages, **body}, 0)
        return prompt_estimate(request, lambda text: len(text.split()))

    plain = estimate([{"role": "user", "content": "a b c"}])
    assert plain == 3 + 8
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A " * 9999}}
    parts = [{"type": "text", "text": "a b c"}, image]
    assert estimate([{"role": "user", "content": parts}]) == plain + IMAGE_TOKENS
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x y"}}
    assert estimate([{"role": "assistant", "content": None, "tool_calls": [call]}]) > 8
    for field in ("name", "tool_call_id", "reasoning_content"):
        assert estimate([{"role": "tool", "content": "a b c", field: "d e"}]) == plain + 2
    assert estimate([{"role": "user", "content": "a b c"}], tools=[{"function": {"name": "f"}}]) > plain


def test_a_lone_surrogate_is_no_error() -> None:
    """JSON can spell one."""
    count, _ = text_counter(BUILTIN)
    assert count("a\ud800b") > 0
    assert bytes_estimate("a\ud800b") > 0


def test_a_long_text_is_counted_by_samples():
    """Without the model's merges too, an estimate looks at half a million characters at most."""
    count, exact = text_counter(None)
    assert not exact
    sentence = "A sentence with some words in it. "
    assert count(sentence * 10) == bytes_estimate(sentence * 10)
    long = sentence * 100_000
    assert count(long) == pytest.approx(bytes_estimate(long), rel=0.01)
    between_samples = long[:70_000] + "1" * 70_000 + long[140_000:]
    assert count(between_samples) < bytes_estimate(between_samples)


def test_texts_that_are_not_answered_are_counted_together():
    """With what a template puts around each."""
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return 7

    assert texts_estimate(["a", "b"], count) == 7 + 2 * MESSAGE_TOKENS
    assert counted == ["a\nb"]


def test_counter_counts_bytes_until_it_has_a_tokenizer():
    """And after it was given none."""
    counter = TextCounter()
    text = "How are you today, my friend? " * 3
    assert counter(text) == bytes_estimate(text)
    assert counter.use(BUILTIN)
    assert counter(text) == len(Tokenizer.from_str(BUILTIN).encode(text, add_special_tokens=False).ids)
    assert not counter.use(None)
