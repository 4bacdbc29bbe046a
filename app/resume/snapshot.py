"""A suspended request as bytes, which the store keeps until its answer is continued (app.store.suspensions).

The JSON object has the request and its turn, with the messages of its conversation in front, the state of
each choice, and that of the request's safety. Token ids are stored beside it, one run after the other.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.core import ChatRequest, Counts, IdempotencyKey, Placement, RawPrompt
from app.journal.entry import Progress
from app.journal.history import LoadedTurn
from app.store.ledger import BillingTerms
from app.store.suspensions import StoredSuspension, Suspension

_VERSION = 1
_LEFT_OUT = frozenset({"past", "raw", "placement", "idempotency", "body", "traceparent", "caller_names"})
_REQUEST_FIELDS = tuple(f.name for f in dataclasses.fields(ChatRequest) if f.name not in _LEFT_OUT)
_TURN_FIELDS = ("run_seqs", "strikes", "from_store", "stored_bytes")


class NotReadable(Exception):
    """A suspended request that this version cannot read."""


@dataclass(frozen=True, slots=True)
class SuspendedRequest:
    """A suspended request: all that it takes to continue it."""

    request_seq: int
    key_id: str | None
    turn: LoadedTurn
    progress: Progress
    safety: Mapping[str, Any]
    """The state of its safety session; see SafetySession.state."""
    terms: BillingTerms
    """The terms that its row is billed by."""


def pack(
    request_seq: int, key_id: str | None, turn: LoadedTurn, progress: Progress, safety: Mapping[str, Any]
) -> Suspension:
    """The request as it is stored. Raises OverflowError for ids that are no uint32."""
    request, raw = turn.request, turn.request.raw
    runs = [*request.past, *progress.token_ids]
    if raw is not None and raw.token_ids is not None:
        runs.append(raw.token_ids)
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    fields["spelled"] = dict(request.caller_names)  # its name in the store
    placement = dataclasses.asdict(request.placement)
    turn_fields = {name: getattr(turn, name) for name in _TURN_FIELDS}
    facts = {
        "version": _VERSION,
        "request": {**fields, "body": dict(request.body), "placement": placement},
        "raw": None if raw is None else {"text": raw.text, "preface": raw.preface},
        "turn": {**turn_fields, "run_seqs": list(turn.run_seqs), "from_store": list(turn.from_store)},
        "counts": {str(choice): tuple(counts) for choice, counts in progress.counts.items()},
        "released": {str(choice): tuple(counts) for choice, counts in progress.released.items()},
        "safety": safety,
        "runs": [len(token_run) for token_run in runs],
        "past": len(request.past),
        "answers": len(progress.token_ids),
    }
    token_ids = b"".join(array("I", token_run).tobytes() for token_run in runs)
    return Suspension(request_seq, key_id, _dumps(facts), token_ids)


def unpack(stored: StoredSuspension) -> SuspendedRequest:
    """The request as it was suspended. Raises NotReadable."""
    suspension = stored.suspension
    try:
        facts = _loads(suspension.request)
        if facts["version"] != _VERSION:
            raise NotReadable
        runs = list(_runs(suspension.token_ids, facts["runs"]))
        past, end = facts["past"], facts["past"] + facts["answers"]
        request = _request(facts, runs[:past], runs[end:], stored.idempotency)
        turn = LoadedTurn(request, answer_ids=stored.answer_ids, **facts["turn"])
        progress = Progress(runs[past:end], _counts(facts["counts"]), _counts(facts["released"]))
        return SuspendedRequest(
            suspension.request_seq, suspension.key_id, turn, progress, facts["safety"], stored.terms
        )
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise NotReadable from exc


def _request(
    facts: Mapping[str, Any],
    past: Sequence[Sequence[int]],
    raw_ids: Sequence[Sequence[int]],
    idempotency: tuple[str, bytes] | None,
) -> ChatRequest:
    fields, raw = dict(facts["request"]), facts["raw"]
    placement = Placement(**{**fields.pop("placement"), "socket_wait_s": 0.0})
    return ChatRequest(
        caller_names=fields.pop("spelled", {}),
        **fields,
        past=past,
        raw=None if raw is None else RawPrompt(raw["text"], raw_ids[0] if raw_ids else None, raw["preface"]),
        placement=placement,
        idempotency=None if idempotency is None else IdempotencyKey(*idempotency),
    )


def _dumps(facts: Any) -> bytes:
    try:
        return orjson.dumps(facts)
    except orjson.JSONEncodeError:  # lone surrogates, or numbers over 64 bits
        return json.dumps(facts).encode()


def _loads(packed: bytes) -> Any:
    try:
        return orjson.loads(packed)
    except orjson.JSONDecodeError:
        return json.loads(packed)


def _counts(stored: Mapping[str, Sequence[int]]) -> dict[int, Counts]:
    return {int(choice): Counts(*counts) for choice, counts in stored.items()}


def _runs(packed: bytes, lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    ids, start = array("I"), 0
    ids.frombytes(packed)
    for length in lengths:
        yield ids[start : start + length]
        start += length
