"""An answer ends as `stop` where its grammar, and what else bears on its row, leaves no token.

Three things leave none: `min_tokens` forbids the end of an answer whose grammar is complete; it forbids a
token of `stop_token_ids` that the grammar wants; a grammar has no way on (`{"$ref": "#"}`). All logits of the
row are then -inf. In SGLang 0.5.20 its probabilities are NaN, and sampling raises in the scheduler of all
(layers/sampler.py). The grammar would refuse a token drawn at random, and SGLang would abort the request.

Here such a row allows the tokens that end a text, and nothing else. A grammar takes that end even where it is
not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

REPLACED: Mapping[str, str] = {
    "sampling.sampling_batch_info:SamplingBatchInfo.apply_logits_bias": "1e39687d59461a97",
    "sampling.sampling_batch_info:SamplingBatchInfo.apply_logits_bias_with_observer": "e1996a728d1d1bfa",
    "constrained.xgrammar_backend:XGrammarGrammar.accept_token": "10ac43f0c3da49ef",
    "constrained.xgrammar_backend:XGrammarGrammar.is_terminated": "175c8ec913ff9700",
}


def install() -> None:
    """Have SGLang's batches leave an end, and its grammars take it."""
    for name in ("apply_logits_bias", "apply_logits_bias_with_observer"):
        setattr(SamplingBatchInfo, name, _leaving_an_end(getattr(SamplingBatchInfo, name)))
    accept, is_terminated = XGrammarGrammar.accept_token, XGrammarGrammar.is_terminated

    def accept_token(self: Any, token: int) -> None:
        try:
            accept(self, token)
        except ValueError:
            if token not in end_ids(self):
                raise
            self.is_cut_off = True

    def is_terminated_or_cut_off(self: Any) -> bool:
        return getattr(self, "is_cut_off", False) or bool(is_terminated(self))

    XGrammarGrammar.accept_token = accept_token
    XGrammarGrammar.is_terminated = is_terminated_or_cut_off


def end_ids(grammar: Any) -> tuple[int, ...]:
    """The ids that end a text by its grammar, of which a reasoner's is inside; only for xgrammar's."""
    inner = getattr(grammar, "grammar", None) or grammar
    if not isinstance(inner, XGrammarGrammar):
        return ()
    own = inner.override_stop_tokens
    return (own,) if isinstance(own, int) else tuple(own or inner.ctx.tokenizer_info.stop_token_ids)


def _leaving_an_end(apply: Any) -> Any:
    @cache
    def ends(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return torch.tensor(ids, device=device)

    def guarded(self: SamplingBatchInfo, logits: torch.Tensor, *args: Any) -> Any:
        result = apply(self, logits, *args)
        if self.grammar_mask is not None:
            is_dead = logits.isneginf().all(dim=-1, keepdim=True)
            ids = end_ids(self.grammar_mask.grammar)
            columns = ends(ids, logits.device) if ids else slice(None)
            logits[:, columns] = logits[:, columns].masked_fill(is_dead, 0.0)
        return result

    return guarded
