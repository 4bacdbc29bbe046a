"""The first phase of training: which words belong to which intent, learnt by the first layer alone.

Only the place before the answer is computed, and there only the first layer: little more than a weighted bag
of words, but tens of times cheaper than the whole network, so it sees far more questions. The whole network
then starts from these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from scripts.training.builtin_model.corpus.background import foreign_text, system_prompt
from scripts.training.builtin_model.corpus.intents import Wordings, draw_question
from scripts.training.builtin_model.corpus.noise import roughen
from scripts.training.builtin_model.export import PAD_ID
from scripts.training.builtin_model.model import SmallLlama, rotary, rotate

ROWS = 512
PROMPTED = 0.2


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings of this phase; the embedding moves at a tenth of the rate, to keep its neighbourhoods."""

    epochs: int
    rate: float
    seed: int


def question_pool(
    wordings: Wordings, tokenizer: Tokenizer, size: int, seed: int, longest: int = 128
) -> tuple[Tensor, Tensor]:
    """Rendered questions up to the answer, padded, and the number of each one's intent."""
    rng = Random(seed)  # noqa: S311 -- text from a seed, no secret
    weights = [len(intent.wordings) ** 0.5 for intent in wordings.intents]
    intents = rng.choices(range(len(weights)), weights=weights, k=size)
    ids = torch.full((size, longest), PAD_ID, dtype=torch.int32)
    for row, number in enumerate(intents):
        question = roughen(draw_question(wordings.intents[number], wordings, rng), wordings, rng)
        opening = _opening(rng) if rng.random() < PROMPTED else ""
        text = f"{opening}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        token_ids = tokenizer.encode(text).ids[-longest:]
        ids[row, : len(token_ids)] = torch.tensor(token_ids)
    return ids, torch.tensor(intents)


def _opening(rng: Random) -> str:
    more = " " + foreign_text(rng, rng.randint(1, 25)) if rng.random() < 0.4 else ""
    return f"<|im_start|>system\n{system_prompt(rng)}{more}<|im_end|>\n"


def first_layer(model: SmallLlama, ids: Tensor) -> Tensor:
    """The first layer's state at each row's last place, through the final norm; nothing else is computed."""
    layer, shape = model.layers[0], model.shape
    attention = layer.self_attn
    lengths = (ids != PAD_ID).sum(1)
    rows, length = ids.shape
    embedded = model.noisy(model.embed_tokens(ids))
    normed = layer.input_layernorm(embedded)
    last = torch.arange(rows), lengths - 1
    cos, sin = rotary(shape, length)
    groups = shape.num_heads // shape.num_kv_heads
    query = attention.q_proj(normed[last]).view(rows, shape.num_kv_heads, groups, shape.head_dim)
    query = rotate(query, cos[lengths - 1][:, None, None], sin[lengths - 1][:, None, None])
    heads = (rows, length, shape.num_kv_heads, shape.head_dim)
    keys = rotate(attention.k_proj(normed).view(heads), cos[:, None], sin[:, None])
    scores = torch.einsum("rhgd,rlhd->rhgl", query, keys) * shape.head_dim**-0.5
    scores = scores.masked_fill((ids == PAD_ID)[:, None, None], -1e9)
    attended = torch.einsum("rhgl,rlhd->rhgd", scores.softmax(-1), attention.v_proj(normed).view(heads))
    hidden = embedded[last] + attention.o_proj(attended.flatten(1))
    out: Tensor = model.norm(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
    return out


def learn_to_read(
    model: SmallLlama, judge: nn.Linear, pool: tuple[Tensor, Tensor], neighbours: Tensor, reading: Reading
) -> None:
    """Train first layer, embedding and judge on the pool; words are dropped or swapped for like ones."""
    ids, intents = pool
    model.train()
    layer = model.layers[0]
    rates = [reading.rate / 10, reading.rate]
    optimizer = torch.optim.AdamW(
        [
            {"params": list(model.embed_tokens.parameters()), "weight_decay": 0.0},
            {"params": [*layer.parameters(), *judge.parameters()], "weight_decay": 0.01},
        ]
    )
    steps = reading.epochs * -(-len(ids) // ROWS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(reading.seed)
    for epoch in range(reading.epochs):
        right = 0
        for rows in _like_long(ids, generator):
            batch = ids[rows].long()
            batch = batch[:, : int((batch != PAD_ID).sum(1).max())]
            batch = swap_words(_drop_words(batch, generator), neighbours, generator)
            verdicts = judge(first_layer(model, batch))
            loss = F.cross_entropy(verdicts, intents[rows], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            right += int((verdicts.argmax(-1) == intents[rows]).sum())
        print(
            f"reading, epoch {epoch + 1}/{reading.epochs}: intents right {right / len(ids):.1%}", flush=True
        )


def _like_long(ids: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Batches of row numbers, rows of like length together, in random order."""
    lengths = (ids != PAD_ID).sum(1) + 6 * torch.rand(len(ids), generator=generator)
    batches = lengths.argsort().split(ROWS)
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def swap_words(ids: Tensor, neighbours: Tensor, generator: torch.Generator, share: float = 0.2) -> Tensor:
    """The ids with some words replaced by a neighbour in meaning."""
    swapped = torch.rand(ids.shape, generator=generator) < share
    chosen = torch.randint(neighbours.shape[1], ids.shape, generator=generator)
    return torch.where(swapped, neighbours[ids, chosen], ids)


def _drop_words(batch: Tensor, generator: torch.Generator, share: float = 0.2) -> Tensor:
    """The batch with some tokens moved out of the row; the last five are the template's and stay."""
    lengths = (batch != PAD_ID).sum(1, keepdim=True)
    place = torch.arange(batch.shape[1]).expand_as(batch)
    dropped = (torch.rand(batch.shape, generator=generator) < share) & (place < lengths - 5)
    kept = torch.where(dropped, PAD_ID, batch)
    order = torch.sort((kept == PAD_ID).to(torch.int8), dim=1, stable=True).indices
    return kept.gather(1, order)
