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
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from scripts.builtin_model.corpus.dialogues import DialogueSource
from scripts.builtin_model.corpus.intents import Wordings, load_wordings
from scripts.builtin_model.examples import Batch, batches, pieces, spoken_tokens
from scripts.builtin_model.export import write_model
from scripts.builtin_model.model import Shape, SmallLlama
from scripts.builtin_model.reading import Reading, learn_to_read, question_pool
from scripts.builtin_model.tokenizer import save_tokenizer, train_tokenizer
from scripts.builtin_model.words import neighbours, start_embedding, word_list

BUILTIN_FOLDER = Path(__file__).resolve().parents[2] / "app" / "engine" / "builtin"
TOKENIZER_DIALOGUES = 20_000
# How often each listed word counts in making the tokenizer: enough to become one token.
WORD_TIMES = 50
# A second, linear head names the intent from the place before the answer. It is trained along, because a
# clean signal there teaches the network to read much sooner than the answer alone, and is not exported.
JUDGE_WEIGHT = 0.5
_UPPER = ("layers.1", "layers.2")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of one training run."""

    reading_questions: int
    reading_epochs: int
    reading_rate: float
    steps: int
    batch_tokens: int
    max_tokens: int
    matrix_rate: float
    first_phase_rate: float
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
    parser.add_argument(
        "--first-phase",
        type=Path,
        help="file for the first phase's result, or an earlier run's state.pt, to go on from",
    )
    parser.add_argument("--reading-questions", type=int, default=50_000)
    parser.add_argument("--reading-epochs", type=int, default=4)
    parser.add_argument("--reading-rate", type=float, default=0.003)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-tokens", type=int, default=6144)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--matrix-rate", type=float, default=0.01)
    parser.add_argument("--first-phase-rate", type=float, default=0.001)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    out: Path = args.out
    first_phase: Path | None = args.first_phase
    del args.out, args.first_phase
    train(Recipe(**vars(args)), out, first_phase)


def train(recipe: Recipe, out: Path, first_phase: Path | None = None) -> None:
    """Make the tokenizer, train the network on it and write both to `out`."""
    source = DialogueSource(load_wordings(), recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape()
    tokenizer = train_tokenizer(_texts(source), shape.vocab_size)
    save_tokenizer(tokenizer, out, shape.max_positions)
    if out.resolve() != BUILTIN_FOLDER:
        shutil.copy(BUILTIN_FOLDER / "chat_template.jinja", out)
    with tempfile.TemporaryDirectory() as folder:
        state = first_phase or Path(folder) / "first_phase.pt"
        if not state.exists():
            _first_phase(recipe, tokenizer, state)
        mp.start_processes(
            _second_phase,
            args=(recipe, out, state, f"file://{folder}/meeting"),
            nprocs=recipe.workers,
            start_method="spawn",
        )


def _networks(recipe: Recipe, wordings: Wordings) -> tuple[SmallLlama, nn.Linear]:
    torch.manual_seed(recipe.seed)
    model = SmallLlama(Shape(), recipe.dropout)
    return model, nn.Linear(model.shape.hidden_size, len(wordings.intents))


def _first_phase(recipe: Recipe, tokenizer: Tokenizer, state: Path) -> None:
    """Learn which words belong to which intent, in one thread; keep the weights in `state`."""
    torch.set_num_threads(1)
    wordings = load_wordings()
    model, judge = _networks(recipe, wordings)
    start_embedding(model.embed_tokens.weight, tokenizer)
    pool = question_pool(wordings, tokenizer, recipe.reading_questions, recipe.seed)
    learn_to_read(model, judge, pool, neighbours(tokenizer), _reading(recipe))
    torch.save({"model": model.state_dict(), "judge": judge.state_dict()}, state)


def _reading(recipe: Recipe) -> Reading:
    return Reading(recipe.reading_epochs, recipe.reading_rate, recipe.seed)


def _second_phase(rank: int, recipe: Recipe, out: Path, state: Path, meeting: str) -> None:
    """One worker: the same network in each, other text, gradients averaged; the first writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=recipe.workers)
    wordings = load_wordings()
    model, judge = _networks(recipe, wordings)
    learnt = torch.load(state)
    model.load_state_dict(learnt["model"])
    if not learnt.get("whole"):
        model.silence_upper_layers()
    judge.load_state_dict(learnt["judge"])
    torch.manual_seed(recipe.seed + rank)
    source = DialogueSource(wordings, recipe.seed + 1 + rank)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model.spoken = spoken_tokens(DialogueSource(wordings, recipe.seed), tokenizer)
    order = Random(recipe.seed + rank)  # noqa: S311 -- an order from a seed, no secret
    stream = batches(source, tokenizer, recipe.batch_tokens, recipe.max_tokens, neighbours(tokenizer), order)
    _optimise(model, judge, recipe, stream, rank)
    if rank == 0:
        write_model(model, out)
        if out.resolve() != BUILTIN_FOLDER:
            learnt = {"model": model.state_dict(), "judge": judge.state_dict(), "whole": True}
            torch.save(learnt, out / "state.pt")
    dist.destroy_process_group()


