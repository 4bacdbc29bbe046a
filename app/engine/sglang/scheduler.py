"""SGLang's scheduler, in which no request holds up the step that all share, or ends it for all.

app.engine.sglang.grammar_guard counts what grammars cost, app.engine.sglang.continuation queues answers that
began elsewhere, and app.engine.sglang.patches has what is replaced of SGLang's own besides.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import run_scheduler_process

from app.engine.sglang import continuation
from app.engine.sglang.grammar_guard import STALL_S, GrammarGuard
from app.engine.sglang.patches import dead_ends, logit_bias, stop_strings


def run(server_args: Any, *args: Any, grammar_mask_ms: float, **kwargs: Any) -> Any:
    """The scheduler process; see CostMeter for `grammar_mask_ms`."""
    dead_ends.install()
    # A mask that is left behind on one tensor parallel rank would not be on another.
    stall_s = STALL_S if server_args.tp_size == 1 else None
    GrammarGuard(grammar_mask_ms, stall_s=stall_s).install()
    continuation.install()
    stop_strings.install()
    logit_bias.install()
    return run_scheduler_process(server_args, *args, **kwargs)
