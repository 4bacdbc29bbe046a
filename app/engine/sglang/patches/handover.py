"""The path from SGLang 0.5.20's detokenizer to our streams: one pass over each batch, no per-request task.

SGLang's own path builds a `meta_info` dict and runs a waiter with a time-out for every request and
token; here a batch's columns go to the request's sink. Requests that are not ours (none in normal
service) take SGLang's path. For ours this leaves out what that path also does: SGLang's
tokenizer-side metrics and traces, request dumps, LoRA release, weight versions, hidden states and
speculative-decoding details; none of it is offered through `SGLangEngine`, which measures for itself.

Nothing here ends the process: a failure goes once to `on_failure`. Output that contradicts earlier
output ends its own choice, and no other.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    TokenizedGenerateReqInput,
    sock_recv,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from app.core import Counts
from app.engine.sglang.live_choices import (
    ABORTED,
    Finish,
    LiveChoice,
    LiveChoices,
    OutputMismatch,
    Replay,
    Step,
    StepBatch,
)
from app.engine.sglang.patches.continued_requests import NOT_CONTINUED, with_continued
from app.errors import EngineFailed

REPLACED: Mapping[str, str] = {
    "managers.tokenizer_manager:TokenizerManager._tokenize_texts": "4b355115b2344bd9",
    "managers.tokenizer_manager:TokenizerManager._validate_one_request": "b89805baf364d512",
    "managers.tokenizer_manager:TokenizerManager._handle_abort_req": "75b01eedc2169c30",
    "managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop": "b1681bd4acbde29d",
}
RECEIVING_S = 0.005
"""Seconds, or one batch, for which the event loop takes the engine's output before all else."""
POLLIN = int(zmq.POLLIN)
"""As a plain integer: an operation with an enumeration's member takes 3 us."""
_new_tuple = tuple.__new__


