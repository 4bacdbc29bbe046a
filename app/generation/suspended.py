"""A suspended request as bytes, which the store keeps until its answer goes on (app.store.suspensions).

The JSON object has the request and its turn, with the messages of its conversation in front, how far each
choice has come, and what safety remembers of the prompt. Token ids stand beside it, one run after the other.
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
from app.generation.history import LoadedTurn
from app.generation.progress import Progress
from app.store.conversations import NewTurn
from app.store.ledger import Terms
from app.store.suspensions import StoredSuspension, Suspension

_VERSION = 1
_LEFT_OUT = ("past", "raw", "placement", "idempotency", "body")


class NotReadable(Exception):
    """A suspended request that this version cannot read."""


@dataclass(frozen=True, slots=True)
class SuspendedRequest:
    """A suspended request: all that it takes to go on with it."""

    request_seq: int
    key_id: str | None
    turn: LoadedTurn
    progress: Progress
    safety: Mapping[str, Any]
    """What safety remembers of the prompt; see RequestSafety.state."""
    terms: Terms
    """The terms that its row is billed by."""


def pack(
    request_seq: int, key_id: str | None, turn: LoadedTurn, progress: Progress, safety: Mapping[str, Any]
) -> Suspension:
    """The request as it is stored. Raises OverflowError for ids that are no uint32."""
    request = turn.request
    raw_ids = None if request.raw is None else request.raw.token_ids
    runs = [*request.past, *progress.token_ids, *([] if raw_ids is None else [raw_ids])]
    fields = {
        name: getattr(request, name)
        for name in (field.name for field in dataclasses.fields(request))
        if name not in _LEFT_OUT
    }
    raw = None if request.raw is None else {"text": request.raw.text, "preface": request.raw.preface}
    facts = {
        "version": _VERSION,
        "request": fields | {"body": dict(request.body), "placement": dataclasses.asdict(request.placement)},
        "raw": raw,
        "turn": {
            "run_seqs": list(turn.run_seqs),
            "strikes": turn.strikes,
            "from_store": list(turn.from_store),
            "stored_bytes": turn.stored_bytes,
        },
        "counts": {str(choice): counts for choice, counts in progress.counts.items()},
        "released": {str(choice): counts for choice, counts in progress.released.items()},
        "safety": safety,
        "runs": [len(run) for run in runs],
        "past": len(request.past),
        "answers": len(progress.token_ids),
    }
    token_ids = b"".join(array("I", run).tobytes() for run in runs)
    return Suspension(request_seq, key_id, _dumps(facts), token_ids)


def unpack(stored: StoredSuspension) -> SuspendedRequest:
    """The request as it was suspended. Raises NotReadable."""
    suspension = stored.suspension
    try:
        facts = _loads(suspension.request)
        if facts["version"] != _VERSION:
            raise NotReadable
        runs = list(_runs(suspension.token_ids, facts["runs"]))
        past, answers = facts["past"], facts["answers"]
        request = _request(facts, runs[:past], runs[past + answers :], stored.idempotency)
        turn = LoadedTurn(request, _stored_turn(request, stored.answer_ids), **facts["turn"])
        progress = Progress(runs[past : past + answers], _counts(facts["counts"]), _counts(facts["released"]))
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
        **fields,
        past=past,
        raw=None if raw is None else RawPrompt(raw["text"], raw_ids[0] if raw_ids else None, raw["preface"]),
        placement=placement,
        idempotency=None if idempotency is None else IdempotencyKey(*idempotency),
    )


def _stored_turn(request: ChatRequest, answer_ids: Sequence[str]) -> NewTurn | None:
    """The turn whose answers are stored already; only their ids are of use any more."""
    if request.conversation_id is None:
        return None
    return NewTurn(
        conversation_id=request.conversation_id,
        owner=request.owner,
        model=request.model,
        title="",
        is_new=False,
        parent_seq=None,
        messages=(),
        answer_ids=answer_ids,
        created_at_us=request.created_at_unix_s * 1_000_000,
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
