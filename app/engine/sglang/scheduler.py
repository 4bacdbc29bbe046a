"""SGLang's scheduler, which takes answers that go on, and which a grammar without a way on does not end.

Where a grammar allows no token at all (`{"$ref": "#"}`, or a branch that nothing can fill), every
logit is -inf, the probabilities are NaN, and sampling raises in the scheduler of everyone
(sglang 0.5.20, layers/sampler.py). With the row made even, any token is drawn, the grammar
refuses it, and SGLang aborts that one request. app.engine.sglang.grammar_guard guards its cost.
app.engine.sglang.continuation queues answers that began elsewhere.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from app.engine.sglang import continuation
from app.engine.sglang.grammar_guard import GrammarGuard
from app.engine.sglang.patches import penalties
from app.engine.sglang.stall_limit import StallLimit, TorchRankStore


def run(server_args: Any, *args: Any, grammar_mask_ms: float, **kwargs: Any) -> Any:
    """The scheduler process; see CostMeter for `grammar_mask_ms`."""
    # With pipeline stages the last has the masks, and the first decides on aborts: it would not know.
    limit = None
    if server_args.pp_size == 1:
        limit = StallLimit(store=TorchRankStore() if server_args.tp_size > 1 else None)
    GrammarGuard(grammar_mask_ms, limit).install()
    continuation.install()
    penalties.install()
    for name in ("apply_logits_bias", "apply_logits_bias_with_observer"):
        setattr(SamplingBatchInfo, name, _leaving_a_way(getattr(SamplingBatchInfo, name)))
    return run_scheduler_process(server_args, *args, **kwargs)


def _leaving_a_way(apply: Any) -> Any:
    def guarded(self: SamplingBatchInfo, logits: Any, *args: Any) -> Any:
        result = apply(self, logits, *args)
        if self.grammar_mask is not None:
            logits.masked_fill_(logits.isneginf().all(dim=-1, keepdim=True), 0.0)
        return result

    return guarded
