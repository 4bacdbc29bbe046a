"""The encoder of answers: MiniLM-L6 fine-tuned, int8, on ONNX Runtime; blocking, for a thread.

One thread and no spinning: the engine needs the cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT, ANSWER = 0, -1
"""Places of the logits of harm, of a prompt and of an answer; those of the categories lie between."""
CLS, SEP = 101, 102
"""The marks of BERT's uncased vocabulary."""
WINDOW = 128
"""Tokens that an encoder reads at once, with both marks."""


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

    def end(self, text: str) -> NDArray[np.float32]:
        """(2 + categories): the logits of the last window of a normalized text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        window = np.array([[CLS, *ids[-(WINDOW - 2) :], SEP]], np.int64)
        (logits,) = self._session.run(None, {"ids": window, "attention": np.ones(window.shape, np.float32)})
        last: NDArray[np.float32] = logits[0]
        return last


def session_of(model: Path) -> Any:
    """ONNX Runtime's session of a file, on one thread that does not spin. Raises what its library raises."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
