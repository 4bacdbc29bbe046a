"""Our server with two ways to screen, chosen by each request's `seed`, for `bench screen --one-process`.

`screens`, `always` or `shipped` comes first, then the product's command line with safety on. With `screens`
requests of the one seed are not screened at all; with the others the encoder reads none of their prompts,
and of the rest all, or those that the product has it read. In one process no two starts differ and no memory
lies elsewhere: what is left is what the screens do.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from app.api import server
from app.cli.main import main
from app.core import ChatRequest, Key
from app.runtime import Runtime
from app.safety.session.screened import session_of
from app.safety.session.session import SafetySession
from scripts.benchmarks.encoder_set import load_models

SEEDS = {"on": 1, "off": 2}
"""Of greedy answers, which they do not change."""


def switched_runtime(what: str, *args: Any, **options: Any) -> Runtime:
    """The server's parts, with both ways to screen."""
    runtime = Runtime(*args, **options)
    assert runtime.safety is not None
    on, off = session_of(runtime.safety), session_of(None)
    if what != "screens":
        never = runtime.build_safety(partial(load_models, "never"))
        assert never is not None
        off = session_of(never)

    def switched(request: ChatRequest, key: Key | None) -> SafetySession:
        return (off if request.body.get("seed") == SEEDS["off"] else on)(request, key)

    runtime.pipeline = runtime.build_pipeline(switched)
    return runtime


if __name__ == "__main__":
    switch = sys.argv.pop(1)
    options = {} if switch == "screens" else {"load_models": partial(load_models, switch)}
    # A function in the place of the class: the server only calls it.
    server.Runtime = partial(switched_runtime, switch, **options)  # type: ignore[attr-defined,assignment]
    sys.exit(main())
