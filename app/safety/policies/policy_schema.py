"""The tables of a policy file, and the policy that they make."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app.safety.categories import BY_CODE, CATEGORIES, CODE_OF, LOCKED, code_of
from app.safety.policies import policy_prompt
from app.safety.policies.allow import MAX_ENTRIES, MAX_PHRASE_CHARS, MIN_PHRASE_CHARS, AllowEntry
from app.safety.policies.policy_file import RATES, Images, Mode, PolicyError, PolicyFile, Rule
from app.safety.policies.policy_prompt import VERSION, Alignment
from app.safety.text.hard_list import HardList
from app.safety.thresholds import MAX_FPR, MIN_FPR
from app.safety.verdict import Action
from app.toml_tables import Location, problems, together

_MAX_CHARS = 20_000
_MAX_REASON_CHARS = 300
_DIGEST = re.compile("[0-9a-f]{64}")


def _in_range(rate: float) -> float:
    if not MIN_FPR <= rate <= MAX_FPR:  # not a number, too
        raise ValueError(f"must be {MIN_FPR:g} to {MAX_FPR:g}, got {rate!r}")
    return rate


def _text(value: object) -> str:
    """A text; an error does not repeat it, for it may be a span that is never to be shown."""
    if not isinstance(value, str) or not value.strip() or len(value) > _MAX_CHARS:
        raise ValueError(f"expected a text of at most {_MAX_CHARS} characters, and not an empty one")
    return value


def _span(text: str) -> str:
    HardList([text])  # raises ValueError
    return text


def _phrase(text: str) -> str:
    num_visible = len("".join(text.split()))
    if num_visible < MIN_PHRASE_CHARS or len(text) > MAX_PHRASE_CHARS:
        raise ValueError(f"expected {MIN_PHRASE_CHARS} letters or more, {MAX_PHRASE_CHARS} at most")
    return text


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError("expected 64 hex digits in lower case, as `tokenring safety explain` prints them")
    return text


def _reason(text: str) -> str:
    if len(text) > _MAX_REASON_CHARS:
        raise ValueError(f"expected at most {_MAX_REASON_CHARS} characters")
    return text


def _category(name: str) -> str:
    if name not in BY_CODE and name not in CODE_OF:
        raise ValueError(f"no such category; there are {', '.join(CODE_OF)}")
    return name


def _category_or_default(name: str) -> str:
    return name if name == "default" else _category(name)


_Rate = Annotated[float, AfterValidator(_in_range)]
_Text = Annotated[str, BeforeValidator(_text)]
_Span = Annotated[_Text, AfterValidator(_span)]
_BUILT_IN = Rule()
_BUILT_IN_TEXTS = Alignment()


class _Table(BaseModel):
    """Values have the type that they need, none is converted; a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _RuleTable(_Table):
    """The rule of a category; what is not set is not changed."""

    action: Action = _BUILT_IN.action
    block_fpr: _Rate = _BUILT_IN.block_fpr
    watch_fpr: _Rate = _BUILT_IN.watch_fpr
    answer_fpr: _Rate = _BUILT_IN.answer_fpr
    watched_answer_fpr: _Rate = _BUILT_IN.watched_answer_fpr

    def over(self, base: Rule) -> Rule:
        """The rule `base`, changed by what is set here."""
        names = {field.name for field in fields(Rule)}
        return replace(base, **self.model_dump(include=names, exclude_unset=True))


class _AlignmentTable(_Table):
    """The words in front of a prompt."""

    mode: policy_prompt.Mode = _BUILT_IN_TEXTS.mode
    version: _Text = _BUILT_IN_TEXTS.version
    normal: _Text = _BUILT_IN_TEXTS.normal
    strict: _Text = _BUILT_IN_TEXTS.strict


class _AllowTable(_Table):
    """One entry of what the operator allows."""

    phrase: Annotated[_Text, AfterValidator(_phrase)] | None = None
    sha256: Annotated[_Text, AfterValidator(_digest)] | None = None
    reason: Annotated[_Text, AfterValidator(_reason)] = Field(description="say why this is allowed")
    date: dt.date = Field(description="the day of the entry, as 2026-11-28")
    expires: dt.date | None = None


