"""How fast a model serves when it is full, and how long its answers are: what its admission begins by.

Written beside the store, once a minute while requests wait, so that a server that is started anew
knows what it can promise. The file may be lost or wrong: then there is a guess, until the first
seconds of waiting have been measured.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from app.admission.output_length import LengthHistogram
from app.admission.throughput import GUESS_WORTH_S, MEMORY_S, Throughput

FILE = "pace.json"
GUESS_S = 8.0
"""How long a pool full of requests is taken to run, of which nothing is known."""
GUESS_TOKENS_PER_S = 4096.0
"""More is not expected then: a promise that is not kept is worse than one for later."""
KEEP_S = 60.0


class ThroughputProfile:
    """One model's, in tokens of reservations that end per second. Without a file it lasts as long as this."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._tokens_per_s: float | None = None
        self._lengths: LengthHistogram | None = None
        self._kept_s = -math.inf

    def guess(self, model: str, capacity_tokens: int) -> float:
        """What to begin by: as it was when the model was last full."""
        if self._tokens_per_s is None:
            pace = self._known(model).get("tokens_per_s")
            if isinstance(pace, int | float) and math.isfinite(pace) and pace > 0:
                self._tokens_per_s = float(pace)
        return self._tokens_per_s or min(capacity_tokens / GUESS_S, GUESS_TOKENS_PER_S)

    @property
    def worth_s(self) -> float:
        """How many seconds of measuring what `guess` said is worth: what was measured outlasts a start.

        None ends in the first seconds of a full node, which is no measure of its pace.
        """
        return GUESS_WORTH_S if self._tokens_per_s is None else MEMORY_S

    def lengths(self, model: str) -> LengthHistogram:
        """How long the model's answers were when it was last full; none where that is not known."""
        if self._lengths is None:
            classes = self._known(model).get("answers")
            with contextlib.suppress(TypeError, ValueError):
                self._lengths = LengthHistogram.of(classes)  # type: ignore[arg-type]  # it is checked there
        return self._lengths or LengthHistogram()

    def observe(self, model: str, throughput: Throughput, lengths: LengthHistogram, now_s: float) -> None:
        """Remember how things are, once that is measured."""
        if not throughput.measured:
            return
        self._tokens_per_s, self._lengths = throughput.tokens_per_s, lengths
        if self._file is not None and now_s - self._kept_s >= KEEP_S:
            self._kept_s = now_s
            answers = [(round(weight, 3), round(tokens, 3)) for weight, tokens in lengths.classes]
            known = {"tokens_per_s": round(self._tokens_per_s), "answers": answers}
            self._write(self._file, self._read() | {model: known})

    def _known(self, model: str) -> dict[str, object]:
        known = self._read().get(model)
        return known if isinstance(known, dict) else {}

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._file.read_bytes()) if self._file is not None else None
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @staticmethod
    def _write(file: Path, paces: dict[str, object]) -> None:
        """Whole or not at all; that a disk is full is others' concern."""
        beside = file.with_suffix(".new")
        with contextlib.suppress(OSError):
            beside.touch(mode=0o600)
            beside.write_text(json.dumps(paces) + "\n", "utf-8")
            beside.replace(file)
