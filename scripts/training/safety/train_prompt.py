"""Trains and measures the classifiers and writes app/safety/models/: `scripts/train_safety --data DIR`.

    folds      leave-sources-out predictions of prompts → fold_*.npz       (n-grams and head, no row seen)
    models     the shipped n-grams and head, of all rows but the held-out
    answers    what reads and what hears answers: of folds → answers_*.pickle, and shipped
    ablation   folds without the project's rows → ablation.npz             (only where `--steps` names it)
    calibrate  blend and thresholds of these, as calibration.json; manifest, CARD.md

What is in the work folder already is not done again. Without `answers` their part of calibration.json and of
the card stays as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.multilingual import MultilingualEncoder, package_files
from app.safety.policies.calibration import FILE_NAME as CALIBRATION
from app.safety.policies.policy_file import Rule
from scripts.training.safety import (
    answer_folds,
    balance,
    calibrate,
    calibrate_answers,
    card,
    export,
    export_multilingual,
    loso,
    manifest,
    rows,
    train_encoder,
    train_multilingual,
    train_ngrams,
    train_output,
)
from scripts.training.safety.answer_folds import AnswerFold
from scripts.training.safety.calibrate_answers import AnswerBlend
from scripts.training.safety.loso import Predictions
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces
from scripts.training.safety.word_vectors import WordVectors

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = 64_000
FOLD_EXAMPLES = 15_000
STEPS = ("folds", "models", "answers", "ablation", "calibrate")


def main(argv: Sequence[str] | None = None) -> None:
    """Do all steps, or those named."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.models.mkdir(parents=True, exist_ok=True)
    public = rows.public(args.data)
    prompts = rows.own() + rows.asked() + public + rows.kept_apart()
    print(f"{len(prompts)} rows, {sum(row.own for row in prompts)} of them the project's own", flush=True)
    if {"folds", "models", "ablation"} & {*args.steps}:
        _prompts(prompts, args)
    if "answers" in args.steps:
        _answers(prompts + rows.as_answers(public), args)
    if "calibrate" in args.steps:
        _calibrate(args)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the public files (MANIFEST.json)")
    parser.add_argument("--weights", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "safety", help="what is between steps")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="texts that the answers' encoder sees")
    parser.add_argument("--fold-examples", type=int, default=FOLD_EXAMPLES, help="the same for a fold's")
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=tuple(s for s in STEPS if s != "ablation")
    )
    return parser.parse_args(argv)


def _prompts(every: list[Row], args: argparse.Namespace) -> None:
    convolutions = args.models / "multilingual.onnx"
    if not convolutions.exists():
        with np.load(package_files() / "weights.npz", allow_pickle=False) as weights:
            export_multilingual.write(weights, convolutions)
    encoder = MultilingualEncoder.load(convolutions)
    features = train_ngrams.Features(every)
    vectors = train_multilingual.drawn(every, encoder)
    folds = range(len(balance.FOLDS))
    if "folds" in args.steps:
        for number in folds:
            path = args.work / f"fold_{number}.npz"
            if not path.exists():
                loso.fold(number, every, features, vectors, encoder).save(path)
    if "models" in args.steps:
        seen = balance.for_training(every)
        train_ngrams.save(train_ngrams.train(features.prompts(seen), features), args.models / "ngrams.npz")
        train_multilingual.save(train_multilingual.train(vectors), args.models / "multilingual.npz")
    if "ablation" in args.steps:
        parts = [loso.fold(number, every, features, vectors, encoder, with_own=False) for number in folds]
        loso.joined(parts).save(args.work / "ablation.npz")


def _answers(every: list[Row], args: argparse.Namespace) -> None:
    texts = train_output.heard(every)
    vectors = WordVectors(args.weights, [text.row.text for text in texts])
    wordpieces = Wordpieces(args.weights)
    for number, left_out in enumerate(balance.FOLDS):
        path = args.work / f"answers_{number}.pickle"
        if not path.exists():
            recipe = train_encoder.Recipe(args.fold_examples, seed=number)
            model = train_encoder.train(balance.for_training(every, left_out), args.weights, recipe)
            answer_folds.fold(number, texts, vectors, model, wordpieces).save(path)
    print("the shipped encoder", flush=True)
    recipe = train_encoder.Recipe(args.examples)
    export.write(
        train_encoder.train(balance.for_training(every), args.weights, recipe), args.models / "encoder.onnx"
    )
    train_output.train(texts, vectors, args.models)
    shutil.copy(args.weights / "tokenizer.json", args.models / "tokenizer.json")


def _calibrate(args: argparse.Namespace) -> None:
    parts = [Predictions.load(path) for path in sorted(args.work.glob("fold_*.npz"))]
    blend, scored = calibrate.blended(loso.joined(parts))
    path = args.models / CALIBRATION
    folds = [AnswerFold.load(path) for path in sorted(args.work.glob("answers_*.pickle"))]
    measured: dict[str, Any] = {
        "n-grams": calibrate.figures(scored, scored.fast),
        "encoder": calibrate.figures(scored, calibrate.sigmoid(scored.of.multilingual.astype("float64"))),
        "blend": calibrate.figures(scored, scored.full),
        "prompt screen": calibrate.figures(scored, scored.full, calibrate.screened(scored)),
    }
    if folds:
        counts = calibrate_answers.weights(folds)
        answers = calibrate_answers.blend(folds, counts)
        output = dict.fromkeys(CATEGORIES, calibrate_answers.table(folds, counts, answers))
        rule = Rule()
        measured["replies"] = calibrate_answers.figures(folds, rule.answer_fpr, rule.watched_answer_fpr)
    else:
        calibrated = json.loads(path.read_text())
        answers = AnswerBlend(**{name: calibrated["blend"][name] for name in AnswerBlend._fields})
        output = calibrated["output"]
    path.write_text(json.dumps(calibrate.document(blend, scored, answers, output), indent=1) + "\n")
    manifest.write(args.models)
    if (args.work / "ablation.npz").exists():
        without = calibrate.harms(Predictions.load(args.work / "ablation.npz"), blend)
        measured["ablation"] = calibrate.figures(without, without.full)
    measured["asked"] = card.asked(args.models)
    (args.work / "figures.json").write_text(json.dumps(measured, indent=1) + "\n")
    card.write(args.models / "CARD.md", measured, rows.own(), _sizes(args.models))


def _sizes(models: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in models.iterdir() if path.suffix in manifest.MODEL_FILES
    }


if __name__ == "__main__":
    main()
