"""The path from SGLang's detokenizer to our streams: one pass over each batch, no per-request task.

SGLang's own path builds a `meta_info` dict and runs a waiter with a time-out for every request and
token; here a batch's columns go to the request's sink. Requests that are not ours (none in normal
service) take SGLang's path. For ours this leaves out what that path also does: SGLang's
tokenizer-side metrics and traces, request dumps, LoRA release, weight versions, hidden states and
speculative-decoding details; none of it is offered through `SGLangEngine`, which measures for itself.

Nothing here ends the process: a failure goes once to `on_failure`, and to every stream.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    TokenizedGenerateReqInput,
    sock_recv,
    unwrap_from_pickle,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from app.core import Counts
from app.engine.grammar.cost import GRAMMAR_ENDED
from app.engine.remote.model import ChoiceSink
from app.engine.tally import TokenTally
from app.errors import BadRequest, EngineFailed, EngineOverloaded, GrammarTooSlow, ServingError

RETRY_AFTER_FULL_S = 1
RECEIVING_S = 0.005
"""Seconds, or one batch, for which the event loop takes the engine's output before all else."""
_new_tuple = tuple.__new__


class HandoverTokenizerManager(TokenizerManager):
    """SGLang's TokenizerManager, with its output path for our requests replaced."""

    def __init__(self, server_args: Any, port_args: Any, **options: Any) -> None:
        super().__init__(server_args, port_args, **options)
        self._on_failure: Callable[[str], None] = lambda _reason: None
        self._max_tokens: Callable[[int, int | None], int] | None = None
        self.num_retractions = 0
        """Times that requests of ours, ended by now, were set aside for lack of KV memory."""
        self._sinks: dict[str, tuple[ChoiceSink, TokenTally]] = {}
        # The socket without asyncio around it: a future for each batch costs more than the batch.
        self._inbox: Any = zmq.Socket.shadow(self.recv_from_detokenizer.underlying)
        self._receiving: asyncio.AbstractEventLoop | None = None
        self._others: asyncio.Queue[Any] = asyncio.Queue()

    # --- requests

    async def submit(
        self, request: TokenizedGenerateReqInput, rid: str, sink: ChoiceSink, tally: TokenTally
    ) -> None:
        """Send a copy of a tokenized request under `rid`; its output goes to `sink`, counted in `tally`."""
        sent = copy.copy(request)
        sent.rid = rid
        # Sending moves image features into shared memory, in place; a prompt may be sent again.
        sent.mm_inputs = copy.deepcopy(request.mm_inputs)
        sent.time_stats = APIServerReqTimeStats(disagg_mode=self.disaggregation_mode)
        sent.time_stats.set_created_time()
        self._sinks[rid] = sink, tally
        try:
            await self._send_one_request(sent)
        except BaseException:
            del self._sinks[rid]
            raise

    async def tokenize(self, obj: Any) -> TokenizedGenerateReqInput:
        """SGLang's own checks, image processing and sampling parameters for one request, unsent."""
        obj.normalize_batch_and_arguments()
        self._init_req_state(obj)
        try:
            return await self._tokenize_one_request(obj)
        finally:
            del self.rid_to_state[obj.rid]

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:  # noqa: FBT001, FBT002  # SGLang's
        """See SGLang, which would tokenize on the event loop what stands beside an image."""
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

    def fail_all(self, reason: str) -> None:
        """End every stream with EngineFailed."""
        sinks, self._sinks = self._sinks, {}
        for sink, _ in sinks.values():
            sink.fail(EngineFailed(reason))

    # --- SGLang's loop

    def start(
        self, *, max_tokens: Callable[[int, int | None], int], on_failure: Callable[[str], None]
    ) -> None:
        """Start receiving on the running loop.

        `max_tokens` makes of a prompt's tokens, and of the tokens asked for, the tokens to generate at most;
        it raises where the prompt does not fit. `on_failure` gets the reason when receiving breaks.
        """
        self._max_tokens, self._on_failure = max_tokens, on_failure
        self.auto_create_handle_loop()

    def auto_create_handle_loop(self) -> None:
        """Start receiving on the running loop; unlike SGLang's, installs no signal handlers."""
        if self._receiving is not None:
            return
        self._receiving = self.event_loop = loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.fileno(), self._on_readable)
        self.asyncio_tasks.add(loop.create_task(self._handle_others()))

    async def stop(self) -> None:
        """Stop receiving and close the sockets that SGLang leaves open."""
        if self._receiving is not None:
            self._receiving.remove_reader(self._inbox.fileno())
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
        """Take what has come; the descriptor tells of it once.

        Where that takes longer than the engine needs for more, it would never end: the rest has its turn
        after whatever else waits for the loop.
        """
        inbox = self._inbox
        until_s = time.monotonic() + RECEIVING_S
        try:
            while not inbox.closed and inbox.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                if time.monotonic() > until_s:
                    asyncio.get_running_loop().call_soon(self._on_readable)
                    return
                self._receive(sock_recv(inbox, zmq.NOBLOCK))
        except Exception as exc:  # noqa: BLE001  # SGLang would end the whole process here
            self._broken(exc)

    def _receive(self, message: Any) -> None:
        if type(message) is not BatchStrOutput:
            self._others.put_nowait(message)
            return
        if rows := self._hand_over(message):
            self._others.put_nowait(_only(message, rows))

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

    def _hand_over(self, batch: BatchStrOutput) -> list[int]:
        """Give each row to its sink; returns the rows that have none."""
        sinks = self._sinks
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
            entry = sinks.get(rid)
            if entry is None:
                rows_of_others.append(row)
                continue
            sink, tally = entry
            if finish is not None:
                del sinks[rid]
                self.num_retractions += batch.retraction_counts[row]
            if finish is None or finish.get("status_code") is None:  # a refusal is an error and no delta
                tally.add(len(token_ids))
            # What `Counts(...)` does, without its Python-level call: this line runs once per token.
            counts = _new_tuple(Counts, (prompt, completion, cached, reasoning))
            sink.take(text, token_ids, finish, counts, batch, row)
        return rows_of_others

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """An abort or a refusal of a request that never ran."""
        entry = self._sinks.pop(recv_obj.rid, None)
        if entry is None:
            super()._handle_abort_req(recv_obj)
            return
        sink, _ = entry
        finish = recv_obj.finished_reason or {"type": "abort", "message": recv_obj.abort_message}
        sink.take("", (), finish, sink.counts, None, 0)


def refusal(finish: dict[str, Any], grammar_param: str | None = None) -> ServingError | None:
    """The error in an abort that SGLang itself decided; None for one that we asked for.

    `grammar_param` is the request's parameter that has its grammar.
    """
    status = finish.get("status_code")
    if status is None:
        return None
    message = str(finish.get("message") or "the engine refused the request")
    if message.startswith(GRAMMAR_ENDED):
        words = message.removeprefix(GRAMMAR_ENDED)
        return GrammarTooSlow(
            f"The request was ended, for its grammar is too slow: {words}.", param=grammar_param
        )
    if status == HTTPStatus.BAD_REQUEST:
        return BadRequest(message)
    if status in {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}:
        return EngineOverloaded(message, retry_after_s=RETRY_AFTER_FULL_S)
    return EngineFailed(message)


def _only(batch: BatchStrOutput, rows: list[int]) -> BatchStrOutput:
    """A batch of some of a batch's rows."""
    total = len(batch.rids)
    columns = {}
    for column in msgspec.structs.fields(type(batch)):
        value = unwrap_from_pickle(getattr(batch, column.name))
        if isinstance(value, list) and len(value) == total:
            columns[column.name] = [value[row] for row in rows]
    return msgspec.structs.replace(batch, **columns)
