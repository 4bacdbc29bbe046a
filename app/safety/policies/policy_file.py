"""The policy file: TOML, checked, with what it leaves out filled in and what may not be loosened kept.

mode = "observe"                # judge and record only
images = "refuse"
block_fpr = 0.001               # for every category that has no word of its own
hard_list = ["a span that is never released"]
[categories.specialized_advice] # by name, or as S6
action = "flag"
[[allow]]                       # what the classifiers refuse by mistake
phrase = "kill the zombie process"
reason = "ticket 4711"
date = 2026-11-28
[alignment]
mode = "always"
[messages]
self_harm = "… {help_lines}"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from app.safety.categories import CATEGORIES, LOCKED
from app.safety.policies.allow import AllowEntry
from app.safety.policies.policy_prompt import Alignment
from app.safety.thresholds import ANSWER_FPR, BLOCK_FPR, MAX_FPR, WATCH_FPR, WATCHED_ANSWER_FPR
from app.safety.verdict import Action
from app.settings import SettingsError

Mode = Literal["enforce", "observe"]
"""`observe` only records what the rules would do (PolicyVariant)."""
Images = Literal["allow", "refuse"]
"""The treatment of a request with images, which no screen reads."""


class PolicyError(SettingsError):
    """The policy file cannot be read, or asks for what cannot be; the message says where."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one category. Rates are the targets of app.safety.policies.calibration."""

    action: Action = "block"
    block_fpr: float = BLOCK_FPR
    """Of prompts: refused."""
    watch_fpr: float = WATCH_FPR
    """Of prompts: admitted under stricter terms."""
    answer_fpr: float = ANSWER_FPR
    """Of answers: halted."""
    watched_answer_fpr: float = WATCHED_ANSWER_FPR
    """Of answers whose prompt is watched: halted."""

    def tightened(self) -> Rule:
        """The rule of a strict key: what would be watched or recorded is blocked; off stays off."""
        return replace(
            self,
            action="off" if self.action == "off" else "block",
            block_fpr=self.watch_fpr,
            watch_fpr=min(2 * self.watch_fpr, MAX_FPR),
            answer_fpr=self.watched_answer_fpr,
        )

    def looser(self) -> list[str]:
        """The settings that are looser than the built-in ones, as they are written in the file."""
        if self.action != "block":
            return [f"action {self.action}"]
        names = [name for name in RATES if getattr(self, name) < getattr(Rule(), name)]
        return [f"{name} {getattr(self, name):g}" for name in names]

    def at_rate(self, block_fpr: float, category: str) -> Rule:
        """The rule with this target for refusing and halting; that of a locked category is not loosened."""
        answer_fpr = block_fpr
        if category in LOCKED:
            block_fpr, answer_fpr = max(block_fpr, Rule().block_fpr), max(answer_fpr, Rule().answer_fpr)
        return replace(
            self,
            block_fpr=block_fpr,
            watch_fpr=max(self.watch_fpr, block_fpr),
            answer_fpr=answer_fpr,
            watched_answer_fpr=max(self.watched_answer_fpr, answer_fpr),
        )


RATES = tuple(name for name in Rule.__slots__ if name != "action")
"""The fields of a rule that are rates."""


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A policy as it was written, complete. `messages` are by category, and `default`."""

    rules: Mapping[str, Rule] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, Rule()))
    alignment: Alignment = field(default_factory=Alignment)
    messages: Mapping[str, str] = field(default_factory=dict)
    hard_list: Sequence[str] = ()
    mode: Mode = "enforce"
    images: Images = "allow"
    allow: Sequence[AllowEntry] = ()

    def at_rate(self, block_fpr: float) -> PolicyFile:
        """The policy with this target for refusing prompts and halting answers, of every category."""
        return replace(self, rules={c: r.at_rate(block_fpr, c) for c, r in self.rules.items()})


def read(path: Path | None) -> PolicyFile:
    """The policy of a file; the built-in one without a file. Raises PolicyError."""
    if path is None:
        return PolicyFile()
    try:
        return parse(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise PolicyError(f"{path}: {exc}") from exc
    except PolicyError as exc:
        raise PolicyError(f"{path}: {exc}") from exc


def parse(document: Mapping[str, Any]) -> PolicyFile:
    """The policy of a parsed file. Raises PolicyError naming all that is wrong."""
    from app.safety.policies import policy_schema  # with pydantic: only where there is a file

    return policy_schema.parse(document)
