"""The terms of a key, read from JSON or flags, and a key as the API and the commands show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from app.api.schema.fields import Field, check_kind, missing, read, read_fields
from app.core import (
    DEGRADING,
    GRAMMARS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    RESUMING,
    SAFETY_LEVELS,
    SCOPES,
    TIERS,
    Key,
    KeyTerms,
)
from app.errors import BadRequest, unknown_parameter
from app.store.keys import NewKey

DEFAULT_OVERLAP_S = 86_400
MAX_OVERLAP_S = 366 * 86_400
MAX_CHARS = 100
MAX_COUNT = 10**12
MAX_USD = 10**9
MAX_MODELS = 100
WEIGHT = Field((int, float), MIN_WEIGHT, MAX_WEIGHT)
ROTATION: Mapping[str, Field] = {"overlap_s": Field((int, float), 0, MAX_OVERLAP_S)}
_MICRO = 1_000_000


def read_terms(body: Mapping[str, Any], at_us: int) -> dict[str, Any]:
    """Those fields of `KeyTerms` that the body names. Raises BadRequest naming the parameter."""
    terms = {}
    for name, value in body.items():
        if name not in _READERS:
            raise unknown_parameter(name, advice=f"a key has {', '.join(_READERS)}")
        field, read = _READERS[name]
        terms[field] = None if value is None and name in NULLABLE else read(name, value)
    expires_at_us = terms.get("expires_at_us")
    if expires_at_us is not None and expires_at_us <= at_us:
        raise BadRequest("expires_at is past; to end a key now, revoke it.", param="expires_at")
    return terms


def read_new(body: Mapping[str, Any], at_us: int) -> tuple[KeyTerms, str | None]:
    """The terms of a new key, and its owner if it is not to be its own. Raises BadRequest."""
    rest = dict(body)
    owner = rest.pop("owner", None)
    if "name" not in rest:
        raise missing("name")
    terms = KeyTerms(**read_terms(rest, at_us))
    return terms, None if owner is None else _text("owner", owner)


def read_overlap_us(body: Mapping[str, Any]) -> int:
    """Microseconds that the secrets of before a rotation stay valid, from `overlap_s`. Raises BadRequest."""
    for name in body.keys() - ROTATION.keys():
        raise unknown_parameter(name, advice="a rotation takes overlap_s")
    return int(read_fields(body, "", ROTATION).get("overlap_s", DEFAULT_OVERLAP_S) * _MICRO)


def as_json(key: Key, at_us: int) -> dict[str, Any]:
    """A key as the API shows it: no secret, nor what is stored of one."""
    terms = key.terms
    ends = [secret.ends_at_us for secret in key.secrets if secret.ends_at_us and secret.ends_at_us > at_us]
    return {
        "id": key.id,
        "object": "key",
        "owner": key.owner,
        "status": key.status(at_us),
        **{name: getattr(terms, field) for name, (field, _) in _READERS.items()},
        "budget_usd": as_usd(terms.budget_micro_usd),
        "created_at": key.created_at_us // _MICRO,
        "expires_at": _unix_s(terms.expires_at_us),
        "revoked_at": _unix_s(key.revoked_at_us),
        "old_secrets_end_at": _unix_s(max(ends, default=None)),
    }


def issued_as_json(issued: NewKey, at_us: int) -> dict[str, Any]:
    """A new key's terms with its secret, shown only here."""
    return {"id": issued.key.id, "key": issued.text, **as_json(issued.key, at_us)}


def as_usd(micro_usd: int | None) -> float | None:
    """An amount in dollars; its six decimals are all there are."""
    return None if micro_usd is None else round(micro_usd / _MICRO, 6)


def _unix_s(at_us: int | None) -> int | None:
    return None if at_us is None else at_us // _MICRO


def _text(param: str, value: Any) -> str:
    """One line that a terminal shows as it is."""
    check_kind(param, value, str)
    if not (0 < len(value) <= MAX_CHARS and value.isprintable() and value == value.strip()):
        raise BadRequest(
            f"{param} must have 1 to {MAX_CHARS} printable characters, and no space around them.",
            param=param,
        )
    return str(value)


def one_of(choices: Sequence[str]) -> Callable[[str, Any], str]:
    """A reader of a parameter that is one of `choices`. It raises BadRequest naming the parameter."""
    field = Field((str,), choices=tuple(choices))
    return lambda param, value: read(value, param, field)


def _count(param: str, value: Any) -> int:
    check_kind(param, value, int)
    if not 1 <= value <= MAX_COUNT:
        raise BadRequest(f"{param} must be 1 to {MAX_COUNT:,}, got {value}; null is no limit.", param=param)
    return int(value)


def _weight(param: str, value: Any) -> float:
    return float(read(value, param, WEIGHT))


def _budget(param: str, value: Any) -> int:
    """USD, as a number or as text, in micro-dollars exactly."""
    check_kind(param, value, str, int, float)
    try:
        # A float's own text is the shortest that reads back the same: what was sent.
        micro = Decimal(str(value)) * _MICRO
    except InvalidOperation:
        micro = Decimal("nan")
    if not (micro.is_finite() and 0 < micro <= MAX_USD * _MICRO and micro == micro.to_integral_value()):
        raise BadRequest(
            f"{param} must be USD above 0 with at most 6 decimals, got {value!r}; null is no limit.",
            param=param,
        )
    return int(micro)


def _models(param: str, value: Any) -> tuple[str, ...]:
    check_kind(param, value, list)
    if not 1 <= len(value) <= MAX_MODELS:
        raise BadRequest(f"{param} must name 1 to {MAX_MODELS} models; null allows all.", param=param)
    for i, name in enumerate(value):
        check_kind(f"{param}[{i}]", name, str)
        if not (0 < len(name) <= 2 * MAX_CHARS and name.isprintable()):
            problem = f"{param}[{i}] must have 1 to {2 * MAX_CHARS} printable characters."
            raise BadRequest(problem, param=f"{param}[{i}]")
    return tuple(dict.fromkeys(value))


def time_us(param: str, value: Any) -> int:
    """A UTC day, a time, or Unix seconds, in microseconds. Raises BadRequest naming the parameter."""
    check_kind(param, value, str, int)
    try:
        if isinstance(value, int):
            at = datetime.fromtimestamp(value, UTC)
        else:
            at = datetime.fromisoformat(value)
            at = at.replace(tzinfo=at.tzinfo or UTC)
        return int(at.timestamp()) * _MICRO
    except (ValueError, OverflowError, OSError):
        raise BadRequest(
            f"{param} must be a UTC day or time, as 2026-11-20 or 2026-11-20T18:00Z, or Unix seconds;"
            f" got {value!r}.",
            param=param,
        ) from None


_READERS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "name": ("name", _text),
    "scope": ("scope", one_of(SCOPES)),
    "tier": ("tier", one_of(TIERS)),
    "weight": ("weight", _weight),
    "rpm": ("rpm", _count),
    "tpm": ("tpm", _count),
    "max_streams": ("max_streams", _count),
    "budget_usd": ("budget_micro_usd", _budget),
    "models": ("models", _models),
    "expires_at": ("expires_at_us", time_us),
    "safety": ("safety", one_of(SAFETY_LEVELS)),
    "degrade": ("degrade", one_of(DEGRADING)),
    "grammars": ("grammars", one_of(GRAMMARS)),
    "resume": ("resume", one_of(RESUMING)),
}
TERMS = tuple(_READERS)
"""The names of the terms in JSON."""
NULLABLE = ("rpm", "tpm", "max_streams", "budget_usd", "models", "expires_at")
