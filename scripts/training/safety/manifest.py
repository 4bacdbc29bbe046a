"""manifest.json of the shipped models, written when all training is done."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.model_files import MANIFEST

MODEL_FILES = frozenset({".json", ".npz", ".onnx"})
"""What a model's file ends with."""


def write(folder: Path = MODELS) -> None:
    """List the models' files of a folder with their size and sha256."""
    listed = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.suffix in MODEL_FILES and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": listed}, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS)
