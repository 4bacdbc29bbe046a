"""Faults of remote servers, and the choices that lost theirs: counted for the metrics, and logged.

A line names the request and the server. It never quotes what came.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import structlog

Fault = Literal[
    "unreachable", "broke_off", "silent", "stalled", "unreadable", "wrong_count", "after_end", "abort"
]
"""What a server did:

- `unreachable`: no connection, no headers, or an answer that is no stream
- `broke_off`: the stream ended before the answer did
- `silent`, `stalled`: nothing came for too long, in one stream, or in all of them and no health either
- `unreadable`: an event that no SGLang sends
- `wrong_count`: a count that does not fit the ids, or goes back
- `after_end`: more of an answer behind its last event
- `abort`: a request that it did not stop when asked to
"""

Moved = Literal["resumed", "ended"]


class FaultLog:
    """Belongs to one engine."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self.faults: Counter[str] = Counter(dict.fromkeys(get_args(Fault), 0))
        self.moved: Counter[str] = Counter(dict.fromkeys(get_args(Moved), 0))
        """Choices that lost their server: `resumed` by another or the same one, or `ended` with an error."""

    def fault(self, kind: Fault, server: str, rid: str = "") -> None:
        """Note what a server did to a request, or to all of its requests."""
        self.faults[kind] += 1
        structlog.get_logger().warning("remote_fault", kind=kind, server=server, request_id=rid)

    def resumed(self, server: str, rid: str, *, tokens: int, waited_s: float) -> None:
        """Note that a choice goes on at a server."""
        self.moved["resumed"] += 1
        structlog.get_logger().info(
            "remote_resumed", server=server, request_id=rid, tokens=tokens, waited_s=round(waited_s, 2)
        )

    def ended(self, rid: str, why: str, prompt_ids: Sequence[int]) -> None:
        """Note that a choice could not go on. A keyed hash of its prompt tells its repetitions."""
        self.moved["ended"] += 1
        prompt = array("q", prompt_ids).tobytes()
        fingerprint = hashlib.blake2b(prompt, key=self._key, digest_size=8).hexdigest()
        structlog.get_logger().warning(
            "remote_request_lost", request_id=rid, why=why, fingerprint=fingerprint
        )
