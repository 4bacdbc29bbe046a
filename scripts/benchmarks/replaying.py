"""Our server over an engine that says given replies, for `bench harm`; `python -m` runs it.

The command line is the product's, with `--engine scripted`. The file named in REPLIES has one JSON string a
line; a request of `seed` k is answered with line k, in pieces like a model's tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from app.api import server
from app.cli.main import main
from app.core import Counts, Delta, Engine
from app.engine.scripted.engine import Script, ScriptedEngine
from app.runtime import Runtime
from app.settings import Settings
from scripts.training.safety.replies import tokens

REPLIES = "REPLIES"


class ReplayEngine(ScriptedEngine):
    """Answers with replies that were written before."""

    def __init__(
        self,
        script: Script,
        replies: Sequence[str],
        *,
        on_death: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        super().__init__(script, on_death=on_death)
        self._replies = replies

    def _deltas(self, answer: Any, choice: int) -> Iterator[Delta]:
        """See ScriptedEngine."""
        reply = self._replies[answer.request.body["seed"]]
        at = 0
        for at, piece in enumerate(tokens(reply)[: answer.max_tokens], start=1):
            counts = Counts(answer.prompt_tokens, at, answer.cached_tokens)
            yield Delta(choice, "text", piece, (at,), counts)
        yield Delta(choice, "text", "", (), Counts(answer.prompt_tokens, at, answer.cached_tokens), "stop")


def engine_of(settings: Settings, on_death: Callable[[str], None]) -> Engine:
    """The engine, with the replies of the file in the environment."""
    lines = Path(os.environ[REPLIES]).read_text("utf-8").splitlines()
    replies = [json.loads(line) for line in lines]
    return ReplayEngine(Script.parse(settings.scripted), replies, on_death=on_death)


class ReplayingRuntime(Runtime):
    """The composition of the product, with that engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "make_engine": engine_of})


if __name__ == "__main__":
    server.Runtime = ReplayingRuntime  # type: ignore[attr-defined]
    sys.exit(main())
