"""The process that checks grammars (`python -m app.engine.grammar.worker`), so that it can be killed.

Lines of JSON on standard input and output: first the vocabulary and the budget, then a grammar and its
report, again and again. xgrammar imports torch and transformers for the names of types alone; without
them this process has 60 MiB and starts in 0.3 s, with them 275 MiB and 2 s.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from types import ModuleType
from typing import Any

from app.engine.parent_death import die_with_parent

MAX_MEMORY_BYTES = 2 * 1024**3
"""A grammar that takes more to compile would take as much in the scheduler."""
NICE = 10
"""The niceness of a worker: below everything that answers requests."""


def main() -> None:
    """Check grammars until standard input ends."""
    setup = json.loads(sys.stdin.buffer.readline())
    die_with_parent(setup["parent"])
    os.nice(NICE)
    import_xgrammar_alone()
    from app.engine.grammar.walk import Vocabulary, Walker

    vocabulary = Vocabulary(setup["serialized"], setup["any_whitespace"], setup["stop_token_ids"])
    walker = Walker(vocabulary, mask_ms=setup["mask_ms"])
    limit_s = setup["limit_s"]
    del setup, vocabulary
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    _say({"ready": True})
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        _allow_s(limit_s)
        _say(walker.check(asked["kind"], asked["source"], asked["tokens"])._asdict())


def import_xgrammar_alone() -> None:
    """Import xgrammar without torch and transformers, unless they are here already."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # "there is none", for the import below
        import tvm_ffi  # noqa: F401  # it takes what it can of torch, and does without

        sys.modules["torch"] = _names(
            "torch", ("Tensor", "LongTensor", "FloatTensor"), int32="int32", tensor=lambda *_, **__: None
        )
        sys.modules["transformers"] = _names(
            "transformers", ("LogitsProcessor", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast")
        )
    import xgrammar  # noqa: F401


def _names(module: str, types: tuple[str, ...], **values: Any) -> ModuleType:
    made = ModuleType(module)
    made.__dict__.update({name: type(name, (), {}) for name in types} | values)
    return made


def _say(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _allow_s(limit_s: float) -> None:
    """Have the kernel end this process (SIGXCPU) once it has had so much more CPU time.

    Not by the clock: on a busy machine an ordinary schema waits, and is no slower for it.
    """
    resource.setrlimit(
        resource.RLIMIT_CPU, (math.ceil(time.process_time() + limit_s), resource.RLIM_INFINITY)
    )


if __name__ == "__main__":
    main()
