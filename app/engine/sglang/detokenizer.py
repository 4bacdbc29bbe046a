"""SGLang's detokenizer, sending only what the hand-over reads.

Half of the time that a batch takes to unpickle in the server goes into each request's scheduler
timings, which only SGLang's own metrics use, and into one array object per request.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process


class HandoverDetokenizer(DetokenizerManager):
    """SGLang's DetokenizerManager with leaner batches."""

    def handle_batch_token_id_out(self, recv_obj: Any) -> Any:
        batch = super().handle_batch_token_id_out(recv_obj)
        batch.time_stats = None
        if batch.output_ids is not None:
            batch.output_ids = [list(ids) for ids in batch.output_ids]
        return batch


def run(server_args: Any, port_args: Any) -> None:
    """The detokenizer process."""
    run_detokenizer_process(server_args, port_args, HandoverDetokenizer)
