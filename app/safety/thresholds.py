"""Every threshold of the safety stages, with its unit and its reason.

docs/safety-evaluation.md has the measurements, docs/log/2026-11.md those of values that were dropped. What a
policy file may set has its default here. Elsewhere are the weights of turns and the sizes of slices
(app.safety.text.turns), and what was trained: app/safety/models/calibration.json, and in output.npz the
score from which an answer is reviewed.
"""

from __future__ import annotations

from typing import NamedTuple

# Policies. A rate is the share of ordinary texts that would be misjudged, and is mapped to a score by
# app.safety.policies.calibration.

MIN_FPR, MAX_FPR = 0.0001, 0.1
"""Least and greatest target of a policy: below, the tables have too few ordinary texts to tell."""
BLOCK_FPR, WATCH_FPR = 0.002, 0.05
"""Of prompts refused; of prompts watched, which costs a reader twelve tokens of delay."""
ANSWER_FPR, WATCHED_ANSWER_FPR = 0.002, 0.02
"""Of answers halted; of answers to watched prompts halted."""
NGRAMS_WATCH_SHARE = 0.2
"""The share of a category's watch rate that the n-grams may spend, before the encoder has read the text."""
GUARD_BLOCK, GUARD_WATCH = 0.5, 0.25
"""Probabilities of a guard model's own *unsafe*, for which there is no calibration of ours."""
NAMED_SHARE = 0.5
"""The notice names the category only if every other score is under this share of its score."""
WATCH_AFTER_STRIKES, STRICT_AFTER_STRIKES = 1, 3
"""Blocked turns after which a whole conversation is watched, and after which it is judged strictly."""

# Prompts.

ENCODER_TIMEOUT_S = 10.0
"""Seconds for which the encoder may read a prompt or an answer; for long prompts there is more."""
ENCODER_CHARS_PER_S = 20_000
"""Characters of a prompt for which it has another second, on a slow machine that reads for others too."""
ENCODER_WAIT_S = 40.0
"""Seconds for which a text may wait for the encoder: with the reading, less than most proxies' minute."""
ENCODED_TEXTS = 128
"""Texts before the newest turns that the encoder reads: those that the n-grams find worst."""
ENCODED_SLICES = 8
"""Slices between the ends of a text that the encoder reads: those that the n-grams find worst."""
DOUBTED_SENTENCE = 0.6
"""The harm of a sentence by the n-grams from which on the encoder reads a prompt that they pass as a whole: a
quarter of ordinary English prompts, and each of 145 harmful requests behind an article."""
FAST_SENTENCES = 16
"""Sentences that the n-grams read on the loop, some 60 us each; of a longer text they are never sure."""
COUNTED_SENTENCES = 16
"""The more sentences, the more strictly each is judged, up to so many: more would hide one among them."""

# Answers, in tokens unless said otherwise.


class Holdback(NamedTuple):
    """The number of newest tokens that are held back: without doubt, and at most."""

    base: int
    max: int


HOLDBACK = Holdback(0, 80)
"""None without doubt: to fill a hold-back takes gaps that a reader sees as a higher ITL."""
WATCHED_HOLDBACK = Holdback(12, 172)
"""Of watched prompts. The first review is after the base."""
SUSPICION_RATIO = 0.55
"""The share of the score of a review at which doubt begins: half of the benign replies never reach it."""
HITS_TO_REVIEW = 2
"""Tokens in a row that have to reach the score of a review: one alone is often noise."""
RECHECK_GROWTH, RECHECK_MIN_TOKENS = 2, 32
"""The factor by which an answer grows until it is reviewed again, and the least length then."""
RECHECK_LOGIT_STEP = 1.0
"""The rise of the score's logit after which an answer is reviewed again. With this step 12% of ordinary
answers are reviewed, 0.2 reviews an answer on average. Reviewing 20% would halt no more harmful answers."""
READ_AT_ONCE_TOKENS = 4
"""Tokens that are scored at once without doubt, where twice as many are held anyway."""
REVIEWED_CHARS = 600
"""Characters at the end of an answer that are reviewed: more than the encoder reads of most languages."""
OPENING_CHARS = 250
"""Characters at its beginning that tell whether it refuses."""
CONTINUED_CHARS = 2_000
"""Characters of a message that the answer continues, and that are scored first: 500 tokens, 2 ms."""
MIN_SPAN_CHARS = 4
"""Characters from which on the beginning of a span is withheld where the caller chose the answer's end."""
