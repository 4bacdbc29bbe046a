"""The policy in force: it turns scores into verdicts. Immutable; a reload replaces it.

A category acts at a threshold, the score of its target false positive rate in the table
that is shipped with the classifiers. The variants of a policy (`PolicyVariant`) are made at first use.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from app.core import SAFETY_LEVELS
from app.safety.categories import BY_CODE, CATEGORIES, LOCKED, name_of
from app.safety.policies import policy_file
from app.safety.policies.allow import Allow
from app.safety.policies.calibration import FILE_NAME, Calibration, Table
from app.safety.policies.notices import Notices
from app.safety.policies.policy_file import Images, PolicyError, PolicyFile
from app.safety.thresholds import (
    GUARD_BLOCK,
    GUARD_WATCH,
    MAX_FPR,
    MIN_FPR,
    NAMED_SHARE,
    NGRAMS_WATCH_SHARE,
    STRICT_AFTER_STRIKES,
    WATCH_AFTER_STRIKES,
)
from app.safety.verdict import ACTIONS, Action, Reading, Scores, Stage, Verdict, highest, stricter
from app.settings import Settings

MAX_CONTACT_CHARS = 200


class Limit(NamedTuple):
    """The action of a category on a text from this score on."""

    action: Action
    threshold: float
    category: str


class PolicyVariant(NamedTuple):
    """The difference between the policies of one file."""

    strict: bool = False
    """The terms of a strict key."""
    watch_all: bool = False
    """Every prompt is watched at least."""
    observing: bool = False
    """Only LOCKED categories, the hard list and `watch_all` act; verdicts say what else would be done."""


class Policy:
    """One policy: a file with the calibration of its targets, in one variant."""

    def __init__(
        self,
        file: PolicyFile,
        calibration: Calibration,
        country: str = "",
        contact: str = "",
        *,
        variant: PolicyVariant | None = None,
        _variants: dict[PolicyVariant, Policy] | None = None,
    ) -> None:
        """`variant` is the file's own if it is None."""
        self._variant = variant or PolicyVariant(observing=file.mode == "observe")
        self.strict, self.watch_all, self.observing = self._variant
        self.images: Images = file.images
        self.hard_list: Sequence[str] = file.hard_list
        self.allow = Allow(file.allow)
        self._made_of = (file, calibration, country, contact)
        self._variants = {} if _variants is None else _variants
        self._variants[self._variant] = self
        self._file = file
        self._calibration = calibration
        self._rules = {c: r.tightened() if self.strict else r for c, r in file.rules.items()}
        self._notices = Notices(country, file.messages, contact)
        self._limits: dict[tuple[Stage, int], list[Limit]] = {}
        self._answers = {watched: self._answer_limits(watched=watched) for watched in (False, True)}
        self._prompt_floors: dict[Stage, float] = {}
        self._doubts = [
            Limit("watch", calibration.at("ngrams", c, max(self._rules[c].watch_fpr, MIN_FPR)), c)
            for c in CATEGORIES
            if self._rules[c].action in {"block", "watch"}
        ]
        self.answer_record_floor = self._record_floor("output")
        """The least harm of an answer on which any policy could act."""
        self.prompt_record_floor = self._record_floor("categories")
        """The least harm of a prompt on which any policy could act, by n-grams and encoder."""
        self.hash = self._hash()
        """Sixteen hex digits over rules, thresholds and texts; with every event."""

    def at_level(self, level: str | None) -> Policy:
        """The policy for a key of that level, of app.core.SAFETY_LEVELS; None is a key that has none."""
        if level in (None, "standard"):
            return self
        return self._with(strict=self.strict or level == "strict", observing=level == "observe")

    @property
    def enforced(self) -> Policy:
        """The policy that does what this one may only observe."""
        return self._with(observing=False)

    def at_rate(self, block_fpr: float) -> Policy:
        """The policy enforced, with this target in place of its own for refusing prompts and halting answers.

        Targets for watching are raised where they would be lower. Locked categories are not loosened.
        """
        return Policy(self._file.at_rate(block_fpr), self._calibration, variant=PolicyVariant())

    def after(self, strikes: int) -> Policy:
        """The policy for a conversation of which so many turns were blocked."""
        return self._with(
            strict=self.strict or strikes >= STRICT_AFTER_STRIKES,
            watch_all=self.watch_all or strikes >= WATCH_AFTER_STRIKES,
        )

    def judge(self, readings: Sequence[Reading]) -> Verdict:
        """The verdict on a prompt with these readings, of which there is at least one."""
        first, *others = readings
        verdict = self.judge_prompt(first.scores, first.stage, texts=first.texts)
        for reading in others:
            other = self.judge_prompt(reading.scores, reading.stage, texts=reading.texts)
            if reading.watch_only:
                verdict = _at_least_watched(verdict, other)
            else:
                verdict = replace(stricter(other, verdict), scores=highest(verdict.scores, other.scores))
        return replace(verdict, readings=readings)

    def judge_prompt(self, scores: Scores, stage: Stage, *, texts: int = 1) -> Verdict:
        """The verdict on a prompt with these scores.

        Where they are the maximum over several slices of a text, each is held to a share of the rate: one
        over the square root of their number, for slices of one text are alike.
        """
        verdict = self._judge(scores, stage, self._prompt_limits(stage, texts))
        if self.watch_all and verdict.action not in ("block", "watch"):
            watch = Verdict("watch", None, verdict.score, 0.0, stage, self.hash, scores)
            return replace(watch, observed=verdict.observed)
        return verdict

    def clear_prompt(self, harm: float, stage: Stage) -> Verdict | None:
        """The verdict on a prompt of this harm, where no category changes it."""
        floor = self._prompt_floors.get(stage)
        if floor is None:
            floor = self._prompt_floors[stage] = _lowest(self._prompt_limits(stage, 1))
        return None if self.watch_all or harm >= floor else Verdict(None, None, harm, floor, stage, self.hash)

    def unallowed(self, turn: str) -> str:
        """The rest of a user's turn without what the operator allows; all of it if nothing is allowed."""
        return self.allow.rest(turn).text

    def lifted(self, refused: Verdict, rest: Verdict) -> Verdict:
        """The verdict on a prompt that was refused, where `rest` is that without what the operator allows.

        It is watched if the rest would not even be watched and nothing locked is near; else it stays refused.
        """
        plain = self._with(watch_all=False, observing=False)
        locked = [
            reading._replace(scores={c: p for c, p in reading.scores.items() if c in LOCKED})
            for reading in refused.readings
        ]
        for readings in (rest.readings, locked):
            if plain.judge(readings).action in ("block", "watch"):
                return refused
        return replace(
            rest,
            action=rest.action if self.observing else "watch",
            observed="watch" if self.observing else None,
            category=None,
            lifted=refused.enforced_category,
        )

    def prompt_thresholds(self, category: str) -> dict[Action, float]:
        """From which score on the encoder's reading of a text does what, by this category; empty if off."""
        limits = self._prompt_limits("encoder", 1)
        return {limit.action: limit.threshold for limit in limits if limit.category == category}

    def is_uncertain(self, scores: Scores) -> bool:
        """True if the n-grams would watch the prompt with the whole watch rate to spend."""
        return bool(scores) and self._judge(scores, "ngrams", self._doubts).watched

    def judge_output(self, scores: Scores, *, watched: bool) -> Verdict:
        """The verdict on an answer with these scores: `block` halts it; `watched` is its prompt's."""
        return self._judge(scores, "stream", self._answers[watched])

    def halted(self) -> Verdict:
        """The verdict on an answer that has a span of the hard list."""
        return Verdict("block", None, 1.0, 0.0, "hard_list", self.hash)

    def blocked(self, scores: Scores, stage: Stage) -> tuple[str, ...]:
        """The categories that would each block a prompt with these scores."""
        limits = self._prompt_limits(stage, 1)
        return tuple(
            c for action, threshold, c in limits if action == "block" and scores.get(c, 0.0) >= threshold
        )

    def notice(self, verdict: Verdict, request_id: str = "") -> str:
        """The message about a blocked prompt or answer; it names a category only where it is sure."""
        return self._notices.message(_named(verdict), request_id)

    def weakened(self) -> list[str]:
        """The ways in which this policy does less than the built-in one, each with its categories."""
        titles: dict[str, list[str]] = {}
        for category, rule in self._rules.items():
            if self.observing and category not in LOCKED:
                titles.setdefault("observed only", []).append(BY_CODE[category].title)
            else:
                for loss in rule.looser():
                    titles.setdefault(loss, []).append(BY_CODE[category].title)
        return [f"{loss}: {', '.join(names)}" for loss, names in titles.items()]

    def alignment(self, *, watched: bool) -> str | None:
        """The text in front of all messages; None for none."""
        return self._file.alignment.text(watched=watched or self.strict)

    def as_json(self) -> dict[str, Any]:
        """The policy as the admin API shows it; of the hard list only how long it is."""
        alignment = self._file.alignment
        return {
            "hash": self.hash,
            "strict_hash": self.at_level("strict").hash,
            "level_hashes": {level: self.at_level(level).hash for level in SAFETY_LEVELS},
            "mode": "observe" if self.observing else "enforce",
            "images": self.images,
            "alignment": {"mode": alignment.mode, "version": alignment.version},
            "hard_list": len(self.hard_list),
            "allow": {"entries": len(self._file.allow), "in_force": len(self.allow.in_force())},
            "categories": {c: self._category_as_json(c) for c in CATEGORIES},
        }

    def _category_as_json(self, category: str) -> dict[str, Any]:
        at = {
            "block": self._at("encoder", category, self._rules[category].block_fpr),
            "watch": self._at("encoder", category, self._rules[category].watch_fpr),
            "answer": self._calibration.at("output", category, self._rules[category].answer_fpr),
            "watched_answer": self._calibration.at(
                "output", category, self._rules[category].watched_answer_fpr
            ),
        }
        return {
            "name": name_of(category),
            "locked": category in LOCKED,
            **asdict(self._rules[category]),
            "thresholds": {name: round(threshold, 6) for name, threshold in at.items()},
        }

    def _judge(self, scores: Scores, stage: Stage, limits: Sequence[Limit]) -> Verdict:
        verdict = self._by_limits(scores, stage, limits)
        if not self.observing or verdict.action is None:
            return verdict
        acting = self._by_limits(scores, stage, [limit for limit in limits if limit.category in LOCKED])
        shown = verdict if acting.action is None else acting
        observed_category = verdict.category if acting.action is not None else None
        return replace(
            shown, action=acting.action, observed=verdict.action, observed_category=observed_category
        )

    def _by_limits(self, scores: Scores, stage: Stage, limits: Sequence[Limit]) -> Verdict:
        """By the category that does most; of several, the one that is furthest over its threshold."""
        for action, threshold, category in _over(scores, limits):
            return Verdict(action, category, scores[category], threshold, stage, self.hash, scores)
        top = max(scores, key=lambda c: scores[c], default=None)
        if top is None:
            return Verdict(None, None, 0.0, 1.0, stage, self.hash, scores)
        threshold = min((limit.threshold for limit in limits if limit.category == top), default=1.0)
        return Verdict(None, top, scores[top], threshold, stage, self.hash, scores)

    def _prompt_limits(self, stage: Stage, texts: int) -> list[Limit]:
        shares = 1 << ((texts - 1).bit_length() + 1) // 2  # powers of two, so that there are few of them
        if (stage, shares) not in self._limits:
            self._limits[stage, shares] = [
                limit for category in CATEGORIES for limit in self._limits_of(category, stage, shares)
            ]
        return self._limits[stage, shares]

    def _limits_of(self, category: str, stage: Stage, shares: int) -> list[Limit]:
        rule = self._rules[category]
        block = self._at(stage, category, rule.block_fpr / shares)
        watch = self._at(stage, category, rule.watch_fpr / shares, watch=True)
        if rule.action == "block" and stage == "ngrams":  # which have no say in a refusal
            return [Limit("watch", watch, category)]
        if rule.action == "block":
            return [Limit("block", block, category), Limit("watch", watch, category)]
        if rule.action == "watch":
            return [Limit("watch", watch, category)]
        return [Limit("flag", block, category)] if rule.action == "flag" else []

    def _at(self, stage: Stage, category: str, fpr: float, *, watch: bool = False) -> float:
        if stage == "guard":
            return GUARD_WATCH if watch or self.strict else GUARD_BLOCK
        if stage == "ngrams":
            share = NGRAMS_WATCH_SHARE if watch else 1.0
            return self._calibration.at("ngrams", category, max(fpr * share, MIN_FPR))
        return self._calibration.at("categories", category, max(fpr, MIN_FPR))

    def _answer_limits(self, *, watched: bool) -> list[Limit]:
        limits = []
        for category, rule in self._rules.items():
            fpr = rule.watched_answer_fpr if watched else rule.answer_fpr
            halts = rule.action == "block" or (rule.action == "watch" and watched)
            if rule.action != "off":
                at = self._calibration.at("output", category, fpr)
                limits.append(Limit("block" if halts else "flag", at, category))
        return limits

    def _record_floor(self, table: Table) -> float:
        return min(self._calibration.at(table, category, MAX_FPR) for category in CATEGORIES)

    def _with(self, **changes: bool) -> Policy:
        """The variant of the same file with these differences."""
        variant = self._variant._replace(**changes)
        made = self._variants.get(variant)
        return made or Policy(*self._made_of, variant=variant, _variants=self._variants)

    def _hash(self) -> str:
        stages: Sequence[Stage] = ("ngrams", "encoder", "guard")
        content = [
            {category: asdict(rule) for category, rule in self._rules.items()},
            [self._prompt_limits(stage, 1) for stage in stages],
            [self._answers[False], self._answers[True]],
            self._file.alignment,
            dict(self._file.messages),
            list(self.hard_list),
            *(["observing"] if self.observing else []),
            *(["images"] if self.images == "refuse" else []),
            *([str(entry) for entry in self._file.allow]),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class Policies:
    """The policy in force; reads its file again on reload."""

    def __init__(
        self, path: Path | None, models: Path, country: str = "", contact: str = "", *, observe: bool = False
    ) -> None:
        """Read both files; with `observe` the policy observes whatever its file says.

        Raises PolicyError, CalibrationDamaged.
        """
        if country and not (len(country) == 2 and country.isascii() and country.isalpha()):
            raise PolicyError(f"safety_country: expected two letters, as US, got {country!r}")
        if len(contact) > MAX_CONTACT_CHARS or not contact.isprintable():
            raise PolicyError(f"safety_contact: expected a line of at most {MAX_CONTACT_CHARS} characters")
        self.path = path
        self._calibration = Calibration.load(models / FILE_NAME)
        self._country = country
        self._contact = contact
        self._observe = observe
        self.current = self._read()
        self.loaded_at_us = time.time_ns() // 1000

    @classmethod
    def of(cls, settings: Settings, models: Path) -> Policies:
        """Those of the settings, by the calibration in a folder of classifiers. Raises as `Policies` does."""
        path = Path(settings.safety_policy) if settings.safety_policy else None
        observe = settings.safety == "observe"
        return cls(path, models, settings.safety_country, settings.safety_contact, observe=observe)

    def reload(self) -> Policy:
        """Read the policy file again; the calibration stays that of the classifiers in memory.

        Raises PolicyError, and then the policy stays as it is.
        """
        self.current = self._read()
        self.loaded_at_us = time.time_ns() // 1000
        return self.current

    def _read(self) -> Policy:
        variant = PolicyVariant(observing=True) if self._observe else None
        file = policy_file.read(self.path)
        return Policy(file, self._calibration, self._country, self._contact, variant=variant)


def _at_least_watched(verdict: Verdict, doubted: Verdict) -> Verdict:
    """The verdict, or a watch where what is only to be watched would have been refused."""
    watch = replace(doubted, action=_watch(doubted.action), observed=_watch(doubted.observed))
    if watch.enforced is None or verdict.blocked:
        return verdict
    return replace(stricter(verdict, watch), scores=highest(verdict.scores, doubted.scores))


def _watch(action: Action | None) -> Action | None:
    return "watch" if action == "block" else None


def _named(verdict: Verdict) -> str | None:
    """The category that the notice names: none where another is nearly as likely.

    Of self-harm the notice offers help even so.
    """
    scores = verdict.scores
    top = max(scores, key=lambda category: scores[category], default=None)
    if top is None or verdict.category is None or verdict.category == "S11":
        return verdict.category
    others = max((p for category, p in scores.items() if category != verdict.category), default=0.0)
    return verdict.category if others < NAMED_SHARE * scores[verdict.category] else None


def _lowest(limits: Sequence[Limit]) -> float:
    """The least harm that does anything; 1 where none does."""
    return min((limit.threshold for limit in limits), default=1.0)


def _over(scores: Mapping[str, float], limits: Sequence[Limit]) -> list[Limit]:
    """The limits that the scores reach, the one that decides first."""
    reached = [limit for limit in limits if scores.get(limit.category, 0.0) >= limit.threshold]
    return sorted(
        reached, key=lambda limit: (ACTIONS.index(limit.action), limit.threshold - scores[limit.category])
    )
