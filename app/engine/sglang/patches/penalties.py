"""Penalties that count each generated token once, wherever the batch or the engine was interrupted.

SGLang 0.5.20 counts the last token of each request as a decode step is prepared, and begins at nothing in a
batch that is prefilled. Under the overlap scheduler the token that was sampled last has not arrived by then,
so the one before it is counted; where a prefill runs between two decode steps, it has arrived, and is
counted in both. Here a step counts the token whose keys and values the step before it has written:

    tokens of the answer          0  1  2  3  …            n known from another engine
    sampled with the counts of    .  .  0  0,1             0 … n-2

The first step has no such token; it counts the last one of the prompt, as SGLang does.
Without the overlap scheduler each step counts the token before its own, which SGLang does right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_schedule
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.utils.common import is_pin_memory_available

REPLACED: Mapping[str, str] = {
    "sampling.penaltylib.orchestrator:_BatchedPenalizer.prepare": "325b07366ca23e3c",
    "managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens": "dce2467c859a7049",
}


def install() -> None:
    """Replace the methods of SGLang 0.5.20 that begin a batch's penalties, and that count a step's tokens."""
    prepare, cumulate = _BatchedPenalizer.prepare, ScheduleBatch.cumulate_penalty_output_tokens

    def prepare_and_rebuild(self: Any) -> None:
        is_new = not self.is_prepared()
        prepare(self)
        if is_new:
            _rebuild(self)

    def cumulate_penalty_output_tokens(self: ScheduleBatch) -> None:
        # With speculation a step has several tokens, which SGLang counts roughly.
        if not _overlaps() or not self.spec_algorithm.is_none():
            cumulate(self)
            return
        lengths = self.seq_lens_cpu.tolist()[: len(self.reqs)]
        last_ids = [_written_last(req, length) for req, length in zip(self.reqs, lengths, strict=True)]
        ids = torch.tensor(last_ids, dtype=torch.int64, pin_memory=is_pin_memory_available(self.device))
        ids = ids.to(self.device, non_blocking=True)
        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)

    _BatchedPenalizer.prepare = prepare_and_rebuild
    ScheduleBatch.cumulate_penalty_output_tokens = cumulate_penalty_output_tokens


def _overlaps() -> bool:
    return not get_schedule().disable_overlap_schedule


def _written_last(req: Req, length: int) -> int:
    """The last of a request's tokens among the first `length`; before its answer, the last of its prompt."""
    written = length - len(req.origin_input_ids)
    token_id: int = req.output_ids[written - 1] if written > 0 else req.origin_input_ids[-1]
    return token_id


def _rebuild(penalizer: Any) -> None:
    """Count what the requests of a new batch have generated before it."""
    rebuild = REBUILDS.get(type(penalizer))
    if rebuild is None:
        return
    overlaps = _overlaps()
    for row, req in enumerate(penalizer.orchestrator.reqs()):
        if req.output_ids:
            counted = [req.origin_input_ids[-1], *req.output_ids[:-1]] if overlaps else list(req.output_ids)
            ids = torch.tensor(counted, dtype=torch.int64, device=penalizer.orchestrator.device)
            rebuild(penalizer, row, req, ids)


def _rebuild_frequency(penalizer: Any, row: int, req: Req, ids: torch.Tensor) -> None:
    if req.sampling_params.frequency_penalty:
        each = penalizer.frequency_penalties[row].expand(len(ids))
        penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, each)


def _rebuild_presence(penalizer: Any, row: int, req: Req, ids: torch.Tensor) -> None:
    if req.sampling_params.presence_penalty:
        penalizer.cumulated_presence_penalties[row, ids] = penalizer.presence_penalties[row]


def _rebuild_repetition(penalizer: Any, row: int, req: Req, ids: torch.Tensor) -> None:
    if req.sampling_params.repetition_penalty != 1.0:
        penalizer.cumulated_repetition_penalties[row, ids] = penalizer.repetition_penalties[row]


def _rebuild_least(penalizer: Any, row: int, _req: Req, ids: torch.Tensor) -> None:
    penalizer.len_output_tokens[row] = len(ids)


REBUILDS: dict[type, Callable[[Any, int, Req, torch.Tensor], None]] = {
    BatchedFrequencyPenalizer: _rebuild_frequency,
    BatchedPresencePenalizer: _rebuild_presence,
    BatchedRepetitionPenalizer: _rebuild_repetition,
    BatchedMinNewTokensPenalizer: _rebuild_least,
}
