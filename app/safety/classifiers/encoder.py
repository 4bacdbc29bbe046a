"""The encoder: MiniLM-L6 fine-tuned, int8, on ONNX Runtime; blocking, for a thread.

One thread and no spinning: the engine needs the cores. A text longer than a window is read in
overlapping windows, and the highest score counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT, ANSWER = 0, -1
"""Where the logits of harm are, of a prompt and of an answer; those of the categories lie between."""
CLS, SEP, PAD = 101, 102, 0
"""The marks of BERT's uncased vocabulary."""
WINDOW = 128
"""Tokens in one window, with both marks."""
OVERLAP = 24
BATCH = 8
"""Windows in one batch; windows of like length are run together, so that there is little padding."""


class Encoder:
    """Logits of texts: the harm of a prompt, then the categories, then the harm of an answer."""

    def __init__(self, session: Any, tokenizer: Any) -> None:
        self._session = session
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model: Path, tokenizer: Path) -> Encoder:
        """The encoder of an ONNX file and a tokenizer.json. Raises what their libraries raise."""
        from tokenizers import Tokenizer

        pieces = Tokenizer.from_file(str(tokenizer))
        pieces.no_truncation()
        pieces.no_padding()
        return cls(session_of(model), pieces)

    def logits(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(texts, 2 + categories): the logits of each normalized text's most harmful window, as a prompt."""
        owners: list[int] = []
        pieces: list[list[int]] = []
        for owner, text in enumerate(texts):
            for window in windows(self._tokenizer.encode(text, add_special_tokens=False).ids):
                owners.append(owner)
                pieces.append(window)
        each = self._run(pieces)
        best: list[NDArray[np.float32]] = []
        for owner in range(len(texts)):
            mine = each[[i for i, other in enumerate(owners) if other == owner]]
            best.append(mine[int(np.argmax(mine[:, PROMPT]))])
        return np.stack(best)

    def end(self, text: str) -> NDArray[np.float32]:
        """(2 + categories): the logits of the last window of a normalized text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        logits: NDArray[np.float32] = self._run([ids[-(WINDOW - 2) :]])[0]
        return logits

    def _run(self, pieces: list[list[int]]) -> NDArray[np.float32]:
        order = sorted(range(len(pieces)), key=lambda i: len(pieces[i]))
        logits_of: dict[int, NDArray[np.float32]] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            ids, attention = _padded([pieces[i] for i in places])
            (logits,) = self._session.run(None, {"ids": ids, "attention": attention})
            logits_of.update(zip(places, logits, strict=True))
        return np.stack([logits_of[i] for i in range(len(pieces))])


def session_of(model: Path) -> Any:
    """ONNX Runtime's session of a file, on one thread that does not spin. Raises what its library raises."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def windows(ids: list[int]) -> list[list[int]]:
    """Token ids in windows that fit beside their marks and overlap; at least one."""
    room = WINDOW - 2
    if len(ids) <= room:
        return [ids]
    count = -(-(len(ids) - OVERLAP) // (room - OVERLAP))
    last = len(ids) - room
    return [ids[start : start + room] for start in (round(i * last / (count - 1)) for i in range(count))]


def _padded(pieces: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    longest = max(len(piece) for piece in pieces) + 2
    ids = np.full((len(pieces), longest), PAD, np.int64)
    attention = np.zeros((len(pieces), longest), np.float32)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece) + 2] = [CLS, *piece, SEP]
        attention[row, : len(piece) + 2] = 1.0
    return ids, attention
