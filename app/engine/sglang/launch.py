"""SGLang's processes: launched, watched and stopped without ending ours.

`launch` must run in a thread that lives as long as the engine: SGLang's children ask the kernel to
be killed with the thread that started them.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.entrypoints import engine as sglang_engine
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.runtime_context import get_schedule
from sglang.srt.server_args import ServerArgs

from app.engine.sglang.allowed_args import refused
from app.engine.sglang.args import SGLangOptions, cpu_threads, server_arguments
from app.engine.sglang.patches.builtin_tools import load_sglang
from app.engine.sglang.patches.cpu_platform import keep_images_on_the_cpu
from app.engine.sglang.patches.handover import HandoverTokenizerManager
from app.engine.sglang.platform import (
    ChildEntry,
    child_environ,
    controller_entry,
    needs_cpu_platform,
    scheduler_entry,
)

STOP_TIMEOUT_S = 10.0
KEEPALIVE_S = 10
"""Seconds between the kernel's keep-alive probes of the first node; nine unanswered end the connection."""
RELEASE_TIMEOUT_S = 15.0
"""Seconds in which schedulers release pinned host memory, which a kill would leave taken; as SGLang's own."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A running SGLang: its tokenizer manager in this process, and its children."""

    manager: HandoverTokenizerManager
    chat: OpenAIServingChat
    processes: tuple[tuple[str, Any], ...]
    scheduler_pids: tuple[int, ...]
    kv_capacity_tokens: int
    max_req_input_len: int
    page_size: int
    replicas: int
    tp: int
    pp: int
    grammar_backend: str
    deterministic: bool
    load_file: Path

    @property
    def vision(self) -> bool:
        """True if the model sees images."""
        return self.manager.mm_processor is not None and self.manager.image_token_id is not None

    def ask_to_end(self) -> bool:
        """Ask the schedulers to end by themselves, so that they release the GPU; True if any was asked.

        To be called in the loop: SGLang's socket sends in no other thread. Pipeline stages do not obey it:
        their loops in SGLang 0.5.20 have no end.
        """
        if needs_cpu_platform() or self.pp > 1:  # on a CPU they hold nothing
            return False
        try:
            self.manager._dispatch_to_scheduler(ShutdownReq())  # noqa: SLF001
        except zmq.ZMQError:
            return False
        return True

    def stop(self, *, asked: bool = False) -> int:
        """End the children; blocks up to `RELEASE_TIMEOUT_S` for schedulers that were asked to end.

        Returns how many of these have been killed. The controller of replicas does not end by itself.
        """
        num_left = _wait(self.scheduler_pids, RELEASE_TIMEOUT_S) if asked else 0
        _kill([process for _, process in self.processes])
        self.load_file.unlink(missing_ok=True)  # 16 KiB of shared memory that SGLang would leave
        if self.manager.mm_processor is not None:
            self.manager.mm_processor.shutdown()
        self.manager.cuda_vmm_feature_transport.shutdown()
        return num_left


def launch(options: SGLangOptions) -> Launched:
    """Start SGLang's processes and wait until the model is loaded.

    Raises SettingsError for a bad server argument, anything else when a process fails.
    """
    server_args, environ = _prepared(options)
    if needs_cpu_platform():
        keep_images_on_the_cpu()
    older = set(multiprocessing.active_children())
    load_files: list[tuple[Any, Path]] = []

    def tokenizer_manager(server_args: Any, ports: Any) -> Any:
        manager, templates = _tokenizer_manager(server_args, ports)
        load_files.append((manager.load_snapshot_reader, Path(shm_path_for(ports.instance_id))))
        return manager, templates

    try:
        with _our_logging():
            manager, templates, ports, init, watchdog, _ = sglang_engine.Engine._launch_subprocesses(  # noqa: SLF001
                server_args,
                tokenizer_manager,
                scheduler_entry(environ, options.grammar_mask_ms),
                _detokenizer_entry(environ),
            )
    except BaseException:
        _kill(list(set(multiprocessing.active_children()) - older))
        for reader, path in load_files:  # SGLang would leave both
            reader.close()
            path.unlink(missing_ok=True)
        raise
    watchdog.stop()  # polls once a second and ends the process; ours waits on the children's sentinels
    infos = init.scheduler_infos
    processes = tuple(zip(watchdog._names, watchdog._processes, strict=True))  # noqa: SLF001
    pids = [process.pid for name, process in processes if name.startswith("scheduler")]
    if server_args.dp_size > 1:  # that one is the controller, which has started the schedulers
        pids = [pid for pid in init.all_child_pids if pid not in {process.pid for _, process in processes}]
    return Launched(
        manager=manager,
        chat=OpenAIServingChat(manager, templates),
        processes=processes,
        scheduler_pids=tuple(pids),
        kv_capacity_tokens=infos[0]["max_total_num_tokens"],
        max_req_input_len=infos[0]["max_req_input_len"],
        page_size=get_schedule().page_size,
        replicas=server_args.dp_size,
        tp=server_args.tp_size,
        pp=server_args.pp_size,
        grammar_backend=manager.config_value("grammar_backend") or "none",
        load_file=Path(shm_path_for(ports.instance_id)),
        deterministic=server_args.enable_deterministic_inference,
    )


