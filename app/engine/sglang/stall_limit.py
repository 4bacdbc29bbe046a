"""The limit on one mask's time: which masks a step leaves out, the same on every tensor parallel rank.

Each rank computes each mask, and no two take the same time. So the first rank goes by its clock, and the
others by what it has left behind, which they look up in the store that the ranks met in. They look only
while a mask keeps them waiting: a step whose masks are quick costs no rank a message.

With grammars SGLang takes the lowest of the ids that the ranks sampled, and an abort ends the request, which
all ranks receive before their next result. So a rank that had the mask in time takes the same step.
"""

from __future__ import annotations

import functools
from typing import Any

STALL_S = 0.5
"""CPU time of a mask after which the step leaves its row out."""
STORE_PREFIX = "tokenring-stalled-masks"


class TorchRankStore:
    """The store of torch.distributed, in which ranks leave one another notes once SGLang has grouped them."""

    @functools.cached_property
    def is_first(self) -> bool:
        """True if this rank's clock is the one that counts; SGLang takes aborts from the same rank."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)

    def set(self, key: str) -> None:
        """Leave a note for all ranks."""
        self._store.set(key, "1")

    def has(self, key: str) -> bool:
        """True if the first rank has left that note."""
        return bool(self._store.check([key]))

    @functools.cached_property
    def _store(self) -> Any:
        from sglang.srt.runtime_context import get_parallel
        from torch.distributed import PrefixStore, distributed_c10d

        met_in = distributed_c10d._get_default_store()  # noqa: SLF001
        return PrefixStore(f"{STORE_PREFIX}-{get_parallel().attn_dp_rank}", met_in)


class StallLimit:
    """Decides for one rank; `store` is None where there is one alone."""

    def __init__(self, stall_s: float = STALL_S, store: TorchRankStore | None = None) -> None:
        self._stall_s = stall_s
        self._store = store
        self._step = 0

    def begin_step(self) -> None:
        """Count a step with masks; all ranks have the same steps, with the same rows."""
        self._step += 1

    def is_over(self, row: int, cpu_s: float) -> bool:
        """True if the step is to leave out a row whose mask has taken so much CPU time."""
        if self._store is None or self._store.is_first:
            return cpu_s > self._stall_s
        return self._store.has(f"{self._step}-{row}")

    def leave(self, row: int) -> None:
        """Note that the step leaves a row out."""
        if self._store is not None and self._store.is_first:
            self._store.set(f"{self._step}-{row}")
