"""The body that imports a conversation: an export of this server, or what another was turned into.

The ids in it say only which message stands below which; the stored ones are new. What a server adds to an
export, such as usage, is taken and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from app.api.schema.fields import ARRAY, Field, dropped, read_fields
from app.api.schema.messages import normalized
from app.core import FinishReason
from app.errors import BadRequest
from app.journal.history import new_conversation_id, stored_message, title_of
from app.store.conversations import MAX_BRANCH_MESSAGES, Status
from app.store.imported import ImportedConversation, ImportedMessage

_LAST_SECOND = 253_402_300_799
"""The end of the year 9999."""
TITLE = Field((str,), min_chars=1, max_chars=200)
_ID = Field((str,), min_chars=1, max_chars=256)
IMPORT: Mapping[str, Field] = {
    "title": TITLE,
    "model": Field((str,), max_chars=512),
    "messages": ARRAY,
    **dropped(("id", "object", "total_tokens", "created_at", "updated_at")),
}
"""The fields of an imported conversation."""
MESSAGE: Mapping[str, Field] = {
    "id": _ID,
    "parent_id": _ID,
    "created_at": Field((int,), 0, _LAST_SECOND),
    "status": Field((str,), choices=get_args(Status)),
    "finish_reason": Field((str,), choices=get_args(FinishReason)),
}
"""What a message of it may have besides the keys of a message of a request."""


def parse_import(body: Mapping[str, Any], owner: str) -> ImportedConversation:
    """The conversation in a body. Raises BadRequest and UnsupportedParameter, naming the place."""
    sent = read_fields(body, "", IMPORT, ("messages",))
    messages = normalized(sent["messages"], max_messages=MAX_BRANCH_MESSAGES)
    title = " ".join(sent.get("title", "").split()) or title_of(messages)
    now_us = time.time_ns() // 1000
    return ImportedConversation(
        id=new_conversation_id(),
        owner=owner,
        title=title,
        model=sent.get("model", ""),
        created_at_us=now_us,
        messages=_tree(sent["messages"], messages, now_us),
    )


def _tree(
    as_sent: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], now_us: int
) -> list[ImportedMessage]:
    """The messages below one another: by `parent_id` where there is one, else below the one before."""
    places: dict[str, int] = {}
    tree: list[ImportedMessage] = []
    for i, (source, message) in enumerate(zip(as_sent, messages, strict=True)):
        where = f"messages[{i}]"
        own = {name: source[name] for name in MESSAGE if name in source}
        sent = read_fields(own, where, MESSAGE)
        above = i - 1 if i else None
        if "parent_id" in source:
            above = _place(sent.get("parent_id"), places, where)
        if "id" in sent and places.setdefault(sent["id"], i) != i:
            raise BadRequest(f"{where}.id is that of messages[{places[sent['id']]}].", param=f"{where}.id")
        status = sent.get("status", "complete")
        tree.append(
            ImportedMessage(
                message=stored_message(message, with_reasoning=True),
                parent_index=above,
                created_at_us=min(now_us, sent["created_at"] * 1_000_000) if "created_at" in sent else now_us,
                status="interrupted" if status == "in_progress" else status,
                finish_reason=sent.get("finish_reason"),
            )
        )
    return tree


def _place(parent_id: str | None, places: Mapping[str, int], where: str) -> int | None:
    if parent_id is None:
        return None
    if parent_id not in places:
        raise BadRequest(
            f"{where}.parent_id must be the id of an earlier message, or null.", param=f"{where}.parent_id"
        )
    return places[parent_id]
