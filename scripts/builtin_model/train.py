"""Trains the built-in model from its corpus and writes it as a model folder.

Everything is drawn from `--seed`: the text, the order, the initial weights and the dropout. The same seed,
worker count and torch build give the same model. Each worker is a process with one thread and batches of its
own; their gradients are averaged.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor

from scripts.builtin_model.corpus.dialogues import DialogueSource
from scripts.builtin_model.corpus.intents import load_wordings
from scripts.builtin_model.examples import batches, pieces
from scripts.builtin_model.export import write_model
from scripts.builtin_model.model import Shape, SmallLlama
from scripts.builtin_model.tokenizer import save_tokenizer, train_tokenizer

BUILTIN_FOLDER = Path(__file__).resolve().parents[2] / "app" / "engine" / "builtin"
TOKENIZER_DIALOGUES = 30_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of one training run."""

    steps: int
    batch_tokens: int
    max_tokens: int
    matrix_rate: float
    embedding_rate: float
    weight_decay: float
    dropout: float
    warmup_steps: int
    workers: int
    seed: int


def main() -> None:
    """Parse the command line, train, write."""
    parser = argparse.ArgumentParser(prog="scripts/train_builtin_model", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=BUILTIN_FOLDER, help="folder to write (default: the built-in one)"
    )
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch-tokens", type=int, default=6144)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--embedding-rate", type=float, default=0.006)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    out: Path = args.out
    del args.out
    train(Recipe(**vars(args)), out)


def train(recipe: Recipe, out: Path) -> None:
    """Make the tokenizer, train the network on it and write both to `out`."""
    source = DialogueSource(load_wordings(), recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    tokenizer = train_tokenizer(_texts(source), shape.vocab_size)
    save_tokenizer(tokenizer, out, shape.max_positions)
    if out.resolve() != BUILTIN_FOLDER:
        shutil.copy(BUILTIN_FOLDER / "chat_template.jinja", out)
    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(
            _work, args=(recipe, out, f"file://{meeting}/point"), nprocs=recipe.workers, start_method="spawn"
        )


def _work(rank: int, recipe: Recipe, out: Path, meeting: str) -> None:
    """One worker: the same network in each, other text, gradients averaged; the first writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=recipe.workers)
    torch.manual_seed(recipe.seed)
    model = SmallLlama(Shape(), recipe.dropout)
    torch.manual_seed(recipe.seed + rank)
    source = DialogueSource(load_wordings(), recipe.seed + 1 + rank)
    _optimise(model, recipe, source, Tokenizer.from_file(str(out / "tokenizer.json")), rank)
    if rank == 0:
        write_model(model, out)
    dist.destroy_process_group()


def _texts(source: DialogueSource) -> Iterator[str]:
    """The text that the tokenizer is made from; passages of foreign text would only dilute it."""
    for _ in range(TOKENIZER_DIALOGUES):
        question, answer = source.question_and_answer()
        yield question.content
        yield answer.content
    for _ in range(TOKENIZER_DIALOGUES // 30):
        yield "".join(text for text, _ in pieces(source.draw()))[:3000]


def _optimise(
    model: SmallLlama, recipe: Recipe, source: DialogueSource, tokenizer: Tokenizer, rank: int
) -> None:
    matrices = [
        weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name
    ]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            others, lr=recipe.embedding_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay / 10
        ),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=optimizer.param_groups[0]["lr"],
            total_steps=recipe.steps,
            pct_start=min(0.3, recipe.warmup_steps / recipe.steps),
            cycle_momentum=False,
            final_div_factor=100.0,
        )
        for optimizer in optimizers
    ]
    model.train()
    started = time.monotonic()
    tokens, smooth = 0, 0.0
    order = Random(recipe.seed + rank)  # noqa: S311 -- an order from a seed, no secret
    stream = batches(source, tokenizer, recipe.batch_tokens, recipe.max_tokens, order)
    for step in range(1, recipe.steps + 1):
        ids, weights = next(stream)
        loss = _step(model, ids, weights, optimizers)
        for schedule in schedules:
            schedule.step()
        tokens += int((weights > 0).sum())
        smooth = loss if step == 1 else 0.9 * smooth + 0.1 * loss
        if rank == 0 and (step % 20 == 0 or step == recipe.steps):
            passed_s = time.monotonic() - started
            speed = f"{tokens / passed_s:,.0f} answer tokens/s"
            print(f"step {step}/{recipe.steps}  loss {smooth:.4f}  {speed}  {passed_s:.0f} s", flush=True)


def _step(model: SmallLlama, ids: Tensor, weights: Tensor, optimizers: list[torch.optim.Optimizer]) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(ids, weights)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    _average_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach())


def _average_gradients(model: SmallLlama) -> None:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
