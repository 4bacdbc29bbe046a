"""Trains the head of the multilingual encoder, of frozen vectors: harm and topics.

The encoder is never changed: vectors of 50,000 drawn texts are made once, for the folds and for what is
shipped, and a head takes a minute. Tuning the encoder's dense layers too found no more in sources left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import WINDOW
from app.safety.classifiers.multilingual import WIDTH, MultilingualEncoder, MultilingualHead
from app.safety.text.normalize import normalize
from scripts.training.safety import balance
from scripts.training.safety.obfuscate import leet, typos
from scripts.training.safety.rows import Row

DRAWN = 50_000
"""Texts that are drawn of all prompts."""
EVERYDAY_TIMES = 2
"""How often each question comes that only sounds harmful and is not in English: there are few others."""
ORDINARY, ORDINARY_TIMES = frozenset({"written_23", "written_25"}), 4
"""Harmless personas, rules, tests of software and the like, and how often each comes besides."""
SEEDS = (0, 1, 2)
"""Heads that are trained apart and added up."""
HIDDEN, DROPOUT = 384, 0.3
SCALE = 8.0
"""What the vectors, of length 1, are multiplied with, for layers that begin at random."""
_EPOCHS, _BATCH, _RATE = 6, 256, 1e-3
_SMOOTHING, _TOPIC_WEIGHT = 0.02, 0.3
_BURIED, _BEHIND = 0.15, 0.7
_UNKNOWN = -100
_DISGUISES = (0.10, 0.14, 0.20, 0.35, 0.38, 0.42)
"""Shares of texts, added up: with typos, in leet, beheaded, in small letters, in capitals, plain."""
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Drawn rows, and the vectors of what was read of them: (rows, WIDTH)."""

    rows: Sequence[Row]
    vectors: Floats

    def without(self, left_out: Sequence[str], *, with_own: bool = True) -> Vectors:
        """Those of other sources, and of the project's own rows where they are wanted."""
        kept = [
            i for i, row in enumerate(self.rows) if row.source not in left_out and (with_own or not row.own)
        ]
        return Vectors([self.rows[i] for i in kept], self.vectors[kept])


def drawn(rows: Sequence[Row], encoder: MultilingualEncoder, count: int = DRAWN, seed: int = 5) -> Vectors:
    """Vectors of drawn prompts, of parts of the long ones, some disguised."""
    rng = random.Random(seed)  # noqa: S311  # an order of rows, no secret
    seen = [row for row in balance.for_training(rows) if row.kind == "prompt"]
    chosen = [seen[i] for i in balance.drawn(seen, count, seed=1)]
    chosen += EVERYDAY_TIMES * [row for row in seen if row.near and row.language not in (None, "en")]
    chosen += ORDINARY_TIMES * [row for row in seen if row.source in ORDINARY]
    pieces = [_part(encoder.ids(_disguised(row.text[:6000], rng)), row, rng) for row in chosen]
    benign = [piece for piece, row in zip(pieces, chosen, strict=True) if not row.harmful]
    pieces = [_buried(piece, benign, rng) for piece in pieces]
    return Vectors(chosen, vectors_of(encoder, pieces))


def vectors_of(encoder: MultilingualEncoder, pieces: Sequence[Sequence[int]]) -> Floats:
    """(windows, WIDTH), read in order of their length."""
    order = np.argsort([len(window) for window in pieces], kind="stable")
    result = np.zeros((len(pieces), WIDTH), np.float32)
    result[order] = encoder.vectors([pieces[i] for i in order])
    return result


def train(seen: Vectors, seeds: Sequence[int] = SEEDS) -> MultilingualHead:
    """The head of these rows."""
    heads = [_trained(seen, seed) for seed in seeds]
    each = len(heads)
    return MultilingualHead(
        np.concatenate([SCALE * head.hidden.weight.detach().numpy().T for head in heads], axis=1),
        np.concatenate([head.hidden.bias.detach().numpy() for head in heads]),
        np.concatenate([head.harm.weight.detach().numpy()[0] / each for head in heads]),
        sum(SCALE * head.topics.weight.detach().numpy().T / each for head in heads),
        np.concatenate(
            [
                sum(head.harm.bias.detach().numpy() / each for head in heads),
                sum(head.topics.bias.detach().numpy() / each for head in heads),
            ]
        ),
    )


def save(head: MultilingualHead, path: Path) -> None:
    """Write the file that MultilingualHead.load reads, in half floats."""
    tables: dict[str, Any] = {name: table.astype(np.float16) for name, table in head._asdict().items()}
    np.savez_compressed(path, **tables)


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, HIDDEN)
        self.harm = nn.Linear(HIDDEN, 1)
        self.topics = nn.Linear(WIDTH, len(CATEGORIES))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        read = self.dropout(vectors)
        harm = self.harm(self.dropout(torch.relu(self.hidden(read))))[:, 0]
        return harm, self.topics(read)


def _trained(seen: Vectors, seed: int) -> _Head:
    torch.manual_seed(seed)
    head = _Head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, weight_decay=0.02)
    vectors = torch.from_numpy(seen.vectors) * SCALE
    harmful = torch.tensor([float(bool(row.harmful)) for row in seen.rows])
    topics = torch.tensor([_topic(row) for row in seen.rows])
    steps = _EPOCHS * (len(vectors) // _BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1 - step / steps)
    )
    head.train()
    for _ in range(_EPOCHS):
        for places in torch.randperm(len(vectors))[: steps // _EPOCHS * _BATCH].split(_BATCH):
            harm, topic = head(vectors[places])
            soft = harmful[places] * (1.0 - 2.0 * _SMOOTHING) + _SMOOTHING
            loss = binary_cross_entropy_with_logits(harm, soft)
            loss += _TOPIC_WEIGHT * cross_entropy(topic, topics[places], ignore_index=_UNKNOWN)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    print(f"head {seed}: loss {loss.item():.3f}", flush=True)
    return head.eval()


def _topic(row: Row) -> int:
    name = row.category or row.near
    return CATEGORIES.index(name) if name in CATEGORIES else _UNKNOWN


def _disguised(text: str, rng: random.Random) -> str:
    draw = rng.random()
    with_typos, in_leet, without_first, in_small, in_capitals, plain = _DISGUISES
    if draw < with_typos:
        return typos(text, rng)
    if draw < in_leet:
        return leet(text, rng)
    if draw < without_first:
        words = text.split(" ")
        return " ".join(words[rng.randrange(1, 3) :]) if len(words) > 8 else text
    if draw < in_small:
        return text.lower()
    if draw < in_capitals:
        return text.upper()
    return normalize(text) if draw < plain else text


def _part(ids: list[int], row: Row, rng: random.Random) -> list[int]:
    """A window of the ids: the beginning, the end, or of a benign text any part."""
    room = WINDOW - 2
    if len(ids) <= room:
        return ids
    if rng.random() < 0.5:
        return ids[:room]
    start = len(ids) - room if row.harmful else rng.randrange(len(ids) - room + 1)
    return ids[start : start + room]


def _buried(piece: list[int], benign: Sequence[list[int]], rng: random.Random) -> list[int]:
    """In some draws a part behind or before benign ones, up to a window."""
    if rng.random() >= _BURIED:
        return piece
    room = WINDOW - 2 - len(piece)
    other = list(chain.from_iterable(rng.choices(benign, k=3)))[: rng.randrange(room + 1)]
    return other + piece if rng.random() < _BEHIND else piece + other
