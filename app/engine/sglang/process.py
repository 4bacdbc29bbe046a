"""The entry of each process that SGLang spawns, run before anything in it imports SGLang or torch.

multiprocessing pickles a process's target before its arguments, and a target is unpickled before
the arguments import SGLang: restoring a `ChildEntry` is the first thing that happens in a child.
Keep the top of this module free of heavy imports.
"""

from __future__ import annotations

import importlib
import os
import signal
import warnings
from typing import Any

from app.engine.parent_death import die_with_parent
from app.engine.sglang.platform import needs_cpu_platform, prepare_process


class ChildEntry:
    """A picklable process target: names SGLang's own entry function, prepares the process for it."""

    def __init__(
        self, module: str, function: str, environ: dict[str, str], options: dict[str, Any] | None = None
    ) -> None:
        self._module = module
        self._function = function
        self._environ = environ
        self._options = options or {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parent": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parent = state.pop("_parent")
        if parent != os.getpid():
            # Here, as SGLang asks for it after seconds of imports: a server that is killed meanwhile would
            # leave a detokenizer of 700 MB behind, which waits for ever.
            die_with_parent(parent)
        self.__dict__.update(state)
        for name, value in self._environ.items():
            os.environ.setdefault(name, value)
        # Ctrl-C and service managers signal the whole process group: when to stop is for the
        # server to say, which has streams to finish. If it dies, the kernel ends its children.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        # Imports of parts that this machine cannot use; what fails is logged as an error.
        warnings.simplefilter("ignore")
        prepare_process()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self._module), self._function)(
            *args, **kwargs, **self._options
        )


def child_environ(threads: int, ranks: int) -> dict[str, str]:
    """Environment of the children on a CPU; empty beside an accelerator. The operator's own values win.

    OpenMP threads that spin while they wait make a small model 10 to 50 times slower once
    anything else runs on the machine.
    """
    if not needs_cpu_platform():
        return {}
    environ = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    if ranks > 1:  # by default SGLang wants one NUMA node per rank
        cores = sorted(os.sched_getaffinity(0))
        share = [cores[rank % len(cores) :: ranks] or cores for rank in range(ranks)]
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, ids)) for ids in share)
    return environ


def scheduler_entry(environ: dict[str, str]) -> ChildEntry:
    """The target of scheduler processes."""
    return ChildEntry("sglang.srt.managers.scheduler", "run_scheduler_process", environ)


def guarded_scheduler_entry(environ: dict[str, str], grammar_mask_ms: float) -> ChildEntry:
    """The target of scheduler processes that no grammar can end or hold up."""
    return ChildEntry("app.engine.sglang.scheduler", "run", environ, {"grammar_mask_ms": grammar_mask_ms})


def detokenizer_entry(environ: dict[str, str]) -> ChildEntry:
    """The target of detokenizer processes."""
    return ChildEntry("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process", environ)


def lean_detokenizer_entry(environ: dict[str, str]) -> ChildEntry:
    """The target of detokenizer processes that feed our hand-over."""
    return ChildEntry("app.engine.sglang.detokenizer", "run", environ)


def controller_entry(environ: dict[str, str]) -> ChildEntry:
    """The target of the process that shares requests out among data-parallel replicas."""
    module = "sglang.srt.managers.data_parallel_controller"
    return ChildEntry(module, "run_data_parallel_controller_process", environ)
