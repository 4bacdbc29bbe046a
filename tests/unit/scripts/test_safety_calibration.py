"""Thresholds that hold for every group of ordinary prompts, and samples as the prompt screen reads them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripts.training.safety import calibrate, loso
from scripts.training.safety.calibrate import Scored
from scripts.training.safety.loso import Predictions
from scripts.training.safety.rows import Row

EASY, HARD = "benign_clinc", "benign_fiction_long"
NUM_EASY, NUM_HARD = 20_000, 1_000


@pytest.fixture
def scored() -> Scored:
    """Short questions that hardly score, and stories that score higher."""
    rng = np.random.default_rng(3)
    count = NUM_EASY + NUM_HARD
    logits = np.concatenate([rng.normal(-6.0, 1.0, NUM_EASY), rng.normal(-2.0, 1.0, NUM_HARD)])
    predictions = Predictions(
        text=np.array(["a text"] * count),
        source=np.array([EASY] * NUM_EASY + [HARD] * NUM_HARD),
        harmful=np.zeros(count, bool),
        category=np.array([""] * count),
        language=np.array([""] * count),
        own=np.zeros(count, bool),
        multilingual=logits.astype(np.float32),
        is_english=np.ones(count, bool),
        is_ascii=np.ones(count, bool),
        ngrams=np.zeros(count),
        doublings=np.zeros(count),
        quick=logits,
        quick_doublings=np.zeros(count),
        num_chars=np.array([50] * NUM_EASY + [3_000] * NUM_HARD),
        topics=np.zeros((count, 14), np.float32),
        gloss=np.where(np.arange(count) < 300, logits, np.nan).astype(np.float32),
    )
    harm = calibrate.sigmoid(logits)
    return Scored(predictions, harm, harm)


@pytest.mark.parametrize("rate", [0.005, 0.01, 0.05])
def test_no_group_is_far_above_the_rate(scored: Scored, rate: float):
    """Stories are a small part of what is sent and score higher; their rate holds all the same."""
    (threshold,) = calibrate.thresholds(scored, scored.full, (rate,))
    stories = scored.of.source == HARD
    slack = calibrate.GROUP_SLACK if rate <= calibrate.LOW else calibrate.WATCH_SLACK
    assert (scored.full[stories] >= threshold).mean() <= slack * rate + 1 / NUM_HARD


def test_the_rate_holds_for_all_prompts_together(scored: Scored):
    """Where no group is worse than the others."""
    questions = scored.of.where(scored.of.source == EASY)
    harm = scored.full[:NUM_EASY]
    (threshold,) = calibrate.thresholds(Scored(questions, harm, harm), harm, (0.01,))
    assert (harm >= threshold).mean() == pytest.approx(0.01, abs=0.001)


def test_a_group_is_a_source_of_one_length_in_english_or_not(scored: Scored):
    """Other languages are a group of their own."""
    is_english = np.arange(len(scored.full)) >= NUM_EASY // 2
    groups = calibrate.groups(replace(scored.of, is_english=is_english))
    assert set(groups) == {
        "benign_clinc, under 200 characters",
        "benign_clinc, under 200 characters, not English",
        "benign_fiction_long, under 4,000 characters",
    }
    assert groups["benign_clinc, under 200 characters, not English"].sum() == NUM_EASY // 2


def test_a_few_rows_are_no_group(scored: Scored):
    """Of 299 rows a rate of 0.4% is one."""
    few = scored.of.where(np.arange(len(scored.full)) < calibrate.GROUP_ROWS - 1)
    assert calibrate.groups(few) == {}


def test_a_set_that_is_kept_apart_is_a_group_however_small(scored: Scored):
    """150 everyday questions of a language are held to the rate as they are."""
    source = np.array(["everyday de"] * 150 + [EASY] * (len(scored.full) - 150))
    groups = calibrate.groups(replace(scored.of, source=source))
    assert groups["everyday de"].sum() == 150


def test_ordinary_prompts_in_other_languages_are_met_as_often_as_english_ones(scored: Scored):
    """Though the encoder gives them lower scores."""
    is_english = np.arange(len(scored.full)) % 2 == 0
    harmful = np.arange(len(scored.full)) % 50 < 2
    logits = scored.of.multilingual + 5.0 * harmful - 1.5 * ~is_english
    _, both = calibrate.blended(
        replace(scored.of, is_english=is_english, harmful=harmful, multilingual=logits)
    )
    ordinary = ~harmful
    for share in (calibrate.FEW, calibrate.MANY):
        at = np.quantile(both.full[ordinary & is_english], 1 - share)
        assert (both.full[ordinary & ~is_english] >= at).mean() == pytest.approx(share, abs=0.001)


def test_a_gloss_reaches_its_bound_and_no_refusal(scored: Scored):
    """However harmful it reads: word by word, nobody can tell a heat pump from a bomb."""
    harmful = np.arange(len(scored.full)) % 50 < 2
    gloss = np.where(harmful & ~np.isnan(scored.of.gloss), 20.0, scored.of.gloss).astype(np.float32)
    multilingual = (scored.of.multilingual + 5.0 * harmful * np.isnan(gloss)).astype(np.float32)
    is_english = np.arange(len(scored.full)) % 3 > 0
    rows = replace(scored.of, harmful=harmful, gloss=gloss, multilingual=multilingual, is_english=is_english)
    blend, both = calibrate.blended(rows)
    (block,) = calibrate.thresholds(both, both.full, (calibrate.BLOCK,))
    glossed = both.full[harmful & (gloss > 10.0)]
    assert glossed == pytest.approx(calibrate.sigmoid(np.full(len(glossed), blend.gloss_most)))
    assert (glossed < block).all()


def test_thresholds_fall_as_rates_rise(scored: Scored):
    """Whatever groups and extrapolation make of them."""
    thresholds = calibrate.thresholds(scored, scored.full)
    assert thresholds == sorted(thresholds, reverse=True)


def test_a_sample_stops_at_so_many_characters_of_a_source():
    """A file of long texts does not take hours."""
    rows = [Row("x" * (loso.CHARS_PER_SOURCE * 3 // 4), harmful=False, source=HARD) for _ in range(5)]
    assert len(loso.sample(rows, (HARD,))) == 2


def test_prompts_of_a_chat_are_sampled_as_joined_turns_too():
    """The prompt screen joins a chat's newest three."""
    source = "benign_flowgpt_chat"
    rows = [Row(f"question {i}", harmful=False, source=source) for i in range(10)]
    chats = [row for row in loso.sample(rows, (source,)) if row.source == loso.turns_of(source)]
    assert len(chats) == loso.NUM_CHATS
    assert all(row.text.count("\n") == 2 and row.harmful is False for row in chats)
