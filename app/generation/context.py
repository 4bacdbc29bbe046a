"""What the stages of one admitted generation share."""

from __future__ import annotations

from dataclasses import dataclass

from app.admission.ticket import Ticket
from app.core import ChatRequest, Key
from app.generation.journal_entry import JournalEntry
from app.generation.request_safety import RequestSafety
from app.generation.trace import Trace
from app.stream.token_stream import TokenStream


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """One admitted and reserved request. `request` has its conversation's messages in front."""

    request: ChatRequest
    key: Key | None
    stream: TokenStream
    trace: Trace
    ticket: Ticket
    entry: JournalEntry
    check: RequestSafety
