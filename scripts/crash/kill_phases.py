"""When the kill test loses a process: the moment at which a live request is in a phase of its life.

queued       some answers have begun, and others wait for their turn
prefill      a long prompt is being read, and its answer has not begun
held_back    tokens were generated, and the screen holds their text
decode       a random share of all the text has come
finishing    an answer is within its last tokens
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from scripts.crash.engine_clients import Client, Reply
from scripts.crash.kill_requests import HELD, Scene

Phase = Literal["queued", "prefill", "decode", "held_back", "finishing"]
PHASES: tuple[Phase, ...] = get_args(Phase)
SCENES: Mapping[Phase, Scene] = {
    "queued": "ordinary",
    "prefill": "long",
    "decode": "ordinary",
    "held_back": "held",
    "finishing": "ordinary",
}
LAST_TOKENS = 10
"""Tokens before the end of an answer, or fewer, in which it is finishing."""
BEGUN_TOKENS = 8
"""Tokens that other answers have when one without text is waiting, or held back."""
LONG_CHARS = 10_000
QUEUED = re.compile(
    r"^tokenring_(?:engine_queued|admission_waiting)_requests(?:\{[^}]*\})? ([0-9.]+)$", re.MULTILINE
)

Reached = Callable[[Sequence[Client]], bool]
"""Whether a live request is in the phase."""


def scenes_of(phases: Sequence[Phase]) -> list[Scene]:
    """The scenes that rounds in these phases play in."""
    return list(dict.fromkeys(SCENES[phase] for phase in phases))


def phases_of(asked: str) -> list[Phase]:
    """The phases that a round may be in: one, or with `any` each of them."""
    return [phase for phase in PHASES if asked in (phase, "any")]


def reached_in(phase: Phase, undisturbed: Sequence[Reply], rng: random.Random) -> Reached:
    """The condition of a round in `phase`, at a random point of it."""
    if phase == "decode":
        return _decoding(rng.uniform(0.05, 0.6), undisturbed)
    if phase == "finishing":
        return _finishing(rng.randint(1, LAST_TOKENS), undisturbed)
    if phase == "prefill":
        return _reading(rng.uniform(0.2, 0.9), undisturbed)
    if phase == "held_back":
        return _silent_beside(rng.randint(BEGUN_TOKENS, 2 * BEGUN_TOKENS), _is_held)
    return _silent_beside(rng.randint(BEGUN_TOKENS, 10 * BEGUN_TOKENS), lambda _client: True)


def num_queued(metrics: str) -> int:
    """Requests that wait, for admission or in the engine, by the server's metrics."""
    return sum(int(float(value)) for value in QUEUED.findall(metrics))


def _decoding(share: float, undisturbed: Sequence[Reply]) -> Reached:
    goal = share * sum(reply.characters for reply in undisturbed)
    return lambda clients: sum(client.reply.characters for client in clients) >= goal


def _finishing(left_tokens: int, undisturbed: Sequence[Reply]) -> Reached:
    def is_reached(clients: Sequence[Client]) -> bool:
        return any(
            not client.reply.finish and 0 < expected.tokens - client.reply.tokens <= left_tokens
            for client, expected in zip(clients, undisturbed, strict=True)
        )

    return is_reached


def _reading(share: float, undisturbed: Sequence[Reply]) -> Reached:
    """By the time that the first text of the first long prompt took undisturbed."""

    def is_reached(clients: Sequence[Client]) -> bool:
        pairs = [
            (client.reply, expected)
            for client, expected in zip(clients, undisturbed, strict=True)
            if is_long(client)
        ]
        after_s = share * min(expected.first_text_s for _, expected in pairs)
        sent_s = max(reply.sent_s for reply, _ in pairs)
        return bool(sent_s) and time.monotonic() >= sent_s + after_s

    return is_reached


def _silent_beside(tokens: int, is_meant: Callable[[Client], bool]) -> Reached:
    """Whether one that is meant has no text, while another answer has some."""

    def is_reached(clients: Sequence[Client]) -> bool:
        reply_tokens = max(client.reply.tokens for client in clients)
        return reply_tokens >= tokens and any(
            is_meant(client) and not client.reply.text for client in clients
        )

    return is_reached


def is_long(client: Client) -> bool:
    """Whether a request has a long prompt."""
    prompt: str = client.body["messages"][0]["content"]
    return len(prompt) > LONG_CHARS


def _is_held(client: Client) -> bool:
    regex: str = client.body.get("regex", "")
    return regex.startswith(HELD)


def is_in(phase: Phase, clients: Sequence[Client], undisturbed: Sequence[Reply]) -> bool:
    """Whether a live request is in the phase now, whatever the moment that was chosen."""
    live = [
        (client, expected)
        for client, expected in zip(clients, undisturbed, strict=True)
        if not client.reply.done
    ]
    if phase == "decode":
        return any(client.reply.text for client, _ in live)
    if phase == "finishing":
        return any(0 <= e.tokens - c.reply.tokens <= LAST_TOKENS and c.reply.text for c, e in live)
    meant = {"prefill": is_long, "held_back": _is_held}.get(phase, lambda _client: True)
    return any(meant(client) and not client.reply.text for client, _ in live)
