"""The policy file: TOML, checked, with what it leaves out filled in and what may not be loosened kept.

block_fpr = 0.005               # for every category that has no word of its own
hard_list = ["a span that is never released"]
[categories.specialized_advice] # by name, or as S6
action = "flag"
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
from typing import Any, get_args

from app.safety.categories import BY_CODE, CATEGORIES, CODE_OF, LOCKED, code_of
from app.safety.policies.alignment import VERSION, Alignment, Mode
from app.safety.policies.thresholds import MAX_FPR, MIN_FPR
from app.safety.text.hard_list import HardList
from app.safety.verdict import ACTIONS, Action
from app.settings import SettingsError

_MAX_CHARS = 20_000


class PolicyError(SettingsError):
    """The policy file cannot be read, or asks for what cannot be; the message says where."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done about one category. Rates are the targets of app.safety.policies.thresholds."""

    action: Action = "block"
    block_fpr: float = 0.01
    """Of prompts: refused."""
    watch_fpr: float = 0.05
    """Of prompts: admitted under stricter terms."""
    answer_fpr: float = 0.02
    """Of answers: halted."""
    watched_answer_fpr: float = 0.05
    """The same where the prompt is watched."""

    def tightened(self) -> Rule:
        """The rule of a strict key: what would be watched or recorded is blocked; off stays off."""
        return replace(
            self,
            action="off" if self.action == "off" else "block",
            block_fpr=self.watch_fpr,
            watch_fpr=min(2 * self.watch_fpr, MAX_FPR),
            answer_fpr=self.watched_answer_fpr,
        )


_RATES = tuple(name for name in Rule.__slots__ if name != "action")


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A policy as it was written, complete. `messages` are by category, and `default`."""

    rules: Mapping[str, Rule] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, Rule()))
    alignment: Alignment = field(default_factory=Alignment)
    messages: Mapping[str, str] = field(default_factory=dict)
    hard_list: Sequence[str] = ()


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
    """The policy of a parsed file. Raises PolicyError."""
    _check_known(document, ("action", *_RATES, "hard_list", "categories", "alignment", "messages"), "")
    general = _rule(Rule(), {k: v for k, v in document.items() if k in ("action", *_RATES)}, "")
    return PolicyFile(
        rules=_rules(general, _table(document, "categories")),
        alignment=_alignment(_table(document, "alignment")),
        messages=_messages(_table(document, "messages")),
        hard_list=_hard_list(document.get("hard_list", [])),
    )


def _rules(general: Rule, tables: Mapping[str, Any]) -> Mapping[str, Rule]:
    rules = {code: _not_looser(general) if code in LOCKED else general for code in CATEGORIES}
    for name, table in tables.items():
        where = f"categories.{name}"
        code = _code(name, where)
        if not isinstance(table, dict):
            raise PolicyError(f"{where}: expected a table")
        _check_known(table, ("action", *_RATES), where)
        rule = _rule(rules[code], table, where)
        if code in LOCKED and rule != _not_looser(rule):
            raise PolicyError(
                f"{where}: {BY_CODE[code].title} cannot be loosened: it blocks, at rates of at least"
                f" {', '.join(f'{rate} {getattr(Rule(), rate):g}' for rate in _RATES)}"
            )
        rules[code] = rule
    return rules


def _not_looser(rule: Rule) -> Rule:
    """The rule, where it is stricter than the built-in one."""
    floor = Rule()
    return Rule("block", *(max(getattr(rule, rate), getattr(floor, rate)) for rate in _RATES))


def _rule(base: Rule, given: Mapping[str, Any], where: str) -> Rule:
    for name, value in given.items():
        at = f"{where}.{name}".lstrip(".")
        if name == "action":
            if value not in ACTIONS:
                raise PolicyError(f"{at}: expected one of {', '.join(ACTIONS)}, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise PolicyError(f"{at}: expected a number, got {value!r}")
        elif not MIN_FPR <= value <= MAX_FPR:
            raise PolicyError(f"{at}: must be {MIN_FPR:g} to {MAX_FPR:g}, got {value!r}")
    rule = replace(base, **given)
    if rule.watch_fpr < rule.block_fpr or rule.watched_answer_fpr < rule.answer_fpr:
        raise PolicyError(
            f"{where or 'the policy'}: what is watched is held to no lower a rate than what is not:"
            " watch_fpr >= block_fpr, watched_answer_fpr >= answer_fpr"
        )
    return rule


def _alignment(table: Mapping[str, Any]) -> Alignment:
    _check_known(table, ("mode", "version", "normal", "strict"), "alignment")
    for name, value in table.items():
        _text(value, f"alignment.{name}")
    if table.get("mode", "off") not in get_args(Mode):
        raise PolicyError(
            f"alignment.mode: expected one of {', '.join(get_args(Mode))}, got {table['mode']!r}"
        )
    if ("normal" in table or "strict" in table) and table.get("version", VERSION) == VERSION:
        raise PolicyError("alignment.version: texts of your own need a version of their own")
    return Alignment()._replace(**table)


def _messages(table: Mapping[str, Any]) -> Mapping[str, str]:
    codes = {n: n if n == "default" else _code(n, f"messages.{n}") for n in table}
    return {codes[name]: _text(value, f"messages.{name}") for name, value in table.items()}


def _hard_list(spans: object) -> Sequence[str]:
    if not isinstance(spans, list):
        raise PolicyError("hard_list: expected a list of texts")
    try:
        HardList([_text(span, "hard_list") for span in spans])
    except ValueError as exc:
        raise PolicyError(f"hard_list: {exc}") from exc
    return tuple(spans)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_CHARS:
        raise PolicyError(f"{where}: expected a text of at most {_MAX_CHARS} characters")
    return value


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise PolicyError(f"{name}: expected a table")
    return table


def _code(name: str, where: str) -> str:
    try:
        return code_of(name)
    except KeyError:
        raise PolicyError(f"{where}: no such category; there are {', '.join(CODE_OF)}") from None


def _check_known(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise PolicyError(f"{where or 'top level'}: unknown key {name!r}; there are {', '.join(known)}")
