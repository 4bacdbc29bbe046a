"""Answers that continue: a request is queued in SGLang 0.5.20's scheduler as if it had been retracted.

SGLang sets a running request aside when memory is short, and later reads its prompt and its answer so far
in one prefill. A request that brings token ids of its answer takes the same way in a scheduler that has
never seen it: `max_tokens`, stops, counts and text continue as if it had run here. What retraction itself
forgets is rebuilt from the ids: the state of the grammar here, the penalties and the count for `min_tokens`
in app.engine.sglang.patches.penalties. A grammar is walked beside the step, in a thread that compiles others;
the request waits meanwhile as if its grammar were being compiled, so that all ranks admit it in one step.

`with_continued` runs in the server, all else in the scheduler's process.
"""

from __future__ import annotations

import copy
import time
from array import array
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler

REPLACED: Mapping[str, str] = {
    "managers.scheduler:Scheduler._add_request_to_queue": "1de9ccc7bb0f1e93",
}
CONTINUED = "continued_ids"
"""The key in `custom_params`, which SGLang hands through and no caller may send."""
NOT_CONTINUED = "The answer cannot continue: "
"""The start of the message of an answer whose state could not be rebuilt."""
WALK_CHUNK_IDS = 256
"""Ids that a grammar accepts before its thread yields to the step: 0.2 ms at 0.7 us an id."""
WALKED_KEY = ("continued", "")
"""SGLang keeps a copy of the grammar that it waited for under a key; all of these have one."""


def with_continued(sampling_params: Any, token_ids: Iterable[int]) -> Any:
    """A copy of a request's sampling parameters that carries the ids its answer begins with."""
    sent = copy.copy(sampling_params)
    sent.custom_params = {**(sampling_params.custom_params or {}), CONTINUED: list(token_ids)}
    return sent


def install() -> None:
    """Replace the method that queues a request."""
    queue = Scheduler._add_request_to_queue  # noqa: SLF001

    def add_request_to_queue(self: Any, req: Req, is_retracted: bool = False) -> None:  # noqa: FBT001, FBT002  # SGLang's
        token_ids = _continued_ids(req)
        if not token_ids:
            queue(self, req, is_retracted)
        elif _has_to_walk(req):
            _begin_walk(self.grammar_manager, req, token_ids)
        else:
            _forget_continued(req)
            if not _continue(self, req, token_ids):
                queue(self, req, is_retracted)

    Scheduler._add_request_to_queue = add_request_to_queue  # noqa: SLF001


def _continued_ids(req: Req) -> list[int] | None:
    custom = req.sampling_params.custom_params
    return custom.get(CONTINUED) if isinstance(custom, dict) else None


def _forget_continued(req: Req) -> None:
    custom = req.sampling_params.custom_params
    del custom[CONTINUED]
    if custom.keys() == {"__req__"}:  # SGLang's reference to the request, for custom_params alone
        req.sampling_params.custom_params = None


def _has_to_walk(req: Req) -> bool:
    """True if the request has a grammar that stands at its beginning."""
    ended = req.finished() or req.to_finish is not None  # refused, or aborted while its grammar compiled
    return not ended and req.grammar is not None and not hasattr(req.grammar, "allows_continued")


def _begin_walk(manager: Any, req: Req, token_ids: list[int]) -> None:
    """Walk a request's grammar in a thread, while the request waits in SGLang's queue of such."""
    req.grammar = manager.grammar_backend.executor.submit(_walk, req.grammar, token_ids)
    req.grammar_key = WALKED_KEY
    manager.grammar_queue.append(req)


def _continue(scheduler: Any, req: Req, token_ids: list[int]) -> bool:
    """Make `req` one that was retracted after `token_ids`; True if it has ended with them already."""
    if req.finished() or req.to_finish is not None:
        return False
    if req.grammar is not None and not req.grammar.allows_continued:
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


def _walk(grammar: Any, token_ids: list[int]) -> Any:
    """The grammar, brought to the state after `token_ids`; its `allows_continued` says whether it has one."""
    inner = getattr(grammar, "grammar", None) or grammar
    try:
        for start in range(0, len(token_ids), WALK_CHUNK_IDS):
            for token_id in token_ids[start : start + WALK_CHUNK_IDS]:
                grammar.accept_token(token_id)
            time.sleep(0)
    except ValueError:
        grammar.allows_continued = False
    else:
        grammar.allows_continued = True
    inner.request_meter = None  # of many steps at once (app.engine.sglang.patches.grammar_guard)
    return grammar


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
