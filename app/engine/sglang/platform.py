"""The needs of a process before it imports SGLang: compilers on PATH, the CPU platform, an entry.

SGLang's own CPU path needs Intel AMX and a kernel wheel no registry has; its plug-in path runs each
layer's plain torch forward instead. Nothing here imports SGLang or torch at the top: it runs before they do,
in the server and in each process that SGLang spawns. Where there is an accelerator the platform is a no-op.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from app.engine.parent_death import die_with_parent

CPU_PLATFORM = "app.engine.sglang.patches.cpu_platform:CpuPlatform"
USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")


def activate() -> str | None:
    """The name of the CPU platform class (entry point `sglang.srt.platforms`); None beside an accelerator."""
    return CPU_PLATFORM if needs_cpu_platform() else None


def needs_cpu_platform() -> bool:
    """True if SGLang would find no device of its own on this machine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":  # the operator has SGLang's AMX kernels
        return False
    torch = importlib.import_module("torch")
    if torch.cuda.is_available() or torch.xpu.is_available():
        return False
    return not (hasattr(torch, "npu") and torch.npu.is_available())


def visible_devices() -> int:
    """The number of accelerators that SGLang sees here; 0 where there is only the CPU."""
    torch = importlib.import_module("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu"))
    return max(int(kind.device_count()) for kind in kinds if kind is not None)


def prepare_process() -> None:
    """Make SGLang importable in this process. Call it before the first import of SGLang.

    The process ends without an interpreter's clean-up (os._exit, SIGKILL), so nothing in it may hold a
    semaphore of multiprocessing, which would then be reported as leaked. tqdm makes one for its bars.

    torchvision's wheel is a CUDA build: beside a CPU torch its operators are missing and the
    import itself fails where it registers their fake kernels. Their schemas are enough.
    """
    find_compilers(Path(sys.executable).parent, os.environ)
    # No process that shows a bar is forked from another one that does: a lock among threads is enough.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    if not needs_cpu_platform() or _torchvision_loads():
        return
    torch = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point) -> Tensor"
    )
    # torch drops the schemas with the Library object: they must live as long as torchvision does.
    vars(importlib.import_module("torchvision"))["_tokenring_schemas"] = library


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection meanwhile: SGLang's import makes 700,000 objects, all of which live on.

    Looking through them again and again is a fifth of its CPU time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def find_compilers(own: Path, environ: MutableMapping[str, str]) -> None:
    """Put this interpreter's folder first on PATH, and name the CUDA compiler where the machine has none.

    SGLang and FlashInfer compile kernels: they call `ninja` by name, and look for nvcc in CUDA_HOME, in
    CUDA_PATH, on PATH and in /usr/local/cuda. scripts/setup lays the pinned compiler out beside that folder.
    """
    others = [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder != str(own)]
    environ["PATH"] = os.pathsep.join([str(own), *others])
    pinned = own.parent / "cuda"
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or shutil.which("nvcc", path=environ["PATH"])
    if not named and not USUAL_NVCC.exists() and pinned.exists():
        environ["CUDA_HOME"] = str(pinned)


def _torchvision_loads() -> bool:
    """True if torchvision is absent, imports as it is, or was prepared already."""
    if importlib.util.find_spec("torchvision") is None:
        return True
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # "operator torchvision::nms does not exist"
        return False
    return True


class ChildEntry:
    """A picklable process target: names an entry function, and prepares the process for it.

    multiprocessing pickles a process's target before its arguments, and a target is unpickled before
    the arguments import SGLang: restoring this is the first thing that happens in a child.
    """

    def __init__(self, function: str, environ: dict[str, str], **options: Any) -> None:
        self._function = function
        self._environ = environ
        self._options = options

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parent": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gc.disable()  # until all is imported: see without_collections
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
        module, _, name = self._function.partition(":")
        function = getattr(importlib.import_module(module), name)
        gc.enable()
        return function(*args, **kwargs, **self._options)


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


def scheduler_entry(environ: dict[str, str], grammar_mask_ms: float) -> ChildEntry:
    """The target of scheduler processes that no grammar can end or hold up."""
    return ChildEntry("app.engine.sglang.scheduler:run", environ, grammar_mask_ms=grammar_mask_ms)


def controller_entry(environ: dict[str, str]) -> ChildEntry:
    """The target of the process that shares requests out among data-parallel replicas."""
    module = "sglang.srt.managers.data_parallel_controller"
    return ChildEntry(f"{module}:run_data_parallel_controller_process", environ)
