"""The files of a shipped model, checked against its manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from app.settings import SettingsError

MANIFEST = "manifest.json"
"""{"version": 1, "files": {name: {"sha256": hex, "bytes": size}}}"""


class ModelDamaged(SettingsError):
    """A file of the classifiers is missing or not the one shipped: the server refuses to start."""


def verify(folder: Path, names: Iterable[str]) -> None:
    """Check the named files of a folder against its manifest. Raises ModelDamaged."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        digests = {name: str(listed[name]["sha256"]) for name in names}
        for name, digest in digests.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise ModelDamaged(f"{folder / name}: not the file that was shipped; install it again")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelDamaged(f"{folder}: the safety classifier cannot be read: {exc!r}") from exc
