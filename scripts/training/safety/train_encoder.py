"""Fine-tunes the encoder: harm as one logit for prompts and one for answers, the category as a softmax.

What a benign row merely sounds like teaches the category head too, so that topic and intent come apart.
The word vectors and the lowest layers stay as published: on few rows they only forget, and cost a third.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import ANSWER, PROMPT, WINDOW
from app.safety.text.normalize import normalize
from scripts.training.safety import balance
from scripts.training.safety.minilm import MiniLM, pretrained
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces, batches, disguised, heard_part, padded, shortened

_IGNORED = -100
_BURIED, _BEHIND = 0.15, 0.7


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast."""

    examples: int
    seed: int = 0
    batch: int = 32
    rate: float = 1.2e-4
    head_rate: float = 1e-3
    layer_decay: float = 0.85
    frozen_layers: int = 2
    warm_up: float = 0.06
    smoothing: float = 0.02
    category_weight: float = 0.3
    near_weight: float = 0.15
    own_share: float = 1.0


def train(rows: Sequence[Row], weights: Path, recipe: Recipe, start: Path | None = None) -> MiniLM:
    """The encoder of these rows, from the published weights in a folder or those of an earlier training."""
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)  # noqa: S311  # an order of rows, no secret
    model = pretrained(weights, len(CATEGORIES))
    if start is not None:
        model.load_state_dict(torch.load(start))
    optimizer = _optimizer(model, recipe)
    chosen = balance.drawn(rows, recipe.examples, recipe.seed, recipe.own_share)
    wordpieces = Wordpieces(weights)
    steps = -(-len(chosen) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step / steps, recipe.warm_up))
    model.train()
    began, loss_sum, step = time.monotonic(), 0.0, 0
    stretch = 40 * recipe.batch
    for done in range(0, len(chosen), stretch):
        block = [rows[i] for i in chosen[done : done + stretch]]
        pieces = [_piece(row, wordpieces, rng) for row in block]
        prompts = [i for i, row in enumerate(block) if row.kind == "prompt"]
        buried = _buried([pieces[i] for i in prompts], _benign([block[i] for i in prompts]), rng)
        for i, piece in zip(prompts, buried, strict=True):
            pieces[i] = piece
        lengths = np.array([len(piece) for piece in pieces])
        for places in batches(lengths, recipe.batch, rng):
            loss = _loss(model, [pieces[i] for i in places], [block[i] for i in places], recipe)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss_sum += loss.item()
            step += 1
        print(
            f"{done + len(block)}/{len(chosen)} loss {loss_sum / step:.4f} {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return model.eval()


def _piece(row: Row, wordpieces: Wordpieces, rng: random.Random) -> list[int]:
    """A part of a row's text, as the prompt screen or an examination may read it."""
    if row.kind == "output":
        return heard_part(wordpieces.ids(normalize(row.text[:6000])), rng)
    return shortened(wordpieces.ids(disguised(row.text[:6000], rng)), rng, harmful=bool(row.harmful))


def _benign(block: Sequence[Row]) -> list[int]:
    return [i for i, row in enumerate(block) if not row.harmful]


def _buried(pieces: list[list[int]], benign: list[int], rng: random.Random) -> list[list[int]]:
    """Some of the pieces behind or before benign ones, up to a window: what is asked may be a small part."""
    if not benign:
        return pieces
    buried = []
    for piece in pieces:
        if rng.random() < _BURIED:
            room = WINDOW - 2 - len(piece)
            other = [token for i in rng.choices(benign, k=3) for token in pieces[i]][
                : rng.randrange(room + 1)
            ]
            piece = other + piece if rng.random() < _BEHIND else piece + other  # noqa: PLW2901
        buried.append(piece)
    return buried


def _pace(done: float, warm_up: float) -> float:
    return min(done / warm_up + 0.01, (1.0 - done) / (1.0 - warm_up))


def _optimizer(model: MiniLM, recipe: Recipe) -> torch.optim.Optimizer:
    for frozen in (model.words, model.positions, model.norm, *model.layers[: recipe.frozen_layers]):
        frozen.requires_grad_(requires_grad=False)
    groups = [{"params": list(model.head.parameters()), "lr": recipe.head_rate}]
    for index, layer in enumerate(model.layers):
        if index >= recipe.frozen_layers:
            rate = recipe.rate * recipe.layer_decay ** (len(model.layers) - 1 - index)
            groups.append({"params": list(layer.parameters()), "lr": rate})
    return torch.optim.AdamW(groups, weight_decay=0.01, fused=True)


def _loss(model: MiniLM, pieces: list[list[int]], rows: list[Row], recipe: Recipe) -> Tensor:
    logits = model(*padded(pieces))
    harmful = torch.tensor([float(bool(row.harmful)) for row in rows])
    soft = harmful * (1.0 - 2.0 * recipe.smoothing) + recipe.smoothing
    is_answer = torch.tensor([row.kind == "output" for row in rows])
    harm = torch.where(is_answer, logits[:, ANSWER], logits[:, PROMPT])
    loss = binary_cross_entropy_with_logits(harm, soft)
    topics = torch.tensor([_topic(row) for row in rows])
    if bool((topics != _IGNORED).any()):
        each = cross_entropy(logits[:, 1:ANSWER], topics, ignore_index=_IGNORED, reduction="none")
        share = torch.where(harmful > 0, recipe.category_weight, recipe.near_weight)
        loss = loss + (each * share).mean()
    return loss


def _topic(row: Row) -> int:
    name = row.category or row.near
    return CATEGORIES.index(name) if name in CATEGORIES else _IGNORED


def logits(model: MiniLM, windows: Sequence[list[int]], batch: int = 64) -> NDArray[np.float32]:
    """(windows, 2 + categories) logits of token windows."""
    order = np.argsort([len(ids) for ids in windows], kind="stable")
    logits = np.zeros((len(windows), 2 + len(CATEGORIES)), np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            logits[places] = model(*padded([windows[i] for i in places])).numpy()
    return logits
