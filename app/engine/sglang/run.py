"""One run of SGLang: from its launch to its stop, with what was made for it. An engine has one after another.

Nothing of SGLang is imported before `start`, and that in the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from app.core import ChatRequest, EngineLoad
from app.engine.sglang.args import NO_MEDIA_DOMAIN, SGLangOptions
from app.engine.sglang.live_choices import LiveChoice, LiveChoices
from app.engine.sglang.platform import prepare_process, without_collections
from app.engine.sglang.process_work import started_cpu_s
from app.engine.sglang.watchdog import HangWatchdog, Progress
from app.engine.sink import GenerationStream, TokenTally
from app.engine.supervise import LossCause
from app.errors import EngineFailed

if TYPE_CHECKING:
    from app.engine.sglang.launch import Launched

EXIT_WAIT_S = 0.5
KILL_INTERVAL_S = 0.05
WARM_UP_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAAA1BMVEV/f3+QyhsjAAAAD0lEQVQoU2Ng"
    "GAWjYGACAAJAAAEq1i4VAAAAAElFTkSuQmCC"
)

OnLoss = Callable[[LossCause, str], None]


class SGLangRun:
    """Made by `start`; once it serves, `on_loss` is called if it ends by itself."""

    def __init__(self, options: SGLangOptions, thread: ThreadPoolExecutor, launched: Launched) -> None:
        from app.engine.sglang.render import Renderer, RenderLimits

        self._options = options
        self._thread = thread
        self.launched = launched
        self.limits = limits = RenderLimits(
            context_length=launched.manager.context_len,
            kv_capacity_tokens=launched.kv_capacity_tokens,
            max_prompt_tokens=launched.max_req_input_len - 1,
            page_size=launched.page_size,
            reserved_tokens=launched.manager.num_reserved_tokens,
            default_max_tokens=options.default_max_tokens,
        )
        domains = options.server_args.get("allowed_media_domains")
        self.renderer = Renderer(
            launched.chat,
            limits,
            name=options.name,
            remote_media=bool(domains) and domains != [NO_MEDIA_DOMAIN],
            deterministic=launched.deterministic,
            vision=launched.vision,
        )
        pool_tokens = launched.kv_capacity_tokens * launched.replicas
        self.model = self.renderer.card(
            options.name, launched.grammar_backend, pool_tokens, launched.replicas
        )
        self._live = LiveChoices()
        self._on_loss: OnLoss | None = None
        self._replicas: dict[int, int] = {}
        """Descriptors of the schedulers that the data parallel controller has started, with their ids."""
        self._is_connected = True
        self._is_lost = False
        self.closed = False

    @classmethod
    async def start(
        cls,
        options: SGLangOptions,
        thread: ThreadPoolExecutor,
        *,
        warm_up_hang_s: float = 0.0,
        on_launched: Callable[[], None] = lambda: None,
    ) -> SGLangRun:
        """Launch SGLang and warm it up. Raises what a launch does; nothing is left of one that failed.

        A warm-up without progress for `warm_up_hang_s` seconds fails; 0 is no limit. `on_launched` is called
        before it.
        """
        older = set(multiprocessing.active_children())
        launching = asyncio.get_running_loop().run_in_executor(thread, _launch, options)
        try:
            launched = await asyncio.shield(launching)
        except asyncio.CancelledError:
            while not launching.done():  # its processes are killed as they appear, so that it ends
                for process in set(multiprocessing.active_children()) - older:
                    process.kill()
                await asyncio.wait([launching], timeout=KILL_INTERVAL_S)
            if launching.exception() is None:
                await cls(options, thread, launching.result()).aclose()
            raise
        try:
            run = cls(options, thread, launched)
        except BaseException:
            await asyncio.get_running_loop().run_in_executor(thread, launched.stop)
            raise
        try:
            run._watch()
            on_launched()
            await run._warm_up(warm_up_hang_s)
        except BaseException:
            await asyncio.shield(run.aclose())
            raise
        return run

    async def freeze(self) -> None:
        """Collect the garbage of the start and of an earlier run, and freeze the rest.

        A full collection of the 700,000 objects that SGLang's import leaves stops a process for 0.4 s, ours
        and each of its children; SGLang's own HTTP server does the same once it is warm.
        """
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)  # 20 MB that a start needs for a moment; takes 3 to 30 ms
        await self.launched.manager.freeze_gc()

    @property
    def progress(self) -> Progress:
        """The progress that its watchdog looks at."""
        sent = len(self._live.running) + len(self._live.replaying)
        return Progress(sent, self.launched.manager.num_batches, self.load())

    def watch_for_hangs(self, hang_s: float, name: str) -> asyncio.Task[None] | None:
        """A task that loses the engine after `hang_s` seconds without progress; none for 0, no limit."""
        if not hang_s:
            return None
        compiled_s = partial(started_cpu_s, self.launched.scheduler_pids)

        def hung(silent_s: float) -> None:
            self.lose("hung", f"no progress for {silent_s:.1f} s")

        watchdog = HangWatchdog(hang_s, lambda: self.progress, hung, compiled_s=compiled_s)
        return asyncio.create_task(watchdog.run(), name=name)

    def serve(self, live: LiveChoices, on_loss: OnLoss, on_mismatch: Callable[[str, str], None]) -> None:
        """From now on, generate for the choices of `live`, and report the engine's end to `on_loss`.

        Raises EngineFailed if it has ended since its warm-up.
        """
        if self._is_lost:
            raise EngineFailed("a process ended while the engine started")
        self._live, self._on_loss = live, on_loss
        self.launched.manager.serve(live, on_mismatch)

    async def aclose(self) -> None:
        """Stop SGLang and its processes, and free what they held; to be called once."""
        loop, launched = asyncio.get_running_loop(), self.launched
        self.closed = True
        self.disconnect()
        asked = False
        try:
            asked = not self._is_lost and launched.ask_to_end()  # a lost engine does not read it
        finally:
            num_left = await loop.run_in_executor(self._thread, partial(launched.stop, asked=asked))
        if num_left:
            hint = "they did not end when they were asked to; memory of the GPU may stay taken for a while"
            structlog.get_logger().warning("schedulers_killed", schedulers=num_left, hint=hint)
        await launched.manager.stop()
        for _, process in launched.processes:
            process.close()
        gc.unfreeze()

    def disconnect(self) -> None:
        """Receive nothing more from it; a second call does nothing."""
        if self._is_connected:
            self._is_connected = False
            loop = asyncio.get_running_loop()
            for _, process in self.launched.processes:
                loop.remove_reader(process.sentinel)
            for descriptor in self._replicas:
                loop.remove_reader(descriptor)
                os.close(descriptor)
            self.launched.manager.disconnect()

    def lose(self, cause: LossCause, reason: str) -> None:
        """Note that it has ended by itself; a second call does nothing.

        Once it serves, `on_loss` has app.engine.sglang.recovery continue its choices. A warm-up fails.
        """
        if not self._is_connected:
            return
        self._is_lost = True
        self.disconnect()
        if self._on_loss is None:  # it is warming up: that fails
            self._live.fail_all(lambda: EngineFailed(reason))
        else:
            self._on_loss(cause, reason)

    def load(self) -> EngineLoad:
        """The load, as its schedulers last wrote it to shared memory."""
        manager = self.launched.manager
        ranks = manager.load_snapshot_reader.read_all()
        return EngineLoad(
            num_running_reqs=sum(rank.num_running_reqs for rank in ranks),
            num_queue_reqs=sum(rank.num_waiting_reqs for rank in ranks),
            used_tokens=sum(rank.num_used_tokens for rank in ranks),
            replica_used_tokens=tuple(rank.num_used_tokens for rank in ranks),
            max_total_tokens=sum(rank.max_total_num_tokens for rank in ranks),
            gen_throughput_tokens_per_s=sum(rank.gen_throughput for rank in ranks),
            max_running_reqs=sum(rank.max_running_requests for rank in ranks),
            num_retractions=manager.num_retractions,
        )

    async def submit(self, choice: LiveChoice) -> bool:
        """Send a choice to the scheduler; False where it has no room, and was ended with an error.

        One that was rendered for a larger KV pool, before a restart, continues as far as this one holds.
        Then it ends with the same error.
        """
        room_tokens = self.limits.room_tokens(len(choice.request.input_ids))
        if choice.max_tokens > room_tokens:
            if len(choice.known_ids) >= room_tokens:
                choice.sink.fail(self._too_small())
                return False
            choice.expect_cut(self._too_small)
        await self.launched.manager.submit(choice)
        return True

    def _too_small(self) -> EngineFailed:
        held = f"has KV memory for {self.limits.kv_capacity_tokens} tokens only"
        return EngineFailed(
            f"The engine was restarted, and {held}: the answer has no room left.", code="engine_restarted"
        )

    def abort(self, rid_prefix: str) -> None:
        """Stop every choice whose id begins so."""
        if self._is_connected:
            self.launched.manager.abort_all_of(rid_prefix)

    def _watch(self) -> None:
        """Receive what the model generates, and notice a child's end at once.

        The child's descriptor becomes readable when it exits.
        """
        self.launched.manager.start(
            self._live,
            max_tokens=self.limits.max_tokens,
            on_failure=lambda reason: self.lose("failed", reason),
        )
        loop = asyncio.get_running_loop()
        for name, process in self.launched.processes:
            loop.add_reader(process.sentinel, self._child_exited, name, process)
        if self.launched.replicas > 1:  # their controller does not look after them
            for pid in self.launched.scheduler_pids:
                with contextlib.suppress(ProcessLookupError):
                    self._replicas[os.pidfd_open(pid)] = pid
        for descriptor, pid in self._replicas.items():
            why = f"the scheduler of a replica, process {pid}, ended"
            loop.add_reader(descriptor, self.lose, "exited", why)

    def _child_exited(self, name: str, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(EXIT_WAIT_S)  # its descriptors close a moment before it can be reaped
        self.lose("exited", f"SGLang's {name} process ended with exit code {process.exitcode}")

    async def _warm_up(self, hang_s: float) -> None:
        """Generate a little, under a watchdog."""
        watching = self.watch_for_hangs(hang_s, "engine warm-up watchdog")
        try:
            await self._warm()
        finally:
            if watching is not None:
                watching.cancel()

    async def _warm(self) -> None:
        """One short request to each replica, and one image: the first takes seconds, later ones do not."""
        contents: list[Any] = ["Hello"]
        if "vision" in self.model.capabilities:
            image = {"type": "image_url", "image_url": {"url": WARM_UP_IMAGE}}
            contents.append([image, {"type": "text", "text": "Hello"}])
        for number, content in enumerate(contents):
            body = {"messages": [{"role": "user", "content": content}]}
            rid = f"warm-up-{number}"
            request = ChatRequest(rid, "", self.model.id, body, 0, max_tokens=2)
            internal, chat_request, _ = await asyncio.to_thread(self.renderer.convert, request)
            tokenized = await self.launched.manager.tokenize(internal, rid)
            num_replicas = self.launched.replicas
            replicas: Sequence[int | None] = range(num_replicas) if num_replicas > 1 else (None,)
            for replica in replicas:
                await self._generate_unread(f"{rid}-{replica}", tokenized, chat_request, replica)

    async def _generate_unread(
        self, rid: str, tokenized: Any, chat_request: Any, replica: int | None
    ) -> None:
        from app.engine.sglang.parse import choice_sink

        async def begin() -> None:
            await self.submit(LiveChoice(rid, tokenized, sink, TokenTally(), replica=replica))

        stream = GenerationStream(1, begin, lambda: None)
        sink = choice_sink(0, stream, len(tokenized.input_ids), self.launched.chat, request=chat_request)
        async for _ in stream:
            pass


def _launch(options: SGLangOptions) -> Launched:
    """Import SGLang, which takes seconds, and start its processes; runs in the engine's thread."""
    with warnings.catch_warnings():
        # Imports warn of hardware that this machine does not have.
        warnings.simplefilter("ignore")
        with without_collections():
            prepare_process()
            from app.engine.sglang.launch import launch

        return launch(options)
