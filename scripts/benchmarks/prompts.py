"""The load's request bodies: seeded prompts, no two alike, the same for both sides of a pair."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

TEXT = """how do I start the server and read a stream after the network dropped which header has the last
event id what does a token cost when the prompt is cached show me the usage of my key for this month please
explain why a request waits in the queue and when it is refused with a retry time can it answer in json"""


@dataclass(frozen=True, slots=True)
class Work:
    """Chat bodies, and how many tokens each generates exactly (`ignore_eos`)."""

    bodies: list[str]
    output_tokens: list[int]


def chat_work(
    model: str,
    requests: int,
    *,
    mean_tokens: int,
    prompt_words: int,
    seed: int,
    spread: float = 0.5,
) -> Work:
    """Greedy streaming chats of `mean_tokens` tokens, give or take the share `spread`.

    Their prompts are words in no order. Unequal lengths let the streams drift apart: with equal ones every
    round arrives as one burst, and TTFT shows only how the burst happened to be cut into prefill batches.
    """
    rng, words = np.random.default_rng(seed), TEXT.split()
    low, high = max(1, round(mean_tokens * (1 - spread))), round(mean_tokens * (1 + spread))
    output_tokens = [int(tokens) for tokens in rng.integers(low, high, size=requests, endpoint=True)]
    prompts = [f"{seed}-{index}: {_prompt(rng, words, prompt_words)}" for index in range(requests)]
    bodies = [_body(model, prompt, tokens) for prompt, tokens in zip(prompts, output_tokens, strict=True)]
    return Work(bodies, output_tokens)


def _prompt(rng: np.random.Generator, words: list[str], length: int) -> str:
    return " ".join(words[pick] for pick in rng.integers(0, len(words), size=length))


def _body(model: str, prompt: str, tokens: int) -> str:
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
