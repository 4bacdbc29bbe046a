"""`SGLangEngine`: real SGLang in this process, behind the `Engine` protocol.

This module imports nothing of SGLang until `start()`, and that in a thread of its own, so that the
server answers while the model loads. The thread lives as long as the engine: SGLang's children are
killed with the thread that started them. Requests are rendered in threads too (`render_queues`).

An `SGLangRun` is one launch of SGLang. Where it ends by itself another follows (`recovery`), and the choices
continue: their readers notice a pause.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from app.core import ChatRequest, Counts, Delta, EngineLoad, Health, ModelCard, Prompt
from app.engine.grammar.cost import GrammarBudget
from app.engine.render_queues import NODE_BYTES, UTF8_BYTES, RenderQueues
from app.engine.request_limits import check_images
from app.engine.sglang.allowed_args import is_speculative
from app.engine.sglang.args import SGLangOptions, as_started
from app.engine.sglang.live_choices import LiveChoice, LiveChoices, choice_id
from app.engine.sglang.process_work import WARM_UP, launch_stage
from app.engine.sglang.recovery import Recovery
from app.engine.sglang.run import SGLangRun
from app.engine.sglang.watchdog import BUSY_FACTOR
from app.engine.sink import GenerationStream, Tallies, TokenTally
from app.engine.supervise import LossCause, RestartHistory, RestartLimits
from app.errors import BadRequest, EngineFailed, EngineNotReady
from app.settings import SettingsError

if TYPE_CHECKING:
    from app.engine.sglang.grammar import GrammarCheck


THREAD = "sglang"
"""The name of the thread that launches SGLang."""
END_S = 30.0
"""Seconds to await the end of a start that was given up: SGLang looks at its processes every 5 s."""


class SGLangEngine:
    """One model served by SGLang in this process; `on_death` is called once if it is lost permanently."""

    def __init__(
        self,
        options: SGLangOptions,
        *,
        on_death: Callable[[str], None] | None = None,
        limits: RestartLimits | None = None,
    ) -> None:
        self._options = options
        self._on_death = on_death or (lambda _reason: None)
        self._limits = limits or RestartLimits()
        self._health = Health.STARTING
        self._is_launched = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._render_queues = RenderQueues()
        self._run: SGLangRun | None = None
        self._grammar: GrammarCheck | None = None
        self._streams: dict[str, GenerationStream] = {}
        self._live = LiveChoices()
        self._tallies = Tallies()
        self.restarts = RestartHistory()
        """The outcomes of its restarts."""
        self._recovery = Recovery(self, self._live, self._limits, self.restarts)
        self._watching: asyncio.Task[None] | None = None
        self._owns_sigquit = False

    # --- life

    @property
    def model(self) -> ModelCard:
        if self._run is None:
            raise EngineNotReady("The model is still loading.", retry_after_s=5)
        return self._run.model

    async def start(self) -> None:
        """Load the model and warm up. Raises EngineFailed, SettingsError."""
        self._own_sigquit(asyncio.get_running_loop())
        try:
            await self._start_first()
        except SettingsError:
            raise
        except Exception as exc:
            self._health = Health.DEAD
            raise EngineFailed(f"SGLang did not start: {type(exc).__name__}: {exc}") from exc
        self._health = Health.READY

    def start_stage(self) -> str:
        """The stage of the start, for people who wait for it; blocks, as `launch_stage` does."""
        return WARM_UP if self._is_launched else launch_stage(os.getpid())

    async def aclose(self) -> None:
        """Stop the engine and its processes; a second call does nothing."""
        self._health = Health.DEAD
        await self._recovery.aclose()
        self._stop_watching()
        grammar, self._grammar = self._grammar, None
        if grammar is not None:
            await grammar.aclose()
        self._live.fail_all(lambda: EngineFailed("The engine was stopped."))
        run, self._run = self._run, None
        if run is not None and not run.closed:
            await run.aclose()
        self._thread.shutdown(wait=False)
        self._render_queues.close()
        if self._owns_sigquit:
            self._owns_sigquit = False
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

    def on_child_failure(self) -> None:
        """Handle the SIGQUIT that a child of SGLang sends when it fails."""
        if self._run is not None:
            self._run.lose("exited", "a process of SGLang reported a failure")

    # --- what recovery does with it

    async def restart(self) -> None:
        """Stop the rest of the engine, and start a new one. Raises any error of the start."""
        if self._run is not None and not self._run.closed:
            await self._run.aclose()
        began_s = asyncio.get_running_loop().time()
        self._run = run = await self._start_run(self._max_restart_s())
        await run.freeze()  # the lost run is gone: what is frozen is not freed before the next loss
        self._serve(run, began_s)

    async def submit(self, choice: LiveChoice) -> None:
        """Send a choice to the present engine, or end it where that has no room for it."""
        assert self._run is not None
        if not await self._run.submit(choice):
            self.restarts.count_lost_choices(1)

    def recovered(self) -> None:
        """Serve requests again."""
        self._health = Health.READY

    def fail_permanently(self, reason: str) -> None:
        """Fail every choice, and report the death to the owner, as the engine is not started again."""
        self._health = Health.DEAD
        self.restarts.count_lost_choices(len(self._live))
        self._live.fail_all(lambda: EngineFailed(f"The engine died: {reason}."))
        self._on_death(reason)

    async def _start_first(self) -> None:
        """Start SGLang for the first time; nothing is left of a start that failed."""
        began_s = asyncio.get_running_loop().time()
        run = await self._start_run(self._limits.start_s)
        try:
            await run.freeze()
            self._grammar = await self._start_grammar_check(run)
            self._serve(run, began_s)
        except BaseException:
            await asyncio.shield(run.aclose())
            raise
        launched = run.launched
        self._run, self._options = run, as_started(self._options, launched.tp, launched.kv_capacity_tokens)

    async def _start_run(self, max_s: float) -> SGLangRun:
        """Launch SGLang, in `max_s` seconds at most; 0 is any time.

        Raises what `SGLangRun.start` does, and EngineFailed where it takes longer; nothing is left then,
        unless the thread itself hangs, which `END_S` seconds are waited for.
        """
        self._is_launched = False

        def launched() -> None:
            self._is_launched = True

        hang_s = BUSY_FACTOR * self._limits.hang_s
        starting = asyncio.create_task(
            SGLangRun.start(self._options, self._thread, warm_up_hang_s=hang_s, on_launched=launched)
        )
        try:
            await asyncio.wait({starting}, timeout=max_s or None)
            if starting.done():
                return starting.result()
        finally:
            if not starting.done():
                starting.add_done_callback(lambda task: task.cancelled() or task.exception())
                starting.cancel()
                await asyncio.wait({starting}, timeout=END_S)  # a thread that hangs itself cannot be ended
        raise EngineFailed(f"the start hangs: it has taken {max_s:.0f} s")

    def _max_restart_s(self) -> float:
        """The longest time for a restart in seconds: the last start's with a wide margin; 0 is any."""
        limits = self._limits
        expected_s = BUSY_FACTOR * self.restarts.start_s + limits.hang_s
        return min(expected_s, limits.start_s or expected_s) if limits.hang_s else limits.start_s

    def _serve(self, run: SGLangRun, began_s: float) -> None:
        """Have `run` generate from now on, and watch it."""
        run.serve(self._live, self._lose, self.restarts.contradicted)
        self.restarts.started(asyncio.get_running_loop().time() - began_s)
        self._watching = run.watch_for_hangs(self._limits.hang_s, "engine watchdog")

    def _lose(self, cause: LossCause, reason: str) -> None:
        self._health = Health.STARTING
        self._stop_watching()
        self._recovery.lose(cause, reason)

    def _stop_watching(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()

    # --- requests

    def tokenizer_json(self) -> str | None:
        return self._running().renderer.tokenizer_json()

    async def tokenize(self, owner: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        renderer = self._running().renderer
        work = partial(renderer.tokenize, text, add_special_tokens=add_special_tokens)
        return await self._render_queues.run_sized(owner, UTF8_BYTES * len(text), work)

    async def detokenize(
        self, owner: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        renderer = self._running().renderer
        work = partial(renderer.detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._render_queues.run_sized(owner, NODE_BYTES * len(token_ids), work)

    async def render(self, request: ChatRequest) -> Prompt:
        """Template, tokenize and check a request. Raises BadRequest naming the parameter, ContextOverflow."""
        run = self._running()
        from app.engine.sglang.render import Rendered, refused

        if "vision" in self.model.capabilities:
            await check_images(request, self._options.images)
        internal, chat_request, spliced = await self._render_queues.run(run.renderer.convert, request)
        if self._grammar is not None:
            await self._grammar.check(request.owner, internal.sampling_params, chat_request)
        try:
            tokenized = await run.launched.manager.tokenize(internal, f"render-{request.request_id}")
        except ValueError as exc:
            if not internal.contains_mm_input():
                raise refused(exc) from None
            # SGLang's message holds the start of the data.
            raise BadRequest("An image, video or audio part could not be read.", param="messages") from None
        rendered = Rendered(tokenized, chat_request, request.n, chat_request.seed)
        return Prompt(
            tokenized.input_ids,
            tokenized.sampling_params.max_new_tokens,
            rendered,
            past_runs=spliced.past_runs,
            rerendered=spliced.rerendered,
            space=None if internal.contains_mm_input() else request.placement.cache_salt,
        )

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """Generate all choices of `prompt`, interleaved as they arrive; begins at the first read."""
        if rid in self._streams:
            raise ValueError(f"request id {rid} is in use")

        async def begin() -> None:
            try:
                await self._begin(rid, prompt, stream, tally)
            except BaseException:
                self.abort(rid)  # choices that were sent have no reader any more
                self._ended(rid)
                raise

        stream = GenerationStream(prompt.handle.choices, begin, lambda: self._ended(rid))
        self._streams[rid] = stream
        tally = self._tallies.begin(rid)
        return stream

    def abort(self, rid: str) -> None:
        """Stop all choices of `rid` at once; unknown and finished ids are ignored."""
        stream = self._streams.get(rid)
        if stream is None:
            return
        stream.abort()
        self._abort_choices(rid, sent=stream.begun)

    def _abort_choices(self, rid: str, *, sent: bool = True) -> None:
        self._live.abort(f"{rid}-")
        if sent and self._run is not None:
            # SGLang aborts by prefix: ids are of fixed length, so this is exactly our choices.
            self._run.abort(f"{rid}-")

    def pop_emitted_tokens(self, rid: str) -> int:
        """Token ids handed over for `rid` so far; forgets it once its stream has ended."""
        return self._tallies.pop(rid)

    def load(self) -> EngineLoad:
        """The engine's current load, as its schedulers last wrote it to shared memory."""
        return self._running().load()

    def health(self) -> Health:
        return self._health

    # --- inside

    def _running(self) -> SGLangRun:
        if self._run is None or self._health is not Health.READY:
            state, wait_s = self._health.value, self.restarts.retry_after_s()
            raise EngineNotReady(f"The engine is {state}.", retry_after_s=wait_s)
        return self._run

    async def _start_grammar_check(self, run: SGLangRun) -> GrammarCheck:
        """The check of grammars over this model's vocabulary, started."""
        from app.engine.sglang.grammar import grammar_check

        options, manager = self._options, run.launched.manager
        make = partial(
            grammar_check,
            manager,
            run.launched.grammar_backend,
            any_whitespace=not manager.server_args.constrained_json_disable_any_whitespace,
            speculative=is_speculative(options.server_args),
            budget=GrammarBudget(options.grammar_check_s, options.grammar_mask_ms),
        )
        check = await asyncio.get_running_loop().run_in_executor(self._thread, make)
        await check.start()
        return check

    async def _begin(self, rid: str, prompt: Prompt, stream: GenerationStream, tally: TokenTally) -> None:
        """Send every choice to SGLang as a request of its own: the prefix cache shares their prompt."""
        run = self._run
        if run is None or self._health is Health.DEAD:
            raise EngineNotReady(f"The engine is {self._health.value}.")
        from app.engine.sglang.parse import choice_sink

        rendered = prompt.handle
        num_tokens = len(prompt.token_ids)
        for index in range(rendered.choices):
            if stream.aborted:
                stream.put_final(Delta(index, "text", "", (), Counts(num_tokens), "abort"))
                continue
            sink = choice_sink(index, stream, num_tokens, run.launched.chat, request=rendered.request)
            request = rendered.request_of(index, deterministic=run.launched.deterministic)
            prior = prompt.continued[index] if prompt.continued else ()
            choice = LiveChoice(choice_id(rid, index), request, sink, tally, prior, prompt.replica)
            if self._health is Health.READY and self._run is not None:
                await self.submit(choice)
            else:
                self._live.wait(choice)

    def _ended(self, rid: str) -> None:
        stream = self._streams.pop(rid, None)
        self._tallies.end(rid)
        if stream is not None and stream.failed and self._run is not None:
            # One choice was refused: the others have no reader any more.
            self._abort_choices(rid)

    def _own_sigquit(self, loop: asyncio.AbstractEventLoop) -> None:
        """SGLang's children report failure by SIGQUIT, whose default action ends this process."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGQUIT, self.on_child_failure)
            self._owns_sigquit = True