class _Document(_RuleTable):
    """The whole file; what stands at its top holds for each category without a word of its own."""

    mode: Mode = "enforce"
    images: Images = "allow"
    hard_list: list[_Span] = Field(default=[])
    allow: list[_AllowTable] = Field(default=[], max_length=MAX_ENTRIES)
    categories: dict[Annotated[str, AfterValidator(_category)], _RuleTable] = Field(default={})
    alignment: _AlignmentTable = _AlignmentTable()
    messages: dict[Annotated[str, AfterValidator(_category_or_default)], _Text] = Field(default={})


def parse(document: Mapping[str, Any]) -> PolicyFile:
    """The policy of a parsed file. Raises PolicyError naming all that is wrong."""
    try:
        checked = _Document.model_validate(document)
    except ValidationError as exc:
        raise PolicyError(together(problems(exc, _table_at))) from None
    rules, wrong = _rules(checked)
    for number, entry in enumerate(checked.allow, start=1):
        if (entry.phrase is None) == (entry.sha256 is None):
            wrong.append(f"allow.entry {number}: needs a phrase or a sha256, and not both")
        if entry.expires is not None and entry.expires <= entry.date:
            wrong.append(f"allow.entry {number}.expires: must be after its date")
    own_texts = checked.alignment.model_fields_set & {"normal", "strict"}
    if own_texts and checked.alignment.version == VERSION:
        wrong.append("alignment.version: texts of your own need a version of their own")
    if wrong:
        raise PolicyError(together(wrong))
    return PolicyFile(
        rules=rules,
        alignment=Alignment()._replace(**checked.alignment.model_dump(exclude_unset=True)),
        messages={n if n == "default" else code_of(n): text for n, text in checked.messages.items()},
        hard_list=tuple(checked.hard_list),
        mode=checked.mode,
        images=checked.images,
        allow=tuple(AllowEntry(**entry.model_dump()) for entry in checked.allow),
    )


def _table_at(location: Location) -> type[BaseModel]:
    tables: dict[str, type[BaseModel]] = {
        "categories": _RuleTable,
        "alignment": _AlignmentTable,
        "allow": _AllowTable,
    }
    return tables.get(str(location[0]), _Document) if location else _Document


def _rules(checked: _Document) -> tuple[Mapping[str, Rule], list[str]]:
    """The rule of each category, and what of them cannot be."""
    general = checked.over(_BUILT_IN)
    wrong = _misordered(general, "the policy")
    rules = {code: _not_looser(general) if code in LOCKED else general for code in CATEGORIES}
    for name, table in checked.categories.items():
        code = code_of(name)
        rule = rules[code] = table.over(rules[code])
        if rule != general:  # else it was said of the policy
            wrong += _misordered(rule, f"categories.{name}")
        if code in LOCKED and rule != _not_looser(rule):
            wrong.append(
                f"categories.{name}: {BY_CODE[code].title} cannot be loosened: it blocks, at rates of at"
                f" least {', '.join(f'{rate} {getattr(_BUILT_IN, rate):g}' for rate in RATES)}"
            )
    return rules, wrong


def _not_looser(rule: Rule) -> Rule:
    """The rule, where it is stricter than the built-in one."""
    return Rule("block", *(max(getattr(rule, rate), getattr(_BUILT_IN, rate)) for rate in RATES))


def _misordered(rule: Rule, where: str) -> list[str]:
    pairs = (("watch_fpr", "block_fpr"), ("watched_answer_fpr", "answer_fpr"))
    return [
        f"{where}: what is watched is held to no lower a rate than what is not: {higher} >= {lower},"
        f" got {getattr(rule, higher):g} and {getattr(rule, lower):g}"
        for higher, lower in pairs
        if getattr(rule, higher) < getattr(rule, lower)
    ]
