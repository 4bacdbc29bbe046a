"""From predictions on sources left out to calibration.json: the blend, and thresholds by target rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from app.safety.categories import CATEGORIES
from app.safety.policies.policy_file import Rule
from app.safety.thresholds import NGRAMS_WATCH_SHARE
from scripts.training.safety.calibrate_answers import AnswerBlend
from scripts.training.safety.loso import FAST_LENGTH, LENGTH, NGRAMS, Predictions
from scripts.training.safety.rows import EVERYDAY, HALF, KEPT_APART, THIRD_TURNS

RATES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1)
BLOCK, WATCH = Rule().block_fpr, Rule().watch_fpr
"""The rates of the built-in policy: of prompts that are refused, and that are at least watched."""
GROUP_SLACK, WATCH_SLACK = 2.5, 2.0
"""How far a group of ordinary prompts may be above a rate for all: one of up to LOW, and one beyond."""
LOW = 0.01
MOST_EVERYDAY = 0.005
"""The share of a set kept apart that may be refused, at whatever rate up to LOW: none of 150."""
FEW, MANY = 0.002, 0.02
"""Shares of ordinary prompts at which those in English and in other languages are made even."""
GLOSSES = 0.03
"""The share of ordinary prompts in Hindi and Indonesian that are watched for their gloss alone."""
GROUP_ROWS = 300
"""Fewer rows than this are no group: a rate of 0.4% is one row there. A set kept apart always is one."""
LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "id", "it", "ja", "ko", "pt", "ru", "tr", "zh")
"""The languages of the everyday questions that are kept apart."""
SHARE: Mapping[str, float] = {
    "asked": 2.0,
    "benign_agent_prompts": 0.7,
    "benign_arena_v01": 3.0,
    "benign_banking77": 0.3,
    "benign_clinc": 0.7,
    "benign_creative_roleplay": 1.0,
    "benign_fiction_long": 0.4,
    "benign_fiction_long (half)": 0.4,
    "benign_flowgpt": 1.5,
    "benign_flowgpt_chat": 3.0,
    "benign_gpt_instructions": 0.7,
    "benign_gpteacher": 1.5,
    "benign_gsm8k": 0.3,
    "benign_instructions": 1.5,
    "benign_lobe_agents": 1.0,
    "benign_long_documents": 1.5,
    "benign_medquad": 0.6,
    "benign_multilingual": 2.0,
    "benign_prompts_chat": 1.0,
    "benign_safe_prompts": 1.5,
    "benign_selfinstruct": 2.0,
    "benign_templates": 0.5,
    "benign_tool_requests": 1.0,
    "turns of asked": 0.5,
    "turns of benign_arena_v01": 0.5,
    "turns of benign_flowgpt_chat": 1.0,
    "turns of benign_lobe_agents": 0.5,
    THIRD_TURNS: 0.5,
    **{f"{EVERYDAY} {language}": 0.15 for language in LANGUAGES},
}
"""What of ordinary traffic is like a source: what people typed counts most, templates least."""
LOOK_ALIKES = ("benign_coconot_pref", "benign_cyber_frr", "benign_cyber_frr_multilingual")
"""Public sources of benign prompts that sound harmful."""
IN_LANGUAGES = "xsafety_multilingual"
"""The public source of harmful prompts in several languages."""
STATEMENTS = ("hate_davidson", "toxicity_surge", "toxigen_safenlp")
"""Public sources of statements, not requests, whose labels people disagree on."""
LENGTHS = (200, 1_000, 4_000)
"""Characters at which a group of short prompts ends and one of longer ones begins."""

Floats = NDArray[np.float64]
Hits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Scored:
    """Predictions with the harm of both stages."""

    of: Predictions
    full: Floats
    fast: Floats


def blended(predictions: Predictions) -> tuple[PromptBlend, Scored]:
    """The blend that tells harmful from benign best among English requests of sources left out.

    In other languages the n-grams know too little: there the encoder decides alone, on a line that has as
    many of the ordinary prompts at FEW and MANY as there are of English ones.
    """
    requests = ~predictions.own & ~np.isin(predictions.source, STATEMENTS)
    weights = _even(predictions.source, predictions.harmful)
    english = requests & predictions.is_english
    both, alone = _both(predictions), _alone(predictions)
    slope, bias = _line(both, predictions.harmful, weights, english)
    fast_slope, fast_bias = _line(alone, predictions.harmful, weights, requests)
    ordinary = np.isin(predictions.source, list(SHARE)) & ~predictions.harmful
    wanted = np.quantile(both[ordinary & predictions.is_english], [1 - MANY, 1 - FEW])
    wanted_of_gloss = float(np.quantile(both[ordinary & predictions.is_english], 1 - WATCH))
    foreign = _foreign(predictions)
    at = np.quantile(foreign[ordinary & ~predictions.is_english], [1 - MANY, 1 - FEW])
    stretch = float((wanted[1] - wanted[0]) / (at[1] - at[0]))
    blend = PromptBlend(
        multilingual=slope,
        ngrams=NGRAMS * slope,
        bias=bias,
        length=LENGTH * slope,
        foreign=slope * stretch,
        foreign_bias=float(slope * (wanted[0] - stretch * at[0])) + bias,
        foreign_length=LENGTH * slope * stretch,
        gloss_bias=_gloss_bias(predictions, ordinary, slope, bias + slope * wanted_of_gloss),
        gloss_most=bias + slope * float(wanted[0]),
        fast_slope=fast_slope,
        fast_bias=fast_bias,
        fast_length=FAST_LENGTH * fast_slope,
    )
    return blend, harms(predictions, blend)


class PromptBlend(NamedTuple):
    """The part of Blend that is about prompts."""

    multilingual: float
    ngrams: float
    bias: float
    length: float
    foreign: float
    foreign_bias: float
    foreign_length: float
    gloss_bias: float
    gloss_most: float
    fast_slope: float
    fast_bias: float
    fast_length: float


def _gloss_bias(predictions: Predictions, ordinary: Hits, slope: float, watched: float) -> float:
    """The intercept with which GLOSSES of the ordinary prompts that have a gloss are watched for it."""
    glosses = (predictions.gloss - LENGTH * predictions.doublings)[ordinary & ~np.isnan(predictions.gloss)]
    return watched - slope * float(np.quantile(glosses, 1 - GLOSSES))


def _line(
    logits: Floats, harmful: NDArray[np.bool_], weights: NDArray[np.float64], chosen: Hits
) -> tuple[float, float]:
    """Slope and intercept from logits to those of the probability."""
    model = LogisticRegression(C=100.0).fit(logits[chosen][:, None], harmful[chosen], weights[chosen])
    return float(model.coef_[0, 0]), float(model.intercept_[0])


def _both(predictions: Predictions) -> Floats:
    both: Floats = _foreign(predictions) + NGRAMS * predictions.ngrams
    return both


def _foreign(predictions: Predictions) -> Floats:
    alone: Floats = (predictions.multilingual - LENGTH * predictions.doublings).astype(np.float64)
    return alone


def _alone(predictions: Predictions) -> Floats:
    alone: Floats = (predictions.quick - FAST_LENGTH * predictions.quick_doublings).astype(np.float64)
    return alone


def harms(predictions: Predictions, blend: PromptBlend) -> Scored:
    """The harm that both stages give to each row."""
    english = blend.multilingual * _both(predictions) + blend.bias
    foreign = blend.foreign * _foreign(predictions) + blend.foreign_bias
    gloss = blend.multilingual * predictions.gloss + blend.gloss_bias - blend.length * predictions.doublings
    full = np.where(predictions.is_english, english, foreign)
    full = np.fmax(full, np.minimum(gloss, blend.gloss_most))
    fast = blend.fast_slope * _alone(predictions) + blend.fast_bias
    return Scored(predictions, sigmoid(full), sigmoid(fast))


def sigmoid(logits: Floats) -> Floats:
    """Logits as probabilities."""
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -30, 30)))
    return result


def _even(source: NDArray[np.str_], harmful: NDArray[np.bool_]) -> Floats:
    """Weights with which each source counts by the root of its size, and both labels alike."""
    weights = np.zeros(len(source))
    for label in (True, False):
        for name in np.unique(source[harmful == label]):
            chosen = (source == name) & (harmful == label)
            weights[chosen] = 1.0 / np.sqrt(chosen.sum())
        weights[harmful == label] /= weights[harmful == label].sum()
    return weights * len(source)


def thresholds(scored: Scored, harm: Floats, rates: Sequence[float] = RATES) -> list[float]:
    """For each rate the harm that this share of all ordinary prompts reaches, and twice that of any group.

    Below one in 500 there are too few rows to count: there the line of the logits is carried on.
    """
    chosen = np.isin(scored.of.source, list(SHARE)) & ~scored.of.harmful
    at = _reached(harm[chosen], _traffic(scored.of.source)[chosen], rates)
    for name, group in groups(scored.of).items():
        slack = [_slack(rate, name) for rate in rates]
        least = _reached(harm[group], np.ones(int(group.sum())), slack)
        at = np.maximum(at, least)
    falling = np.maximum.accumulate(at[::-1])[::-1]
    return [float(value) for value in np.round(sigmoid(falling), 5)]


def _slack(rate: float, group: str) -> float:
    """The share of a group that may reach what `rate` of all reach."""
    if rate > LOW:
        return rate * WATCH_SLACK
    return min(rate * GROUP_SLACK, MOST_EVERYDAY) if group.startswith(KEPT_APART) else rate * GROUP_SLACK


def _reached(harm: Floats, weights: Floats, rates: Sequence[float]) -> Floats:
    """For each rate the logit of the harm that this share reaches."""
    order = np.argsort(-harm)
    share = np.cumsum(weights[order]) / weights.sum()
    logit = np.log(harm[order] / (1.0 - harm[order]))
    at = np.interp(np.log(rates), np.log(share), logit)
    low, high = (np.interp(np.log(rate), np.log(share), logit) for rate in (0.004, 0.02))
    slope = (low - high) / np.log(0.02 / 0.004)
    carried = low + slope * np.log(0.004 / np.array(rates))
    result: Floats = np.where(np.array(rates) < 0.002, np.maximum(at, carried), at)
    return result


def groups(predictions: Predictions) -> dict[str, Hits]:
    """The groups of ordinary prompts that a rate holds for: by source, length and language."""
    bucket = np.digitize(predictions.num_chars, LENGTHS)
    names = [f"under {chars:,} characters" for chars in LENGTHS] + ["longer"]
    ordinary = np.isin(predictions.source, list(SHARE)) & ~predictions.harmful
    result: dict[str, Hits] = {}
    files = np.char.replace(predictions.source, HALF, "")
    for source in np.unique(files[ordinary]):
        if source.startswith(KEPT_APART):
            result[str(source)] = files == source
            continue
        for number, length in enumerate(names):
            for is_english, language in ((True, ""), (False, ", not English")):
                group = ordinary & (files == source) & (bucket == number)
                group &= predictions.is_english == is_english
                if group.sum() >= GROUP_ROWS:
                    result[f"{source}, {length}{language}"] = group
    return result


def _traffic(source: NDArray[np.str_]) -> Floats:
    weights = np.zeros(len(source))
    for name, share in SHARE.items():
        chosen = source == name
        weights[chosen] = share / max(1, chosen.sum())
    return weights


NOT_SURE = 0.5
"""The share of ordinary prompts that the encoder reads; the others the n-grams let pass (PromptScreen)."""


def document(
    blend: PromptBlend, scored: Scored, answers: AnswerBlend, output: Mapping[str, Any]
) -> dict[str, Any]:
    """calibration.json; `output` is the table of answers."""
    full, fast = thresholds(scored, scored.full), thresholds(scored, scored.fast)
    prompt = {category: {"fpr": list(RATES), "threshold": full} for category in CATEGORIES}
    first = {category: {"fpr": list(RATES), "threshold": fast} for category in CATEGORIES}
    return {
        "version": 1,
        "blend": {**blend._asdict(), **answers._asdict()},
        "sure_below": thresholds(scored, scored.fast, (NOT_SURE,))[0],
        "categories": prompt,
        "ngrams": first,
        "output": output,
    }


def screened(scored: Scored) -> tuple[Hits, Hits]:
    """What the prompt screen flags and what it at least watches, by the built-in policy.

    The n-grams alone may have a prompt watched at a part of the rate, and let pass what they are sure of.
    """
    sure = scored.of.is_ascii & (scored.fast < thresholds(scored, scored.fast, (NOT_SURE,))[0])
    hits = []
    for rate, share in ((BLOCK, 0.0), (WATCH, NGRAMS_WATCH_SHARE)):
        late = scored.full >= thresholds(scored, scored.full, (rate,))[0]
        early = scored.fast >= thresholds(scored, scored.fast, (rate * share,))[0] if share else ~sure & late
        hits.append(early | (late & ~sure))
    return hits[0], hits[0] | hits[1]


def figures(scored: Scored, harm: Floats, hits: tuple[Hits, Hits] | None = None) -> dict[str, Any]:
    """Recall or false positives of each source and group at the policy's two rates, or of `hits`."""
    predictions, (at_block, at_watch) = scored.of, thresholds(scored, harm, (BLOCK, WATCH))
    hits = hits or (harm >= at_block, harm >= at_watch)
    public = ~predictions.own
    by_source: dict[str, Any] = {}
    for name in np.unique(predictions.source):
        for label in (True, False):
            chosen = (predictions.source == name) & (predictions.harmful == label)
            if chosen.any():
                shares = _shares(hits, chosen / chosen.sum())
                by_source[f"{name} {'harmful' if label else 'benign'}"] = [
                    int(chosen.sum()),
                    *shares.values(),
                ]
    harmful = predictions.harmful & public
    looks = np.isin(predictions.source, LOOK_ALIKES)
    traffic = _traffic(predictions.source)
    return {
        "threshold": {"block": at_block, "watch": at_watch},
        "pooled_recall": _shares(hits, harmful / harmful.sum()),
        "mean_source_recall": _mean_recall(by_source),
        "look_alikes_flagged": _shares(hits, looks / looks.sum()) if looks.any() else {},
        "ordinary_flagged": _shares(hits, traffic / traffic.sum()),
        "auc": round(float(roc_auc_score(predictions.harmful[public], harm[public])), 4),
        "by_source": by_source,
        "by_language": _by_language(predictions, hits),
        "kept_apart": {name: row for name, row in by_source.items() if name.startswith(KEPT_APART)},
        "by_group": {
            name: [int(group.sum()), *_shares(hits, group / group.sum()).values()]
            for name, group in groups(predictions).items()
        },
    }


def _by_language(predictions: Predictions, hits: tuple[Hits, Hits]) -> dict[str, Any]:
    """Recall in each language of the public source of harmful prompts in several."""
    result: dict[str, Any] = {}
    for language in np.unique(predictions.language[predictions.source == IN_LANGUAGES]):
        chosen = (predictions.source == IN_LANGUAGES) & (predictions.language == language)
        chosen &= predictions.harmful
        result[str(language)] = [int(chosen.sum()), *_shares(hits, chosen / chosen.sum()).values()]
    return result


def _shares(hits: tuple[Hits, Hits], weights: Floats) -> dict[str, float]:
    return {rate: round(float(weights @ hit), 4) for rate, hit in zip(("block", "watch"), hits, strict=True)}


def _mean_recall(by_source: Mapping[str, Sequence[float]]) -> dict[str, float]:
    harmful = [
        row
        for name, row in by_source.items()
        if name.endswith(" harmful") and not name.startswith(("written", "frames"))
    ]
    return {
        rate: round(float(np.mean([row[i] for row in harmful])), 4)
        for i, rate in ((1, "block"), (2, "watch"))
    }
