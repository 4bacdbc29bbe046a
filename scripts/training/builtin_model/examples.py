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

from scripts.training.builtin_model.corpus.dialogues import Dialogue, DialogueSource
from scripts.training.builtin_model.export import PAD_ID, START_ID

ANSWER_WEIGHT = 1.0
# The first tokens of an answer decide which answer it is. Some short rows are cut there, so that a step sees
# more questions.
CUT_SHARE, CUT_TOKENS = 0.25, 6
# `<|im_end|>`, newline, `<|im_start|>`, `assistant`, newline; tokens below 265 are bytes, marks and markup.
TEMPLATE_TAIL, FIRST_MERGED = 5, 265
SWAPPED, DROPPED, LONGEST_SWAPPED = 0.2, 0.15, 150
# In this share of the single questions the layers above the first cannot see the question: they must answer
# from what the first layer has read, which generalises better than what they would pick up themselves.
HIDDEN_SHARE = 0.85
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
    """Token ids and, for each, how much predicting it counts; where an answer begins, and to which intent."""

    ids: list[int]
    weights: list[float]
    marks: list[tuple[int, int]]
    hidden_before: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows; the places before which an answer to `intents` begins; what upper layers do not see."""

    ids: Tensor
    weights: Tensor
    rows: Tensor
    places: Tensor
    intents: Tensor
    hidden_before: Tensor | None


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
    begins: list[int] = []
    for text, weight in pieces(dialogue):
        piece = tokenizer.encode(text).ids
        if weight:
            begins.append(len(ids))
        ids += piece
        weights += [weight] * len(piece)
    lost = max(0, len(ids) - max_tokens)
    answers = [turn for turn in dialogue.messages if turn.role == "assistant"]
    marks = [
        (begin - lost, turn.intent)
        for begin, turn in zip(begins, answers, strict=True)
        if turn.intent is not None and begin > lost
    ]
    return Row(ids[lost:], weights[lost:], marks)


def batches(
    source: DialogueSource,
    tokenizer: Tokenizer,
    batch_tokens: int,
    max_tokens: int,
    neighbours: Tensor,
    rng: Random,
) -> Iterator[Batch]:
    """Endless batches of about `batch_tokens` tokens, rows of like length together to save padding."""
    while True:
        drawn = (encode(source.draw(), tokenizer, max_tokens) for _ in range(3000))
        rows = [_maybe_cut(_trouble(row, neighbours, rng), rng) for row in drawn]
        rows.sort(key=lambda row: len(row.ids) + rng.random() * 8)
        grouped = list(_group(rows, batch_tokens))
        rng.shuffle(grouped)
        for group in grouped:
            yield _pad(group)


def _trouble(row: Row, neighbours: Tensor, rng: Random) -> Row:
    """A single question with words dropped or swapped for neighbours in meaning, and at times hidden."""
    if len(row.marks) != 1 or len(row.ids) > LONGEST_SWAPPED:
        return row
    ((answer, intent),) = row.marks
    question: list[int] = []
    for place, token in enumerate(row.ids[: answer - TEMPLATE_TAIL]):
        after_mark = place > 0 and row.ids[place - 1] == START_ID
        if token < FIRST_MERGED or after_mark or rng.random() >= DROPPED:
            swap = rng.random() < SWAPPED
            question.append(int(neighbours[token, rng.randrange(neighbours.shape[1])]) if swap else token)
    lost = answer - TEMPLATE_TAIL - len(question)
    hidden_before = answer - lost - 1 if rng.random() < HIDDEN_SHARE else 0
    ids = question + row.ids[answer - TEMPLATE_TAIL :]
    return Row(ids, row.weights[lost:], [(answer - lost, intent)], hidden_before)


def spoken_tokens(source: DialogueSource, tokenizer: Tokenizer, drawn: int = 5000) -> Tensor:
    """Which tokens answers are made of, shape (vocabulary, 1)."""
    spoken = torch.zeros(tokenizer.get_vocab_size(), 1, dtype=torch.bool)
    for _ in range(drawn):
        row = encode(source.draw(), tokenizer, 100_000)
        spoken[[token for token, weight in zip(row.ids, row.weights, strict=True) if weight]] = True
    return spoken


def _maybe_cut(row: Row, rng: Random) -> Row:
    """The row, or its beginning up to the first tokens of its only answer."""
    if rng.random() >= CUT_SHARE:
        return row
    places = [place for place, weight in enumerate(row.weights) if weight > 0]
    if not places or places[-1] - places[0] + 1 != len(places):
        return row
    end = places[0] + CUT_TOKENS
    return Row(row.ids[:end], row.weights[:end], row.marks, row.hidden_before)


def _group(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        if group and len(row.ids) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _pad(rows: list[Row]) -> Batch:
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), PAD_ID, dtype=torch.long)
    weights = torch.zeros((len(rows), width))
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = torch.tensor(row.ids)
        weights[place, : len(row.ids)] = torch.tensor(row.weights)
    marks = [(number, place - 1, intent) for number, row in enumerate(rows) for place, intent in row.marks]
    places, starts, intents = torch.tensor(marks, dtype=torch.long).reshape(-1, 3).unbind(dim=1)
    hidden_before = torch.tensor([row.hidden_before for row in rows])
    return Batch(ids, weights, places, starts, intents, hidden_before if width <= LONGEST_SWAPPED else None)
