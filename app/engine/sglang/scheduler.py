"""SGLang's scheduler process, in which no request holds up the step that all share, or ends it for all."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import run_scheduler_process

from app.engine.sglang.patches import continued_requests, dead_ends, logit_bias, penalties, stop_strings
from app.engine.sglang.patches.grammar_guard import GrammarGuard
from app.engine.sglang.stall_limit import StallLimit, TorchRankStore


def run(server_args: Any, *args: Any, grammar_mask_ms: float, **kwargs: Any) -> Any:
    """The scheduler process; see CostMeter for `grammar_mask_ms`."""
    dead_ends.install()
    # With pipeline stages the last has the masks, and the first decides on aborts: it would not know.
    limit = None
    if server_args.pp_size == 1:
        limit = StallLimit(store=TorchRankStore() if server_args.tp_size > 1 else None)
    GrammarGuard(grammar_mask_ms, limit).install()
    continued_requests.install()
    stop_strings.install()
    logit_bias.install()
    penalties.install()
    return run_scheduler_process(server_args, *args, **kwargs)
