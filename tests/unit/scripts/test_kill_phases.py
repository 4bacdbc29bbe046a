"""The moments at which the kill test loses something."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from scripts.crash.engine_clients import Client, Reply
from scripts.crash.kill_phases import (
    BEGUN_TOKENS,
    LAST_TOKENS,
    PHASES,
    SCENES,
    Phase,
    is_in,
    num_queued,
    phases_of,
    reached_in,
    scenes_of,
)
from scripts.crash.kill_requests import KINDS, bodies, kind_of

TOKENS = 100


def scene(phase: Phase) -> tuple[list[Client], list[Reply]]:
    """Eight clients that have received nothing, and their undisturbed replies: 100 tokens of 2 characters."""
    clients = [Client(1, body) for body in bodies(SCENES[phase], 8, TOKENS, mix=True)]
    undisturbed = [Reply("", text={"0": "ab" * TOKENS}, counts={0: TOKENS}) for _ in clients]
    return clients, undisturbed


def receives(client: Client, tokens: int) -> None:
    """The client has so many tokens."""
    client.reply.text = {"0": "ab" * tokens}
    client.reply.counts = {0: tokens}


def first_of(clients: Sequence[Client], kind: str, of: Phase) -> Client:
    """The first client of a kind in the phase's scene."""
    return next(c for n, c in enumerate(clients) if kind_of(n, SCENES[of], mix=True) == kind)


def test_any_is_every_phase() -> None:
    """And each phase has a scene."""
    assert phases_of("any") == list(PHASES)
    assert phases_of("prefill") == ["prefill"]
    assert scenes_of(phases_of("any")) == ["ordinary", "long", "held"]


def test_the_mix_has_every_kind() -> None:
    """Twice among sixteen."""
    kinds = [kind_of(number, "ordinary", mix=True) for number in range(16)]
    assert sorted(kinds) == sorted([*KINDS] * 2)
    assert {kind_of(number, "ordinary", mix=False) for number in range(16)} == {"plain"}


def test_a_quarter_of_a_special_scene_is_special() -> None:
    """The others are as always."""
    assert [kind_of(number, "held", mix=True) for number in range(0, 16, 4)] == ["held"] * 4
    long_prompt = bodies("long", 1, TOKENS, mix=True)[0]["messages"][0]["content"]
    assert len(long_prompt) > 10_000


def test_decoding_is_a_share_of_all_text() -> None:
    """At most six tenths of it."""
    clients, undisturbed = scene("decode")
    is_reached = reached_in("decode", undisturbed, random.Random(1))
    assert not is_reached(clients)
    for client in clients:
        receives(client, 60)
    assert is_reached(clients)
    assert is_in("decode", clients, undisturbed)


def test_finishing_is_within_the_last_tokens() -> None:
    """Of an answer that has not ended."""
    clients, undisturbed = scene("finishing")
    is_reached = reached_in("finishing", undisturbed, random.Random(1))
    receives(clients[0], TOKENS - LAST_TOKENS - 1)
    assert not is_reached(clients)
    assert not is_in("finishing", clients, undisturbed)
    receives(clients[0], TOKENS - 1)
    assert is_reached(clients)
    assert is_in("finishing", clients, undisturbed)
    clients[0].reply.finish = {0: "length"}
    assert not is_reached(clients)


@pytest.mark.parametrize(("phase", "kind"), [("held_back", "held"), ("queued", "plain")])
def test_a_request_without_text_beside_others_is_held_or_waits(phase: Phase, kind: str) -> None:
    """Until it has some."""
    clients, undisturbed = scene(phase)
    is_reached = reached_in(phase, undisturbed, random.Random(1))
    meant = first_of(clients, kind, phase)
    for client in clients:
        if client is not meant:
            receives(client, 10 * BEGUN_TOKENS)
    held = [c for n, c in enumerate(clients) if kind_of(n, SCENES[phase], mix=True) == kind]
    assert is_reached(clients)
    assert is_in(phase, clients, undisturbed)
    for client in held:
        receives(client, 1)
    assert not is_reached(clients)
    assert not is_in(phase, clients, undisturbed)


def test_a_long_prompt_is_read_for_a_share_of_the_time_that_it_takes() -> None:
    """The time is that of the undisturbed run."""
    clients, undisturbed = scene("prefill")
    is_reached = reached_in("prefill", undisturbed, random.Random(1))
    for expected in undisturbed:
        expected.first_text_s = 1e9
    assert not is_reached(clients)  # nothing was sent
    for client in clients:
        client.reply.sent_s = 1e-9
    assert not is_reached(clients)
    for expected in undisturbed:
        expected.first_text_s = 1e-9
    assert is_reached(clients)
    assert is_in("prefill", clients, undisturbed)


def test_those_that_wait_are_counted_by_the_metrics() -> None:
    """In the engine and before it."""
    metrics: Any = (
        '# TYPE tokenring_engine_queued_requests gauge\ntokenring_engine_queued_requests{model="a"} 3.0\n'
        'tokenring_admission_waiting_requests{tier="batch"} 2\ntokenring_admission_waiting_tokens 99\n'
    )
    assert num_queued(metrics) == 5
