"""Trains and measures the prompt classifier and writes app/safety/models/: `scripts/train_safety --data DIR`.

    1. an encoder of the project's rows alone → base.pt                (seen by all folds, so trained once)
    2. leave-sources-out folds → fold_*.npz                            (n-grams and encoder, no row seen)
    3. the shipped n-grams and encoder, of all rows but the held-out
    4. folds without the project's rows → ablation*.npz               (only where `--steps` names it)
    5. blend and thresholds of 2, as calibration.json; tokenizer, manifest, CARD.md

Step 2 screens answers too → answers_*.pickle; step 3 trains the model that hears every token of an answer.
Steps whose file is in the work folder already are not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import MODELS
from app.safety.policies.policy_file import Rule
from app.safety.policies.thresholds import FILE_NAME as CALIBRATION
from app.safety.text.gloss import Glosser
from scripts.training.safety import (
    answer_folds,
    balance,
    calibrate,
    calibrate_answers,
    card,
    export,
    loso,
    manifest,
    rows,
    train_encoder,
    train_ngrams,
    train_output,
)
from scripts.training.safety.answer_folds import AnswerFold
from scripts.training.safety.loso import Predictions
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces
from scripts.training.safety.train_ngrams import Features
from scripts.training.safety.word_vectors import WordVectors

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = 64_000
BASE_EXAMPLES = 13_000
FOLD_EXAMPLES = 15_000
ABLATION_EXAMPLES = 10_000
BASE_SEED = 9


def main(argv: Sequence[str] | None = None) -> None:
    """Do all steps, or those named."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.models.mkdir(parents=True, exist_ok=True)
    if {"folds", "models", "ablation"} & {*args.steps}:
        _train(args)
    if "calibrate" in args.steps:
        _calibrate(args)


def _train(args: argparse.Namespace) -> None:
    public = rows.public(args.data)
    all_rows = rows.own() + rows.asked() + public + rows.as_answers(public)
    all_rows += rows.glosses(all_rows, Glosser.load())
    features = train_ngrams.Features(all_rows)
    print(f"{len(all_rows)} rows, {sum(row.own for row in all_rows)} of them the project's own", flush=True)
    if "folds" in args.steps:
        _folds(all_rows, features, args)
    if "models" in args.steps:
        _models(all_rows, features, args)
    if "ablation" in args.steps:
        _ablation(all_rows, features, args)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the public files (MANIFEST.json)")
    parser.add_argument("--weights", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "safety", help="what is between steps")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="texts that the shipped encoder sees")
    parser.add_argument("--base-examples", type=int, default=BASE_EXAMPLES, help="the same, before the folds")
    parser.add_argument("--fold-examples", type=int, default=FOLD_EXAMPLES, help="the same for a fold's")
    parser.add_argument("--ablation-examples", type=int, default=ABLATION_EXAMPLES)
    parser.add_argument(
        "--folds", type=int, nargs="+", default=range(len(balance.FOLDS)), help="in this order"
    )
    parser.add_argument("--start", type=Path, help="an earlier encoder.pt to go on from, at a lower rate")
    steps = ("folds", "models", "ablation", "calibrate")
    parser.add_argument(
        "--steps", nargs="+", choices=steps, default=tuple(s for s in steps if s != "ablation")
    )
    return parser.parse_args(argv)


def _base(all_rows: list[Row], args: argparse.Namespace) -> Path:
    """The encoder that folds go on from: of rows that all of them may see."""
    path: Path = args.work / "base.pt"
    if not path.exists():
        print("base: the project's rows alone", flush=True)
        seen = [row for row in balance.for_training(all_rows) if row.own]
        recipe = train_encoder.Recipe(args.base_examples, seed=BASE_SEED)
        torch.save(train_encoder.train(seen, args.weights, recipe).state_dict(), path)
    return path


