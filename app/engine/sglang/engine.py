"""`SGLangEngine`: real SGLang in this process, behind the `Engine` protocol.

This module imports nothing of SGLang until `start()`, and that in a thread of its own, so that the
server answers while the model loads. The thread lives as long as the engine: SGLang's children are
killed with the thread that started them. Requests are rendered in threads too (`render_queues`).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import secrets
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from app.core import ChatRequest, Counts, Delta, EngineLoad, Health, ModelCard, Prompt
from app.engine.generation_stream import GenerationStream
from app.engine.image_limits import check_images
from app.engine.limits import check_text_only
from app.engine.render_queues import NODE_BYTES, UTF8_BYTES, RenderQueues
from app.engine.sglang.args import NO_MEDIA_DOMAIN, SGLangOptions
from app.engine.sglang.live_choices import LiveChoice, LiveChoices
from app.engine.sglang.platform import prepare_process
from app.engine.tally import Tallies, TokenTally
from app.errors import BadRequest, EngineFailed, EngineNotReady
from app.settings import SettingsError

if TYPE_CHECKING:
    from app.engine.sglang.grammar import GrammarCheck
    from app.engine.sglang.launch import Launched
    from app.engine.sglang.render import Renderer, RenderLimits
    from app.engine.sglang.splice import Splice

EXIT_WAIT_S = 0.5
WARM_UP_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAAA1BMVEV/f3+QyhsjAAAAD0lEQVQoU2Ng"
    "GAWjYGACAAJAAAEq1i4VAAAAAElFTkSuQmCC"
)


class SGLangEngine:
    """One model served by SGLang in this process; `on_death` is called once if it dies."""

    def __init__(self, options: SGLangOptions, *, on_death: Callable[[str], None] | None = None) -> None:
        self._options = options
        self._on_death = on_death or (lambda _reason: None)
        self._health = Health.STARTING
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._render_queues = RenderQueues()
        self._launched: Launched | None = None
        self._renderer: Renderer | None = None
        self._grammar: GrammarCheck | None = None
        self._model: ModelCard | None = None
        self._streams: dict[str, GenerationStream] = {}
        self._live = LiveChoices()
        self._tallies = Tallies()
        self._owns_sigquit = False

    # --- life

    @property
    def model(self) -> ModelCard:
        if self._model is None:
            raise EngineNotReady("The model is still loading.", retry_after_s=5)
        return self._model

    async def start(self) -> None:
        """Load the model and warm up. Raises EngineFailed with the reason, or SettingsError."""
        loop = asyncio.get_running_loop()
        self._own_sigquit(loop)
        try:
            self._launched = await loop.run_in_executor(self._thread, self._launch)
            limits = self._describe(self._launched)
            self._watch(loop, self._launched, limits)
            self._grammar = await self._check_of_grammars(loop, self._launched)
            await self._warm_up()
            # A full collection of the 700,000 objects that SGLang's import leaves stops a process for 0.4 s,
            # ours and each of its children; SGLang's own HTTP server does the same once it is warm.
            gc.collect()
            await self._launched.manager.freeze_gc()
        except SettingsError:
            raise
        except Exception as exc:
            self._health = Health.DEAD
            raise EngineFailed(f"SGLang did not start: {type(exc).__name__}: {exc}") from exc
        self._health = Health.READY

    async def aclose(self) -> None:
        """Stop the engine and its processes; a second call does nothing."""
        launched, self._launched = self._launched, None
        grammar, self._grammar = self._grammar, None
        if grammar is not None:
            await grammar.aclose()
        loop = asyncio.get_running_loop()
        self._health = Health.DEAD
        if launched is not None:
            for _, process in launched.processes:
                loop.remove_reader(process.sentinel)
            self._live.fail_all(lambda: EngineFailed("The engine was stopped."))
            await loop.run_in_executor(self._thread, launched.stop)
            await launched.manager.stop()
            for _, process in launched.processes:
                process.close()
            gc.unfreeze()
        self._thread.shutdown(wait=False)
        self._render_queues.close()
        if self._owns_sigquit:
            self._owns_sigquit = False
            loop.remove_signal_handler(signal.SIGQUIT)

    def on_child_failure(self) -> None:
        """Handle the SIGQUIT that a child of SGLang sends when it fails."""
        self._die("a process of SGLang reported a failure")

    # --- requests

    def tokenizer_json(self) -> str | None:
        """See Engine.tokenizer_json; None for tokenizers that are not of the `tokenizers` library."""
        launched, _ = self._running()
        backend = getattr(launched.manager.tokenizer, "backend_tokenizer", None)
        return None if backend is None else backend.to_str()

    async def tokenize(self, owner: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """See Engine.tokenize."""
        _, renderer = self._running()
        work = partial(renderer.tokenize, text, add_special_tokens=add_special_tokens)
        return await self._render_queues.run_sized(owner, UTF8_BYTES * len(text), work)

    async def detokenize(
        self, owner: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """See Engine.detokenize."""
        _, renderer = self._running()
        work = partial(renderer.detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._render_queues.run_sized(owner, NODE_BYTES * len(token_ids), work)

    async def render(self, request: ChatRequest) -> Prompt:
        """Template, tokenize and check a request. Raises BadRequest naming the parameter, ContextOverflow."""
        launched, renderer = self._running()
        from app.engine.sglang.render import MAX_CHOICES, Rendered, refused

        if not 1 <= request.n <= MAX_CHOICES:
            raise BadRequest(f"n: must be between 1 and {MAX_CHOICES}.", param="n")
        if "vision" in self.model.capabilities:
            await check_images(request, self._options.images)

        def convert(request: ChatRequest) -> tuple[Any, Any, Splice]:
            """Convert a request in a thread, as it looks at each message."""
            if "vision" not in self.model.capabilities:
                check_text_only(request)
            return renderer.convert(request)

        internal, chat_request, spliced = await self._render_queues.run(convert, request)
        if self._grammar is not None:
            await self._grammar.check(request.owner, internal.sampling_params, chat_request)
        internal.rid = f"render-{request.request_id}"
        try:
            tokenized = await launched.manager.tokenize(internal)
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
        """Generate all choices of `prompt`, interleaved as they come; begins at the first read."""
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
        if stream is None or self._launched is None:
            return
        stream.abort()
        self._live.abort(f"{rid}-")
        if stream.begun:
            # SGLang aborts by prefix: ids are of fixed length, so this is exactly our choices.
            self._launched.manager.abort_all_of(f"{rid}-")

    def emitted_tokens(self, rid: str) -> int:
        """Token ids handed over for `rid` so far; forgets it once its stream has ended."""
        return self._tallies.of(rid)

    def load(self) -> EngineLoad:
        """The engine's current load, as its schedulers last wrote it to shared memory."""
        launched, _ = self._running()
        ranks = launched.manager.load_snapshot_reader.read_all()
        return EngineLoad(
            num_running_reqs=sum(rank.num_running_reqs for rank in ranks),
            num_queue_reqs=sum(rank.num_waiting_reqs for rank in ranks),
            used_tokens=sum(rank.num_used_tokens for rank in ranks),
            max_total_tokens=sum(rank.max_total_num_tokens for rank in ranks),
            gen_throughput_tokens_per_s=sum(rank.gen_throughput for rank in ranks),
            max_running_reqs=sum(rank.max_running_requests for rank in ranks),
            num_retractions=launched.manager.num_retractions,
        )

    def health(self) -> Health:
        return self._health

    # --- inside

    def _running(self) -> tuple[Launched, Renderer]:
        if self._launched is None or self._renderer is None or self._health is Health.DEAD:
            state = self._health.value
            raise EngineNotReady(f"The engine is {state}.", retry_after_s=5)
        return self._launched, self._renderer

    def _launch(self) -> Launched:
        """Import SGLang, which takes seconds, and start its processes; runs in the engine's thread."""
        with warnings.catch_warnings():
            # Imports warn of hardware that this machine does not have.
            warnings.simplefilter("ignore")
            prepare_process()
            from app.engine.sglang.launch import launch

            return launch(self._options)

    def _watch(self, loop: asyncio.AbstractEventLoop, launched: Launched, limits: RenderLimits) -> None:
        """Receive what the model generates, and notice a child's death at once.

        The child's descriptor becomes readable when it exits.
        """
        launched.manager.start(
            self._live,
            max_tokens=limits.max_tokens,
            on_failure=self._die,
            on_contradiction=lambda _rid, _what: None,
        )
        for name, process in launched.processes:
            loop.add_reader(process.sentinel, self._child_exited, name, process)

    def _child_exited(self, name: str, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(EXIT_WAIT_S)  # its descriptors close a moment before it can be reaped
        self._die(f"SGLang's {name} process ended with exit code {process.exitcode}")

    def _die(self, reason: str) -> None:
        """Tell every stream and the owner, once. While starting, `start()` raises instead."""
        if self._health is Health.DEAD:
            return
        was_ready = self._health is Health.READY
        self._health = Health.DEAD
        if self._launched is not None:
            self._live.fail_all(lambda: EngineFailed(f"The engine died: {reason}."))
        if was_ready:
            self._on_death(reason)

    def _describe(self, launched: Launched) -> RenderLimits:
        """Make the renderer and the model's card; returns the limits of prompts and answers."""
        from app.engine.sglang.render import Renderer, RenderLimits

        limits = RenderLimits(
            context_length=launched.manager.context_len,
            kv_capacity_tokens=launched.kv_capacity_tokens,
            max_prompt_tokens=launched.max_req_input_len - 1,
            page_size=launched.page_size,
            reserved_tokens=launched.manager.num_reserved_tokens,
            default_max_tokens=self._options.default_max_tokens,
        )
        domains = self._options.server_args.get("allowed_media_domains")
        self._renderer = Renderer(
            launched.chat,
            limits,
            name=self._options.name,
            remote_media=bool(domains) and domains != [NO_MEDIA_DOMAIN],
            deterministic=launched.deterministic,
        )
        self._model = ModelCard(
            id=self._options.name,
            context_length=launched.manager.context_len,
            kv_capacity_tokens=launched.kv_capacity_tokens * launched.replicas,
            max_prompt_tokens=limits.max_prompt_tokens,
            capabilities=launched.capabilities(),
        )
        return limits

    async def _check_of_grammars(
        self, loop: asyncio.AbstractEventLoop, launched: Launched
    ) -> GrammarCheck | None:
        """The check of grammars over this model's vocabulary; None where SGLang has none."""
        from app.engine.sglang.grammar import GrammarCheck

        setup = await loop.run_in_executor(self._thread, launched.grammar_setup, self._options)
        check = None if setup is None else GrammarCheck(setup)
        if check is not None:
            await check.start()
        return check

    async def _warm_up(self) -> None:
        """One short request, and one image: the first of each takes seconds, later ones do not."""
        contents: list[Any] = ["Hello"]
        if "vision" in self.model.capabilities:
            image = {"type": "image_url", "image_url": {"url": WARM_UP_IMAGE}}
            contents.append([image, {"type": "text", "text": "Hello"}])
        for number, content in enumerate(contents):
            body = {"messages": [{"role": "user", "content": content}]}
            request = ChatRequest(f"warm-up-{number}", "", self.model.id, body, 0, max_tokens=2)
            prompt = await self.render(request)
            async for _ in self.generate(request.request_id, prompt):
                pass

    async def _begin(self, rid: str, prompt: Prompt, stream: GenerationStream, tally: TokenTally) -> None:
        """Send every choice to SGLang as a request of its own: the prefix cache shares their prompt."""
        launched, _ = self._running()
        from app.engine.sglang.parse import choice_sink

        rendered = prompt.handle
        for index in range(rendered.choices):
            if stream.aborted:
                final = Delta(index, "text", "", (), Counts(len(prompt.token_ids)), "abort")
                stream.put_final(final)
                continue
            sink = choice_sink(index, stream, len(prompt.token_ids), launched.chat, request=rendered.request)
            request = rendered.tokenized
            if launched.deterministic:
                request = _with_seed(request, rendered.seed, index)
            prior = prompt.continued[index] if prompt.continued else ()
            await launched.manager.submit(LiveChoice(f"{rid}-{index:03d}", request, sink, tally, prior))

    def _ended(self, rid: str) -> None:
        stream = self._streams.pop(rid, None)
        self._tallies.end(rid)
        if stream is not None and stream.failed and self._launched and self._health is Health.READY:
            # One choice was refused: the others have no reader any more.
            self._launched.manager.abort_all_of(f"{rid}-")

    def _own_sigquit(self, loop: asyncio.AbstractEventLoop) -> None:
        """SGLang's children report failure by SIGQUIT, whose default action ends this process."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGQUIT, self.on_child_failure)
            self._owns_sigquit = True


def _with_seed(tokenized: Any, seed: int | None, index: int) -> Any:
    """Choices of a seeded request differ from one another, reproducibly; unseeded ones are random.

    In deterministic mode SGLang would take 42 for every request without a seed.
    """
    request = copy.copy(tokenized)
    request.sampling_params = copy.copy(tokenized.sampling_params)
    request.sampling_params.sampling_seed = secrets.randbits(31) if seed is None else seed + index
    return request
