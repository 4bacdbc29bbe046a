"""SGLang's scheduler whose first forward passes wait for a compiler, and whose first starts fail.

The folder `SCHEDULER_TEST_DIR` says how: the file `fails` has the number of starts that still fail, and
`compiles_s` the seconds for which a compiler computes before the first pass, and before the first long one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = "SCHEDULER_TEST_DIR"
LONG_TOKENS = 300
COMPILER = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


def run(server_args: Any, *args: Any, grammar_mask_ms: float, **kwargs: Any) -> Any:
    """The scheduler process."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from app.engine.sglang import scheduler

    folder = Path(os.environ[FOLDER])
    starts = folder / "starts"
    starts.write_text(str(int(starts.read_text()) + 1) if starts.exists() else "1")
    if fails := int((folder / "fails").read_text()):
        (folder / "fails").write_text(str(fails - 1))
        raise SystemExit(7)
    forward, due = ModelRunner.forward, [1, LONG_TOKENS]

    def compile_first(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if due and len(forward_batch.input_ids) >= due[0]:
            del due[0]
            compiles_s = (folder / "compiles_s").read_text()
            subprocess.run([sys.executable, "-S", "-c", COMPILER, compiles_s], check=True)
        return forward(self, forward_batch, *args, **kwargs)

    ModelRunner.forward = compile_first
    return scheduler.run(server_args, *args, grammar_mask_ms=grammar_mask_ms, **kwargs)
