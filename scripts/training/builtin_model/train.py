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
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from scripts.training.builtin_model.corpus.dialogues import DialogueSource
from scripts.training.builtin_model.corpus.intents import Wordings, load_wordings
from scripts.training.builtin_model.examples import Batch, batches, pieces, spoken_tokens
from scripts.training.builtin_model.export import write_model
from scripts.training.builtin_model.model import Shape, SmallLlama
from scripts.training.builtin_model.reading import Reading, learn_to_read, question_pool
from scripts.training.builtin_model.tokenizer import save_tokenizer, train_tokenizer
from scripts.training.builtin_model.words import neighbours, start_embedding, word_list

BUILTIN_FOLDER = Path(__file__).resolve().parents[3] / "app" / "engine" / "builtin"
TOKENIZER_DIALOGUES = 20_000
# How often each listed word counts in making the tokenizer: enough to become one token.
WORD_TIMES = 50
STATE = "state.pt"
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
    other_rate: float
    first_layer_rate: float
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
        "--start-from",
        type=Path,
        help="folder of an earlier run or an exported model: train its weights further, with its tokenizer",
    )
    parser.add_argument("--reading-questions", type=int, default=80_000)
    parser.add_argument("--reading-epochs", type=int, default=16)
    parser.add_argument("--reading-rate", type=float, default=0.003)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-tokens", type=int, default=3584)
    parser.add_argument("--max-tokens", type=int, default=4000)
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--other-rate", type=float, default=0.0015)
    parser.add_argument("--first-layer-rate", type=float, default=0.0003)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    out: Path = args.out
    earlier: Path | None = args.start_from
    del args.out, args.start_from
    train(Recipe(**vars(args)), out, earlier)


def train(recipe: Recipe, out: Path, earlier: Path | None = None) -> None:
    """Make the tokenizer, train the network on it and write both to `out`; or go on from an earlier run."""
    out.mkdir(parents=True, exist_ok=True)
    if earlier is None:
        source = DialogueSource(load_wordings(), recipe.seed)
        save_tokenizer(train_tokenizer(_texts(source), Shape().vocab_size), out, Shape().max_positions)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if out.resolve() != earlier.resolve():
                shutil.copy(earlier / name, out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    if out.resolve() != BUILTIN_FOLDER:
        shutil.copy(BUILTIN_FOLDER / "chat_template.jinja", out)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / STATE
        _first_phase(recipe, tokenizer, state, earlier)
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


def _first_phase(recipe: Recipe, tokenizer: Tokenizer, state: Path, earlier: Path | None) -> None:
    """Learn which words belong to which intent, in one thread; keep the weights in `state`."""
    torch.set_num_threads(1)
    wordings = load_wordings()
    model, judge = _networks(recipe, wordings)
    if earlier is None:
        start_embedding(model.embed_tokens.weight, tokenizer)
        learnt = {}
    elif (earlier / STATE).exists():
        learnt = torch.load(earlier / STATE)
        model.load_state_dict(learnt["model"])
        judge.load_state_dict(learnt["reader"])
    else:  # an exported model: it reads already, and has no judge
        model.load_exported(load_file(earlier / "model.safetensors"))
        torch.save({"model": model.state_dict(), "judge": None}, state)
        return
    pool = question_pool(wordings, tokenizer, recipe.reading_questions, recipe.seed)
    learn_to_read(model, judge, pool, neighbours(tokenizer), _reading(recipe))
    reader = judge.state_dict()
    if earlier is None:
        model.silence_upper_layers()
    torch.save({"model": model.state_dict(), "judge": learnt.get("judge", reader), "reader": reader}, state)


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
    if learnt["judge"] is not None:
        judge.load_state_dict(learnt["judge"])
    judge_weight = 0.0 if learnt["judge"] is None else JUDGE_WEIGHT
    torch.manual_seed(recipe.seed + rank)
    source = DialogueSource(wordings, recipe.seed + 1 + rank)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model.spoken = spoken_tokens(DialogueSource(wordings, recipe.seed), tokenizer)
    order = Random(recipe.seed + rank)  # noqa: S311 -- an order from a seed, no secret
    stream = batches(source, tokenizer, recipe.batch_tokens, recipe.max_tokens, neighbours(tokenizer), order)
    _optimise(model, judge, recipe, stream, rank, judge_weight)
    if rank == 0:
        write_model(model, out)
        if out.resolve() != BUILTIN_FOLDER:
            learnt |= {"model": model.state_dict(), "judge": judge.state_dict()}
            torch.save(learnt, out / STATE)
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
    model: SmallLlama,
    judge: nn.Linear,
    recipe: Recipe,
    stream: Iterator[Batch],
    rank: int,
    judge_weight: float,
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
            hidden = model.hidden(batch.ids, batch.hidden_before)
            loss = model.loss(hidden, batch.ids, batch.weights)
            verdicts = judge(hidden[batch.rows, batch.places]).float()
            judged = F.cross_entropy(verdicts, batch.intents) if len(batch.intents) else verdicts.sum()
        _step(loss + judge_weight * judged, parameters, optimizers)
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
    """Muon for the matrices of the upper layers; AdamW for the rest, slow for the first layer."""
    named = dict(model.named_parameters())
    upper = [weight for name, weight in named.items() if weight.dim() == 2 and name[:8] in _UPPER]
    first = [weight for name, weight in named.items() if name.startswith("layers.0")]
    taken = {id(weight) for weight in (*upper, *first)}
    others = [weight for weight in named.values() if id(weight) not in taken]
    return [
        torch.optim.Muon(upper, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            [*others, *judge.parameters()], lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0
        ),
        torch.optim.AdamW(first, lr=recipe.first_layer_rate, betas=(0.9, 0.98), weight_decay=0.0),
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
    for gradient, averaged in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(averaged.view_as(gradient))


if __name__ == "__main__":
    main()