def _folds(all_rows: list[Row], features: Features, args: argparse.Namespace) -> None:
    base = _base(all_rows, args)
    texts = train_output.heard(all_rows)
    vectors = WordVectors(args.weights, [text.row.text for text in texts])
    wordpieces = Wordpieces(args.weights)
    for number in args.folds:
        path = args.work / f"fold_{number}.npz"
        if not path.exists():
            fold, model = loso.fold(number, all_rows, features, args.weights, args.fold_examples, start=base)
            fold.save(path)
            assert model is not None
            torch.save(model.state_dict(), args.work / f"fold_{number}.pt")
            answers = answer_folds.fold(number, texts, vectors, model, wordpieces)
            answers.save(args.work / f"answers_{number}.pickle")


def _ablation(all_rows: list[Row], features: Features, args: argparse.Namespace) -> None:
    path = args.work / "ablation.npz"
    if not path.exists() and args.ablation_examples:
        fold, _ = loso.fold(
            loso.ABLATED, all_rows, features, args.weights, args.ablation_examples, with_own=False
        )
        fold.save(path)
    path = args.work / "ablation_ngrams.npz"
    if not path.exists():
        without = [
            loso.fold(number, all_rows, features, args.weights, 0, with_own=False)[0]
            for number in sorted(args.folds)
        ]
        loso.joined(without).save(path)


def _models(all_rows: list[Row], features: Features, args: argparse.Namespace) -> None:
    seen = balance.for_training(all_rows)
    ngrams = train_ngrams.train(features.prompts(seen), features)
    train_ngrams.save(ngrams, args.models / "ngrams.npz")
    recipe = train_encoder.Recipe(args.examples)
    if args.start:
        recipe = replace(recipe, rate=recipe.rate / 2, head_rate=recipe.head_rate / 4, seed=1)
    print("the shipped encoder", flush=True)
    model = train_encoder.train(seen, args.weights, recipe, args.start)
    torch.save(model.state_dict(), args.work / "encoder.pt")
    export.write(model, args.models / "encoder.onnx")
    texts = train_output.heard(all_rows)
    train_output.train(texts, WordVectors(args.weights, [text.row.text for text in texts]), args.models)
    shutil.copy(args.weights / "tokenizer.json", args.models / "tokenizer.json")


def _calibrate(args: argparse.Namespace) -> None:
    parts = [Predictions.load(path) for path in sorted(args.work.glob("fold_*.npz"))]
    blend, scored = calibrate.blended(loso.joined(parts))
    folds = [AnswerFold.load(path) for path in sorted(args.work.glob("answers_*.pickle"))]
    counts = calibrate_answers.weights(folds)
    answers = calibrate_answers.blend(folds, counts)
    output = dict.fromkeys(CATEGORIES, calibrate_answers.table(folds, counts, answers))
    document = calibrate.document(blend, scored, answers, output)
    (args.models / CALIBRATION).write_text(json.dumps(document, indent=1) + "\n")
    manifest.write(args.models)
    measured: dict[str, Any] = {
        "n-grams": calibrate.figures(scored, scored.fast),
        "encoder": calibrate.figures(scored, calibrate.sigmoid(scored.of.encoder.astype(np.float64))),
        "blend": calibrate.figures(scored, scored.full),
        "prompt screen": calibrate.figures(scored, scored.full, calibrate.screened(scored)),
    }
    if (args.work / "ablation_ngrams.npz").exists():
        measured["ablation"] = card.ablation(args.work, scored, blend)
    measured["asked"] = card.asked(args.models)
    rule = Rule()
    measured["replies"] = calibrate_answers.figures(folds, rule.answer_fpr, rule.watched_answer_fpr)
    (args.work / "figures.json").write_text(json.dumps(measured, indent=1) + "\n")
    (args.models / "CARD.md").write_text(card.text(measured, rows.own(), _sizes(args.models), _seen(args)))


def _seen(args: argparse.Namespace) -> dict[str, str]:
    names = ("examples", "base_examples", "fold_examples", "ablation_examples")
    seen = {name: f"{getattr(args, name):,}" for name in names}
    if args.start:
        seen["examples"] += " beyond those of an earlier one"
    return seen


def _sizes(models: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in models.iterdir() if path.suffix in manifest.MODEL_FILES
    }


if __name__ == "__main__":
    main()
