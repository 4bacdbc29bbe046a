"""Prefills and decode steps take turns, so that running answers keep about a third of the scheduler's time.

SGLang 0.5.20 prefills as long as anything waits. Requests that come one by one, as those of many prompts do,
or of one token, have a pass each, and nothing decodes meanwhile: one caller stopped the streams of others for
0.8 s at a time. Its `prefill_decode_interval` counts passes; one of 16 prompts takes the time of four steps.

Here each pass owes decode steps by its size, and none begins while a whole step is owed. What was decoded
before counts: a burst that comes now and then is prefilled at once. Counts alone decide, not times: all ranks
must decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.scheduler import Scheduler

REPLACED: Mapping[str, str] = {
    "managers.scheduler:Scheduler.get_new_batch_prefill": "a8b9a7a4fee3e50e",
}
SHARE = 0.5
"""Decode steps' time owed for each step's time of a prefill."""
ROWS = 4
TOKENS = 256
"""So many prompts of a pass, and so many of its tokens, take the time of a decode step, about."""
MAX_AHEAD = 4.0
"""Decode steps, at most, that count before a pass."""


class PrefillTurns:
    """Whose turn it is: decode steps owed, below zero where more were run."""

    def __init__(self) -> None:
        self._owed = 0.0

    @property
    def must_decode(self) -> bool:
        """Whether a decode step comes next, where anything is there to decode."""
        return self._owed >= 1.0

    def prefilled(self, rows: int, tokens: int) -> None:
        """A pass was run, of so many prompts and tokens."""
        self._owed += SHARE * (1 + rows / ROWS + tokens / TOKENS)

    def decoded(self) -> None:
        """A decode step was run."""
        self._owed = max(self._owed - 1.0, -MAX_AHEAD)

    def idled(self) -> None:
        """Nothing is there to decode."""
        self._owed = min(self._owed, 0.0)


def install() -> None:
    """Have SGLang's scheduler look whose turn it is before it makes a prefill batch."""
    make, turns = Scheduler.get_new_batch_prefill, PrefillTurns()

    def get_new_batch_prefill(self: Any, running_batch: Any) -> Any:
        is_idle = running_batch.is_empty() or running_batch.is_prefill_only
        if is_idle:
            turns.idled()
        elif turns.must_decode:
            turns.decoded()
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        plan = make(self, running_batch)
        batch = plan.batch_to_run
        if batch is not None and not batch.forward_mode.is_mixed():  # a mixed one decodes as well
            turns.prefilled(len(batch.reqs), batch.extend_num_tokens)
        elif not is_idle:
            turns.decoded()
        return plan

    Scheduler.get_new_batch_prefill = get_new_batch_prefill