def run_ranks(options: SGLangOptions, node_rank: int) -> None:
    """Start the ranks of another node than the server's; returns when one ends, or the first node's rank 0.

    A rank whose GPU waits for one that is gone may not notice; a connection to rank 0 shows its end. Raises
    what `launch` does. For a process of its own, which SGLang ends when a rank fails.
    """
    server_args, environ = _prepared(options, node_rank)
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # else SGLang opens a port for health checks
    sglang_engine.Engine._launch_subprocesses(  # noqa: SLF001
        server_args,
        _tokenizer_manager,
        scheduler_entry(environ, options.grammar_mask_ms),
        _detokenizer_entry(environ),
    )
    host, _, port = str(server_args.dist_init_addr).rpartition(":")
    # To PyTorch's store, which rank 0 holds.
    with socket.create_connection((host.strip("[]"), int(port))) as rank_0:
        rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        rank_0.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        rank_0.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        wait([rank_0, *(process.sentinel for process in multiprocessing.active_children())])


def _prepared(options: SGLangOptions, node_rank: int = 0) -> tuple[ServerArgs, dict[str, str]]:
    """SGLang's arguments, and the environment of its processes. Raises SettingsError."""
    load_sglang()
    server_args = resolved_args(options, node_rank=node_rank)
    return server_args, prepared_environ(options, server_args)


def prepared_environ(options: SGLangOptions, server_args: ServerArgs) -> dict[str, str]:
    """The environment of SGLang's processes, with the entry of its controller of replicas in place."""
    threads = cpu_threads(options, len(os.sched_getaffinity(0)))
    environ = child_environ(threads, server_args.tp_size * server_args.pp_size * server_args.dp_size)
    sglang_engine.run_data_parallel_controller_process = controller_entry(environ)
    return environ


def _detokenizer_entry(environ: dict[str, str]) -> ChildEntry:
    """The target of detokenizer processes that feed our hand-over."""
    return ChildEntry("app.engine.sglang.patches.detokenizer:run", environ)


def resolved_args(options: SGLangOptions, **own: Any) -> ServerArgs:
    """SGLang's record of the options and `own`. Raises SettingsError with the reason where it refuses."""
    server_args = ServerArgs(**server_arguments(options) | own)
    with _our_logging():
        sglang_engine.configure_logger(server_args)
        try:
            server_args.resolve_once()
            server_args.check_server_args()
        except (AssertionError, NotImplementedError, TypeError, ValueError) as exc:
            raise refused(exc, options.server_args, options.where) from exc
    return server_args


def _tokenizer_manager(server_args: Any, port_args: Any) -> Any:
    return sglang_engine.init_tokenizer_manager(server_args, port_args, HandoverTokenizerManager)


@contextlib.contextmanager
def _our_logging() -> Iterator[None]:
    """SGLang replaces the root logger's handlers; put ours back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _wait(pids: Iterable[int], timeout_s: float) -> int:
    """Wait for the end of processes, children or not, reaped or not; returns how many have not ended."""
    deadline, num_left = time.monotonic() + timeout_s, 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                num_left += not wait([descriptor], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)
    return num_left


def _kill(processes: list[Any]) -> None:
    """Kill processes and their children."""
    import psutil

    for process in processes:
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(process.pid).children(recursive=True)
        if process.is_alive():
            process.kill()
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.join(STOP_TIMEOUT_S)
