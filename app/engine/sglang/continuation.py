"""Answers that go on: a request is queued in SGLang's scheduler as if it had been retracted.

SGLang sets a running request aside when memory is short, and later reads its prompt and its answer so far
in one prefill. A request that brings token ids of its answer takes the same way in a scheduler that has
never seen it: `max_tokens`, stops, counts and text go on as if it had run here. What retraction itself
forgets is rebuilt from the ids: the state of the grammar, the penalties, and the count for `min_tokens`.

`with_continued` runs in the server, all else in the scheduler's process.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer

CONTINUED = "continued_ids"
"""The key in `custom_params`, which SGLang hands through and no caller may send."""
NOT_CONTINUED = "The answer cannot go on: "
"""The start of the message of an answer whose state could not be rebuilt."""


def with_continued(sampling_params: Any, token_ids: Iterable[int]) -> Any:
    """A copy of a request's sampling parameters that carries the ids its answer begins with."""
    sent = copy.copy(sampling_params)
    sent.custom_params = {**(sampling_params.custom_params or {}), CONTINUED: list(token_ids)}
    return sent


def install() -> None:
    """Replace the methods of SGLang 0.5.20 that queue a request and that begin a batch's penalties."""
    queue = Scheduler._add_request_to_queue  # noqa: SLF001
    prepare = _BatchedPenalizer.prepare

    def add_request_to_queue(self: Any, req: Req, is_retracted: bool = False) -> None:  # noqa: FBT001, FBT002  # SGLang's
        token_ids = _taken_from(req)
        if not token_ids or not _continue(self, req, token_ids):
            queue(self, req, is_retracted)

    def prepare_and_rebuild(self: Any) -> None:
        is_new = not self.is_prepared()
        prepare(self)
        if is_new:
            _rebuild_penalties(self)

    Scheduler._add_request_to_queue = add_request_to_queue  # noqa: SLF001
    _BatchedPenalizer.prepare = prepare_and_rebuild


def _taken_from(req: Req) -> list[int] | None:
    """The ids that a request's answer begins with, taken out of its parameters."""
    custom = req.sampling_params.custom_params
    if not isinstance(custom, dict) or CONTINUED not in custom:
        return None
    token_ids: list[int] = custom.pop(CONTINUED)
    if custom.keys() == {"__req__"}:  # SGLang's reference to the request, for custom_params alone
        req.sampling_params.custom_params = None
    return token_ids


def _continue(scheduler: Any, req: Req, token_ids: list[int]) -> bool:
    """Make `req` one that was retracted after `token_ids`; whether it has ended with them already."""
    if req.finished() or req.to_finish is not None:  # it was refused, or aborted while its grammar compiled
        return False
    if req.grammar is not None and not _walk(req.grammar, token_ids):
        message = NOT_CONTINUED + "its grammar does not allow what was generated"
        req.set_finish_with_abort(message, HTTPStatus.INTERNAL_SERVER_ERROR)
        return False
    req.output_ids = array("q", token_ids)
    req.is_retracted = req.retracted_stain = True
    scheduler.batch_result_processor._maybe_update_reasoning_tokens(req, token_ids)  # noqa: SLF001
    if req.return_logprob:
        _leave_out_logprobs(req, len(token_ids))
    req.update_finish_state()
    if not req.finished():
        return False
    scheduler.output_streamer.stream_output([req], req.return_logprob)
    return True


def _walk(grammar: Any, token_ids: list[int]) -> bool:
    """Bring a grammar to the state after `token_ids`; whether it allows them."""
    try:
        for token_id in token_ids:
            grammar.accept_token(token_id)
    except ValueError:
        return False
    inner = getattr(grammar, "grammar", None) or grammar
    inner.request_meter = (
        None  # the walk took the time of many steps at once (app.engine.sglang.grammar_guard)
    )
    return True


def _leave_out_logprobs(req: Req, num_tokens: int) -> None:
    """Send logprobs for new tokens alone, and none of the prompt: the first run has sent those."""
    logprob = req.logprob
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        for column in ("_val", "_idx"):
            getattr(logprob, name + column).extend([None] * num_tokens)
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        for column in ("_val", "_idx"):
            setattr(logprob, name + column, [])
    req.send_output_token_logprobs_offset = num_tokens
    req.input_logprob_sent = True


def _rebuild_penalties(penalizer: Any) -> None:
    """Count what the requests of a new batch have generated before it; SGLang begins at nothing."""
    rebuild = REBUILDS.get(type(penalizer))
    if rebuild is None:
        return
    for row, req in enumerate(penalizer.orchestrator.reqs()):
        if req.output_ids:
            rebuild(penalizer, row, req)


def _ids_of(penalizer: Any, req: Req) -> torch.Tensor:
    return torch.tensor(req.output_ids, dtype=torch.int64, device=penalizer.orchestrator.device)


def _rebuild_frequency(penalizer: Any, row: int, req: Req) -> None:
    if req.sampling_params.frequency_penalty:
        ids = _ids_of(penalizer, req)
        each = penalizer.frequency_penalties[row].expand(len(ids))
        penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, each)


def _rebuild_presence(penalizer: Any, row: int, req: Req) -> None:
    if req.sampling_params.presence_penalty:
        penalty = penalizer.presence_penalties[row]
        penalizer.cumulated_presence_penalties[row, _ids_of(penalizer, req)] = penalty


def _rebuild_repetition(penalizer: Any, row: int, req: Req) -> None:
    if req.sampling_params.repetition_penalty != 1.0:
        penalty = penalizer.repetition_penalties[row]
        penalizer.cumulated_repetition_penalties[row, _ids_of(penalizer, req)] = penalty


def _rebuild_least(penalizer: Any, row: int, req: Req) -> None:
    penalizer.len_output_tokens[row] = len(req.output_ids)


REBUILDS: dict[type, Callable[[Any, int, Req], None]] = {
    BatchedFrequencyPenalizer: _rebuild_frequency,
    BatchedPresencePenalizer: _rebuild_presence,
    BatchedRepetitionPenalizer: _rebuild_repetition,
    BatchedMinNewTokensPenalizer: _rebuild_least,
}