def _texts(source: DialogueSource) -> Iterator[str]:
    """The text that the tokenizer is made from; passages of foreign text would only dilute it."""
    for _ in range(TOKENIZER_DIALOGUES):
        question, answer = source.question_and_answer()
        yield question.content
        yield answer.content
    for _ in range(TOKENIZER_DIALOGUES // 30):
        yield "".join(text for text, _ in pieces(source.draw()))[:3000]
    for word in word_list():
        yield f" {word}" * WORD_TIMES


def _optimise(
    model: SmallLlama, judge: nn.Linear, recipe: Recipe, stream: Iterator[Batch], rank: int
) -> None:
    optimizers = _optimizers(model, judge, recipe)
    schedules = [_one_cycle(optimizer, recipe) for optimizer in optimizers]
    parameters = [*model.parameters(), *judge.parameters()]
    model.train()
    started = time.monotonic()
    questions, seen = 0, _Smooth()
    for step in range(1, recipe.steps + 1):
        batch = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.hidden(batch.ids)
            loss = model.loss(hidden, batch.ids, batch.weights)
            verdicts = judge(hidden[batch.rows, batch.places]).float()
            judged = F.cross_entropy(verdicts, batch.intents) if len(batch.intents) else verdicts.sum()
        _step(loss + JUDGE_WEIGHT * judged, parameters, optimizers)
        for schedule in schedules:
            schedule.step()
        questions += len(batch.intents)
        right = (verdicts.argmax(-1) == batch.intents).float().mean() if len(batch.intents) else seen.right
        seen.add(float(loss.detach()), float(right))
        if rank == 0 and (step % 20 == 0 or step == recipe.steps):
            passed_s = time.monotonic() - started
            speed = f"{questions / passed_s:,.0f} questions/s"
            print(f"step {step}/{recipe.steps}  {seen}  {speed}  {passed_s:.0f} s", flush=True)


@dataclass(slots=True)
class _Smooth:
    """Running means of the loss and of the share of intents that the judge recognises."""

    loss: float = 0.0
    right: float = 0.0
    count: int = 0

    def add(self, loss: float, right: float) -> None:
        self.count += 1
        share = max(0.04, 1 / self.count)
        self.loss += share * (loss - self.loss)
        self.right += share * (right - self.right)

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  intents right {self.right:.1%}"


def _optimizers(model: SmallLlama, judge: nn.Linear, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the upper layers; AdamW, and slower, for what the first phase has made."""
    upper = {name for name, weight in model.named_parameters() if weight.dim() == 2 and name[:8] in _UPPER}
    matrices = [weight for name, weight in model.named_parameters() if name in upper]
    others = [weight for name, weight in model.named_parameters() if name not in upper]
    others += judge.parameters()
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.first_phase_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _one_cycle(optimizer: torch.optim.Optimizer, recipe: Recipe) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=optimizer.param_groups[0]["lr"],
        total_steps=recipe.steps,
        pct_start=min(0.3, recipe.warmup_steps / recipe.steps),
        cycle_momentum=False,
        final_div_factor=100.0,
    )


def _step(loss: Tensor, parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    _average_gradients(parameters)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