class HandoverTokenizerManager(TokenizerManager):
    """SGLang's TokenizerManager, with its output path for our requests replaced."""

    def __init__(self, server_args: Any, port_args: Any, **options: Any) -> None:
        super().__init__(server_args, port_args, **options)
        self._on_failure: Callable[[str], None] = lambda _reason: None
        self._on_mismatch: Callable[[str, str], None] = lambda _rid, _what: None
        self._max_tokens: Callable[[int, int | None], int] | None = None
        self.num_retractions = 0
        """Times that requests of ours, ended by now, were set aside for lack of KV memory."""
        self.num_batches = 0
        """Messages received; while choices are open, an engine that sends none makes no progress."""
        self._live = LiveChoices()
        self._cut_off: set[str] = set()
        """Choices that were ended here, and whose last step has not arrived."""
        # The socket without asyncio around it: a future for each batch costs more than the batch.
        self._inbox: Any = zmq.Socket.shadow(self.recv_from_detokenizer.underlying)
        self._receiving: asyncio.AbstractEventLoop | None = None
        self._others: asyncio.Queue[Any] = asyncio.Queue()

    # --- requests

    async def submit(self, choice: LiveChoice) -> None:
        """Send a copy of a choice's request, to continue behind the ids of its answer so far."""
        rid, sent = choice.rid, copy.copy(choice.request)
        sent.rid, sent.routed_dp_rank = rid, choice.replica
        # Sending moves image features into shared memory, in place; a prompt may be sent again.
        sent.mm_inputs = copy.deepcopy(choice.request.mm_inputs)
        sent.time_stats = APIServerReqTimeStats(disagg_mode=self.disaggregation_mode)
        sent.time_stats.set_created_time()
        if choice.known_ids:
            sent.sampling_params = with_continued(sent.sampling_params, choice.known_ids)
            self._live.replaying[rid] = Replay(choice)
        else:
            self._live.running[rid] = choice
        try:
            await self._send_one_request(sent)
        except BaseException:
            self._live.pop(rid)
            raise
        if choice.aborted:  # while it was sent: the scheduler did not know it then
            self.abort_all_of(rid)

    async def tokenize(self, obj: Any, rid: str) -> TokenizedGenerateReqInput:
        """SGLang's own checks, image processing and sampling parameters for one request, unsent."""
        obj.rid = rid
        obj.normalize_batch_and_arguments()
        self._init_req_state(obj)
        try:
            return await self._tokenize_one_request(obj)
        finally:
            del self.rid_to_state[obj.rid]

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:  # noqa: FBT001, FBT002  # SGLang's
        """Tokenize the text beside an image in a thread; SGLang would do it on the event loop."""
        tokenizing = super()._tokenize_texts(texts, is_cross_encoder)
        if self.async_dynamic_batch_tokenizer is not None:  # it has a thread already
            return await tokenizing
        return await asyncio.to_thread(asyncio.run, tokenizing)

    def _validate_one_request(self, obj: Any, input_ids: list[int]) -> None:
        if self._max_tokens is not None:
            asked = obj.sampling_params.get("max_new_tokens")
            obj.sampling_params["max_new_tokens"] = self._max_tokens(len(input_ids), asked)
        super()._validate_one_request(obj, input_ids)

    def abort_all_of(self, rid_prefix: str) -> None:
        """Stop every request whose id starts with `rid_prefix`."""
        self._dispatch_to_scheduler(AbortReq(rid=rid_prefix))

    # --- SGLang's loop

    def start(
        self,
        live: LiveChoices,
        *,
        max_tokens: Callable[[int, int | None], int],
        on_failure: Callable[[str], None],
    ) -> None:
        """Start receiving on the running loop, for the choices in `live`.

        `max_tokens` makes of a prompt's tokens, and of the tokens asked for, the tokens to generate at most;
        it raises where the prompt does not fit. `on_failure` gets the reason when receiving breaks.
        """
        self._live, self._max_tokens, self._on_failure = live, max_tokens, on_failure
        self.auto_create_handle_loop()

    def serve(self, live: LiveChoices, on_mismatch: Callable[[str, str], None]) -> None:
        """Serve other choices; `on_mismatch` gets a choice's id, and what is wrong with it."""
        self._live, self._on_mismatch = live, on_mismatch

    def auto_create_handle_loop(self) -> None:
        """Start receiving on the running loop; unlike SGLang's, installs no signal handlers."""
        if self._receiving is not None:
            return
        self._receiving = self.event_loop = loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.fileno(), self._on_readable)
        self.asyncio_tasks.add(loop.create_task(self._handle_others()))

    def disconnect(self) -> None:
        """Receive nothing more; a second call does nothing."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.remove_reader(self._inbox.fileno())

    async def stop(self) -> None:
        """Stop receiving and close the sockets that SGLang leaves open."""
        self.disconnect()
        tasks = list(self.asyncio_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context = self.recv_from_detokenizer.context  # one for all sockets; SGLang keeps it nowhere else
        for socket in (self.recv_from_detokenizer, self.send_to_scheduler):
            socket.close(linger=0)
        context.term()
        self.load_snapshot_reader.close()

    def _on_readable(self) -> None:
        """Receive all messages that have arrived; the descriptor signals them once.

        Where that takes longer than the engine needs for more, it would never end: the rest is received
        after whatever else waits for the loop.
        """
        inbox = self._inbox
        until_s = time.monotonic() + RECEIVING_S
        try:
            while self._receiving is not None and inbox.getsockopt(zmq.EVENTS) & POLLIN:
                if time.monotonic() > until_s:
                    asyncio.get_running_loop().call_soon(self._on_readable)
                    return
                self._receive(sock_recv(inbox, zmq.NOBLOCK))
        except Exception as exc:  # noqa: BLE001  # SGLang would end the whole process here
            self._broken(exc)

    def _receive(self, message: Any) -> None:
        self.num_batches += 1
        if type(message) is not StepBatch and type(message) is not BatchStrOutput:
            self._others.put_nowait(message)
            return
        if self._hand_over(message):
            self._others.put_nowait(message)  # SGLang leaves out the rows that are not its own

    async def _handle_others(self) -> None:
        """SGLang's own handling of what is not ours, in order of arrival."""
        try:
            while True:
                message = await self._others.get()
                if isinstance(message, BatchStrOutput):
                    await self._handle_batch_output(message)
                else:
                    self._result_dispatcher(message)
        except Exception as exc:  # noqa: BLE001  # as above
            self._broken(exc)

    def _broken(self, exc: Exception) -> None:
        self._on_failure(f"receiving from the detokenizer failed: {type(exc).__name__}")

    def _hand_over(self, batch: StepBatch | BatchStrOutput) -> list[int]:
        """Give each row to its choice's sink; returns the rows that are of no choice."""
        running = self._live.running
        rows_of_others: list[int] = []
        for row, (rid, text, token_ids, finish, prompt, completion, cached, reasoning) in enumerate(
            zip(
                batch.rids,
                batch.output_strs,
                batch.output_ids,
                batch.finished_reasons,
                batch.prompt_tokens,
                batch.completion_tokens,
                batch.cached_tokens,
                batch.reasoning_tokens,
                strict=True,
            )
        ):
            # What `Counts(...)` does, without its Python-level call: this line runs once per token.
            counts = _new_tuple(Counts, (prompt, completion, cached, reasoning))
            choice = running.get(rid)
            if choice is None:
                if rid in self._live.replaying:
                    self._hand_over_again(rid, text, token_ids, finish, counts, (batch, row))
                elif rid in self.rid_to_state:
                    rows_of_others.append(row)
                else:
                    self._drop_stale(rid, finish)
                continue
            if finish is not None:
                del running[rid]
                self.num_retractions += batch.retraction_counts[row]
                self._end(choice, text, token_ids, finish, counts, (batch, row))
                continue
            # What `choice.take(...)` does, for the same reason.
            ids = choice.ids
            if len(token_ids) == 1:  # half the time of `extend`
                ids.append(token_ids[0])
            else:
                ids.extend(token_ids)
            if len(ids) != completion:
                self._end_mismatched(choice, f"{len(ids)} token ids, and a count of {completion}")
                continue
            choice.num_chars += len(text)
            choice.sink.take(text, token_ids, None, counts, batch, row)
        return rows_of_others

    def _end(
        self,
        choice: LiveChoice,
        text: str,
        token_ids: Sequence[int],
        finish: dict[str, Any],
        counts: Counts,
        step: Step,
    ) -> None:
        """Give a choice its last step."""
        num_ids = len(choice.ids) + len(token_ids)
        if finish.get("status_code") is not None:  # an error, and no tokens
            choice.end_refused(finish)
        elif finish["type"] == "abort" and not choice.aborted:
            choice.end_refused(finish | {"status_code": HTTPStatus.INTERNAL_SERVER_ERROR})
        elif num_ids != counts.completion_tokens:
            self._end_mismatched(choice, f"{num_ids} token ids, and a count of {counts.completion_tokens}")
        else:
            choice.take(text, token_ids, finish, counts, step)

    def _hand_over_again(
        self, rid: str, text: str, token_ids: Sequence[int], finish: Finish, counts: Counts, step: Step
    ) -> None:
        """Give a step to a choice that is continued."""
        replay = self._live.replaying[rid]
        choice = replay.choice
        if finish is not None and finish.get("status_code") is not None:
            del self._live.replaying[rid]
            if str(finish.get("message")).startswith(NOT_CONTINUED):
                self._on_mismatch(rid, "its own ids are not allowed by its grammar")
            choice.end_refused(finish)
            return
        try:
            replay.take(text, token_ids, finish, counts, step)
        except OutputMismatch as exc:
            self._end_mismatched(choice, str(exc))
            return
        if finish is not None:
            del self._live.replaying[rid]
        elif replay.done:
            del self._live.replaying[rid]
            self._live.running[rid] = choice

    def _drop_stale(self, rid: str, finish: Finish) -> None:
        """Drop a step of a choice that has ended; those that were cut off here may still have some."""
        if rid not in self._cut_off:
            self._on_mismatch(rid, "output after the final delta")
        elif finish is not None:
            self._cut_off.remove(rid)

    def _end_mismatched(self, choice: LiveChoice, what: str) -> None:
        """End a choice whose output cannot be trusted, and no other."""
        self._live.pop(choice.rid)
        self._cut_off.add(choice.rid)
        self.abort_all_of(choice.rid)
        self._on_mismatch(choice.rid, what)
        choice.sink.fail(EngineFailed(f"The engine's output for this request contradicts itself: {what}."))

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """An abort or a refusal of a request that never ran."""
        choice = self._live.pop(recv_obj.rid)
        if choice is None:
            super()._handle_abort_req(recv_obj)
            return
        choice.end_refused(recv_obj.finished_reason or {**ABORTED, "message": recv_obj.abort_message})
