"""Turns conversations into token rows with a weight per token, and rows into padded batches.

The rendering is the chat template's, made piece by piece so that each piece can have its weight; a test holds
the two equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.builtin_model.corpus.dialogues import Dialogue, DialogueSource
from scripts.builtin_model.export import PAD_ID

ANSWER_WEIGHT = 1.0
# The first tokens of an answer decide which answer it is; the rest is soon learnt. Cutting half of the short rows
# there lets a step see more questions.
CUT_SHARE, CUT_TOKENS = 0.5, 12
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and, for each, how much predicting it counts."""

    ids: list[int]
    weights: list[float]


def pieces(dialogue: Dialogue) -> Iterator[tuple[str, float]]:
    """The rendered conversation in order, each piece with its weight."""
    messages = dialogue.messages
    if dialogue.tools:
        head = "<|im_start|>system\n"
        if messages[0].role == "system":
            head += messages[0].content + "\n\n"
            messages = messages[1:]
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in dialogue.tools)
        yield head + _TOOLS_HEAD + listed + _TOOLS_TAIL, 0.0
    for message in messages:
        yield f"<|im_start|>{message.role}\n", 0.0
        if message.role == "assistant":
            yield message.content + "<|im_end|>", ANSWER_WEIGHT
        else:
            yield message.content + "<|im_end|>", 0.0
        yield "\n", 0.0


def encode(dialogue: Dialogue, tokenizer: Tokenizer, max_tokens: int) -> Row:
    """The row of a conversation; one too long loses its beginning."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in pieces(dialogue):
        piece = tokenizer.encode(text).ids
        ids += piece
        weights += [weight] * len(piece)
    return Row(ids[-max_tokens:], weights[-max_tokens:])


def batches(
    source: DialogueSource, tokenizer: Tokenizer, batch_tokens: int, max_tokens: int, rng: Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of about `batch_tokens` tokens, rows of like length together to save padding."""
    while True:
        rows = [_maybe_cut(encode(source.draw(), tokenizer, max_tokens), rng) for _ in range(3000)]
        rows.sort(key=lambda row: len(row.ids) + rng.random() * 8)
        grouped = list(_group(rows, batch_tokens))
        rng.shuffle(grouped)
        for group in grouped:
            yield _pad(group)


def _maybe_cut(row: Row, rng: Random) -> Row:
    """The row, or its beginning up to the first tokens of its only answer."""
    if rng.random() >= CUT_SHARE:
        return row
    places = [place for place, weight in enumerate(row.weights) if weight > 0]
    if not places or places[-1] - places[0] + 1 != len(places):
        return row
    end = places[0] + CUT_TOKENS
    return Row(row.ids[:end], row.weights[:end])


def _group(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        if group and len(row.ids) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _pad(rows: list[Row]) -> tuple[Tensor, Tensor]:
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), PAD_ID, dtype=torch.long)
    weights = torch.zeros((len(rows), width))
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = torch.tensor(row.ids)
        weights[place, : len(row.ids)] = torch.tensor(row.weights)
    return ids, weights
