"""SGLang 0.5.20's detokenizer, sending only what the hand-over reads, and reading no text again without end.

A batch that is all ours goes to the server with a quarter of its columns (StepBatch). In one with requests
of SGLang's own path, only the scheduler's timings are left out, which SGLang's own metrics use.

SGLang decodes all tokens since the last whole character with each new one. `logit_bias` can force an
answer of half characters: after 4,000 of them each choice takes 0.9 ms a step, in the process of everyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process

from app.engine.sglang.live_choices import StepBatch, is_choice_id

REPLACED: Mapping[str, str] = {
    "managers.detokenizer_manager:DetokenizerManager.handle_batch_token_id_out": "1b6df998fec82ee2",
    "managers.detokenizer_manager:DetokenizerManager._decode_batch_token_id_output": "8387a2398f081d32",
}
MAX_BROKEN_TOKENS = 32
"""Tokens without a whole character after which their text is taken as it is; a character has four at most."""

_columns = attrgetter(*StepBatch._fields)


class HandoverDetokenizer(DetokenizerManager):
    """SGLang's DetokenizerManager with leaner batches."""

    def handle_batch_token_id_out(self, recv_obj: Any) -> Any:
        batch = super().handle_batch_token_id_out(recv_obj)
        batch.time_stats = None
        if batch.output_ids is not None:  # an array object for each request takes longer to unpickle
            batch.output_ids = [list(ids) for ids in batch.output_ids]
        return StepBatch._make(_columns(batch)) if all(map(is_choice_id, batch.rids)) else batch

    def _decode_batch_token_id_output(self, recv_obj: Any) -> list[str]:
        texts: list[str] = super()._decode_batch_token_id_output(recv_obj)
        for row, rid in enumerate(recv_obj.rids):
            status = self.decode_status.get(rid)
            if status is not None and len(status.decode_ids) - status.read_offset > MAX_BROKEN_TOKENS:
                texts[row] += self._passed_through(status, recv_obj, row)
        return texts

    def _passed_through(self, status: Any, recv_obj: Any, row: int) -> str:
        """The rest of a row's text, broken or not; later tokens are decoded without it."""
        context, text = self._grouped_batch_decode(
            [status.decode_ids[status.surr_offset : end] for end in (status.read_offset, None)],
            [recv_obj.skip_special_tokens[row]] * 2,
            [recv_obj.spaces_between_special_tokens[row]] * 2,
        )
        fresh: str = text[len(context) :]
        rest = fresh[status.sent_offset - status.decoded_text_len :]
        status.append_decoded_text(fresh)
        status.surr_offset, status.read_offset = status.read_offset, len(status.decode_ids)
        status.sent_offset = status.decoded_text_len
        return rest


def run(server_args: Any, port_args: Any) -> None:
    """The detokenizer process."""
    run_detokenizer_process(server_args, port_args, HandoverDetokenizer)
