"""What replaces functions of SGLang's scheduler, on SGLang's own objects and without an engine."""

from __future__ import annotations

import threading
import warnings
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.sglang.platform import prepare_process

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

VOCAB = 16
PROMPT = [3, 7]
ANSWER = [9, 2, 2, 5, 9, 1]
PENALTY = 0.5


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """SGLang, whose imports warn of hardware that this machine does not have."""
    prepare_process()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from app.engine.sglang.patches import continued_requests, penalties  # noqa: F401


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalties as they are counted under the overlap scheduler."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer

    from app.engine.sglang.patches import penalties

    for owner, name in ((_BatchedPenalizer, "prepare"), (ScheduleBatch, "cumulate_penalty_output_tokens")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(penalties, "_overlaps", lambda: True)
    penalties.install()


class Batch(SimpleNamespace):
    """The fields of a batch that penalties read; a namespace alone takes no weak reference."""


def penalties_of(known: Sequence[int], arrived: Sequence[int]) -> list[float]:
    """The frequency penalties after a decode step for each of `arrived`, which says what has come before it.

    The answer was prefilled behind the ids in `known`.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.penaltylib import BatchedFrequencyPenalizer, BatchedPenalizerOrchestrator

    sampling = SimpleNamespace(frequency_penalty=PENALTY)
    req = SimpleNamespace(sampling_params=sampling, origin_input_ids=PROMPT, output_ids=array("q", known))
    batch = Batch(reqs=[req], device="cpu", spec_algorithm=SimpleNamespace(is_none=lambda: True))
    orchestrator = BatchedPenalizerOrchestrator(VOCAB, batch, {BatchedFrequencyPenalizer})
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)
    import torch

    batch.seq_lens_cpu = torch.tensor([len(PROMPT) + len(known)])
    for num_arrived in arrived:
        req.output_ids = array("q", ANSWER[:num_arrived])
        ScheduleBatch.cumulate_penalty_output_tokens(batch)
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    counted = orchestrator.penalizers[BatchedFrequencyPenalizer].cumulated_frequency_penalties[0]
    return [float(value) for value in counted]


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("arrived", [[0, 1, 2, 3], [0, 2, 2, 4], [1, 2, 3, 4]])
def test_under_overlap_each_token_is_counted_once(arrived: list[int]) -> None:
    """Whether the last one has arrived or not, which a prefill in between decides."""
    expected = [0.0] * VOCAB
    for token_id in [PROMPT[-1], *ANSWER[:3]]:
        expected[token_id] += PENALTY
    assert penalties_of([], arrived) == expected


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("known", range(1, 5))
def test_an_answer_that_goes_on_is_where_the_undisturbed_one_was(known: int) -> None:
    """After the prefill of what is known, and after each step behind it."""
    for steps in range(3):
        undisturbed = penalties_of([], range(known + steps))
        assert penalties_of(ANSWER[:known], range(known, known + steps)) == undisturbed


@dataclass
class Grammar:
    """A grammar that notes the thread in which it accepts a token."""

    forbidden: int = -1
    accepted: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def accept_token(self, token_id: int) -> None:
        if token_id == self.forbidden:
            raise ValueError
        self.accepted.append(token_id)
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize(("forbidden", "allowed"), [(-1, True), (900, False)])
def test_a_grammar_is_walked_beside_the_step(forbidden: int, allowed: bool) -> None:
    """The request waits in the queue of grammars that compile, in which all ranks agree on who is ready."""
    from app.engine.sglang.patches import continued_requests

    grammar, ids = Grammar(forbidden), list(range(1000))
    with ThreadPoolExecutor(1) as executor:
        manager = SimpleNamespace(grammar_backend=SimpleNamespace(executor=executor), grammar_queue=[])
        req: Any = SimpleNamespace(grammar=grammar, to_finish=None, finished=lambda: False, grammar_key=None)
        assert continued_requests._has_to_walk(req)
        continued_requests._begin_walk(manager, req, ids)
        assert manager.grammar_queue == [req]
        assert req.grammar_key
        req.grammar = req.grammar.result()  # as SGLang does once all ranks are ready
    assert grammar.accepted == ids[: forbidden if forbidden > 0 else None]
    assert grammar.threads.isdisjoint({threading.get_ident()})
    assert req.grammar.allows_continued is allowed
    assert not continued_requests._has_to_walk(req)
